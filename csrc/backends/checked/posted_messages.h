#pragma once

// Rank 0's part for messages: it tells both ends of each that the other one is there, or why it
// will not be. No torch in here.

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backends/checked/matching.h"
#include "backends/checked/protocol.h"
#include "backends/checked/questions.h"
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
  // Which receive of rank 0 takes a message that is on its way to it; none where that may be
  // another one once the message is here.
  std::optional<uint64_t> receive_for(const Posted& send) const;
  // The rank posts nothing more, and waits for nothing.
  void leave(int rank);
  // Its end of number `number` is about to be given up: where it is delivered, who receives it is
  // told.
  void withdraw(int rank, uint64_t number);
  // Who receives it has let go of it.
  void hear_withdrawn(int receiver, int rank, uint64_t number);
  // A message is late, and it is known now in what state ranks are.
  void answer(const Question& question, const std::function<std::string(int rank)>& state_of);

  // The group has ended, and nobody waits for any of them.
  void drop_all() {
    matching_ = {};
    withdrawn_.clear();
  }

  // Whether none waits.
  bool is_empty() const;
  // Whom the message waits for; none where that can be anybody, or it does not wait any more.
  std::vector<int> awaited_by(const Question& question) const;

 private:
  const Posted* find(int rank, uint64_t number) const;
  // Waits no longer. One that is delivered may yet be received, until who receives it has let go of
  // it.
  void give_up(const Posted& posted, const Difference& why);
  void deny(const Posted& posted, ErrorKind kind, const Difference& why,
            const OtherEnd& other = {});
  // It waits no longer: tells who was told that it does, or who receives it.
  void unwant(const Posted& posted);
  void tell_to_withdraw(const Posted& posted);
  // Ranks that left post nothing more.
  void deny_those_without_peers();
  // Whom a message can come from, or go to.
  std::vector<int> peers_of(const Posted& posted) const;

  const Roster& roster_;
  const RankProgress& progress_;
  const Tell tell_;
  Matching matching_;
  // Of which who receives them has let go, before they are given up.
  std::map<std::pair<int, uint64_t>, Posted> withdrawn_;
};

}  // namespace c10d_ext
