#include "frontend/dispatch_state.h"

#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace c10d_ext {

bool is_intercepted(const at::Tensor& t) {
  constexpr c10::DispatchKeySet special(
      {c10::DispatchKey::Python, c10::DispatchKey::FuncTorchGradWrapper,
       c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Batched});
  constexpr c10::DispatchKeySet modes({c10::DispatchKey::Python, c10::DispatchKey::PythonDispatcher,
                                       c10::DispatchKey::FuncTorchDynamicLayerFrontMode});
  return t.key_set().has_any(special) ||
         c10::impl::tls_local_dispatch_key_set().included_.has_any(modes);
}

bool is_traced(const at::Tensor& t) {
  return t.is_meta() || t.is_lazy() || t.key_set().has(c10::DispatchKey::Functionalize) ||
         is_intercepted(t);
}

bool has_tangent(const at::Tensor& t) {
  return c10::AutogradState::get_tls_state().get_fw_grad_mode() &&
         t._fw_grad(/*level=*/0).defined();
}

bool is_plain(const at::Tensor& t) {
  // Lazy tensors are traced by the kernel itself.
  return !(t.is_lazy() ? is_intercepted(t) : is_traced(t)) && !has_tangent(t);
}

}  // namespace c10d_ext
