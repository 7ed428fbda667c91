#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

namespace c10d_ext::shm {

void futex_wake_all(std::atomic<uint32_t>& word);

// Sleeps on a word of shared memory: until it is rung, has another value than `seen`, `timeout` is
// over, or for no reason at all.
void futex_sleep(std::atomic<uint32_t>& word, uint32_t seen, std::chrono::nanoseconds timeout);

// As that, and until the kernel marks one of `pulses` (null: none) with FUTEX_OWNER_DIED, when it
// wakes one sleeper of each. As that alone where there are 128 of them or more, or the kernel is
// older than 5.16.
void futex_sleep(std::atomic<uint32_t>& word, uint32_t seen,
                 const std::vector<std::atomic<uint32_t>*>& pulses,
                 std::chrono::nanoseconds timeout);

}  // namespace c10d_ext::shm
