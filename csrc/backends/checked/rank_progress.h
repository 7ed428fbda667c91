#pragma once

// What rank 0 knows of each rank of a group: which collectives it has called, and whether it is
// still there. For the coordinator's thread alone. No torch in here.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "backends/checked/protocol.h"
#include "backends/checked/roster.h"
#include "base/fingerprint.h"

namespace c10d_ext {

class RankProgress {
 public:
  // `roster` outlives it.
  explicit RankProgress(const Roster& roster)
      : roster_(roster), calls_(static_cast<size_t>(roster.place().size)), left_(calls_.size()) {}

  // A rank says that it calls a collective. Throws std::runtime_error where that makes no sense.
  void hear_call(int rank, Payload& words);
  // How many collectives all ranks have called, and been told of.
  uint64_t agreed() const {
    return agreed_;
  }
  // The number of the last collective that a rank has called.
  uint64_t at(int rank) const {
    return agreed_ + calls_[static_cast<size_t>(rank)].size();
  }
  // Whether some rank has called the next collective, and whether all have.
  bool has_someone_called() const;
  bool have_all_called() const;
  // Once all have: what each rank has called, which is agreed on from here on, and the data that
  // came with it, where all gave theirs.
  struct Calls {
    std::vector<Fingerprint> called;
    std::vector<std::string> data;
  };
  Calls take_calls();
  // Ranks that have not called `seq`; where all have, all but this one.
  std::vector<int> suspects(uint64_t seq) const;

  // How ranks are no more there: kLeft, kGone or kUnreachable. The first time is the one that
  // counts, but for a rank that says that it leaves.
  void leave(int rank) {
    left_[static_cast<size_t>(rank)] = kLeft;
  }
  // False: that was known of all of them.
  bool lose(const std::vector<int>& ranks, const std::string& how);
  bool is_there(int rank) const {
    return left_[static_cast<size_t>(rank)].empty();
  }
  const std::string& how_left(int rank) const {
    return left_[static_cast<size_t>(rank)];
  }
  bool has_lost_some() const;
  // Whether all ranks but this one are gone or have left.
  bool is_alone() const;
  // The end of the group for the ranks that are no more there.
  End lost() const;

 private:
  const Roster& roster_;
  uint64_t agreed_ = 0;
  // What each rank has called since the last collective on which all agreed.
  struct Call {
    Fingerprint called;
    std::optional<std::string> data;
  };
  std::vector<std::deque<Call>> calls_;
  std::vector<std::string> left_;  // how each rank has, empty: it has not
};

}  // namespace c10d_ext
