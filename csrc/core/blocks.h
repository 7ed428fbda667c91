#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>

#include <optional>
#include <string>
#include <vector>

// The calls of a coalescing block as one, from and into the caller's own tensors, without a
// gradient. Each output has as many elements as its call needs. Complete on return unless
// `async_op`; false, and nothing has happened, where the backend may not write a tensor itself.
namespace c10d_ext {

bool write_all_gather_block(bool async_op, const std::vector<at::Tensor>& inputs,
                            const std::vector<at::Tensor>& outputs, const std::string& group_name);

bool write_reduce_scatter_block(bool async_op, const std::vector<at::Tensor>& inputs,
                                const std::vector<at::Tensor>& outputs,
                                const std::string& reduce_op,
                                const std::optional<c10::Scalar>& factor,
                                const std::string& group_name);

}  // namespace c10d_ext
