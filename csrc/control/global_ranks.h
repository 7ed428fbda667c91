#pragma once

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <utility>
#include <vector>

namespace c10d_ext {

// Where the ranks of a group are in their world; nothing where that is not known.
struct GlobalRanks {
  c10::intrusive_ptr<c10d::Store> world;  // where all of its ranks have met
  std::vector<uint64_t> ranks;

  static GlobalRanks of(const c10::intrusive_ptr<c10d::Store>& store, std::vector<uint64_t> ranks) {
    const auto part = c10::dynamic_intrusive_pointer_cast<c10d::PrefixStore>(store);
    return {part ? part->getUnderlyingNonPrefixStore() : store, std::move(ranks)};
  }
  // Of some of them.
  GlobalRanks part(const std::vector<int>& group_ranks) const {
    GlobalRanks some{world, {}};
    if (!ranks.empty()) {
      for (const int rank : group_ranks) {
        some.ranks.push_back(ranks.at(static_cast<size_t>(rank)));
      }
    }
    return some;
  }
};

}  // namespace c10d_ext
