#pragma once

// The thread of a group that drives its operations while nobody waits for one.

#include <atomic>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "backends/shm/aside.h"

namespace c10d_ext::shm {

// What the progress thread drives.
class Driven : public std::enable_shared_from_this<Driven> {
 public:
  virtual ~Driven() = default;
  virtual bool has_pending() const = 0;
  // Whether some of it should not wait until the thread looks by itself.
  virtual bool is_urgent() const = 0;
  // Works at what is pending until `relieved`, or until `stopping`.
  virtual void drive_until(const std::function<bool()>& relieved,
                           const std::function<bool()>& stopping) = 0;
};

// Usually one thread. Where it runs a user's callback, which may block until another operation is
// done, another one takes over, and the first one becomes a spare.
class ProgressThread {
 public:
  // `enabled`: whether there may be a thread at all.
  ProgressThread(Driven& driven, bool enabled) : driven_(driven), enabled_(enabled) {}

  // Something is pending that nobody waits for.
  void wake();

  // The threads end, as soon as they look; there will be no more.
  void stop();
  // After stop(): returns when they are gone (but for the one that calls).
  void join();
  // In a forked child, where the threads do not exist.
  void abandon();

  // A thread that waits drives the operations itself, for as long as one of these lives: the
  // progress thread leaves the work to it.
  class Waiter;

 private:
  class OnDuty;
  class Shift;

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
  // The thread looks by itself, for a while after it last found something.
  std::atomic<bool> lingers_{false};
  bool wanted_ = false;
  bool stop_ = false;
  // Whether a thread has the shift, and how many wait for their turn.
  bool manned_ = false;
  int spares_ = 0;
  bool handed_over_ = false;
  std::condition_variable handover_;
  std::list<std::thread> threads_;
};

// A thread's duty to a group, for as long as it lives.
class ProgressThread::OnDuty : public Duty {
 protected:
  explicit OnDuty(ProgressThread& progress)
      : progress_(progress), outer_(std::exchange(here, this)) {}
  ~OnDuty() {
    here = outer_;
  }
  ProgressThread& progress_;

 private:
  Duty* const outer_;
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
