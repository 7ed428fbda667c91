#include "backends/shm/spread.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <thread>

namespace c10d_ext::shm {

namespace {

// A look costs about 1 us, a move some 10 us and what the caches held.
constexpr std::chrono::microseconds kLookEvery{500};
constexpr std::chrono::milliseconds kMoveEvery{10};

void move_to(int cpu, const cpu_set_t& allowed) {
  cpu_set_t there;
  CPU_ZERO(&there);
  CPU_SET(cpu, &there);
  if (sched_setaffinity(0, sizeof(there), &there) != 0) {
    return;
  }
  if (sched_setaffinity(0, sizeof(allowed), &allowed) != 0) {
    // None of them is this process' any more. The kernel takes what is from a set of all.
    std::fill_n(reinterpret_cast<unsigned char*>(&there), sizeof(there), 0xff);
    static_cast<void>(sched_setaffinity(0, sizeof(there), &there));
  }
}

}  // namespace

Spread::Spread(const Team& team)
    : team_(team),
      fills_(static_cast<unsigned>(team.size()) >=
             std::max(2u, std::thread::hardware_concurrency())) {}

int Spread::tell_always() {
  const int cpu = sched_getcpu();
  if (told_.load(std::memory_order_relaxed) != cpu) {
    told_.store(cpu, std::memory_order_relaxed);
    team_.control(team_.rank()).cpu.store(cpu + 1, std::memory_order_relaxed);
  }
  return cpu;
}

void Spread::look_always(Clock::time_point now) {
  const int here = tell_always();
  if (now < next_.load(std::memory_order_relaxed)) {
    return;
  }
  next_.store(now + kLookEvery, std::memory_order_relaxed);
  std::array<uint16_t, CPU_SETSIZE> ranks{};
  for (int p = 0; p < team_.size(); ++p) {
    const int cpu = team_.control(p).cpu.load(std::memory_order_relaxed) - 1;
    if (cpu >= 0 && cpu < CPU_SETSIZE) {
      ++ranks[static_cast<size_t>(cpu)];
    }
  }
  cpu_set_t allowed;
  if (here < 0 || here >= CPU_SETSIZE || ranks[static_cast<size_t>(here)] < 2 ||
      sched_getaffinity(0, sizeof(allowed), &allowed) != 0) {
    return;
  }
  int best = here;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &allowed) &&
        ranks[static_cast<size_t>(cpu)] < ranks[static_cast<size_t>(best)]) {
      best = cpu;
    }
  }
  if (ranks[static_cast<size_t>(best)] + 2 <= ranks[static_cast<size_t>(here)]) {
    next_.store(now + kMoveEvery, std::memory_order_relaxed);
    move_to(best, allowed);
    tell_always();
  }
}

}  // namespace c10d_ext::shm
