#pragma once

// Ranks tell each other which collectives cannot be done any more, once rank 0 is lost, which would
// have told them: those whose part broke off tell their leaders, and leaders each other and their
// hosts. For rank 0's host the next one's leader does. No torch in here.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <utility>
#include <vector>

#include "backends/checked/protocol.h"
#include "backends/checked/roster.h"

namespace c10d_ext {

class LastWords {
 public:
  using Tell = std::function<void(int rank, const Payload& seq)>;
  using Doom = std::function<void(uint64_t seq)>;

  // `tell`: another rank, with kDoomed. `doom`: fails it here. `roster` outlives this.
  LastWords(const Roster& roster, Tell tell, Doom doom)
      : roster_(roster), tell_(std::move(tell)), doom_(std::move(doom)) {}

  // Collective `seq` broke off here, or somebody says so.
  void add(uint64_t seq) {
    constexpr size_t kMost = 1024;
    if (broken_.size() < kMost && broken_.insert(seq).second && has_lost_root_) {
      pass_on(seq);
    }
  }
  void lose_root() {
    has_lost_root_ = true;
    for (const uint64_t seq : broken_) {
      pass_on(seq);
    }
  }

 private:
  void pass_on(uint64_t seq) const {
    doom_(seq);
    const auto& here = roster_.own_host();
    if (here.empty()) {
      return;  // no lines but those to rank 0
    }
    const Payload words = Payload().put(static_cast<int64_t>(seq));
    const auto tell_all = [&](const std::vector<int>& ranks) {
      for (const int rank : ranks) {
        if (rank != 0 && rank != roster_.place().rank) {
          tell_(rank, words);
        }
      }
    };
    const auto& hosts = roster_.hosts();
    const int next = hosts[1].front();
    const int leader = here.front() != 0 ? here.front() : next;
    if (leader != roster_.place().rank) {
      tell_all({leader});
      return;
    }
    tell_all(here);
    for (const auto& ranks : hosts) {
      tell_all({ranks.front()});
    }
    if (leader == next) {
      tell_all(hosts.front());
    }
  }

  const Roster& roster_;
  const Tell tell_;
  const Doom doom_;
  std::set<uint64_t> broken_;
  bool has_lost_root_ = false;
};

}  // namespace c10d_ext
