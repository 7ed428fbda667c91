#include "work/device_order.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <optional>
#include <utility>

#include "base/memory.h"

namespace c10d_ext {

namespace {

c10::Device device_of(at::TensorList outputs) {
  return outputs.empty() ? c10::Device(c10::kCPU) : outputs.front().device();
}

}  // namespace

DeviceOrder::DeviceOrder(at::TensorList outputs)
    : device_(device_of(outputs)),
      capture_(device_.is_cpu() ? 0 : capture_on(device_)),
      is_sync_(SyncScope::is_on()) {}

bool DeviceOrder::has_lost_capture() const {
  return capture_ != 0 && capture_on(device_) != capture_;
}

std::exception_ptr DeviceOrder::lost_capture() {
  return std::make_exception_ptr(c10::Error(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
      "a wait outside the CUDA graph capture that it was started in: wait for it there"));
}

void DeviceOrder::check_capture(const WorkText& text) const {
  if (capture_on(device_) != capture_) {
    C10_THROW_ERROR(
        Error, text.with_cause("a wait in a CUDA graph capture, and it was started before that: "
                               "wait for it before the capture"));
  }
}

void DeviceOrder::note_completion(at::TensorList outputs) {
  for (const auto& output : outputs) {
    used_here(output);
  }
  if (is_waited_for_at_once() && !DeviceCompletions::get().contains_any(outputs)) {
    return;
  }
  auto completion = std::make_shared<const DeviceCompletion>(device_, capture_);
  for (const auto& output : outputs) {
    DeviceCompletions::get().add(output.storage().unsafeGetStorageImpl(), completion);
  }
  const std::lock_guard lock(mutex_);
  completion_ = std::move(completion);
}

void DeviceOrder::follow_completion() const {
  DeviceCompletionPtr completion;
  {
    const std::lock_guard lock(mutex_);
    completion = completion_;
  }
  if (completion) {
    completion->follow();
  }
}

void DeviceOrder::on_own_stream(const std::function<void()>& wait) const {
  const c10::impl::VirtualGuardImpl device(device_.type());
  std::optional<c10::StreamGuard> own_stream;
  if (capture_on(device_) == 0) {
    own_stream.emplace(device.getStreamFromGlobalPool(device_, /*isHighPriority=*/false));
  }
  wait();
}

}  // namespace c10d_ext
