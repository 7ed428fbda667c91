#pragma once

// Whether a thread that waits shares its core with somebody who has much to do.

#include <algorithm>
#include <chrono>

namespace c10d_ext::shm {

// Who gives way loses its turn to whoever else wants the core, and the kernel returns it when that
// one's slice, some milliseconds, is over: where another program computes, each step of a
// collective would take as long. Who sleeps keeps its claim, and runs as soon as it is woken.
// Measured with 2 ranks on 2 cores, each of which another program loads as well: an all_reduce and
// a broadcast of 8 B take 5.4 ms where the ranks give way, 0.05 ms where they sleep.
class Crowd {
 public:
  using Clock = std::chrono::steady_clock;

  // The thread gave way at `left` and came back at `back`.
  void gave_way(Clock::time_point left, Clock::time_point back) {
    if (back - left < kLong) {
      return;
    }
    // Found again soon after it was looked for again: it is looked for more rarely.
    pause_ = back < until_ + pause_ ? std::min(2 * pause_, kLongestPause) : kFirstPause;
    until_ = back + pause_;
  }
  // Whether to sleep rather than to give way.
  bool is_there(Clock::time_point now) const {
    return now < until_;
  }

  // Ranks that share a core return it sooner, but where they compute.
  static constexpr std::chrono::milliseconds kLong{1};
  static constexpr std::chrono::milliseconds kFirstPause{20};
  static constexpr std::chrono::milliseconds kLongestPause{1280};

 private:
  Clock::time_point until_{};
  std::chrono::milliseconds pause_{kFirstPause};
};

}  // namespace c10d_ext::shm
