// barrier: every rank keeps its input, complete when all ranks have called.

#include "frontend/op.h"

namespace c10d_ext {
namespace {

// Kernels: CPU, CUDA and Meta.

at::Tensor barrier(const at::Tensor& input, string_view group_name) {
  constexpr string_view op = "barrier";
  const Group group = resolve_group(op, group_name);
  check_strided(op, group, "input", input);
  at::Tensor out = empty_of_shape(input);
  submit(group, CollectiveRequest::barrier(op, input, out));
  return out;
}

C10D_EXT_HANDLE(barrier, "barrier")

// Derivatives: the identity, in which nobody waits for anybody.

at::Tensor barrier_autograd(c10::DispatchKeySet keys, const at::Tensor& input,
                            string_view group_name) {
  return differentiable(
      input, [&] { return barrier_handle().redispatch(below_autograd(keys), input, group_name); },
      [&] {
        return Derivative{
            "BarrierBackward", Constants::none(),
            [](const Tensors& grads, const Tensors&) { return grads; },
            // Not the input's own tangent, which writing the result in place would change.
            [](const Tensors& tangents, const Tensors&) { return Tensors{tangents[0].clone()}; }};
      });
}

void register_kernels(torch::Library& m) {
  m.impl("barrier", barrier);
}

constexpr auto kNames = {"barrier"};

}  // namespace

TORCH_LIBRARY_FRAGMENT(c10d_ext, m) {
  m.def("barrier(Tensor input, str group_name) -> Tensor", schema_tags());
}

TORCH_LIBRARY_IMPL(c10d_ext, CPU, m) {
  register_kernels(m);
}

TORCH_LIBRARY_IMPL(c10d_ext, CUDA, m) {
  register_kernels(m);
}

TORCH_LIBRARY_IMPL(c10d_ext, Meta, m) {
  register_kernels(m);
}

TORCH_LIBRARY_IMPL(c10d_ext, Autograd, m) {
  m.impl("barrier", barrier_autograd);
}

TORCH_LIBRARY_IMPL(c10d_ext, Conjugate, m) {
  keep_lazy_bits(m, kNames);
}

TORCH_LIBRARY_IMPL(c10d_ext, Negative, m) {
  keep_lazy_bits(m, kNames);
}

}  // namespace c10d_ext
