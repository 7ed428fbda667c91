#pragma once

// A leader's part: it passes the calls of its host's ranks with their data on to rank 0 and, where
// all of them gave some, to the other leaders, and gives its own ranks the word to go once it has
// all calls. Data that is to be reduced it reduces before each of the two (host_sums.h). What is
// not agreed on so, as some rank gave no data, or as they do not fit together, rank 0 tells all
// ranks. No torch in here.

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "backends/checked/protocol.h"
#include "backends/checked/roster.h"

namespace c10d_ext {

// Used under a lock of whoever owns it.
class Relay {
 public:
  // Says it to a rank, this one included.
  using Tell = std::function<void(int rank, Says kind, const Payload& words)>;

  // `roster` outlives it.
  Relay(const Roster& roster, Tell tell);

  // What a rank of this host calls, as it says it. Throw std::runtime_error where that makes no
  // sense.
  void hear_call(int rank, Payload words) {
    add_call(rank, take_call(rank, words));
  }
  // The two halves of that; the second one also for what this leader itself calls.
  Calling take_call(int rank, Payload& words);
  void add_call(int rank, Calling call);
  // What another leader passes on; the same.
  void hear_calls(int leader, Payload& words);
  // Rank 0 has told of the collective: it is not agreed on here.
  void settle(uint64_t seq);
  // Rank 0 is told of each call as it comes, and of those that are here, from now on.
  void pass_on_singly();
  // How many collectives each rank of this host has called.
  std::vector<int64_t> counts() const;

 private:
  // What a rank of this host has called: how many, and those that others of it have not.
  struct Caller {
    uint64_t count = 0;
    std::deque<Calling> calls;
  };
  // Of the ranks of some hosts, those of one after the other's.
  using Calls = std::vector<std::pair<int, Calling>>;

  bool is_for_root() const {
    return roster_.place().rank != 0;
  }
  bool have_all_called() const;
  // The next collective, which all of this host have called.
  void pass_on();
  bool is_settled(uint64_t seq) const {
    return seq <= settled_up_to_ || settled_.count(seq) != 0;
  }
  // Adds what a host has called, and gives the word to go where all have called and agree.
  void add(uint64_t seq, Calls of_host);

  const Roster& roster_;
  const Tell tell_;
  CallReader reader_;
  bool is_single_ = false;
  std::map<int, Caller> callers_;
  // Rank 0's word may come before that of an earlier collective is given here.
  uint64_t settled_up_to_ = 0;
  std::set<uint64_t> settled_;  // those after it
  // Those with the data of all ranks of some hosts.
  std::map<uint64_t, Calls> open_;
};

}  // namespace c10d_ext
