#include "base/memory.h"

#include <ATen/MemoryOverlap.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstring>

namespace c10d_ext {

namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kWorthwhile = 2 * kHugePage;

bool is_less_than_a_byte(const at::Tensor& t) {
  using c10::ScalarType;
  const auto dtype = t.scalar_type();
  return (dtype >= ScalarType::UInt1 && dtype <= ScalarType::UInt7) ||
         (dtype >= ScalarType::Int1 && dtype <= ScalarType::Int7);
}

// Up to here torch's copy_ takes longer to look at two tensors than to copy them.
constexpr size_t kLittle = 4096;

bool is_little_and_plain(const at::Tensor& t) {
  constexpr auto kHasNoMemory = c10::python_ks | c10::functorch_transforms_ks |
                                c10::DispatchKeySet(c10::DispatchKey::ZeroTensor);
  return t.is_cpu() && t.numel() > 0 && t.nbytes() <= kLittle && is_dense(t) && t.has_storage() &&
         !t.key_set().has_any(kHasNoMemory);
}

at::Tensor as_bytes(const at::Tensor& t) {
  return t.view(c10::ScalarType::Byte);
}

}  // namespace

void prefer_huge_pages(const at::Tensor& fresh) {
  if (!fresh.is_cpu() || !fresh.has_storage() ||
      fresh.key_set().has_any(c10::python_ks | c10::functorch_transforms_ks)) {
    return;
  }
  const size_t bytes = fresh.storage().nbytes();
  if (bytes < kWorthwhile) {
    return;
  }
  const auto begin = reinterpret_cast<uintptr_t>(fresh.storage().data());
  if (begin == 0) {
    return;
  }
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = (begin + bytes) / kHugePage * kHugePage;
  if (first < last) {
    // Fails where huge pages are switched off: nothing is lost.
    static_cast<void>(madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE));
  }
}

void used_here(const at::Tensor& t) {
  if (t.is_cpu() || t.is_meta()) {
    return;
  }
  const c10::impl::VirtualGuardImpl guard(t.device().type());
  guard.recordDataPtrOnStream(t.storage().data_ptr(), guard.getStream(t.device()));
}

at::Tensor alias_of(const at::Tensor& t) {
  at::Tensor alias = uncounted_alias_of(t);
  if (!alias.is_same(t)) {
    alias.unsafeGetTensorImpl()->set_version_counter(t.unsafeGetTensorImpl()->version_counter());
  }
  return alias;
}

at::Tensor uncounted_alias_of(const at::Tensor& t) {
  if (!t.defined() || !t.has_storage()) {
    return t;
  }
  at::Tensor alias = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(t.storage()), t.key_set(), t.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return alias;
}

std::vector<at::Tensor> aliases_of(at::TensorList tensors) {
  std::vector<at::Tensor> aliases;
  aliases.reserve(tensors.size());
  for (const auto& t : tensors) {
    aliases.push_back(alias_of(t));
  }
  return aliases;
}

// Built by hand: two views through the dispatcher cost more than the rest of a start, and cannot
// take a tensor of one element with an odd stride.
at::Tensor span_of(const at::Tensor& t, caffe2::TypeMeta dtype, int64_t offset, int64_t count) {
  at::Tensor span = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(t.storage()), t.key_set(), dtype);
  auto* impl = span.unsafeGetTensorImpl();
  const auto start = t.storage_offset() * static_cast<int64_t>(t.itemsize());
  impl->set_storage_offset(start / static_cast<int64_t>(dtype.itemsize()) + offset);
  impl->set_sizes_contiguous({count});
  return span;
}

at::Tensor span_of(const at::Tensor& t, int64_t offset, int64_t count) {
  return span_of(t, t.dtype(), offset, count);
}

at::Tensor bytes_of(const at::Tensor& t) {
  return span_of(t, caffe2::TypeMeta::Make<uint8_t>(), 0, static_cast<int64_t>(t.nbytes()));
}

void copy_values(const at::Tensor& out, const at::Tensor& source) {
  if (out.scalar_type() == source.scalar_type() && out.numel() == source.numel() &&
      is_little_and_plain(out) && is_little_and_plain(source)) {
    std::memmove(out.mutable_data_ptr(), source.const_data_ptr(), out.nbytes());
    return;
  }
  if (C10_UNLIKELY(is_less_than_a_byte(out))) {
    as_bytes(out).copy_(as_bytes(source).reshape(out.sizes()));
    return;
  }
  out.copy_(source.sizes() == out.sizes() ? source : source.reshape(out.sizes()));
}

at::Tensor clone_of(const at::Tensor& source) {
  return C10_UNLIKELY(is_less_than_a_byte(source))
             ? as_bytes(source).clone(at::MemoryFormat::Contiguous).view(source.scalar_type())
             : source.clone(at::MemoryFormat::Contiguous);
}

at::Tensor apart_from(const at::Tensor& source, const at::Tensor& out) {
  return source.is_meta() || source.is_same(out) ||
                 at::get_overlap_status(source, out) == at::MemOverlapStatus::No
             ? source
             : clone_of(source);
}

at::Tensor contiguous(const at::Tensor& source) {
  return C10_UNLIKELY(is_less_than_a_byte(source))
             ? as_bytes(source).contiguous().view(source.scalar_type())
             : source.contiguous();
}

}  // namespace c10d_ext
