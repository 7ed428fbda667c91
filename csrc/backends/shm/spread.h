#pragma once

// Keeps the ranks of a group apart on a machine that they fill.

#include <atomic>
#include <chrono>
#include <cstdint>

#include "backends/shm/team.h"

namespace c10d_ext::shm {

// Ranks that were woken by one thread start on its core, and ranks that wait by giving way look
// busy: the kernel leaves all of them there for many milliseconds, with other cores idle. A rank
// that waits on a core with two more ranks than another one has goes over there. All it may run on
// stays as it was.
class Spread {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Spread(const Team& team);

  // Any thread of the rank: says where the rank runs.
  void tell() {
    if (fills_) {
      tell_always();
    }
  }
  // Of a thread that waits and is about to give way.
  void look(Clock::time_point now) {
    if (fills_) {
      look_always(now);
    }
  }

 private:
  int tell_always();
  void look_always(Clock::time_point now);

  const Team& team_;
  // Whether there are as many ranks as cores: on a larger machine the kernel finds them free ones.
  const bool fills_;
  std::atomic<int> told_{-1};
  // Of the next look.
  std::atomic<Clock::time_point> next_{Clock::time_point()};
};

}  // namespace c10d_ext::shm
