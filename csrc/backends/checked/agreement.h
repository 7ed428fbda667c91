#pragma once

// How ranks that share no memory agree on what they do. Each tells rank 0 what it has called, over
// a connection to it or by its host's leader, and rank 0 tells all whether that fits together:
// nobody sends data before. Of a message its two ends tell, in the order of their calls;
// collectives know nothing of it. The same connections tell who is gone, and who does not come. No
// torch in here.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backends/checked/contribution.h"
#include "base/errors.h"
#include "base/fingerprint.h"
#include "control/store.h"

namespace c10d_ext {

class Agreement {
 public:
  using Milliseconds = std::chrono::milliseconds;
  using Clock = std::chrono::steady_clock;

  // Both functions are called where the agreement's work is done, on a thread of its own or one
  // that waits; `fail` on the caller's where the group is of no more use.
  struct Operation {
    std::string op;  // as the caller calls it
    Fingerprint called;
    Milliseconds timeout;
    // All ranks have called it, as their collective `seq`.
    std::function<void(uint64_t seq)> begin;
    // Instead of `begin`, or after it where it was not done() by then.
    std::function<void(const Failure&)> fail;
    // What this rank contributes, where it is little: it travels with the call.
    std::optional<Contribution> data = std::nullopt;
    // Instead of `begin`, where all ranks gave their data: it is here, in the order of ranks, or
    // what leaders have reduced it to.
    std::function<void(uint64_t seq, const std::vector<SharedBytes>& data)> receive = nullptr;
    // Its data is long on its way: ranks say when it is there, so that it fails at once where one
    // is lost in the middle of it.
    bool is_long = false;
  };

  // One end of a message. Both functions are called as those of an operation, and may not throw.
  struct Message {
    bool sends;
    int peer;  // -1: whoever sends first
    int64_t tag;
    uint64_t bytes;
    DType dtype;
    Milliseconds timeout;
    // Its other end is there and fits, at rank `peer`. Both ends begin messages of one tag in the
    // same order.
    std::function<void(int peer)> begin;
    // Instead of `begin`.
    std::function<void(const Failure&)> fail;
    // A send's, of most_with_words() at most: it may travel with what is said of it.
    std::optional<SharedBytes> data = std::nullopt;
    // Instead of `begin`, where the data did: here it is, or it has gone where this end sends. Of
    // every message of up to kLittleMessage bytes.
    std::function<void(int peer, std::string_view data)> receive = nullptr;
    // Of a receive: the memory that its data belongs in, which may get a part of the data before
    // receive() is called. The agreement writes nothing there after begin() or fail().
    std::shared_ptr<char> landing = nullptr;
  };

  // Hears at once of ranks that are gone, where the agreement's work is done, but for those that
  // have left in good order; of none where the group is aborted.
  using Lose = std::function<void(const std::vector<int>& ranks)>;

  // Collective over the ranks of `place`. Throws where they cannot reach rank 0 in time. `machine`:
  // where this process runs, found out where it is empty. `lose` may be empty.
  static std::unique_ptr<Agreement> join(const KeyValueStore& store, const Place& place,
                                         Milliseconds timeout, const std::string& machine = {},
                                         Lose lose = {});
  ~Agreement();
  // What is in flight may end meanwhile: collectives, and messages that wait for their other ends,
  // which rank 0 is asked to give up after that, so that neither end begins without the other. What
  // has not ended by then, and what is called later, fails.
  // Rank 0 goes on for the others until all of them have left: they may have messages among
  // themselves.
  void leave(Milliseconds grace);
  // At the end of the process: those it goes on for have `grace`, and messages that wait for their
  // other ends the time that they have.
  static void end_service(Milliseconds grace);
  // Whether it goes on for others, or has not said all to them. Waits that long for the end of it.
  static bool serves(Milliseconds within);

  // Its number among this rank's; the first is 1.
  uint64_t call(Operation&& operation);
  // How many have been called.
  uint64_t count() const;
  // Whether some have been called that are not done.
  bool has_collectives() const;
  // The ranks of each host whose leader tells them what all have called; none where rank 0 tells
  // everybody. And how many ranks one tells at most, itself among them.
  const std::vector<std::vector<int>>& led_hosts() const;
  size_t told_by_one() const;
  // So many bytes of a message to `peer` may travel with what is said of it.
  size_t most_with_words(int peer) const;
  // Its number among this rank's messages; the first is 1. What became of it after its begin() is
  // nobody's business here.
  uint64_t post(Message message);
  // For who waits for collective `seq` to begin, and has nothing else to do: until it has begun or
  // failed, `until` at most, what comes is taken in here, and not by the agreement's thread, which
  // would have to wake this one. True: it has not, and the time is over; false also where another
  // caller does so. `begun`: when it began to wait, for at first it stays awake.
  bool help(uint64_t seq, Clock::time_point until, Clock::time_point begun = Clock::now());
  // The same for a message.
  bool help_message(uint64_t number, Clock::time_point until,
                    Clock::time_point begun = Clock::now());
  // The data of number `seq` is there, which is said at once: this rank may be about to end.
  void done(uint64_t seq);
  // Its exchange broke off: it fails once it is known why.
  void broke(uint64_t seq, const std::string& why);
  // Why collective `seq` (0: a message) cannot be done any more; waits that long for somebody to
  // know it.
  std::optional<Failure> failure(const std::string& op, uint64_t seq, Milliseconds within) const;
  // The ranks that have not called collective `seq`, and a text that names them with their states;
  // none where all have, or where rank 0 does not say so in time. Rank 0 where it is stopped, as
  // far as this rank can see. Calls `look` now and then, which may throw.
  std::pair<std::vector<int>, std::string> awaited(
      uint64_t seq, Milliseconds within, const std::function<void()>& look = [] {});
  // Whom a message waits for: its other end, also where that has sent what is not here yet; none
  // where it waits for nobody, or for anybody.
  std::pair<std::vector<int>, std::string> awaited_by_message(
      uint64_t number, Milliseconds within, const std::function<void()>& look = [] {});
  // The pid of a rank whose process is gone, as far as is known.
  std::optional<int> gone(int rank) const;
  // Whether a collective has failed after it was begun: whoever does it may never come to an end.
  bool has_abandoned() const;
  // Whether this is a fork of the process that joined.
  bool is_foreign() const;
  // Whether this thread does an agreement's work, and may not wait.
  static bool is_here();
  // Ends the group on all ranks.
  void abort();

 private:
  class Impl;
  explicit Agreement(std::shared_ptr<Impl> impl);
  const std::shared_ptr<Impl> impl_;
};

}  // namespace c10d_ext
