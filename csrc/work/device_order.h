#pragma once

// How a work is ordered on a device. For work/*.cpp.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>

#include "base/sync_scope.h"
#include "work/device_completion.h"
#include "work/work_text.h"

namespace c10d_ext {

// Orders the streams that wait for a work on a device behind it, and knows the CUDA graph that the
// work is captured into. Does nothing for a work on the CPU. One that is started under SyncScope is
// waited for on the stream of its call, which then orders what comes next as after any kernel.
class DeviceOrder {
 public:
  // Of a work on the CPU.
  DeviceOrder() = default;
  // Of a work that writes `outputs`, as it starts.
  explicit DeviceOrder(at::TensorList outputs);

  bool is_cpu() const {
    return device_.is_cpu();
  }
  const c10::Device& device() const {
    return device_;
  }
  // By the call that has started the work: a wait elsewhere is another call's.
  bool is_waited_for_at_once() const {
    return is_sync_ && SyncScope::is_on();
  }

  // Whether the work was captured into a CUDA graph that this thread is no longer in. Nobody can
  // wait for such a work, nor query it.
  bool has_lost_capture() const;
  static std::exception_ptr lost_capture();

  // A captured stream can wait only for work of the same capture; any other wait would end the
  // capture or, later, the process. Throws where this thread captures and the work is older.
  void check_capture(const WorkText& text) const;

  // Notes on the current stream that the work, and what `outputs` needed after it, is queued.
  void note_completion(at::TensorList outputs);

  // The stream that waits second waits for what the first one has queued.
  void follow_completion() const;

  // Calls `wait` with a current stream of its own, so that the caller's stream does not wait. Not
  // in a capture, which has no other stream.
  void on_own_stream(const std::function<void()>& wait) const;

 private:
  const c10::Device device_{c10::kCPU};
  const uint64_t capture_ = 0;
  const bool is_sync_ = false;
  mutable std::mutex mutex_;
  DeviceCompletionPtr completion_;  // under mutex_
};

}  // namespace c10d_ext
