#pragma once

// Coroutines that wait until other ranks have reached a stage.

#include <coroutine>
#include <exception>
#include <optional>
#include <utility>

#include "backends/shm/group_memory.h"

namespace c10d_ext::shm {

// A running collective, or a part of one. It runs until it has to wait, and the thread that drives
// the engine resumes it once the wait is over; between two waits it moves about one chunk. A task
// that awaits another task continues when that one has finished.
class Task {
 public:
  struct promise_type;
  using Handle = std::coroutine_handle<promise_type>;

  struct promise_type {
    GroupMemory::Wait wait;
    // The task that is awaited; null: none.
    Handle part;
    std::optional<Failure> failure;
    std::exception_ptr error;

    ~promise_type() {
      if (part) {
        part.destroy();
      }
    }

    Task get_return_object() {
      return Task(Handle::from_promise(*this));
    }
    std::suspend_always initial_suspend() noexcept {
      return {};
    }
    std::suspend_always final_suspend() noexcept {
      return {};
    }
    void return_value(std::optional<Failure> f) {
      failure = std::move(f);
    }
    void unhandled_exception() {
      error = std::current_exception();
    }
    // Once the task has finished.
    std::optional<Failure> outcome() {
      if (error) {
        std::rethrow_exception(error);
      }
      return failure;
    }

    struct WaitAwaiter {
      GroupMemory::Wait wait;
      bool await_ready() {
        return wait.over();
      }
      void await_suspend(Handle handle) {
        handle.promise().wait = wait;
      }
      void await_resume() {}
    };
    WaitAwaiter await_transform(GroupMemory::Wait w) {
      return {w};
    }

    struct PartAwaiter {
      promise_type& whole;
      bool await_ready() {
        return false;
      }
      void await_suspend(Handle) {}
      std::optional<Failure> await_resume() {
        return whole.part.promise().outcome();
      }
    };
    PartAwaiter await_transform(Task&& task) {
      wait.rank = GroupMemory::kNobody;
      part = std::exchange(task.handle_, {});
      return {*this};
    }

    // Returns to the driving thread, which checks its deadline.
    std::suspend_always await_transform(std::suspend_always pause) {
      wait.rank = GroupMemory::kNobody;
      return pause;
    }
  };

  Task() = default;
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, {})) {}
  Task& operator=(Task&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Task() {
    if (handle_) {
      handle_.destroy();
    }
  }

  explicit operator bool() const {
    return static_cast<bool>(handle_);
  }
  // False: the wait is not over, nothing was done.
  bool advance() {
    return advance(handle_);
  }
  bool finished() const {
    return handle_.done();
  }
  const GroupMemory::Wait& wait() const {
    Handle innermost = handle_;
    while (innermost.promise().part) {
      innermost = innermost.promise().part;
    }
    return innermost.promise().wait;
  }
  std::optional<Failure> failure() const {
    return handle_.promise().outcome();
  }

 private:
  explicit Task(Handle handle) : handle_(handle) {}

  static bool advance(Handle handle) {
    promise_type& promise = handle.promise();
    if (promise.part) {
      if (!promise.part.done() && !advance(promise.part)) {
        return false;
      }
      if (!promise.part.done()) {
        return true;
      }
      // What awaits it goes on at once.
    } else if (!promise.wait.over()) {
      return false;
    }
    handle.resume();
    return true;
  }

  Handle handle_;
};

}  // namespace c10d_ext::shm
