#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "base/progress_handoff.h"

namespace c10d_ext {

// The end of an operation, and who wants to hear of it. Settled once, by the thread that drives the
// engine; asked by any.
class Outcome {
 public:
  using Future = c10::intrusive_ptr<c10::ivalue::Future>;

  // Only where nobody else has it.
  void renew() {
    state_.store(kRunning, std::memory_order_relaxed);
  }
  bool is_renewable() const {
    return !error_ && !future_ && !listener_;
  }

  // The result is there, or the error. Callbacks may still be running.
  bool settled() const {
    return state_.load(std::memory_order_acquire) == kSettled;
  }
  // Once it is settled.
  const std::exception_ptr& error() const {
    return error_;
  }

  // `outputs`: what the future holds, once it is settled.
  template <class Outputs>
  Future future(std::string_view op, const Outputs& outputs) {
    std::unique_lock lock(audience_mutex_);
    if (!future_) {
      future_ =
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
      if (!expect()) {
        lock.unlock();
        complete(future_, op, outputs);
      }
    }
    return future_;
  }
  // Once at most.
  void when_settled(std::function<void(std::exception_ptr)> over) {
    std::unique_lock lock(audience_mutex_);
    if (expect()) {
      listener_ = std::move(over);
    } else {
      lock.unlock();
      over(error_);
    }
  }

  // All that is asked of it afterwards has been written.
  template <class Outputs>
  void settle(std::exception_ptr error, std::string_view op, const Outputs& outputs) {
    error_ = std::move(error);
    if (state_.exchange(kSettled, std::memory_order_acq_rel) != kAwaited) {
      return;
    }
    std::function<void(std::exception_ptr)> listener;
    Future future;
    {
      std::lock_guard lock(audience_mutex_);
      listener.swap(listener_);
      future = future_;
    }
    if (listener) {
      listener(error_);
    }
    if (future) {
      complete(future, op, outputs);
    }
  }

 private:
  enum State : uint8_t { kRunning, kAwaited, kSettled };

  // Under audience_mutex_. False: settled already, there is nothing to wait for.
  bool expect() {
    uint8_t state = kRunning;
    return state_.compare_exchange_strong(state, kAwaited, std::memory_order_acq_rel) ||
           state == kAwaited;
  }

  template <class Outputs>
  void complete(const Future& future, std::string_view op, const Outputs& outputs) const {
    const ProgressHandoff handoff;
    try {
      if (error_) {
        future->setErrorIfNeeded(error_);
      } else {
        future->markCompleted(c10::IValue(outputs()));
      }
    } catch (const std::exception& e) {
      TORCH_WARN("shm: a callback of ", op, " failed: ", e.what());
    }
  }

  // Written before state_ becomes kSettled.
  std::exception_ptr error_;
  std::atomic<uint8_t> state_{kRunning};
  // Who wants to hear of the end. Guarded by audience_mutex_.
  std::mutex audience_mutex_;
  Future future_;
  std::function<void(std::exception_ptr)> listener_;
};

}  // namespace c10d_ext
