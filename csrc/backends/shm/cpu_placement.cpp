#include "backends/shm/cpu_placement.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <thread>

namespace c10d_ext::shm {

namespace {

// A look costs about 1 us, a move some 10 us and the contents of the caches.
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
    // None of these cores is allowed any more (cpuset). Of a set of all cores the kernel takes
    // those that are.
    std::fill_n(reinterpret_cast<unsigned char*>(&there), sizeof(there), 0xff);
    static_cast<void>(sched_setaffinity(0, sizeof(there), &there));
  }
}

}  // namespace

CpuPlacement::CpuPlacement(const GroupMemory& memory)
    : memory_(memory),
      fills_machine_(static_cast<unsigned>(memory.size()) >=
                     std::max(2u, std::thread::hardware_concurrency())) {}

int CpuPlacement::publish_cpu_always() {
  const int cpu = sched_getcpu();
  if (published_.load(std::memory_order_relaxed) != cpu) {
    published_.store(cpu, std::memory_order_relaxed);
    memory_.control(memory_.rank()).cpu.store(cpu + 1, std::memory_order_relaxed);
  }
  return cpu;
}

void CpuPlacement::rebalance_always(Clock::time_point now) {
  const int here = publish_cpu_always();
  if (now < next_look_.load(std::memory_order_relaxed)) {
    return;
  }
  next_look_.store(now + kLookEvery, std::memory_order_relaxed);
  std::array<uint16_t, CPU_SETSIZE> ranks{};
  for (int p = 0; p < memory_.size(); ++p) {
    const int cpu = memory_.control(p).cpu.load(std::memory_order_relaxed) - 1;
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
    next_look_.store(now + kMoveEvery, std::memory_order_relaxed);
    move_to(best, allowed);
    publish_cpu_always();
  }
}

}  // namespace c10d_ext::shm
