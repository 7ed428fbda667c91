#pragma once

// Where on a device the end of a collective was queued, so that whoever waits second, on another
// stream, waits for it as well.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace c10d_ext {

// The CUDA graph that the device's current stream is captured into, 0 where it is not.
uint64_t capture_on(const c10::Device& device);

// Recorded by whoever waited for the collective first, or found it over.
class DeviceCompletion {
 public:
  // `capture`: the CUDA graph that the collective was captured into, or 0.
  DeviceCompletion(const c10::Device& device, uint64_t capture);

  // The current stream goes on after it.
  void follow() const;

  // Nobody has to wait for it any more. Asks the device.
  bool is_over() const;

 private:
  const c10::Device device_;
  const uint64_t capture_;
  const c10::Stream on_;
  c10::Event event_;
};
using DeviceCompletionPtr = std::shared_ptr<const DeviceCompletion>;

// Of the storages written last. One that was freed meanwhile, and its address given to another, has
// the other wait for what is over. Completions hold events and no memory; those that are over go
// when many have been added.
class DeviceCompletions {
 public:
  void add(const c10::StorageImpl* storage, const DeviceCompletionPtr& completion);
  // Of tensors that were written on the current stream, with no work behind them. Under SyncScope
  // only where an older one would be followed.
  void add_written_here(at::TensorList tensors);
  // The current stream goes on after what wrote the tensor, whose memory is kept for it.
  void follow(const at::Tensor& t) const;
  bool contains(const c10::StorageImpl* storage) const;
  bool contains_any(at::TensorList tensors) const;
  // Asks the device, which the caller must be allowed to.
  void sweep();

  static DeviceCompletions& get();

 private:
  static constexpr size_t kSweepAt = 64;

  mutable std::mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, DeviceCompletionPtr> last_;
  size_t limit_ = kSweepAt;
};

}  // namespace c10d_ext
