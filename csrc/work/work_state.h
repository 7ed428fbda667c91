#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <mutex>
#include <string_view>
#include <utility>

#include "base/progress_handoff.h"

namespace c10d_ext {

enum class WorkStatus : uint8_t { Queued, Running, Done, Failed };

constexpr float kNotTimed = std::numeric_limits<float>::quiet_NaN();

// Where a work is, what has become of it, and who wants to hear of its end. Settled (done or
// failed) once, by one thread; asked by any.
class WorkState {
 public:
  using Future = c10::intrusive_ptr<c10::ivalue::Future>;
  using Listener = std::function<void(std::exception_ptr error)>;

  // Only where nobody else has it.
  void renew() {
    bits_.store(0, std::memory_order_relaxed);
    is_told_ = false;
    set_source(-1);
    is_claimed_.store(false, std::memory_order_relaxed);
  }
  bool is_renewable() const {
    return !error_ && !future_ && !listener_;
  }

  WorkStatus status() const {
    const uint8_t bits = bits_.load(std::memory_order_acquire);
    if ((bits & kSettled) != 0) {
      return error_ ? WorkStatus::Failed : WorkStatus::Done;
    }
    return (bits & kQueued) != 0 ? WorkStatus::Queued : WorkStatus::Running;
  }
  // The result is there, or the error. Callbacks may still be running.
  bool settled() const {
    return (bits_.load(std::memory_order_acquire) & kSettled) != 0;
  }
  bool queued() const {
    return (bits_.load(std::memory_order_acquire) & (kQueued | kSettled)) == kQueued;
  }
  // These two only once it is settled.
  const std::exception_ptr& error() const {
    return error_;
  }
  void report() const {
    if (C10_UNLIKELY(error_ != nullptr)) {
      std::rethrow_exception(error_);
    }
  }

  // It waits for something before it runs. Before anyone else knows of it.
  void queue() {
    bits_.store(kQueued, std::memory_order_relaxed);
  }
  // All that was written before is seen by who finds it no longer queued.
  void start() {
    bits_.fetch_and(static_cast<uint8_t>(~kQueued), std::memory_order_release);
  }

  // What is known of it: -1 and kNotTimed where nothing is. All of it is once it is settled.
  void set_number(int64_t number) {
    number_.store(number, std::memory_order_relaxed);
  }
  void set_source(int source) {
    source_.store(source, std::memory_order_relaxed);
  }
  void set_milliseconds(float milliseconds) {
    milliseconds_.store(milliseconds, std::memory_order_relaxed);
  }
  int64_t number() const {
    return number_.load(std::memory_order_relaxed);
  }
  int source() const {
    return source_.load(std::memory_order_relaxed);
  }
  float milliseconds() const {
    return milliseconds_.load(std::memory_order_relaxed);
  }

  // Where several threads may find that it is over: true for the one that settles it.
  bool claim() {
    return !is_claimed_.exchange(true);
  }

  // Settles it. `value`: what the future holds.
  template <class Value>
  void settle(std::exception_ptr error, std::string_view op, const Value& value) {
    if (end(std::move(error))) {
      tell(op, value);
    }
  }
  void settle(std::exception_ptr error, std::string_view op) {
    settle(std::move(error), op, [] { return c10::IValue(); });
  }
  // Its two halves. All that is asked of it afterwards has been written before the first; true:
  // somebody waits for the second.
  bool end(std::exception_ptr error) {
    error_ = std::move(error);
    // Adds a bit that is not set.
    return (bits_.fetch_add(kSettled, std::memory_order_acq_rel) & kAwaited) != 0;
  }
  template <class Value>
  void tell(std::string_view op, const Value& value) {
    tell(op, value, [](const auto& callbacks) { callbacks(); });
  }
  // `elsewhere(callbacks)` has them run, on another thread even, for which this is kept.
  template <class Value, class Elsewhere>
  void tell(std::string_view op, const Value& value, const Elsewhere& elsewhere) {
    Listener listener;
    Future future;
    {
      std::lock_guard lock(audience_mutex_);
      listener.swap(listener_);
      future = future_;
      is_told_ = true;
    }
    settled_.notify_all();
    if (listener || future) {
      elsewhere([this, op, value, listener = std::move(listener), future = std::move(future)] {
        if (listener) {
          listener(error_);
        }
        if (future) {
          complete(future, op, value);
        }
      });
    }
  }

  // `make` makes the future, `value` what it holds once it is settled.
  template <class Make, class Value>
  Future future(std::string_view op, const Make& make, const Value& value) {
    std::unique_lock lock(audience_mutex_);
    if (!future_) {
      future_ = make();
      if (!expect()) {
        lock.unlock();
        complete(future_, op, value);
      }
    }
    return future_;
  }
  // One that holds nothing.
  Future future(std::string_view op) {
    return future(
        op, [] { return c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get()); },
        [] { return c10::IValue(); });
  }
  // Once at most.
  void when_settled(Listener over) {
    std::unique_lock lock(audience_mutex_);
    if (expect()) {
      listener_ = std::move(over);
    } else {
      lock.unlock();
      over(error_);
    }
  }
  // What `block(settled_, lock, is_settled)` returns, which waits for the end as it likes.
  template <class Block>
  bool wait(const Block& block) {
    std::unique_lock lock(audience_mutex_);
    if (!expect()) {
      return true;
    }
    return block(settled_, lock, [this] { return settled(); });
  }

 private:
  static constexpr uint8_t kQueued = 1, kAwaited = 2, kSettled = 4;

  // Under audience_mutex_. Whether tell() is yet to come; false: there is nothing to wait for.
  bool expect() {
    uint8_t bits = bits_.load(std::memory_order_acquire);
    while ((bits & kSettled) == 0) {
      if (bits_.compare_exchange_weak(bits, bits | kAwaited, std::memory_order_acq_rel)) {
        return true;
      }
    }
    return (bits & kAwaited) != 0 && !is_told_;
  }

  template <class Value>
  void complete(const Future& future, std::string_view op, const Value& value) const {
    const ProgressHandoff handoff;
    try {
      if (error_) {
        future->setErrorIfNeeded(error_);
      } else {
        future->markCompleted(value());
      }
    } catch (const std::exception& e) {
      TORCH_WARN(op, ": a callback of its future failed: ", e.what());
    }
  }

  // Written before it is settled.
  std::exception_ptr error_;
  std::atomic<int64_t> number_{-1};
  std::atomic<int> source_{-1};
  std::atomic<float> milliseconds_{kNotTimed};
  std::atomic<uint8_t> bits_{0};
  std::atomic<bool> is_claimed_{false};
  // Who wants to hear of the end. Guarded by audience_mutex_.
  std::mutex audience_mutex_;
  std::condition_variable settled_;
  Future future_;
  Listener listener_;
  bool is_told_ = false;
};

}  // namespace c10d_ext
