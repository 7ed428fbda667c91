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

// What a rank on another machine has to answer rank 0. One that is well takes a few milliseconds;
// on a machine that is short of processors its thread may be held up for longer, and must not be
// taken for one that stands still.
constexpr std::chrono::milliseconds kSilent{3000};
// What rank 0 has to find out what is the matter: it may ask first who is there.
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
  // Not answered before, for its answer may be on its way; and not after.
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

  // Whether one is open that has the same answer.
  bool has(const Question& question) const;
  // It is answered once the ranks that are silent have said that they are there, or have had their
  // time.
  void add(Question question);
  // A rank says that it is there, or is known to be no more.
  void hear(int rank);
  // When there is something to take_ripe().
  Clock::time_point next() const;
  // Those to answer now.
  std::vector<Question> take_ripe(Clock::time_point now);

 private:
  std::vector<Question> questions_;
};

}  // namespace c10d_ext
