#pragma once

// What ranks give to a collective of little data, which travels with their calls. No torch in here.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/types.h"
#include "control/payload.h"
#include "control/shared_bytes.h"

namespace c10d_ext {

// How values become one with those of other ranks.
struct ReducedBy {
  DType dtype;
  ReduceOp op;

  friend bool operator==(const ReducedBy&, const ReducedBy&) = default;
};

// One rank's: the same bytes for every rank, or a part for each.
class Contribution {
 public:
  Contribution() = default;
  explicit Contribution(SharedBytes bytes) : bytes_(std::move(bytes)) {}
  // Of which leaders tell ranks no more than what comes of those of all. Throws std::runtime_error
  // where they cannot be so reduced.
  Contribution to_be_reduced(const ReducedBy& how) &&;
  // Of a rank whose values are in those of the first one of its host.
  static Contribution in_first();
  // Of so many bytes for each rank, one after the other. Throws std::runtime_error where they are
  // not what there is.
  Contribution(SharedBytes bytes, const std::vector<int64_t>& parts);

  bool has_parts() const {
    return !ends_.empty();
  }
  const std::optional<ReducedBy>& reduced_by() const {
    return reduced_by_;
  }
  bool is_in_first() const {
    return is_in_first_;
  }
  // Of all parts.
  const SharedBytes& bytes() const {
    return bytes_;
  }
  // Whether values with those of another one are reduced one by one.
  bool fits(const Contribution& other) const {
    return reduced_by_ == other.reduced_by_ && size() == other.size() && ends_ == other.ends_;
  }
  // With other bytes, as many.
  Contribution with(SharedBytes bytes) const;
  size_t size() const {
    return bytes_.size();
  }
  // What there is for a rank.
  SharedBytes of(int rank) const;
  // What is passed on where there are these ranks alone: of parts theirs, and of the others
  // nothing.
  Contribution of(const std::vector<int>& ranks) const;

 private:
  friend Payload& put(Payload& words, const Contribution& contribution);

  SharedBytes bytes_;
  std::vector<size_t> ends_;  // of the parts
  std::optional<ReducedBy> reduced_by_;
  bool is_in_first_ = false;
};

Payload& put(Payload& words, const Contribution& contribution);
Payload& put(Payload& words, const std::optional<Contribution>& contribution);
// Of a group of so many ranks. Throws std::runtime_error where it can be of none.
std::optional<Contribution> take_contribution(Payload& words, int ranks);

// What a rank is to have of all contributions; of none where not all ranks gave theirs.
Payload& put_all_of(Payload& words, const std::vector<Contribution>& all, int rank);
// That, or the one that they were reduced to.
std::vector<SharedBytes> take_all(Payload& words, int ranks);

// So many bytes of all ranks together travel with calls at most, whatever is set.
constexpr size_t kMostData = 262144;
// So many bytes a rank gives where `most` of all ranks together are little. Of some collectives the
// root alone gives. What each rank has a part of goes over the link of each host once, and not to
// each other host whose leader passes it on: as much for each of them is little. What leaders
// reduce is as much as that of one rank of each host. `hosts`: 0 where rank 0 passes data on.
constexpr size_t most_of_a_rank(OpType type, size_t most, size_t ranks, size_t hosts,
                                bool is_reduced) {
  const bool is_exchange =
      type == OpType::AllToAll || type == OpType::ReduceScatter || type == OpType::Scatter;
  const bool is_of_root = type == OpType::Broadcast || type == OpType::Scatter;
  const size_t given = is_of_root ? 1 : is_reduced && hosts > 0 ? hosts : ranks;
  return most * (is_exchange && hosts > 0 ? hosts : 1) / given;
}

}  // namespace c10d_ext
