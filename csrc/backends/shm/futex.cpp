#include "backends/shm/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <ctime>

namespace c10d_ext::shm {

namespace {

// futex_waitv(2), which headers older than the kernel do not have.
constexpr long kFutexWaitV = 449;
constexpr uint32_t kOf32Bits = 2;
struct Waited {
  uint64_t value, address;
  uint32_t flags, reserved;
};

timespec timespec_of(std::chrono::nanoseconds time) {
  const int64_t ns = std::max<int64_t>(time.count(), 0);
  return {static_cast<time_t>(ns / 1000000000), static_cast<long>(ns % 1000000000)};
}

}  // namespace

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void futex_sleep(std::atomic<uint32_t>& word, uint32_t seen, std::chrono::nanoseconds timeout) {
  const timespec t = timespec_of(timeout);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &t, nullptr, 0);
}

void futex_sleep(std::atomic<uint32_t>& word, uint32_t seen,
                 const std::vector<std::atomic<uint32_t>*>& pulses,
                 std::chrono::nanoseconds timeout) {
  static std::atomic<bool> is_there{true};
  std::array<Waited, 128> waited;
  if (!is_there.load(std::memory_order_relaxed) || pulses.size() >= waited.size()) {
    futex_sleep(word, seen, timeout);
    return;
  }
  size_t count = 0;
  const auto add = [&](std::atomic<uint32_t>& w, uint32_t value) {
    waited[count++] = {value, reinterpret_cast<uint64_t>(&w), kOf32Bits, 0};
  };
  add(word, seen);
  for (auto* pulse : pulses) {
    const uint32_t value = pulse == nullptr ? FUTEX_OWNER_DIED : pulse->load();
    if ((value & FUTEX_OWNER_DIED) == 0) {
      add(*pulse, value);
    }
  }
  // Until then by the monotonic clock, which is the steady one.
  const timespec t = timespec_of(std::chrono::steady_clock::now().time_since_epoch() + timeout);
  const long woken = syscall(kFutexWaitV, waited.data(), count, 0, &t, CLOCK_MONOTONIC);
  if (woken < 0 && errno != EAGAIN && errno != EINTR && errno != ETIMEDOUT) {
    is_there.store(false, std::memory_order_relaxed);
    futex_sleep(word, seen, timeout);
  }
}

}  // namespace c10d_ext::shm
