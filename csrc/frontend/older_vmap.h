#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

// Batches of torch's older vmap, which is_grads_batched=True and vectorize=True are built on. A
// tensor carries all its batch dimensions at once, each with the level of its vmap.
namespace c10d_ext {

// The innermost level that `tensors` are batched at, each tensor without its dimension of that
// level, and where that dimension was, nothing for a tensor without one.
std::tuple<int64_t, std::vector<at::Tensor>, std::vector<std::optional<int64_t>>> peel_batch(
    std::vector<at::Tensor> tensors);

// `t` with its dimension `dim` as the batch of `level`, which is above those that it has already.
at::Tensor add_batch(const at::Tensor& t, int64_t level, std::optional<int64_t> dim);

// A tangent that is waited for, batches first in memory as torch wants them; those of rows come
// second.
at::Tensor batch_first(const at::Tensor& tangent);

}  // namespace c10d_ext
