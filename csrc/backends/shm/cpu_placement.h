#pragma once

// Spreads the ranks of a group over the cores of a machine that they fill.

#include <atomic>
#include <chrono>
#include <cstdint>

#include "backends/shm/group_memory.h"

namespace c10d_ext::shm {

// Ranks that one thread wakes start on its core, and ranks that wait by yielding look busy: the
// kernel leaves all of them there for many milliseconds while other cores are idle. So a waiting
// rank whose core has at least two more ranks than another core moves to that one. Its affinity
// stays as it was.
class CpuPlacement {
 public:
  using Clock = std::chrono::steady_clock;

  explicit CpuPlacement(const GroupMemory& memory);

  // Publishes the core on which the calling thread of this rank runs.
  void publish_cpu() {
    if (fills_machine_) {
      publish_cpu_always();
    }
  }
  // Moves the calling thread if that helps. For a thread that waits and is about to yield.
  void rebalance(Clock::time_point now) {
    if (fills_machine_) {
      rebalance_always(now);
    }
  }

 private:
  int publish_cpu_always();
  void rebalance_always(Clock::time_point now);

  const GroupMemory& memory_;
  // Whether there are as many ranks as cores: on a larger machine the kernel finds free cores.
  const bool fills_machine_;
  std::atomic<int> published_{-1};
  // When to look at the other ranks' cores again.
  std::atomic<Clock::time_point> next_look_{Clock::time_point()};
};

}  // namespace c10d_ext::shm
