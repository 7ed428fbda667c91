#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <cstddef>

namespace c10d_ext {

// Bytes of memory that collectives have given back and that are kept for the next ones at most, as
// TORCH_C10D_EXT_RESULT_CACHE says; docs/shm.md has how long. 0: none is. Throws where the setting
// makes no sense.
size_t most_kept();

// Whether a tensor is in such memory for its size: from 1 MiB on. The heap reuses its own for
// smaller ones by itself.
bool is_kept(c10::IntArrayRef sizes, c10::ScalarType dtype);

// A contiguous tensor on the CPU in such memory; undefined where it is not, or where torch is to
// show that uninitialized memory is read.
at::Tensor kept_empty(c10::IntArrayRef sizes, c10::ScalarType dtype);

// A contiguous tensor on the CPU for what a collective puts aside while it lasts, as at::empty
// makes it. A large one has pages that are there already.
at::Tensor scratch(c10::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace c10d_ext
