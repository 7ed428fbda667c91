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

struct Op {
  static constexpr const char* stem = "barrier";
  static constexpr auto functional = &barrier;

  // Derivatives: the identity, in which nobody waits for anybody.
  static Derivative derivative(string_view /*op*/, at::TensorList /*inputs*/,
                               string_view /*group_name*/) {
    return {"BarrierBackward", Constants::none(),
            [](const Tensors& grads, const Tensors&) { return grads; },
            // Not the input's own tangent, which writing the result in place would change.
            [](const Tensors& tangents, const Tensors&) { return Tensors{tangents[0].clone()}; }};
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(c10d_ext, m) {
  m.def("barrier(Tensor input, str group_name) -> Tensor", schema_tags());
}

C10D_EXT_COLLECTIVE(Op)

}  // namespace c10d_ext
