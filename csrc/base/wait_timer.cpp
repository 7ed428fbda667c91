#include "base/wait_timer.h"

#include <atomic>
#include <mutex>

namespace c10d_ext {

namespace {

std::atomic<bool> counts{false};
thread_local bool is_held = false;

struct Sums {
  std::mutex mutex;
  WaitTimer::Times times;

  static Sums& instance() {
    // Leaked on purpose: threads of the program may wait while the process goes down.
    static auto* sums = new Sums;
    return *sums;
  }
};

}  // namespace

WaitTimer::WaitTimer(std::string_view backend) {
  if (!counts.load(std::memory_order_relaxed) || is_held) {
    return;
  }
  is_held = true;
  backend_ = backend;
  since_ = std::chrono::steady_clock::now();
}

WaitTimer::~WaitTimer() {
  if (backend_.empty()) {
    return;
  }
  is_held = false;
  const auto held = std::chrono::steady_clock::now() - since_;
  auto& sums = Sums::instance();
  const std::lock_guard lock(sums.mutex);
  sums.times[std::string(backend_)] += held;
}

void WaitTimer::start() {
  counts.store(true, std::memory_order_relaxed);
}

void WaitTimer::expect(std::string_view backend) {
  auto& sums = Sums::instance();
  const std::lock_guard lock(sums.mutex);
  sums.times.try_emplace(std::string(backend));
}

WaitTimer::Times WaitTimer::times() {
  auto& sums = Sums::instance();
  const std::lock_guard lock(sums.mutex);
  return sums.times;
}

}  // namespace c10d_ext
