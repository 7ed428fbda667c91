#pragma once

// The agreements of this process that go on after it has left: rank 0's for the other ranks, and
// each one until the others have what it has said. No torch in here.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "backends/checked/star.h"

namespace c10d_ext {

class Service {
 public:
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;

  static Service& of_this_process();

  void add(const Star* star);
  void remove(const Star* star);

  // When it is over but for messages; Clock::time_point::max(): not for now.
  Clock::time_point until() const {
    return until_;
  }
  // Whether messages, too, are left to themselves.
  bool ends_at_once() const {
    return at_once_;
  }

  void end(Milliseconds grace);
  bool goes_on(Milliseconds within);

 private:
  static Service*& instance();

  std::atomic<Clock::time_point> until_{Clock::time_point::max()};
  std::atomic<bool> at_once_{false};
  std::mutex mutex_;
  std::condition_variable ended_;
  std::vector<const Star*> stars_;
};

}  // namespace c10d_ext
