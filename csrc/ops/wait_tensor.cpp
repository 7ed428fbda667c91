// wait_tensor: the end of every collective.

#include <ATen/ops/alias.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "frontend/op.h"
#include "work/pending.h"

namespace c10d_ext {
namespace {

at::Tensor wait_tensor(const at::Tensor& tensor) {
  wait(tensor);
  // Below autograd an op must not return its very argument.
  return at::alias(tensor);
}

C10D_EXT_HANDLE(wait_tensor, "wait_tensor")

// Under functionalization torch's wait takes our place: graph passes know it by name. Elsewhere
// ours stays, which returns the very tensor: torch's meta function would straighten odd strides.
bool is_functionalized(const at::Tensor& tensor) {
  using c10::impl::TorchDispatchModeKey;
  return tensor.key_set().has(c10::DispatchKey::Functionalize) ||
         c10::impl::TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FUNCTIONAL).has_value();
}

at::Tensor wait_tensor_autograd(c10::DispatchKeySet keys, const at::Tensor& tensor) {
  // Asked of the tensor: a transform's interpreter hides its wrappers' keys from `keys`.
  const bool in_transform = tensor.key_set().has_any(c10::DispatchKeySet(
      {c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched}));
  const bool traced = (keys | tensor.key_set())
                          .has_any(c10::DispatchKeySet(
                              {c10::DispatchKey::Python, c10::DispatchKey::Functionalize}));
  if (!in_transform && !traced) {
    // The tensor itself, history and all: nothing to record.
    wait(tensor);
    return tensor;
  }
  return differentiable(
      tensor,
      [&] {
        return !in_transform && is_functionalized(tensor)
                   ? traced_wait(tensor)
                   : wait_tensor_handle().redispatch(below_autograd(keys), tensor);
      },
      [] {
        return Derivative{"WaitTensorBackward", Constants::none(),
                          [](const Tensors& grads, const Tensors&) { return grads; },
                          [](const Tensors& tangents, const Tensors&) { return tangents; }};
      });
}

at::Tensor wait_tensor_functionalize(const at::Tensor& tensor) {
  const at::Tensor inner = functional_value(tensor);
  at::AutoDispatchSkipFunctionalize below_functionalize;
  const at::Tensor waited = traced_wait(inner);
  return at::functionalization::impl::isFunctionalTensor(tensor)
             ? at::functionalization::impl::to_functional_tensor(waited)
             : waited;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(c10d_ext, m) {
  m.def("wait_tensor(Tensor(a) tensor) -> Tensor(a)", schema_tags());
}

C10D_EXT_ON_DEVICES([](torch::Library& m) { m.impl("wait_tensor", wait_tensor); })

TORCH_LIBRARY_IMPL(c10d_ext, Autograd, m) {
  m.impl("wait_tensor", wait_tensor_autograd);
}

TORCH_LIBRARY_IMPL(c10d_ext, Functionalize, m) {
  m.impl("wait_tensor", wait_tensor_functionalize);
}

C10D_EXT_KEEP_LAZY_BITS([](torch::Library& m) { keep_lazy_bits(m, "wait_tensor"); })

}  // namespace c10d_ext
