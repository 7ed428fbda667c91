#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <string_view>

#include "base/group.h"
#include "base/reduction.h"

// The verbs of a process group for every dtype, reduce op, stride and size.
//
// Each starts the collective on the backend of the tensors' device and attaches it to `out`'s
// storage (see pending.h). `source` is read until the collective completes and never written,
// unless it is `out` itself or shares memory with it; `out` may have any strides and conj or neg
// bits. What the backend cannot do, or does wrongly, is done here from what it can: bytes are moved
// instead of dtypes it does not know, values are accumulated in a dtype it has, reduce-scatter is
// an exchange and a local reduction on gloo.
//
// Meta tensors start nothing, so that one kernel serves real and fake tensors.
// Callers have checked shapes, ranks and reduce ops, alike on every rank.
namespace c10d_ext {

void start_all_reduce(std::string_view op, const Group& group, const at::Tensor& source,
                      const at::Tensor& out, const Reduction& reduction);
void start_all_reduce_coalesced(std::string_view op, const Group& group, at::TensorList sources,
                                at::TensorList outs, const Reduction& reduction);

// `out` on ranks other than `dst` is left alone.
void start_reduce(std::string_view op, const Group& group, const at::Tensor& source,
                  const at::Tensor& out, const Reduction& reduction, int64_t dst);

// out holds N sources one after the other.
void start_all_gather(std::string_view op, const Group& group, const at::Tensor& source,
                      const at::Tensor& out);
void start_all_gather_coalesced(std::string_view op, const Group& group, at::TensorList sources,
                                at::TensorList outs);
// Rank i contributes sizes[i] rows (dim 0).
void start_all_gather_uneven(std::string_view op, const Group& group, const at::Tensor& source,
                             const at::Tensor& out, c10::IntArrayRef sizes);

// source holds N outs one after the other.
void start_reduce_scatter(std::string_view op, const Group& group, const at::Tensor& source,
                          const at::Tensor& out, const Reduction& reduction);
void start_reduce_scatter_coalesced(std::string_view op, const Group& group, at::TensorList sources,
                                    at::TensorList outs, const Reduction& reduction);
// Rank i receives sizes[i] rows (dim 0) of source.
void start_reduce_scatter_uneven(std::string_view op, const Group& group, const at::Tensor& source,
                                 const at::Tensor& out, const Reduction& reduction,
                                 c10::IntArrayRef sizes);

// Rows of dim 0. A rank exchanges even when it has nothing to send or receive itself.
void start_all_to_all(std::string_view op, const Group& group, const at::Tensor& source,
                      const at::Tensor& out, c10::IntArrayRef output_splits,
                      c10::IntArrayRef input_splits);

// `source` counts on rank `src` only.
void start_broadcast(std::string_view op, const Group& group, const at::Tensor& source,
                     const at::Tensor& out, int64_t src);
void start_broadcast_coalesced(std::string_view op, const Group& group, at::TensorList sources,
                               at::TensorList outs, int64_t src);

// `out` counts on rank `dst` only.
void start_gather(std::string_view op, const Group& group, const at::Tensor& source,
                  const at::Tensor& out, int64_t dst);
// `source` counts on rank `src` only.
void start_scatter(std::string_view op, const Group& group, const at::Tensor& source,
                   const at::Tensor& out, int64_t src);

// Each rank's `out` gets its own `source`, which nobody else sees: shapes may differ between ranks,
// and a rank meets the others with an empty tensor, too.
void start_barrier(std::string_view op, const Group& group, const at::Tensor& source,
                   const at::Tensor& out);

}  // namespace c10d_ext
