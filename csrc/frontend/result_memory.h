#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

namespace c10d_ext {

// A contiguous tensor for the result of a collective on `like`, as at::empty makes it. Large ones
// on the CPU get memory that results before them have given back; docs/shm.md says how much of it
// is kept, and how long.
at::Tensor empty_result(c10::SymIntArrayRef sizes, const at::Tensor& like);

// Memory that is kept for results to come.
size_t idle_result_bytes();
void release_idle_results();

}  // namespace c10d_ext
