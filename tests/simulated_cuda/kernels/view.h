#pragma once

#include <ATen/ATen.h>

#include <vector>

namespace simulated_cuda {

// Where and how a tensor of a device lies, without keeping its memory: what a kernel is launched
// with. Of a tensor of the host, which a kernel gets by value, a copy.
class View {
 public:
  explicit View(const at::Tensor& t)
      : sizes_(t.sizes().vec()),
        strides_(t.strides().vec()),
        dtype_(t.scalar_type()),
        is_conj_(t.is_conj()),
        is_neg_(t.is_neg()),
        is_number_(t.unsafeGetTensorImpl()->is_wrapped_number()) {
    if (t.is_cuda()) {
      data_ = t.numel() == 0 ? nullptr : const_cast<void*>(t.const_data_ptr());
    } else {
      by_value_ = t.clone();
      if (is_number_) {
        by_value_.unsafeGetTensorImpl()->set_wrapped_number(true);
      }
    }
  }

  // The same memory as a tensor of the CPU.
  at::Tensor tensor() const {
    if (by_value_.defined()) {
      return by_value_;
    }
    at::Tensor t = data_ == nullptr
                       ? at::empty_strided(sizes_, strides_, at::TensorOptions(dtype_))
                       : at::from_blob(data_, sizes_, strides_, at::TensorOptions(dtype_));
    if (is_conj_) {
      t._set_conj(true);
    }
    if (is_neg_) {
      t._set_neg(true);
    }
    if (is_number_) {
      t.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    return t;
  }

 private:
  std::vector<int64_t> sizes_;
  std::vector<int64_t> strides_;
  c10::ScalarType dtype_;
  bool is_conj_;
  bool is_neg_;
  bool is_number_;
  void* data_ = nullptr;
  at::Tensor by_value_;
};

}  // namespace simulated_cuda
