#pragma once

// Groups of some of the ranks of another.

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <set>
#include <vector>

#include "core/group.h"

namespace c10d_ext {

// torch.distributed.SHRINK_ABORT
inline constexpr int kShrinkAbort = 1;

// The ranks in the world of `ranks` of a group, where the group knows its own.
inline std::vector<uint64_t> global_ranks_of(const c10d::Backend::Options& group,
                                             const std::vector<int>& ranks) {
  std::vector<uint64_t> global_ranks;
  if (!group.global_ranks_in_group.empty()) {
    for (const int rank : ranks) {
      global_ranks.push_back(group.global_ranks_in_group.at(rank));
    }
  }
  return global_ranks;
}

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
