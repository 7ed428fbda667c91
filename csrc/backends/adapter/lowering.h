#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <utility>

#include "backends/adapter/adapter.h"
#include "base/reduction.h"
#include "work/pending.h"

// The verbs over a backend: what it cannot do is made of what it can. Each reads its sources and
// begins at once; see collectives/submit.h for their arguments.
namespace c10d_ext::lowering {

Started all_reduce(const Carrier& carrier, const at::Tensor& source, const at::Tensor& out,
                   const Reduction& reduction);
Started all_reduce_coalesced(const Carrier& carrier, at::TensorList sources, at::TensorList outs,
                             const Reduction& reduction);
Started reduce(const Carrier& carrier, const at::Tensor& source, const at::Tensor& out,
               const Reduction& reduction, int64_t dst);
Started all_gather(const Carrier& carrier, const at::Tensor& source, const at::Tensor& out);
Started all_gather_coalesced(const Carrier& carrier, at::TensorList sources, at::TensorList outs);
Started all_gather_uneven(const Carrier& carrier, const at::Tensor& source, const at::Tensor& out,
                          c10::IntArrayRef sizes);
Started reduce_scatter(const Carrier& carrier, const at::Tensor& source, const at::Tensor& out,
                       const Reduction& reduction);
Started reduce_scatter_coalesced(const Carrier& carrier, at::TensorList sources,
                                 at::TensorList outs, const Reduction& reduction);
// Rank i receives chunk_elements[i] elements of everyone's `source`, reduced.
Started exchange_and_reduce(const Carrier& carrier, const at::Tensor& source, const at::Tensor& out,
                            const Reduction& reduction, c10::IntArrayRef chunk_elements);
// Bytes to and from each rank.
Started all_to_all(const Carrier& carrier, const at::Tensor& source, const at::Tensor& out,
                   c10::IntArrayRef out_bytes, c10::IntArrayRef in_bytes);
Started broadcast(const Carrier& carrier, const at::Tensor& source, const at::Tensor& out,
                  int64_t src);
Started broadcast_coalesced(const Carrier& carrier, at::TensorList sources, at::TensorList outs,
                            int64_t src);
Started gather(const Carrier& carrier, const at::Tensor& source, const at::Tensor& out,
               int64_t dst);
Started scatter(const Carrier& carrier, const at::Tensor& source, const at::Tensor& out,
                int64_t src);
// The verb that torch.distributed.barrier calls, so that the ranks that call that are met.
Started barrier(const Carrier& carrier, const at::Device& device);

// One rank alone: its own value, times the factor.
void reduce_alone(const at::Tensor& source, const at::Tensor& out, const Reduction& reduction);

// A dense tensor to receive `out`'s data in, and the copy into `out` where they differ.
std::pair<at::Tensor, Finish> landing(const at::Tensor& out);

}  // namespace c10d_ext::lowering
