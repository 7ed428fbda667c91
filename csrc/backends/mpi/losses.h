#pragma once

// The ranks of a group that are gone. No torch in here.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <vector>

namespace c10d_ext::mpi {

// MPI does not say that a rank is gone: what is sent to it fails, or ends this process (library.h),
// and what it has not sent is waited for without end. Others who know say so here. Of any thread.
class Losses {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Losses(int ranks) : lost_(static_cast<size_t>(ranks)) {}

  void add(const std::vector<int>& ranks) {
    for (const int rank : ranks) {
      lost_.at(static_cast<size_t>(rank)) = true;
    }
    auto never = Clock::time_point::max();
    since_.compare_exchange_strong(never, Clock::now());
  }
  bool has(int rank) const {
    return lost_.at(static_cast<size_t>(rank));
  }
  // When the first of them went.
  Clock::time_point since() const {
    return since_;
  }

 private:
  std::vector<std::atomic<bool>> lost_;
  std::atomic<Clock::time_point> since_{Clock::time_point::max()};
};

}  // namespace c10d_ext::mpi
