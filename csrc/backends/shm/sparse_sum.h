#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include <vector>

#include "backends/shm/engine.h"
#include "base/reduction.h"
#include "base/sparse.h"

namespace c10d_ext {

// What each rank has of a sparse tensor, which becomes the sum of all.
class SparseSum {
 public:
  SparseSum(const at::Tensor& tensor, ReduceOp op) : tensor_(tensor), op_(op) {}

  // This rank's part.
  shm::Buffer own() {
    const at::Tensor own = added_up(tensor_);
    indices_ = own._indices().contiguous();
    values_ = own._values().to(tensor_.scalar_type()).contiguous();
    return pieces(indices_, values_);
  }
  // Where the parts go, which have so many bytes.
  std::vector<shm::Buffer> room(const std::vector<uint64_t>& bytes) {
    std::vector<int64_t> entries = values_.sizes().vec();
    entries[0] = 1;
    const auto each = static_cast<uint64_t>(indices_.size(0)) * sizeof(int64_t) +
                      static_cast<uint64_t>(c10::multiply_integers(entries)) * values_.itemsize();
    std::vector<shm::Buffer> buffers;
    for (const uint64_t b : bytes) {
      TORCH_CHECK(each == 0 ? b == 0 : b % each == 0, "values of ", each, " bytes came as ", b);
      entries[0] = static_cast<int64_t>(each == 0 ? 0 : b / each);
      all_indices_.push_back(at::empty({indices_.size(0), entries[0]}, indices_.options()));
      all_values_.push_back(at::empty(entries, values_.options()));
      buffers.push_back(pieces(all_indices_.back(), all_values_.back()));
    }
    return buffers;
  }
  void add_up() {
    const at::Tensor sum =
        added_up(at::cat(all_indices_, 1), at::cat(all_values_, 0), tensor_.sizes());
    if (op_ == ReduceOp::Avg) {
      sum._values().div_(static_cast<int64_t>(all_values_.size()));
    }
    tensor_.copy_(sum.to(tensor_.scalar_type()));
  }

 private:
  static shm::Buffer pieces(const at::Tensor& indices, const at::Tensor& values) {
    // What this rank sends the engine only reads.
    const auto piece = [](const at::Tensor& t) {
      return shm::Piece{static_cast<std::byte*>(const_cast<void*>(t.const_data_ptr())), t.nbytes()};
    };
    return {piece(indices), piece(values)};
  }

  const at::Tensor tensor_;
  const ReduceOp op_;
  at::Tensor indices_, values_;
  std::vector<at::Tensor> all_indices_, all_values_;
};

}  // namespace c10d_ext
