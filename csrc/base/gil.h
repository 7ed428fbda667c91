#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

namespace c10d_ext {

// While it lives, this thread is without the GIL, if it had it.
class GilReleased {
 public:
  GilReleased();
  ~GilReleased();
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  void* state_ = nullptr;  // Python's, of this thread
};

// Runs `f` without the GIL. For whatever blocks: the threads that it waits for may need it, and
// not every caller has released it (AOTInductor's runner has not).
template <class F>
void without_gil(F&& f) {
  const GilReleased released;
  f();
}

// Whether the GIL can be taken: not before Python starts, nor once it ends.
bool python_is_up();

// For waits: lets Ctrl-C through.
void check_signals();

// Waits for `is_over`, which `lock` guards, and lets Ctrl-C through; false: not by `until`.
template <class IsOver>
bool wait_interruptibly(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                        std::chrono::steady_clock::time_point until, const IsOver& is_over) {
  constexpr std::chrono::milliseconds kLook{50};
  while (!is_over()) {
    const auto now = std::chrono::steady_clock::now();
    if (now >= until) {
      return false;
    }
    changed.wait_until(lock, std::min(until, now + kLook));
    lock.unlock();
    check_signals();
    lock.lock();
  }
  return true;
}

}  // namespace c10d_ext
