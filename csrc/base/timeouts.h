#pragma once

#include <algorithm>
#include <chrono>

namespace c10d_ext {

// As long as anything waits, whatever timeout it was given: the clock counts nanoseconds, and what
// users take for "never" would run over.
constexpr std::chrono::milliseconds kLongestWait = std::chrono::days(365);

inline std::chrono::milliseconds bounded(std::chrono::milliseconds timeout) {
  return std::clamp(timeout, std::chrono::milliseconds(0), kLongestWait);
}

}  // namespace c10d_ext
