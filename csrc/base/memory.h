#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace c10d_ext {

// Asks for huge pages under a large fresh CPU tensor: the first touch of 64 MiB costs 16384 page
// faults otherwise, more time than the collective that fills it. A hint, without effect where the
// kernel has none to give; anything but a large plain CPU tensor is left alone.
void prefer_huge_pages(const at::Tensor& fresh);

// Tells the allocator of a device that the current stream uses the tensor's memory: given back
// before that is over, it is handed out again only after. Without effect on the CPU.
void used_here(const at::Tensor& t);

// The same values in the same memory, as a tensor that Python never sees. What a collective in
// flight holds is this: a backend's thread releases it at any time, and releasing a tensor that
// Python has seen takes the GIL, which is gone for good when the process ends.
at::Tensor alias_of(const at::Tensor& t);
std::vector<at::Tensor> aliases_of(at::TensorList tensors);
// The same with a version counter of its own, for a backend to write: backends write on threads of
// theirs, by torch's ops even, and what they write does not count as a write of the user's.
at::Tensor uncounted_alias_of(const at::Tensor& t);

// Contiguous and without conj or neg bits: a backend can write it directly.
inline bool is_dense(const at::Tensor& t) {
  return t.is_contiguous() && !t.is_conj() && !t.is_neg();
}

// `count` elements from element `offset` on of a dense tensor, its memory taken as 1-D of `dtype`.
at::Tensor span_of(const at::Tensor& t, caffe2::TypeMeta dtype, int64_t offset, int64_t count);
at::Tensor span_of(const at::Tensor& t, int64_t offset, int64_t count);

// The memory of a dense tensor.
at::Tensor bytes_of(const at::Tensor& t);

// out.copy_(source) of as many elements, a contiguous source.clone(), and source.contiguous(), of
// every dtype: torch cannot copy the integers of 1 to 7 bits, of which each takes a byte.
void copy_values(const at::Tensor& out, const at::Tensor& source);
at::Tensor clone_of(const at::Tensor& source);
at::Tensor contiguous(const at::Tensor& source);

// `source`, or a copy of it where writing `out` would overwrite a part of it.
at::Tensor apart_from(const at::Tensor& source, const at::Tensor& out);

}  // namespace c10d_ext
