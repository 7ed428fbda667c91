#pragma once

// The calls of this rank that are not over: those that wait for other ranks, those that run, those
// that failed; and when one is late. Not for several threads at once: whoever holds one has the
// lock. No torch in here, and no connection.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backends/checked/protocol.h"
#include "backends/checked/roster.h"
#include "base/errors.h"
#include "base/fingerprint.h"
#include "control/landing.h"

namespace c10d_ext {

// A collective, or one end of a message.
struct OpenCall {
  std::string op;
  std::optional<int64_t> tag;  // of a message
  std::chrono::milliseconds timeout;
  std::function<void(uint64_t)> begin;  // with the peer of a message, else the number
  std::function<void(const Failure&)> fail;
  std::chrono::steady_clock::time_point late{};  // when it has taken too long, as far as is known
  bool asked = false;                            // rank 0, what is the matter
  // Instead of `begin`, where all ranks' data came with the calls, or a message's with its other
  // end (of a send, nothing: it has gone). Both are taken out once all ranks have called it.
  std::function<void(uint64_t, const std::vector<SharedBytes>&)> receive;
  bool is_long = false;  // this rank says when it is done
  // Of a receive that lends its memory: where its data comes to at once.
  std::shared_ptr<Landing> landing = nullptr;

  // Reserves the landing for one sentence with so many bytes of data; null where it cannot be.
  std::shared_ptr<Landing> reserve_landing(size_t bytes) const {
    return landing && landing->size() == bytes && landing->reserve() ? landing : nullptr;
  }
  // Nothing comes to its memory from here on.
  void give_back() const {
    if (landing) {
      landing->give_back();
    }
  }
};

// A call that fails gives the memory that it lent back to its caller.
struct FailedCall {
  FailedCall(OpenCall failed, Failure why) : call(std::move(failed)), failure(std::move(why)) {
    call.give_back();
  }

  OpenCall call;
  Failure failure;
};

// A collective or message that has had its time, of which rank 0 is asked.
struct LateCall {
  Says kind;
  uint64_t seq;
  std::string what;
  int sender = -1;  // whose message a receive waits for; -1: nobody knows
};

// What has had its time, as take_late() finds it.
struct LateCalls {
  std::vector<LateCall> questions;  // to rank 0
  std::string unanswered;           // what rank 0 says nothing about
};

class CallTable {
 public:
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;
  using Begin = std::pair<uint64_t, std::function<void(uint64_t)>>;

  static constexpr auto kNever = Clock::time_point::max();

  using Failed = FailedCall;
  using Late = LateCalls;

  // `roster` outlives this. `verdict`: what rank 0 has to find out what is the matter.
  CallTable(const Roster& roster, Milliseconds verdict) : roster_(roster), verdict_(verdict) {}

  // A call that waits for other ranks from here on.
  void add_collective(uint64_t seq, OpenCall&& call) {
    add(waiting_, seq, std::move(call));
  }
  void add_message(uint64_t number, OpenCall&& call) {
    add(messages_, number, std::move(call));
  }
  // All ranks have called it: it runs, or is given their data where that has come.
  void go(uint64_t seq, std::vector<SharedBytes> data);
  // From here on the inner backend knows of the message, and of its end; or its data is here.
  // Throws std::runtime_error where there is nobody to receive that.
  void grant(uint64_t number, uint64_t peer, std::optional<SharedBytes> data);
  void deny_collective(uint64_t seq, ErrorKind kind, const Difference& why) {
    deny(waiting_, seq, kind, why);
  }
  void deny_message(uint64_t number, ErrorKind kind, const Difference& why) {
    deny(messages_, number, kind, why);
  }
  // Reserves the landing of message `number`, as OpenCall does.
  std::shared_ptr<Landing> reserve_landing(uint64_t number, size_t bytes) {
    const auto found = messages_.find(number);
    return found == messages_.end() ? nullptr : found->second.reserve_landing(bytes);
  }
  // Rank 0 is to be asked of the message another time.
  void ask_again(uint64_t number) {
    if (const auto found = messages_.find(number); found != messages_.end()) {
      found->second.asked = false;
      found->second.late = soonest_ = Clock::now();
    }
  }
  // Rank 0 is to be asked at once to give up those that wait: the group is about to be left.
  void give_up_messages();
  // A collective whose data is there, which runs no longer; none where it did not.
  std::optional<OpenCall> take_running(uint64_t seq);
  // Its data does not come. Whether rank 0 is to be asked why.
  bool break_off(uint64_t seq);
  // The group is of no more use. The first reason stays.
  void finish(End end);
  // Collective `seq` has broken off at some rank, which does no long one from there on; and the
  // group is of no more use.
  void doom(uint64_t seq);
  // Messages to begin, and all that is left, which fails.
  std::pair<std::vector<Begin>, std::vector<Failed>> close();

  // When something that runs or waits is late.
  Clock::time_point next_late() const;
  // `is_root_stopped` is asked where something is late.
  Late take_late(Clock::time_point now, const std::function<bool()>& is_root_stopped);
  // Messages to begin, and what has failed.
  std::pair<std::vector<Begin>, std::vector<Failed>> take_settled();
  // The collectives of a group run one after the other, in the order of their calls.
  std::optional<Begin> next_to_begin();

  const std::optional<End>& end() const {
    return end_;
  }
  // Where a collective has failed after it was begun.
  bool has_abandoned() const {
    return abandoned_;
  }
  // Whether a collective is agreed on that has not begun.
  bool has_begins() const {
    return !begins_.empty();
  }
  // Whether a collective is there that has not begun.
  bool is_waiting(uint64_t seq) const {
    return waiting_.count(seq) != 0 || begins_.count(seq) != 0;
  }
  // Whether a message's other end is not there, as far as is known.
  bool is_message_waiting(uint64_t number) const {
    return messages_.count(number) != 0;
  }
  // The last collective that all ranks have called, as far as is known.
  uint64_t agreed() const {
    return agreed_;
  }
  bool has_collectives() const {
    return !waiting_.empty() || !running_.empty();
  }
  // Whether messages wait for their other ends, or to begin.
  bool has_messages() const {
    return !messages_.empty() || !grants_.empty();
  }
  bool gives_up() const {
    return gives_up_;
  }

  // Of what ends with the group, once it has ended.
  Failure told(const std::string& op, uint64_t seq, const std::optional<int64_t>& tag) const;

 private:
  using Calls = std::map<uint64_t, OpenCall>;

  void add(Calls& calls, uint64_t seq, OpenCall&& call);
  // Those that leaders may yet say to go with wait on.
  void keep_agreed(const End& end);
  void deny(Calls& calls, uint64_t seq, ErrorKind kind, const Difference& why);

  const Roster& roster_;
  const Milliseconds verdict_;
  bool abandoned_ = false, gives_up_ = false;
  uint64_t agreed_ = 0;
  Calls waiting_;  // for the other ranks to call it
  Calls running_;
  Calls messages_;  // that wait for their other ends
  // Nothing that waits is late before.
  Clock::time_point soonest_ = kNever;
  // Agreed on, by their numbers: rank 0's word may come before a leader's of an earlier one.
  std::map<uint64_t, std::function<void(uint64_t)>> begins_;
  std::vector<Begin> grants_;
  std::vector<Failed> fails_;
  std::optional<End> end_;
};

}  // namespace c10d_ext
