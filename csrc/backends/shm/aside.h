#pragma once

namespace c10d_ext::shm {

// What a thread does for all who wait for a group's operations: it moves their data.
class Duty {
 public:
  // Others do it from here on, until resume().
  virtual void leave() = 0;
  virtual void resume() = 0;

  // Of this thread, the innermost one; null: none.
  static inline thread_local Duty* here = nullptr;

 protected:
  ~Duty() = default;
};

// While one of these lives, this thread has no duty. For the callbacks of users, which may block
// until another operation is done: the thread that runs one must not be the one who does that.
class Aside {
 public:
  Aside() : duty_(Duty::here) {
    Duty::here = nullptr;
    if (duty_ != nullptr) {
      duty_->leave();
    }
  }
  ~Aside() {
    if (duty_ != nullptr) {
      duty_->resume();
    }
    Duty::here = duty_;
  }
  Aside(const Aside&) = delete;
  Aside& operator=(const Aside&) = delete;

 private:
  Duty* const duty_;
};

}  // namespace c10d_ext::shm
