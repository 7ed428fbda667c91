// broadcast: every rank gets rank src's input.

#include "frontend/op.h"

namespace c10d_ext {
namespace {

// Kernels: CPU, CUDA and Meta.

at::Tensor broadcast(const at::Tensor& input, int64_t src, string_view group_name) {
  constexpr string_view op = "broadcast";
  const Group group = resolve_group(op, group_name);
  check_strided(op, group, "input", input);
  check_rank(op, group, "src", src);
  at::Tensor out = empty_of_shape(input);
  submit(group, CollectiveRequest::broadcast(op, input, out, src));
  return out;
}

at::Tensor& broadcast_(at::Tensor& input, int64_t src, string_view group_name) {
  constexpr string_view op = "broadcast";
  const Group group = resolve_group(op, group_name);
  check_strided(op, group, "input", input);
  check_written(op, group, "input", input);
  check_rank(op, group, "src", src);
  submit(group, CollectiveRequest::broadcast(op, input, input, src));
  return input;
}

Tensors broadcast_coalesced(at::TensorList inputs, int64_t src, string_view group_name) {
  constexpr string_view op = "broadcast_coalesced";
  const Group group = resolve_group(op, group_name);
  check_list(op, group, inputs);
  check_rank(op, group, "src", src);
  Tensors outs = empty_of_shapes(inputs);
  submit(group, CollectiveRequest::broadcast_coalesced(op, inputs, outs, src));
  return outs;
}

Tensors broadcast_coalesced_(at::TensorList inputs, int64_t src, string_view group_name) {
  constexpr string_view op = "broadcast_coalesced";
  const Group group = resolve_group(op, group_name);
  check_list(op, group, inputs);
  for (const auto& input : inputs) {
    check_written(op, group, "each input", input);
  }
  check_rank(op, group, "src", src);
  submit(group, CollectiveRequest::broadcast_coalesced(op, inputs, inputs, src));
  return inputs.vec();
}

struct Op {
  static constexpr const char* stem = "broadcast";
  static constexpr auto functional = &broadcast;
  static constexpr auto in_place = &broadcast_;
  static constexpr auto coalesced = &broadcast_coalesced;
  static constexpr auto coalesced_in_place = &broadcast_coalesced_;

  // Derivatives: src's input reached every rank, so its gradient is the sum over ranks; the others'
  // inputs reached nobody.
  static Derivative derivative(string_view /*op*/, at::TensorList /*inputs*/, int64_t src,
                               string_view group_name) {
    Derivative d{"BroadcastBackward", Constants(src, group_name)};
    d.adjoint = [src, name = std::string(group_name)](const Tensors& grads, const Tensors&) {
      return call::reduce_coalesced(grads, kSum, src, name);
    };
    d.tangent = [src, name = std::string(group_name)](const Tensors& tangents, const Tensors&) {
      return call::broadcast_coalesced(tangents, src, name);
    };
    return d;
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(c10d_ext, m) {
  m.def("broadcast(Tensor input, int src, str group_name) -> Tensor", schema_tags());
  m.def("broadcast_(Tensor(a!) input, int src, str group_name) -> Tensor(a!)", schema_tags());
  m.def("broadcast_coalesced(Tensor[] inputs, int src, str group_name) -> Tensor[]", schema_tags());
  m.def("broadcast_coalesced_(Tensor[](a!) inputs, int src, str group_name) -> Tensor[](a!)",
        schema_tags());
}

C10D_EXT_COLLECTIVE(Op)

}  // namespace c10d_ext
