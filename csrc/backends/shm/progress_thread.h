#pragma once

// The thread of a group that drives its operations while no other thread waits for one.

#include <atomic>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "base/progress_handoff.h"

namespace c10d_ext::shm {

// What the progress thread drives.
class Driven : public std::enable_shared_from_this<Driven> {
 public:
  virtual ~Driven() = default;
  virtual bool has_pending() const = 0;
  // Whether an operation should not wait until the progress thread polls.
  virtual bool is_urgent() const = 0;
  // Drives pending operations until `relieved` or `stopping`.
  virtual void drive_until(const std::function<bool()>& relieved,
                           const std::function<bool()>& stopping) = 0;
};

// Usually one thread. A user's callback that it runs may block until another operation is done:
// then another thread takes over, and the first one becomes a spare when the callback returns.
class ProgressThread {
 public:
  // `enabled`: whether there may be a thread at all.
  ProgressThread(Driven& driven, bool enabled) : driven_(driven), enabled_(enabled) {}

  // An operation is pending for which no thread waits.
  void wake();

  // The threads end as soon as they notice; no new ones start.
  void stop();
  // After stop(): returns when the threads have ended, except for the calling one.
  void join();
  // Forgets the threads, in a forked child, where they do not exist.
  void abandon();

  // While one of these exists, its thread waits and drives the operations, and the progress thread
  // leaves them to it.
  class Waiter;

 private:
  class OnDuty;
  class Active;

  bool is_left_alone() const {
    return driven_.has_pending() && waiters_.load() == 0;
  }
  bool stopping();
  // With mutex_ held.
  void call_thread();
  void run();
  // False: the end.
  bool wait_for_work();

  Driven& driven_;
  const bool enabled_;
  std::atomic<int> waiters_{0};

  std::mutex mutex_;
  std::condition_variable work_arrives_;
  // The thread polls, for a while after it last found work.
  std::atomic<bool> polls_{false};
  bool wanted_ = false;
  bool stop_ = false;
  // Whether a thread acts as the progress thread, and how many spare threads wait.
  bool active_ = false;
  int spares_ = 0;
  bool handed_over_ = false;
  std::condition_variable handover_;
  std::list<std::thread> threads_;
};

// The calling thread drives a group, for as long as this exists.
class ProgressThread::OnDuty : public ProgressDuty {
 protected:
  explicit OnDuty(ProgressThread& progress)
      : progress_(progress), outer_(std::exchange(here, this)) {}
  ~OnDuty() {
    here = outer_;
  }
  ProgressThread& progress_;

 private:
  ProgressDuty* const outer_;
};

class ProgressThread::Waiter final : public OnDuty {
 public:
  explicit Waiter(ProgressThread& progress) : OnDuty(progress) {
    resume();
  }
  ~Waiter() {
    leave();
  }
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;
  void leave() override;
  void resume() override;
};

}  // namespace c10d_ext::shm
