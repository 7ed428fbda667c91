#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <system_error>
#include <utility>

#include "base/signal_masked_thread.h"

namespace c10d_ext {

// Threads for tasks that may block: as many as there are tasks at a time, each kept for a while
// after its last one. Tasks do not throw. Threads are not inherited by a forked child, which must
// not use the pool.
class ThreadPool : public std::enable_shared_from_this<ThreadPool> {
 public:
  // `name`: of the threads, a literal of at most 15 characters.
  static std::shared_ptr<ThreadPool> make(const char* name) {
    return std::shared_ptr<ThreadPool>(new ThreadPool(name));
  }

  // Where no thread is to be had, who asks does the task.
  void run(const std::function<void()>& task) {
    if (!try_run(task)) {
      task();
    }
  }
  // False where no thread is to be had: nothing has been done.
  bool try_run(std::function<void()> task) {
    std::unique_lock lock(mutex_);
    if (idle_ > tasks_.size()) {
      tasks_.push_back(std::move(task));
      lock.unlock();
      added_.notify_one();
      return true;
    }
    lock.unlock();
    try {
      signal_masked_thread(name_, [self = shared_from_this(), first = std::move(task)]() mutable {
        first();
        first = nullptr;
        self->serve();
      }).detach();
    } catch (const std::system_error&) {
      return false;
    }
    return true;
  }

 private:
  explicit ThreadPool(const char* name) : name_(name) {}

  void serve() {
    constexpr std::chrono::seconds kKept{5};
    std::unique_lock lock(mutex_);
    for (;;) {
      ++idle_;
      const bool any = added_.wait_for(lock, kKept, [this] { return !tasks_.empty(); });
      --idle_;
      if (!any) {
        return;
      }
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
    }
  }

  const char* const name_;
  std::mutex mutex_;
  std::condition_variable added_;
  std::deque<std::function<void()>> tasks_;
  size_t idle_ = 0;
};

}  // namespace c10d_ext
