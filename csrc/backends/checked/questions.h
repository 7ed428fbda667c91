#pragma once

// What rank 0 is yet to answer, and which ranks have not said meanwhile that they are there. For
// the coordinator's thread alone. No torch in here.

#include <chrono>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "backends/checked/protocol.h"

namespace c10d_ext {

// How long rank 0 waits for the answer of a rank on another machine before it calls that silent. A
// rank that is well answers within milliseconds, or later where its machine is short of processors.
constexpr std::chrono::milliseconds kSilent{3000};
// How long other ranks wait for rank 0 to tell what is the matter: it may ask first who is there.
constexpr std::chrono::milliseconds kVerdict = kSilent + std::chrono::milliseconds(2000);

// Whether a rank in that state will not answer.
inline bool is_stuck(const std::string& state) {
  return state == "stopped" || state == "silent";
}

// Something is the matter with collective `seq`, or message `seq` of rank `of`, or rank `of` asks
// about one of them; or a rank has lost its line to another one, and `of` is one of the two, or
// leads it.
struct Question {
  uint64_t seq;
  Says kind;
  std::string why;
  int of = 0;
  int sender = -1;  // whose message `of` waits for; -1: it does not know
  // Rank 0 answers it not before, as news may be on their way, and not after.
  std::chrono::steady_clock::time_point from{}, until{};
  std::set<int> silent{};

  // Its answer ends the group.
  bool ends_group() const {
    return kind == kLate || waits_for_news();
  }
  // It may be for a rank whose end is yet to be heard of.
  bool waits_for_news() const {
    return kind == kBroken || kind == kSevered;
  }
};

class Questions {
 public:
  using Clock = std::chrono::steady_clock;

  // Whether the same question is open.
  bool has(const Question& question) const;
  // It is answered once the ranks that are silent have said that they are there, or have had their
  // time.
  void add(Question question);
  // A rank has answered, or is gone.
  void hear(int rank);
  // When there is something to take_ripe().
  Clock::time_point next() const;
  // Those to answer now.
  std::vector<Question> take_ripe(Clock::time_point now);

 private:
  std::vector<Question> questions_;
};

}  // namespace c10d_ext
