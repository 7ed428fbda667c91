#include "backends/shm/progress_thread.h"

#include <pthread.h>
#include <sched.h>

#include <chrono>
#include <system_error>
#include <utility>

namespace c10d_ext::shm {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

// The progress thread starts this much later: the caller may wait, and so drive, before that.
constexpr microseconds kHeadStart{100};
// For kPollingTime after it last found work the thread polls, once per kPollInterval, and is not
// woken for small operations: a wakeup costs more than the collective.
constexpr milliseconds kPollInterval{1};
constexpr milliseconds kPollingTime{20};

// A woken batch thread does not preempt the thread that woke it, which is in the middle of an
// asynchronous call.
void become_batch_job() {
  if (sched_getscheduler(0) == SCHED_OTHER) {
    const sched_param none{};
    static_cast<void>(sched_setscheduler(0, SCHED_BATCH, &none));  // where it may
  }
}

}  // namespace

void ProgressThread::Waiter::leave() {
  if (progress_.waiters_.fetch_sub(1) == 1 && progress_.driven_.has_pending()) {
    progress_.wake();
  }
}

void ProgressThread::Waiter::resume() {
  progress_.waiters_.fetch_add(1);
}

// A thread acts as the progress thread: one at a time.
class ProgressThread::Active final : public OnDuty {
 public:
  explicit Active(ProgressThread& progress) : OnDuty(progress) {}
  void leave() override {
    std::lock_guard lock(progress_.mutex_);
    progress_.active_ = false;
    progress_.polls_.store(false);
    if (progress_.is_left_alone()) {
      progress_.call_thread();
    }
  }
  void resume() override {
    std::lock_guard lock(progress_.mutex_);
    replaced_ = progress_.active_;
    if (!replaced_) {
      progress_.active_ = true;
      progress_.polls_.store(true);
    }
  }
  // Another thread has taken over.
  bool replaced() const {
    return replaced_;
  }

 private:
  bool replaced_ = false;
};

void ProgressThread::wake() {
  // Either this sees that the thread no longer polls, or the thread sees the pending operation.
  if (!enabled_ || (polls_.load() && !driven_.is_urgent())) {
    return;
  }
  std::lock_guard lock(mutex_);
  if (waiters_.load() == 0) {
    call_thread();
  }
}

void ProgressThread::call_thread() {
  if (stop_) {
    return;
  }
  wanted_ = true;
  if (active_) {
    work_arrives_.notify_one();
    return;
  }
  if (spares_ != 0) {
    handed_over_ = true;
    handover_.notify_one();
  } else {
    try {
      threads_.emplace_back([this, alive = driven_.shared_from_this()] { run(); });
    } catch (const std::system_error& error) {
      throw std::system_error(error.code(), "shm: a group needs a thread of its own");
    }
  }
  active_ = true;
}

// Acts as the progress thread until another thread has taken over, then waits as a spare.
void ProgressThread::run() {
  become_batch_job();
  pthread_setname_np(pthread_self(), "c10d_ext_shm");
  for (;;) {
    Active self(*this);
    const auto relieved = [&] { return self.replaced() || !is_left_alone(); };
    while (!self.replaced()) {
      if (!wait_for_work()) {
        return;
      }
      driven_.drive_until(relieved, [&] { return stopping(); });
    }
    std::unique_lock lock(mutex_);
    ++spares_;
    handover_.wait(lock, [&] { return stop_ || handed_over_; });
    --spares_;
    if (stop_) {
      return;
    }
    handed_over_ = false;
  }
}

bool ProgressThread::wait_for_work() {
  std::unique_lock lock(mutex_);
  const auto deadline = Clock::now() + kPollingTime;
  polls_.store(true);
  for (;;) {
    if (wanted_ && !stop_) {
      wanted_ = false;
      work_arrives_.wait_for(lock, kHeadStart, [&] { return stop_; });
      return !stop_;
    }
    if (!polls_.load()) {
      work_arrives_.wait(lock, [&] { return stop_ || wanted_; });
    } else if (!work_arrives_.wait_for(lock, kPollInterval, [&] { return stop_ || wanted_; })) {
      polls_.store(Clock::now() < deadline);
      if (is_left_alone()) {
        return true;
      }
    }
    if (stop_) {
      return false;
    }
  }
}

bool ProgressThread::stopping() {
  std::lock_guard lock(mutex_);
  return stop_;
}

void ProgressThread::stop() {
  std::lock_guard lock(mutex_);
  stop_ = true;
  work_arrives_.notify_all();
  handover_.notify_all();
}

void ProgressThread::join() {
  for (std::thread& thread : threads_) {
    if (thread.get_id() == std::this_thread::get_id()) {
      // The last reference went away in a callback.
      thread.detach();
    } else {
      thread.join();
    }
  }
}

void ProgressThread::abandon() {
  static_cast<void>(new std::list<std::thread>(std::move(threads_)));
}

}  // namespace c10d_ext::shm
