#pragma once

namespace c10d_ext {

// What a thread does for all who wait for a group's operations: it moves their data.
class ProgressDuty {
 public:
  // Others do it from here on, until resume().
  virtual void leave() = 0;
  virtual void resume() = 0;

  // Of this thread, the innermost one; null: none.
  static inline thread_local ProgressDuty* here = nullptr;

 protected:
  ~ProgressDuty() = default;
};

// While one of these lives, this thread has no duty. For the callbacks of users, which may block
// until another operation is done: the thread that runs one must not be the one who does that.
class ProgressHandoff {
 public:
  ProgressHandoff() : duty_(ProgressDuty::here) {
    ProgressDuty::here = nullptr;
    if (duty_ != nullptr) {
      duty_->leave();
    }
  }
  ~ProgressHandoff() {
    if (duty_ != nullptr) {
      duty_->resume();
    }
    ProgressDuty::here = duty_;
  }
  ProgressHandoff(const ProgressHandoff&) = delete;
  ProgressHandoff& operator=(const ProgressHandoff&) = delete;

 private:
  ProgressDuty* const duty_;
};

}  // namespace c10d_ext
