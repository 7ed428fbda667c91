#pragma once

// Rank 0's part for messages: it tells both ends of each that the other one is there, or why it
// will not be. No torch in here.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "backends/checked/matching.h"
#include "backends/checked/protocol.h"
#include "backends/checked/rank_progress.h"
#include "backends/checked/roster.h"

namespace c10d_ext {

class PostedMessages {
 public:
  using Tell = std::function<void(int rank, Says kind, const Payload& words)>;

  // `roster` and `progress` outlive it.
  PostedMessages(const Roster& roster, const RankProgress& progress, Tell tell);

  // One end of one, which waits for the other from here on where that is not there.
  void add(const Posted& posted);
  // The rank posts nothing more, and waits for nothing.
  void leave(int rank);
  // Its end of number `number` waits no longer.
  void give_up(int rank, uint64_t number, const std::string& why, const std::vector<int>& ranks);

  bool is_empty() const {
    return matching_.is_empty();
  }
  bool waits(int rank, uint64_t number) const {
    return matching_.find(rank, number) != nullptr;
  }
  // Whom it waits for; none where that can be anybody.
  std::vector<int> awaited_by(int rank, uint64_t number) const;

 private:
  void deny(const Posted& posted, ErrorKind kind, const Difference& why);
  // It waits no longer: tells who was told that it does.
  void unwant(const Posted& posted);
  // Ranks that left post nothing more.
  void deny_those_without_peers();
  // Whom a message can come from, or go to.
  std::vector<int> peers_of(const Posted& posted) const;

  const Roster& roster_;
  const RankProgress& progress_;
  const Tell tell_;
  Matching matching_;
};

}  // namespace c10d_ext
