#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

// What in-place and out= ops write must be left alone until the wait. A write before it, as far as
// torch's version counter shows one, is an error at the wait, whether it came in time to do harm or
// not. Known of tensors that are all of their storage: of a part, the counter also counts writes to
// the rest.
namespace c10d_ext {

// Called when the op has counted its own write. One more op on the same tensor, before the
// wait, is in order.
void leave_alone(std::string_view op, std::string_view group_name, const at::Tensor& t);

// Called after wait_tensor: raises where somebody has written. Forgets it.
void check_left_alone(const c10::StorageImpl* storage);

// Whoever takes the collective's work waits by that, in an order of his own, or looks when it is
// over: no more is known of when the tensor is the user's again.
void release_to_user(const c10::StorageImpl* storage) noexcept;

}  // namespace c10d_ext
