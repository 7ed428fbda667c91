#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <string>
#include <vector>

#include "base/reduction.h"

// The ops as functions that go through the dispatcher and wait: what derivatives are written with,
// so that a derivative is itself differentiable, batched and traced like any other use of the ops.
// A list of one tensor is sent as the tensor.
namespace c10d_ext::call {

using Tensors = std::vector<at::Tensor>;

at::Tensor wait_tensor(const at::Tensor& tensor);
Tensors waited(Tensors tensors);

at::Tensor all_reduce(const at::Tensor& input, const Reduction& reduction,
                      const std::string& group);
Tensors all_reduce_coalesced(const Tensors& inputs, const Reduction& reduction,
                             const std::string& group);
at::Tensor all_gather_into_tensor(const at::Tensor& input, int64_t group_size,
                                  const std::string& group);
Tensors all_gather_into_tensor_coalesced(const Tensors& inputs, int64_t group_size,
                                         const std::string& group);
at::Tensor reduce_scatter_tensor(const at::Tensor& input, const Reduction& reduction,
                                 int64_t group_size, const std::string& group);
Tensors reduce_scatter_tensor_coalesced(const Tensors& inputs, const Reduction& reduction,
                                        int64_t group_size, const std::string& group);
at::Tensor all_to_all_single(const at::Tensor& input, c10::SymIntArrayRef output_split_sizes,
                             c10::SymIntArrayRef input_split_sizes, const std::string& group);
at::Tensor broadcast(const at::Tensor& input, int64_t src, const std::string& group);
Tensors broadcast_coalesced(const Tensors& inputs, int64_t src, const std::string& group);
at::Tensor reduce(const at::Tensor& input, const Reduction& reduction, int64_t dst,
                  const std::string& group);
// One message, made here: there is no such op.
Tensors reduce_coalesced(const Tensors& inputs, const Reduction& reduction, int64_t dst,
                         const std::string& group);
at::Tensor gather(const at::Tensor& input, int64_t dst, const std::string& group);
at::Tensor scatter(const at::Tensor& input, int64_t src, const std::string& group,
                   const std::optional<c10::SymInt>& size);
at::Tensor permute_tensor(const at::Tensor& input, c10::IntArrayRef src_dst,
                          const std::string& group);
at::Tensor all_gather(const at::Tensor& input, c10::SymIntArrayRef sizes, const std::string& group);
at::Tensor reduce_scatter(const at::Tensor& input, const Reduction& reduction,
                          c10::SymIntArrayRef sizes, const std::string& group);

}  // namespace c10d_ext::call
