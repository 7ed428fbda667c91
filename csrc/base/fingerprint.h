#pragma once

// What must be the same on all ranks of a collective, and the texts that tell where it is not. Made
// once, for shared memory and for backends that are checked. No torch in here.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/types.h"

namespace c10d_ext {

// What a rank says of a collective that it has called.
struct Fingerprint {
  using Sizes = std::vector<int64_t>;

  OpType op_type = OpType::Barrier;
  // The elements, as they are called in texts: "float32".
  std::string unit;
  // What else there is to say of the elements: " in 2 tensors of sizes [3, 4]".
  std::string details;
  // How many travel together.
  int64_t tensors = 1;
  ReduceOp reduce_op = ReduceOp::None;
  int root = -1;
  // Elements of each rank's part as far as this rank knows; negative: they differ, or there is no
  // such number.
  int64_t count = -1;
  bool is_uneven = false;
  // As add_shape() tells them; 0: shapes are not compared.
  uint64_t shapes = 0;
  // The line that has called it, "train/loop.py:12"; empty: lines are not compared.
  std::string call_site;
  // How the rank would carry it out, where ranks may differ in that: " with algorithms '...'".
  std::string manner;
  // Elements to and from each rank. Empty where the ranks' parts cannot differ.
  Sizes sends, expects;

  friend bool operator==(const Fingerprint&, const Fingerprint&) = default;

  // Several tensors, which travel together: their sizes.
  Fingerprint&& of_members(const Sizes& sizes) &&;
  Fingerprint&& reduced_by(ReduceOp op) &&;
  Fingerprint&& rooted_at(int64_t rank) &&;
  // With `own` elements of this rank's for every rank.
  Fingerprint&& gathered(int64_t own, Sizes of_ranks) &&;
  Fingerprint&& scattered(Sizes of_ranks, int64_t own) &&;
  Fingerprint&& exchanged(Sizes to_ranks, Sizes from_ranks) &&;
  // All parts to the root, or from it, where `parts` is not empty.
  Fingerprint&& gathered_at(int64_t rank, int64_t own, const Sizes& parts, int64_t ranks) &&;
  Fingerprint&& scattered_from(int64_t rank, int64_t own, const Sizes& parts, int64_t ranks) &&;

 private:
  void count_parts(bool is_even, int64_t each);
};

// "all_reduce(6 x float32, sum)"
std::string text_of(const Fingerprint& fingerprint);

// " in 2 tensors of sizes [3, 4]"; empty for one.
std::string text_of_members(size_t tensors, const std::string& sizes);

// What ranks do not agree on, and the ranks at fault.
struct Difference {
  std::string text;
  std::vector<int> ranks;
  // No later call can be trusted to meet its counterparts: see difference().
  bool ends_group = false;
};

// What is wrong where ranks 0, 1, ... have called these as collective `seq`.
//
// The group ends where ranks send different numbers of tensors. Calls of a coalescing block travel
// together where dtype and reduction are the same: ranks that disagree on these make different
// numbers of collectives of one block, and a later collective of one rank would meet an earlier one
// of another.
std::optional<Difference> difference(const std::vector<Fingerprint>& calls, uint64_t seq);

// What each rank sends must be what the other expects, between every two ranks that are concerned:
// all, or with the root of a gather or scatter. Sizes of which `element` are told as one; `root`:
// as the first of the two knows it.
std::optional<Difference> difference_of_parts(
    OpType op_type, size_t ranks, uint64_t seq, const std::function<int(size_t from)>& root,
    const std::function<int64_t(size_t from, size_t to)>& sent,
    const std::function<int64_t(size_t from, size_t to)>& expected, int64_t element,
    const std::function<std::string(size_t from)>& unit);

// "what is sent must be what is received, got ...": of a message that does not fit its receiver's
// tensor.
std::string text_of_misfit(int from, uint64_t sent, DType sent_dtype, int to, uint64_t expected,
                           DType expected_dtype, int64_t tag);

// "the wait must end within ...": of one whose own timeout has passed. `who` names the ranks that
// are awaited, as far as is known.
std::string text_of_wait_timeout(std::chrono::milliseconds timeout, const std::string& who);

// What is compared of several shapes (0: none yet), and one more. Shapes that are all the same,
// with up to 6 dimensions that are not too large for 60 bits, stand for themselves, others are
// hashed.
uint64_t add_shape(uint64_t shapes, const int64_t* sizes, size_t dimensions);
// Whether they do, where both are told.
bool shapes_agree(uint64_t first, uint64_t second);
// "[2, 4]", or "hash 1f2e"; empty where there is none.
std::string text_of_shapes(uint64_t shapes);
// Of calls that travel together.
uint64_t join_shapes(uint64_t first, uint64_t second);

}  // namespace c10d_ext
