#pragma once

// Detects that a waiting thread shares its core with a program that computes.

#include <algorithm>
#include <chrono>

namespace c10d_ext::shm {

// A thread that calls sched_yield() gets its core back when the time slice of the other program,
// some milliseconds, has ended: each step of a collective would take as long. A thread that sleeps
// runs as soon as it is woken. Measured with 2 ranks on 2 cores, each of which another program
// loads as well: an all_reduce and a broadcast of 8 B take 5.4 ms where the ranks yield, 0.05 ms
// where they sleep.
class ContentionDetector {
 public:
  using Clock = std::chrono::steady_clock;

  // The thread called sched_yield() at `left`, which returned at `back`.
  void yielded(Clock::time_point left, Clock::time_point back) {
    if (back - left < kLongYield) {
      return;
    }
    // Contention right after the last pause: the next pause is longer.
    pause_ = back < until_ + pause_ ? std::min(2 * pause_, kLongestPause) : kFirstPause;
    until_ = back + pause_;
  }
  // Whether to sleep rather than to yield.
  bool is_contended(Clock::time_point now) const {
    return now < until_;
  }

  // A yield that takes longer means contention: ranks that only wait return the core sooner.
  static constexpr std::chrono::milliseconds kLongYield{1};
  static constexpr std::chrono::milliseconds kFirstPause{20};
  static constexpr std::chrono::milliseconds kLongestPause{1280};

 private:
  Clock::time_point until_{};
  std::chrono::milliseconds pause_{kFirstPause};
};

}  // namespace c10d_ext::shm
