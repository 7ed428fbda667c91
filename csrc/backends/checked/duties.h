#pragma once

// What a rank does for the agreement: its own part, and the coordinator's and a leader's where it
// is one. No torch in here.

#include <chrono>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "backends/checked/coordinator.h"
#include "backends/checked/last_words.h"
#include "backends/checked/open_calls.h"
#include "backends/checked/participant.h"
#include "backends/checked/relay.h"
#include "backends/checked/roster.h"
#include "backends/checked/star.h"

namespace c10d_ext {

// How long a rank that leaves, or aborts, waits until the others have what it said last.
constexpr std::chrono::milliseconds kLinger{2000};

// By one thread at a time.
class Duties final : private Star::Listener {
 public:
  using Clock = OpenCalls::Clock;

  // `roster` and `calls` outlive this. `lose`: as of a Participant.
  Duties(const Roster& roster, OpenCalls& calls, std::vector<Connection> lines,
         std::vector<FdOwner> death_sockets, Participant::Lose lose);

  // For what other threads may do: wait and wake.
  const Star& star() const {
    return star_;
  }

  // A caller waits in the thread's place, and wants to know when what it waits for may be over.
  void set_helped(bool helped) {
    helped_ = helped;
  }

  // Takes in what has come, and does what follows. When something is late.
  Clock::time_point work(const Star::Ready& ready);
  // Says what there is to say, and does what follows at once. When something is late.
  Clock::time_point tell_news();
  Clock::time_point next_look() const;

  // Leaves the group, on the thread.
  void say_goodbye();

 private:
  void settle();

  void hear(int rank, uint32_t kind, Payload& words) override;
  std::shared_ptr<Landing> find_landing(int rank, uint32_t kind, Payload words) override;
  // What rank 0, or this leader, has said.
  void obey(uint32_t kind, Payload& words);
  void hear_beside_the_star(int rank, uint32_t kind, Payload& words);
  bool is_led_by(int rank) const;
  bool tells_of_the_end(int rank) const;
  void lose(const std::vector<int>& ranks, const std::string& how) override;

  // To rank 0, which may be this one.
  void say(Says kind, Payload words);
  // What it calls, to this rank's leader, and to rank 0 what has no data or is its own host's. Both
  // may be this one.
  void say_call(const Calling& call);
  // As the coordinator, or a leader. To a rank, which may be this one.
  void tell(int rank, Says kind, const Payload& words);

  // Rank 0's: collectives fail from here on, but others may have messages among themselves.
  void serve();

  const Roster& roster_;
  OpenCalls& calls_;
  Star star_;
  Participant participant_;
  std::optional<Coordinator> coordinator_;  // rank 0's
  std::optional<Relay> relay_;              // a leader's
  LastWords last_words_;                    // of any other rank
  std::set<int> left_;                      // of those to whom there is a line beside the star
  bool helped_ = false;
};

}  // namespace c10d_ext
