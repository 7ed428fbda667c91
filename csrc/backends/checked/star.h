#pragma once

// Rank 0's connections to the other ranks of a group, or another rank's one to rank 0, and those of
// leaders: what comes over them, and which are lost. No torch in here.
//
// Two may wait for that at a time, the agreement's thread and a caller who has nothing else to do.
// What comes wakes the caller where there is one, and else the thread (EPOLLEXCLUSIVE, of which the
// caller's set is the first); so whoever was woken has to take it in.

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backends/checked/heartbeat.h"
#include "backends/checked/protocol.h"
#include "backends/checked/roster.h"
#include "control/connection.h"
#include "control/death_sockets.h"
#include "control/landing.h"
#include "control/process.h"

namespace c10d_ext {

// Used under a lock of whoever owns it, but for wake() and wait().
class Star {
 public:
  using Clock = std::chrono::steady_clock;
  enum class Waiter : uint8_t { Caller, Thread };
  // What has come: lines that can be read, or kWoken, or kCut.
  using Ready = std::vector<uint64_t>;

  // Who uses it.
  class Listener {
   public:
    virtual ~Listener() = default;
    // What `rank` says. Throws std::runtime_error where that makes no sense, and then loses it.
    virtual void hear(int rank, uint32_t kind, Payload& words) = 0;
    // Where the data of what a rank says belongs. The data is yet to come: `words` have its size
    // alone. Null: nobody waits for the data.
    virtual std::shared_ptr<Landing> find_landing(int rank, uint32_t kind, Payload words) = 0;
    // Ranks to which there is no connection any more; `how`: kGone or kUnreachable.
    virtual void lose(const std::vector<int>& ranks, const std::string& how) = 0;
  };

  // `roster` and `listener` outlive this. By rank: a connection, and a socket for DeathSockets,
  // where there are any.
  Star(const Roster& roster, Listener& listener, std::vector<Connection> lines,
       std::vector<FdOwner> death_sockets);

  // Ends the wait of one of the two, or the next one of either. From any thread.
  void wake() const;
  void wake(Waiter waiter) const;

  // Waits for something to come, until then at most; until `awake_until` without sleep.
  Ready wait(Waiter waiter, Clock::time_point until, Clock::time_point awake_until = {}) const;
  // The thread's: what comes over lines is left to callers.
  Ready wait_aside(Clock::time_point until) const;
  // All that may have come, for who does not know.
  Ready everything() const;
  // Tells the listener of it.
  void take_in(const Ready& ready);
  // Says it to a rank; to one that is lost, nothing.
  void say(int rank, Says kind, const Payload& words);
  Clock::time_point next_beat() const {
    return heartbeat_.next();
  }
  // Says that this rank is there, where that is due.
  void beat();

  // Says that this rank leaves, and after which collective; the others do not take its end for a
  // loss.
  void leave(uint64_t after);
  // Until the others have heard what was said last, or have had `limit` for it. Calls `look` now
  // and then: `is_heard`, their kernels have all of it, or the limit is over. A process that ends
  // before may take it back.
  void linger(std::chrono::milliseconds limit, const std::function<void(bool is_heard)>& look);

 private:
  static constexpr uint64_t kWoken = uint64_t{1} << 32;
  static constexpr uint64_t kWokenAlone = kWoken + 1;
  static constexpr uint64_t kCut = kWoken + 2;

  Ready wait(const FdOwner& set, Waiter waiter, Clock::time_point until,
             Clock::time_point awake_until) const;
  void say_over(size_t line, Says kind, const Payload& words);
  // Has what comes over a line wake a waiter, also where it takes more of what is unsent.
  void watch(size_t line);
  void close(size_t line);
  void hear_all(size_t line);
  void hear(size_t line);
  void cut(size_t line);
  void lose(size_t line);

  const Roster& roster_;
  Listener& listener_;
  const FdOwner wake_;
  // By Waiter: what wakes it alone, and what it waits for.
  const std::array<FdOwner, 2> wake_one_;
  const std::array<FdOwner, 2> watched_;
  const FdOwner watched_aside_;
  std::vector<Connection> lines_;
  std::vector<uint32_t> watched_for_;  // by line: 0 where it is not watched
  Heartbeat heartbeat_;
  std::optional<DeathSockets> death_sockets_;
};

}  // namespace c10d_ext
