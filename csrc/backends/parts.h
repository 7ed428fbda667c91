#pragma once

// Groups of some of the ranks of another.

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "core/group.h"

namespace c10d_ext {

// torch.distributed.SHRINK_ABORT
inline constexpr int kShrinkAbort = 1;

// Where the ranks of a group are in their world; nothing where that is not known.
struct Seats {
  c10::intrusive_ptr<c10d::Store> world;  // where all of its ranks have met
  std::vector<uint64_t> global_ranks;

  static Seats of(const c10::intrusive_ptr<c10d::Store>& store,
                  std::vector<uint64_t> global_ranks) {
    const auto part = c10::dynamic_intrusive_pointer_cast<c10d::PrefixStore>(store);
    return {part ? part->getUnderlyingNonPrefixStore() : store, std::move(global_ranks)};
  }
  // Of some of them.
  Seats part(const std::vector<int>& ranks) const {
    Seats some{world, {}};
    if (!global_ranks.empty()) {
      for (const int rank : ranks) {
        some.global_ranks.push_back(global_ranks.at(static_cast<size_t>(rank)));
      }
    }
    return some;
  }
};

// Those that shrink() keeps, which call it.
inline std::vector<int> remaining(const Group& group, const std::vector<int64_t>& to_exclude) {
  const std::set<int64_t> excluded(to_exclude.begin(), to_exclude.end());
  C10D_EXT_CHECK_VALUE(excluded.count(group.rank()) == 0, "shrink", group,
                       "the ranks that remain must call it, got a call of excluded rank ",
                       group.rank());
  std::vector<int> ranks;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (excluded.count(rank) == 0) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

}  // namespace c10d_ext
