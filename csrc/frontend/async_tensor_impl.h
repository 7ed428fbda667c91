#pragma once

// The tensor behind an AsyncCollectiveTensor, for the files of async_tensor.

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/FunctionRef.h>

#include <atomic>
#include <utility>

#include "work/pending.h"

namespace c10d_ext::async_tensor {

constexpr c10::DispatchKey kKey = c10::DispatchKey::DeferredInit;

class AsyncTensorImpl final : public c10::TensorImpl {
 public:
  AsyncTensorImpl(c10::Storage storage, c10::DispatchKeySet keys, caffe2::TypeMeta dtype,
                  at::Tensor elem, bool over)
      : c10::TensorImpl(c10::TensorImpl::VIEW, std::move(storage), keys, dtype),
        elem_(std::move(elem)),
        over_(over) {
    copy_geometry();
    set_version_counter(elem_.unsafeGetTensorImpl()->version_counter());
  }

  const at::Tensor& elem() const {
    return elem_;
  }
  void set_elem(at::Tensor elem) {
    elem_ = std::move(elem);
  }
  void copy_geometry() {
    set_sizes_and_strides(elem_.sizes(), elem_.strides(), elem_.storage_offset());
  }

  // Said by whoever asked first, and never by the collective's own progress: what a user sees of
  // it must not depend on timing.
  bool waited() const {
    return waited_.load(std::memory_order_acquire);
  }
  void wait() {
    if (waited()) {
      return;
    }
    if (!over_) {
      c10d_ext::wait(elem_);
    }
    waited_.store(true, std::memory_order_release);
  }
  // Known to be complete from the start, so that waiting costs nothing.
  bool over() const {
    return over_ || waited();
  }

  void release_resources() override {
    c10::TensorImpl::release_resources();
    elem_.reset();
  }

 private:
  at::Tensor elem_;
  const bool over_;
  std::atomic<bool> waited_{false};
};

// Null of another tensor.
AsyncTensorImpl* impl_of(const at::Tensor& t);

// A wrapper around `elem`, which has no history, with the storage of another one or a new one.
at::Tensor make(at::Tensor elem, bool over, c10::Storage storage = {});
// Its Python object, which lives as long as the tensor. With the GIL.
PyObject* make_object(const at::Tensor& wrapper);

bool has_history(const at::Tensor& t);
bool may_have_tangent(const at::Tensor& t);
// Whether a compiler or a transform records what is called now.
bool is_recorded();

// The values as autograd has the wrapper: what is recorded of this is recorded of the wrapper.
at::Tensor recordable(const at::Tensor& wrapper, const AsyncTensorImpl& impl);
// A view taken where nothing was recorded has the base's need for gradients, and no edge.
bool is_recordable(const at::Tensor& wrapper);

// Takes one view of a wrapper, as a wrapper; false where that is not for here.
bool view(const c10::OperatorHandle& op, torch::jit::Stack* stack);
// The finished values of a wrapper as a view of it, so that what is written into either reaches the
// history of both.
at::Tensor waited_view(const at::Tensor& wrapper, c10::function_ref<at::Tensor()> values);

}  // namespace c10d_ext::async_tensor
