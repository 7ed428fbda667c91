#pragma once

#include <ATen/core/Tensor.h>

namespace c10d_ext {

// Whether a mode, a transform or a tensor subclass sees the calls on `t`.
bool is_intercepted(const at::Tensor& t);

// The same, or `t` is no tensor that a backend could read.
bool is_traced(const at::Tensor& t);

bool has_tangent(const at::Tensor& t);

// Whether nobody but the kernel, and reverse mode, needs to know that `t` is read or written.
bool is_plain(const at::Tensor& t);

}  // namespace c10d_ext
