#pragma once

// What the files of lowering share.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "backends/adapter/adapter.h"
#include "work/pending.h"

namespace c10d_ext::lowering {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

Tensors rows_of(const at::Tensor& flat, int64_t rows);
at::Tensor empty_bytes(int64_t count, const at::Tensor& like);
Started all_to_all_bytes(const Adapter& adapter, const at::Tensor& source_bytes,
                         const at::Tensor& out_bytes, std::vector<int64_t> out_splits,
                         std::vector<int64_t> in_splits);
Started all_gather_bytes(const Adapter& adapter, const at::Tensor& source_bytes,
                         const at::Tensor& out_bytes);
// Rank i contributes `sizes[i]` of the elements of `out`, or of multiples of them.
Started all_gather_uneven(const Adapter& adapter, const at::Tensor& source, const at::Tensor& out,
                          c10::IntArrayRef sizes);
// The values of several tensors of one dtype, one after the other.
at::Tensor flattened(at::TensorList tensors);
Finish unflatten_later(const at::Tensor& flat, at::TensorList outs);
Tensors columns(const at::Tensor& matrix, at::TensorList widths_of, int64_t divisor);

// Of requests that have_parts(), and of lists of several dtypes: everything travels as bytes.
Started with_parts(const Adapter& adapter, const HeldRequest& request);
Started all_gather_bytes_of_list(const Adapter& adapter, at::TensorList sources,
                                 at::TensorList outs);

// Collectives that reduce.
Started all_reduce_sparse(const Adapter& adapter, const at::Tensor& tensor,
                          const Reduction& reduction);
Started all_reduce(const Adapter& adapter, const at::Tensor& input, const at::Tensor& out,
                   const Reduction& reduction);
Started exchange_and_reduce(const Adapter& adapter, const at::Tensor& source, const at::Tensor& out,
                            const Reduction& reduction, c10::IntArrayRef chunk_elements);
Started reduce_scatter(const Adapter& adapter, const at::Tensor& input, const at::Tensor& out,
                       const Reduction& reduction);
Started all_reduce_coalesced(const Adapter& adapter, at::TensorList sources, at::TensorList outs,
                             const Reduction& reduction);
Started reduce(const Adapter& adapter, const at::Tensor& source, const at::Tensor& out,
               const Reduction& reduction, int64_t dst);
Started reduce_scatter_coalesced(const Adapter& adapter, at::TensorList sources,
                                 at::TensorList outs, const Reduction& reduction);
// One rank alone: its own value, times the factor.
void reduce_alone(const at::Tensor& source, const at::Tensor& out, const Reduction& reduction);

}  // namespace c10d_ext::lowering
