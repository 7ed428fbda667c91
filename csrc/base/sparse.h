#pragma once

// Sums of sparse tensors, of every dtype that a tensor can be reduced in.

#include <ATen/core/Tensor.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <c10/core/ScalarType.h>

namespace c10d_ext {

// In which values of `dtype` are added up.
inline c10::ScalarType sum_dtype(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kFloat:
    case c10::kDouble:
      return dtype;
    case c10::kComplexHalf:
      return c10::kComplexFloat;
    case c10::kUInt16:
    case c10::kUInt32:
    case c10::kUInt64:
      return c10::kLong;
    default:
      return c10::isFloatingType(dtype) ? c10::kFloat : dtype;
  }
}

// The values of each index added up.
inline at::Tensor added_up(const at::Tensor& indices, const at::Tensor& values,
                           c10::IntArrayRef sizes) {
  return at::_sparse_coo_tensor_unsafe(indices, values.to(sum_dtype(values.scalar_type())), sizes)
      .coalesce();
}
inline at::Tensor added_up(const at::Tensor& sparse) {
  return sparse.is_coalesced() ? sparse
                               : added_up(sparse._indices(), sparse._values(), sparse.sizes());
}

}  // namespace c10d_ext
