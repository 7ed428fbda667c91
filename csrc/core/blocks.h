#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>

#include <optional>
#include <string>
#include <vector>

// The calls of a coalescing block, started as one, from and into the caller's own tensors: plain
// ones, of eager code. Each output has as many elements as its call needs.
namespace c10d_ext {

void start_all_gather_block(const std::vector<at::Tensor>& inputs,
                            const std::vector<at::Tensor>& outputs, const std::string& group_name);

void start_reduce_scatter_block(const std::vector<at::Tensor>& inputs,
                                const std::vector<at::Tensor>& outputs,
                                const std::string& reduce_op,
                                const std::optional<c10::Scalar>& factor,
                                const std::string& group_name);

}  // namespace c10d_ext
