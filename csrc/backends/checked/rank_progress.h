#pragma once

// What rank 0 knows of each rank of a group: which collectives it has called, and whether it is
// still there. For the coordinator's thread alone. No torch in here.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
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
      : roster_(roster),
        reader_(roster.place().size, roster.hosts().size()),
        calls_(static_cast<size_t>(roster.place().size)),
        counts_(calls_.size()),
        done_(calls_.size()),
        left_(calls_.size()),
        left_after_(calls_.size()) {}

  // A rank calls a collective, its next one. Throw std::runtime_error where it is not, or where
  // what the rank says makes no sense.
  void add_call(int rank, Calling call);
  void hear_call(int rank, Payload& words);
  // Ranks of its host do, as a leader says, maybe behind what they have said themselves; the same.
  void hear_calls(int leader, Payload& words);
  // It says how many it has called, of which its leader may be yet to tell; and where it is one,
  // what the ranks of its host have; the same.
  void hear_counts(int rank, Payload& words);
  // How many collectives all ranks have called, and been told of.
  uint64_t agreed() const {
    return agreed_;
  }
  // The number of the last collective that a rank has called.
  uint64_t at(int rank) const {
    return std::max(agreed_, counts_[static_cast<size_t>(rank)]);
  }
  // Whether all have called the next collective.
  bool have_all_called() const;
  // Whether some have, and it will not come to be, as others are no more there.
  bool is_next_lost() const;
  // Once all have: what each rank has called, which is agreed on from here on, and the data that
  // came with it, where all gave theirs.
  struct Calls {
    std::vector<Called> called;
    std::vector<Contribution> data;
  };
  Calls take_calls();
  // The data of a long collective is there on a rank. Throws std::runtime_error where that makes no
  // sense.
  void hear_done(int rank, uint64_t seq);
  // The last of those.
  uint64_t done(int rank) const {
    return done_[static_cast<size_t>(rank)];
  }
  // Ranks that have not called `seq`.
  std::vector<int> behind(uint64_t seq) const;
  // Where there are none: who may keep the others from hearing of it, leaders and, before all have
  // been told, those whose call has not come here.
  std::vector<int> holding_up(uint64_t seq) const;
  // Those behind; where all have been told that all have called it, all but this one.
  std::vector<int> suspects(uint64_t seq) const;

  // How ranks are no more there: kLeft, kGone or kUnreachable. The first time is the one that
  // counts, but for a rank that says that it leaves. `after`: the last collective that it knows to
  // be agreed on, of which its leader may have known before this one.
  void leave(int rank, uint64_t after);
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
  void note(int rank, uint64_t count);

  const Roster& roster_;
  CallReader reader_;
  uint64_t agreed_ = 0;
  // What each rank has called since the last collective on which all agreed.
  std::vector<std::map<uint64_t, Calling>> calls_;
  std::vector<uint64_t> counts_;  // and its last, as far as is known
  std::vector<uint64_t> done_;
  std::vector<std::string> left_;     // how each rank has, empty: it has not
  std::vector<uint64_t> left_after_;  // those that have
};

}  // namespace c10d_ext
