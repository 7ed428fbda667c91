#pragma once

// Rank 0's other part: who hears what every rank has called, says whether it fits together, and
// what is the matter where it does not come to that. One thread does all of it. No torch in here.

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "backends/checked/posted_messages.h"
#include "backends/checked/protocol.h"
#include "backends/checked/questions.h"
#include "backends/checked/rank_progress.h"
#include "backends/checked/roster.h"

namespace c10d_ext {

class Coordinator {
 public:
  using Clock = std::chrono::steady_clock;
  // Says it to a rank, rank 0 included; to one that is gone, nothing.
  using Tell = std::function<void(int rank, Says kind, const Payload& words)>;

  // `roster` outlives it.
  Coordinator(const Roster& roster, Tell tell);

  // What a rank says. Throws std::runtime_error where that makes no sense.
  void hear(int rank, uint32_t kind, Payload& words);
  // What rank 0 calls, or another rank of its host. Throws as hear().
  void add_call(int rank, const Calling& call);
  // Which receive of rank 0 takes the message that a rank posts, the data of which is yet to come.
  // Throws as hear().
  std::optional<uint64_t> receive_for(int rank, Payload& words) const;
  // Ranks are no more there; `how`: kGone or kUnreachable.
  void lose(const std::vector<int>& ranks, const std::string& how);
  // When there is something to look() at.
  Clock::time_point next_look() const;
  void look(Clock::time_point now);

  // Whether all ranks but this one are gone or have left.
  bool is_alone() const;
  // Whether a message waits for its other end.
  bool has_messages() const;

 private:
  void compare();
  void tell_all(Says kind, const Payload& words);
  void tell_others(const std::vector<int>& ranks, Says kind, const Payload& words);
  void tell_done(uint64_t seq);
  void end_for_all(End end);
  void ask(Question question, const std::vector<int>& ranks);
  void answer(const Question& question);

  // Who has not called a collective; where all have, those who may not have told of it.
  std::vector<int> suspects_of(uint64_t seq) const;
  // Whom the collective or message waits for; none where that can be anybody.
  std::vector<int> awaited_by(const Question& question) const;

  const Roster& roster_;
  const Tell tell_;
  bool has_ended_ = false;
  RankProgress progress_;
  PostedMessages messages_;
  Questions questions_;
};

}  // namespace c10d_ext
