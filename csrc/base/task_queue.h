#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "base/signal_masked_thread.h"

namespace c10d_ext {

// Runs tasks one after the other on a thread of its own, which is left to itself where one does not
// end. Tasks do not throw.
class TaskQueue {
 public:
  // `name`: of the thread, at most 15 characters.
  static std::shared_ptr<TaskQueue> start(const char* name) {
    auto queue = std::make_shared<TaskQueue>();
    signal_masked_thread(name, [queue] { queue->run(); }).detach();
    return queue;
  }

  void submit(std::function<void()> task) {
    {
      std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
  }

  // The thread ends once it has done what was submitted.
  void stop() {
    {
      std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    changed_.notify_one();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stopped_ || !tasks_.empty(); });
      if (tasks_.empty()) {
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

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool stopped_ = false;
};

}  // namespace c10d_ext
