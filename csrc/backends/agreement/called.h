#pragma once

// What a rank says of a collective that it has called. No torch in here.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backends/shm/engine.h"

namespace c10d_ext {

struct Called {
  using Sizes = std::vector<int64_t>;

  shm::Verb verb = shm::Verb::Barrier;
  // The elements, as they are called in texts: "float32".
  std::string unit;
  // What else must be the same on all ranks, the way it is told: ", sum, root 0".
  std::string rest;
  int root = -1;
  // Elements of each rank's part as far as this rank knows; negative: they differ, or there is no
  // such number.
  int64_t count = -1;
  // As shm::add_shape() tells them; 0: shapes are not compared.
  uint64_t shapes = 0;
  // Elements to and from each rank. Empty where the ranks' parts cannot differ.
  Sizes sends, expects;

  // Several tensors, which travel together: their sizes.
  Called&& of_members(const Sizes& sizes) &&;
  Called&& reduced_by(std::string_view reduce_op) &&;
  Called&& rooted_at(int64_t rank) &&;
  // With `own` elements of this rank's for every rank.
  Called&& gathered(int64_t own, Sizes of_ranks) &&;
  Called&& scattered(Sizes of_ranks, int64_t own) &&;
  Called&& exchanged(Sizes to_ranks, Sizes from_ranks) &&;
  // All parts to the root, or from it, where `parts` is not empty.
  Called&& gathered_at(int64_t rank, int64_t own, const Sizes& parts, int64_t ranks) &&;
  Called&& scattered_from(int64_t rank, int64_t own, const Sizes& parts, int64_t ranks) &&;
};

// "all_reduce(6 x float32, sum)"
std::string text_of(const Called& called);

struct Difference {
  std::string text;
  std::vector<int> ranks;
};

// What is wrong where ranks 0, 1, ... have called these as collective `seq`.
std::optional<Difference> difference(const std::vector<Called>& calls, uint64_t seq);

}  // namespace c10d_ext
