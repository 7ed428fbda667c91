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

// How long the progress thread leaves work to a caller who is about to wait for it anyway.
constexpr microseconds kHeadStart{100};
// What is not urgent waits until the thread looks by itself, each kLookEvery for kLinger after it
// last found something: waking it would cost more than the collective.
constexpr milliseconds kLookEvery{1};
constexpr milliseconds kLinger{20};

// Of the thread that calls: woken, it waits for its turn. Otherwise it would take the core from who
// woke it, in the middle of the call that started something asynchronous.
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

// Of the progress thread: one thread at a time.
class ProgressThread::Shift final : public OnDuty {
 public:
  explicit Shift(ProgressThread& progress) : OnDuty(progress) {}
  void leave() override {
    std::lock_guard lock(progress_.mutex_);
    progress_.manned_ = false;
    progress_.lingers_.store(false);
    if (progress_.is_left_alone()) {
      progress_.call_thread();
    }
  }
  void resume() override {
    std::lock_guard lock(progress_.mutex_);
    over_ = progress_.manned_;
    if (!over_) {
      progress_.manned_ = true;
      progress_.lingers_.store(true);
    }
  }
  // Another thread took it over.
  bool over() const {
    return over_;
  }

 private:
  bool over_ = false;
};

void ProgressThread::wake() {
  // Either this sees that the thread does not linger any more, or the thread sees what is pending.
  if (!enabled_ || (lingers_.load() && !driven_.is_urgent())) {
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
  if (manned_) {
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
  manned_ = true;
}

// Starts with the shift, and waits for another one once that was taken over by a thread that may be
// in a callback next.
void ProgressThread::run() {
  become_batch_job();
  pthread_setname_np(pthread_self(), "c10d_ext_shm");
  for (;;) {
    Shift shift(*this);
    const auto relieved = [&] { return shift.over() || !is_left_alone(); };
    while (!shift.over()) {
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
  const auto deadline = Clock::now() + kLinger;
  lingers_.store(true);
  for (;;) {
    if (wanted_ && !stop_) {
      wanted_ = false;
      work_arrives_.wait_for(lock, kHeadStart, [&] { return stop_; });
      return !stop_;
    }
    if (!lingers_.load()) {
      work_arrives_.wait(lock, [&] { return stop_ || wanted_; });
    } else if (!work_arrives_.wait_for(lock, kLookEvery, [&] { return stop_ || wanted_; })) {
      lingers_.store(Clock::now() < deadline);
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
