#pragma once

// Every rank's own part, rank 0's too: what it does on the agreement's thread with what rank 0
// tells it, and what it tells rank 0, or its leader, of its calls. No torch in here.

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "backends/checked/open_calls.h"
#include "backends/checked/protocol.h"
#include "backends/checked/roster.h"

namespace c10d_ext {

class Participant {
 public:
  using Clock = OpenCalls::Clock;
  // Says it to rank 0, which may be this one.
  using Say = std::function<void(Says kind, Payload words)>;
  // Has the thread come round once more.
  using Wake = std::function<void()>;

  // Says what it calls, to whom that concerns.
  using SayCall = std::function<void(const Calling& call)>;
  // Says it to another rank, to which there is a line.
  using Tell = std::function<void(int rank, Says kind, const Payload& words)>;
  // Hears at once of ranks that are gone, but for those that have left in good order.
  using Lose = std::function<void(const std::vector<int>& ranks)>;

  // `roster` and `calls` outlive this. `lose` may be empty.
  Participant(const Roster& roster, OpenCalls& calls, Say say, SayCall say_call, Tell tell,
              Wake wake, Lose lose);

  // What rank 0 says. Throws std::runtime_error where that makes no sense.
  void obey(uint32_t kind, Payload& words);
  // Of a message, what its other end says; the same.
  void hear_of_message(int rank, uint32_t kind, Payload& words);
  // Collective `seq` has broken off at some rank.
  void doom(uint64_t seq);
  // There is no connection to rank 0 any more; `how`: kGone or kUnreachable.
  void lose_root(const std::string& how);
  // The first collective that rank 0 may not have done; none where it leaves in good order, or does
  // not tell this one.
  std::optional<uint64_t> undone_by_root() const;

  // Says what other threads of this rank have left to be said.
  void tell_news();
  // Asks rank 0 about what is late, and finds it out where rank 0 does not answer.
  void look(Clock::time_point now);
  // Calls what other code has to do, without a lock.
  void settle();

  // Tells rank 0 how many collectives this one has called; a leader, each rank of its host.
  void say_count(const std::vector<int64_t>& of_host = {}) const;

  // That the data of collective `seq` does not come.
  static News broken(uint64_t seq, const std::string& why);

 private:
  void finish(End end);
  void lose_everybody();

  const Roster& roster_;
  OpenCalls& calls_;
  const Say say_;
  const SayCall say_call_;
  const Tell tell_;
  const Wake wake_;
  const Lose lose_;
  bool root_left_ = false;
  uint64_t root_done_ = 0;
  uint64_t called_ = 0;  // the last collective of which it has told
};

}  // namespace c10d_ext
