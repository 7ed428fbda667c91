#pragma once

// Rank 0's connections to the other ranks of a group, or another rank's one to rank 0: what comes
// over them, and which are lost. No torch in here.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backends/checked/heartbeat.h"
#include "backends/checked/protocol.h"
#include "backends/checked/roster.h"
#include "control/connection.h"
#include "control/death_sockets.h"
#include "control/process.h"

namespace c10d_ext {

// Used by one thread, but for wake().
class Star {
 public:
  using Clock = std::chrono::steady_clock;

  // Who uses it.
  class Listener {
   public:
    virtual ~Listener() = default;
    // What `rank` says. Throws std::runtime_error where that makes no sense, and then loses it.
    virtual void hear(int rank, uint32_t kind, Payload& words) = 0;
    // Ranks to which there is no connection any more; `how`: kGone or kUnreachable.
    virtual void lose(const std::vector<int>& ranks, const std::string& how) = 0;
  };

  // `roster` and `listener` outlive this. By rank: a connection, and a socket for DeathSockets.
  Star(const Roster& roster, Listener& listener, std::vector<Connection> lines,
       std::vector<FdOwner> death_sockets);

  // Ends the wait of the thread that listens, or its next one. From any thread.
  void wake() const;

  // Waits for something to come, until then at most, and tells the listener of it. False: the wait
  // was interrupted.
  bool listen(Clock::time_point until);
  // Says it to a rank; to one that is lost, nothing.
  void say(int rank, Says kind, const Payload& words);
  Clock::time_point next_beat() const {
    return heartbeat_.next();
  }
  // Says that this rank is there, where that is due.
  void beat();

  // Says that this rank leaves; the others do not take its end for a loss.
  void leave();
  // Until the others have heard what was said last, or have had `limit` for it.
  void linger(std::chrono::milliseconds limit);

 private:
  void hear(size_t line);
  void cut(size_t line);
  void lose(size_t line);

  const Roster& roster_;
  Listener& listener_;
  const Pipe wake_;
  std::vector<Connection> lines_;
  Heartbeat heartbeat_;
  std::optional<DeathSockets> death_sockets_;
};

}  // namespace c10d_ext
