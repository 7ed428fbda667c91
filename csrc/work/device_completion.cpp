#include "work/device_completion.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#ifdef C10D_EXT_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <algorithm>
#include <iterator>
#include <optional>

#include "base/memory.h"
#include "base/sync_scope.h"
#include "work/pending.h"

namespace c10d_ext {

namespace {

c10::Stream current_stream(const c10::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace

uint64_t capture_on(const c10::Device& device) {
#ifdef C10D_EXT_WITH_CUDA
  if (device.is_cuda()) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    C10_CUDA_CHECK(
        cudaStreamGetCaptureInfo(c10::cuda::getCurrentCUDAStream(device.index()), &status, &id));
    return status == cudaStreamCaptureStatusActive ? id : 0;
  }
#else
  (void)device;
#endif
  return 0;
}

DeviceCompletion::DeviceCompletion(const c10::Device& device, uint64_t capture)
    : device_(device), capture_(capture), on_(current_stream(device)), event_(device.type()) {
  event_.record(on_);
}

void DeviceCompletion::follow() const {
  const auto here = current_stream(device_);
  // An event of a CUDA graph's capture means something there alone.
  if (here != on_ && capture_on(device_) == capture_) {
    event_.block(here);
  }
}

bool DeviceCompletion::is_over() const {
  return capture_ == 0 ? event_.query() : capture_on(device_) != capture_;
}

void DeviceCompletions::add(const c10::StorageImpl* storage,
                            const DeviceCompletionPtr& completion) {
  bool are_many = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    last_[storage] = completion;
    are_many = last_.size() >= limit_;
  }
  if (are_many && may_query_device()) {
    sweep();
  }
}

void DeviceCompletions::add_written_here(at::TensorList tensors) {
  if (tensors.empty() || tensors.front().is_cpu() ||
      (SyncScope::is_on() && !contains_any(tensors))) {
    return;
  }
  const auto device = tensors.front().device();
  const auto completion = std::make_shared<const DeviceCompletion>(device, capture_on(device));
  for (const auto& t : tensors) {
    add(t.storage().unsafeGetStorageImpl(), completion);
  }
}

void DeviceCompletions::follow(const at::Tensor& t) const {
  DeviceCompletionPtr found;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto entry = last_.find(t.storage().unsafeGetStorageImpl());
    found = entry == last_.end() ? nullptr : entry->second;
  }
  if (found) {
    found->follow();
    used_here(t);
  }
}

bool DeviceCompletions::contains(const c10::StorageImpl* storage) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return last_.find(storage) != last_.end();
}

bool DeviceCompletions::contains_any(at::TensorList tensors) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(tensors.begin(), tensors.end(), [this](const at::Tensor& t) {
    return last_.find(t.storage().unsafeGetStorageImpl()) != last_.end();
  });
}

void DeviceCompletions::sweep() {
#ifdef C10D_EXT_WITH_CUDA
  // Another thread may be capturing, which no question from here is to spoil.
  std::optional<c10::cuda::CUDAStreamCaptureModeGuard> mode;
  mode.emplace(cudaStreamCaptureModeThreadLocal);
#endif
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto entry = last_.begin(); entry != last_.end();) {
    entry = entry->second->is_over() ? last_.erase(entry) : std::next(entry);
  }
  limit_ = std::max(kSweepAt, 2 * last_.size());
}

DeviceCompletions& DeviceCompletions::get() {
  // Never destroyed, as the table of works.
  static auto* instance = new DeviceCompletions;
  return *instance;
}

}  // namespace c10d_ext
