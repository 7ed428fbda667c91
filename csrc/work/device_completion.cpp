#include "work/device_completion.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#ifdef C10D_EXT_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <iterator>

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
  std::lock_guard<std::mutex> lock(mutex_);
  last_[storage] = completion;
}

void DeviceCompletions::follow(const c10::StorageImpl* storage) const {
  DeviceCompletionPtr found;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto entry = last_.find(storage);
    found = entry == last_.end() ? nullptr : entry->second;
  }
  if (found) {
    found->follow();
  }
}

void DeviceCompletions::sweep() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto entry = last_.begin(); entry != last_.end();) {
    entry = entry->second->is_over() ? last_.erase(entry) : std::next(entry);
  }
}

DeviceCompletions& DeviceCompletions::get() {
  // Never destroyed, as the table of works.
  static auto* instance = new DeviceCompletions;
  return *instance;
}

}  // namespace c10d_ext
