#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

namespace c10d_ext::shm {

void futex_wake_all(std::atomic<uint32_t>& word);

// Sleeps on a word of shared memory until it is woken, differs from `seen`, `timeout` is over, or
// spuriously.
void futex_sleep(std::atomic<uint32_t>& word, uint32_t seen, std::chrono::nanoseconds timeout);

// The same, and until the kernel marks one of `pulses` (null: none) with FUTEX_OWNER_DIED: then it
// wakes one sleeper of each. With 128 pulses or more, or before Linux 5.16, pulses do not wake.
void futex_sleep(std::atomic<uint32_t>& word, uint32_t seen,
                 const std::vector<std::atomic<uint32_t>*>& pulses,
                 std::chrono::nanoseconds timeout);

}  // namespace c10d_ext::shm
