#include "frontend/async_tensor.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <typeinfo>
#include <utility>

#include "base/memory.h"
#include "frontend/async_tensor_impl.h"
#include "frontend/autograd.h"
#include "frontend/dispatch_state.h"
#include "work/pending.h"

namespace c10d_ext {

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

// Leaked: tensors outlive the module at the interpreter's end.
PyObject* async_type = nullptr;
PyObject* wait_op = nullptr;  // torch.ops.c10d_ext.wait_tensor.default

c10::Storage sealed_storage(const at::Tensor& elem) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), elem.storage().nbytes(),
                       c10::DataPtr(nullptr, elem.device()), c10::GetAllocator(c10::kMeta),
                       /*resizable=*/true);
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(
      "AsyncCollectiveTensor: its memory must be reached through .wait(), got a request for its "
      "data pointer");
  return storage;
}

}  // namespace

namespace async_tensor {

AsyncTensorImpl* impl_of(const at::Tensor& t) {
  auto* impl = t.unsafeGetTensorImpl();
  // The key alone does not tell: `z.data = wrapper` gives it to a tensor of another kind.
  return impl->key_set().has(kKey) && typeid(*impl) == typeid(AsyncTensorImpl)
             ? static_cast<AsyncTensorImpl*>(impl)
             : nullptr;
}

at::Tensor make(at::Tensor elem, bool over, c10::Storage storage) {
  if (!storage) {
    storage = sealed_storage(elem);
  }
  const auto keys = elem.key_set().add(kKey);
  const auto dtype = elem.dtype();
  return at::detail::make_tensor<AsyncTensorImpl>(std::move(storage), keys, dtype, std::move(elem),
                                                  over);
}

PyObject* make_object(const at::Tensor& wrapper) {
  PyObject* object = THPVariable_Wrap(wrapper, reinterpret_cast<PyTypeObject*>(async_type));
  if (object != nullptr) {
    wrapper.unsafeGetTensorImpl()->set_python_dispatch(true);
  }
  return object;
}

bool is_recorded() {
  using c10::impl::TorchDispatchModeKey;
  using c10::impl::TorchDispatchModeTLS;
  constexpr DispatchKeySet recorders({DispatchKey::PythonDispatcher, DispatchKey::PreDispatch,
                                      DispatchKey::Functionalize,
                                      DispatchKey::FuncTorchDynamicLayerFrontMode});
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  if (included.has_any(recorders)) {
    return true;
  }
  // Modes of users see the ops, and get what everybody gets.
  return included.has(DispatchKey::Python) &&
         (TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FAKE).has_value() ||
          TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::PROXY).has_value() ||
          TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FUNCTIONAL).has_value());
}

bool has_history(const at::Tensor& t) {
  return t.unsafeGetTensorImpl()->autograd_meta() != nullptr && t.requires_grad();
}

bool may_have_tangent(const at::Tensor& t) {
  return t.unsafeGetTensorImpl()->autograd_meta() != nullptr && has_tangent(t);
}

at::Tensor recordable(const at::Tensor& wrapper, const AsyncTensorImpl& impl) {
  if (!c10::GradMode::is_enabled() || !has_history(wrapper)) {
    return impl.elem();
  }
  at::Tensor values = alias_of(impl.elem());
  torch::autograd::impl::set_gradient_edge(values, torch::autograd::impl::gradient_edge(wrapper));
  return values;
}

bool is_recordable(const at::Tensor& wrapper) {
  return !c10::GradMode::is_enabled() || !has_history(wrapper) || !wrapper.is_view() ||
         wrapper.grad_fn() != nullptr;
}

}  // namespace async_tensor

using namespace async_tensor;

namespace {

AsyncTensorImpl& impl_or_throw(const at::Tensor& t) {
  auto* impl = impl_of(t);
  TORCH_CHECK(impl != nullptr,
              "AsyncCollectiveTensor: must be the result of a functional collective, got a tensor "
              "of another kind");
  return *impl;
}

bool can_wrap(const at::Tensor& t) {
  constexpr DispatchKeySet special({DispatchKey::Python, DispatchKey::Functionalize,
                                    DispatchKey::FuncTorchGradWrapper,
                                    DispatchKey::FuncTorchBatched, DispatchKey::Batched, kKey});
  return !t.key_set().has_any(special) && !t.is_lazy() && t.layout() == c10::kStrided &&
         !t.is_conj() && !t.is_neg() && !t._is_zerotensor();
}

PyObject* wrap_known(const at::Tensor& t, bool over) {
  const bool recorded = t.requires_grad();
  const bool dual = has_tangent(t);
  const at::Tensor wrapper = make(recorded || dual ? alias_of(t) : t, over);
  if (recorded) {
    // The wrapper is the node's output from here on, and `t` is dropped.
    torch::autograd::impl::set_gradient_edge(wrapper, torch::autograd::impl::gradient_edge(t));
  }
  PyObject* object = make_object(wrapper);
  if (dual && object != nullptr) {
    wrapper._set_fw_grad(t._fw_grad(/*level=*/0), /*level=*/0, /*is_inplace_op=*/false);
  }
  return object;
}

}  // namespace

void set_async_tensor_type(PyObject* type, PyObject* wait) {
  Py_INCREF(type);
  Py_INCREF(wait);
  async_type = type;
  wait_op = wait;
}

bool is_async_tensor(const at::Tensor& t) {
  return t.defined() && impl_of(t) != nullptr;
}

bool is_async_object(PyObject* object) {
  return reinterpret_cast<PyObject*>(Py_TYPE(object)) == async_type;
}

PyObject* wrap_async(const at::Tensor& t) {
  if (!can_wrap(t)) {
    Py_RETURN_NONE;
  }
  return wrap_known(t, !is_pending(t));
}

PyObject* deliver(const at::Tensor& result) {
  if (!can_wrap(result) || is_recorded()) {
    // By way of Python, where tracers look, too.
    PyObject* plain = THPVariable_Wrap(result);
    PyObject* waited = plain == nullptr ? nullptr : PyObject_CallOneArg(wait_op, plain);
    Py_XDECREF(plain);
    return waited;
  }
  return wrap_known(result, !is_pending(result));
}

PyObject* deliver_complete(const at::Tensor& result) {
  if (!can_wrap(result) || is_recorded()) {
    return THPVariable_Wrap(result);
  }
  return wrap_known(result, /*over=*/true);
}

const at::Tensor& elem_of(const at::Tensor& wrapper) {
  return impl_or_throw(wrapper).elem();
}

void set_elem(const at::Tensor& wrapper, const at::Tensor& elem) {
  auto& impl = impl_or_throw(wrapper);
  TORCH_CHECK(can_wrap(elem), "AsyncCollectiveTensor: must wrap a plain dense tensor, got another");
  TORCH_CHECK(elem.device() == wrapper.device(),
              "AsyncCollectiveTensor: .data must stay on its device, ", wrapper.device(), ", got ",
              elem.device(), "; assign to what .wait() returns");
  // Its own from here on: neither the shape nor the version of what it was before.
  at::Tensor own = alias_of(elem);
  own.unsafeGetTensorImpl()->set_version_counter(impl.version_counter());
  impl.set_elem(std::move(own));
  impl.set_storage_and_dtype(sealed_storage(elem), elem.dtype());
  impl.copy_geometry();
}

void follow_elem(const at::Tensor& wrapper) {
  auto& impl = impl_or_throw(wrapper);
  if (wrapper.sizes() != impl.elem().sizes() || wrapper.strides() != impl.elem().strides() ||
      wrapper.storage_offset() != impl.elem().storage_offset()) {
    impl.copy_geometry();
  }
}

bool is_waited(const at::Tensor& wrapper) {
  return impl_or_throw(wrapper).waited();
}

void wait_async(const at::Tensor& wrapper) {
  impl_or_throw(wrapper).wait();
}

std::optional<at::Tensor> plain_of(const at::Tensor& wrapper) {
  auto* found = impl_of(wrapper);
  if (found == nullptr || is_recorded()) {
    return std::nullopt;
  }
  auto& impl = *found;
  impl.wait();
  if (!has_history(wrapper) && !may_have_tangent(wrapper)) {
    return impl.elem();
  }
  return waited_view(wrapper, [&] { return alias_of(impl.elem()); });
}

}  // namespace c10d_ext
