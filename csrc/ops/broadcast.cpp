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

C10D_EXT_HANDLE(broadcast, "broadcast")
C10D_EXT_HANDLE(broadcast_, "broadcast_")
C10D_EXT_HANDLE(broadcast_coalesced, "broadcast_coalesced")
C10D_EXT_HANDLE(broadcast_coalesced_, "broadcast_coalesced_")

// Derivatives: src's input reached every rank, so its gradient is the sum over ranks; the others'
// inputs reached nobody.

Derivative derivative(int64_t src, string_view group_name) {
  Derivative d{"BroadcastBackward", Constants(src, group_name)};
  d.adjoint = [src, name = std::string(group_name)](const Tensors& grads, const Tensors&) {
    return call::reduce_coalesced(grads, kSum, src, name);
  };
  d.tangent = [src, name = std::string(group_name)](const Tensors& tangents, const Tensors&) {
    return call::broadcast_coalesced(tangents, src, name);
  };
  return d;
}

at::Tensor broadcast_autograd(c10::DispatchKeySet keys, const at::Tensor& input, int64_t src,
                              string_view group_name) {
  return differentiable(
      input,
      [&] { return broadcast_handle().redispatch(below_autograd(keys), input, src, group_name); },
      [&] { return derivative(src, group_name); });
}

at::Tensor& broadcast__autograd(c10::DispatchKeySet keys, at::Tensor& input, int64_t src,
                                string_view group_name) {
  differentiable_in_place(
      "broadcast_", group_name, input,
      [&] { broadcast__handle().redispatch(below_autograd(keys), input, src, group_name); },
      [&] { return Tensors{call::wait_tensor(broadcast_handle().call(input, src, group_name))}; },
      [&] { return derivative(src, group_name); });
  return input;
}

Tensors broadcast_coalesced_autograd(c10::DispatchKeySet keys, at::TensorList inputs, int64_t src,
                                     string_view group_name) {
  return differentiable(
      inputs,
      [&] {
        return broadcast_coalesced_handle().redispatch(below_autograd(keys), inputs, src,
                                                       group_name);
      },
      [&] { return derivative(src, group_name); });
}

Tensors broadcast_coalesced__autograd(c10::DispatchKeySet keys, at::TensorList inputs, int64_t src,
                                      string_view group_name) {
  differentiable_in_place(
      "broadcast_coalesced_", group_name, inputs,
      [&] {
        broadcast_coalesced__handle().redispatch(below_autograd(keys), inputs, src, group_name);
      },
      [&] { return call::waited(broadcast_coalesced_handle().call(inputs, src, group_name)); },
      [&] { return derivative(src, group_name); });
  return inputs.vec();
}

// torch.func.

Tensors broadcast_coalesced__transformed(at::TensorList inputs, int64_t src,
                                         string_view group_name) {
  return replaced(inputs, call::waited(broadcast_coalesced_handle().call(inputs, src, group_name)));
}

// Functionalization.

at::Tensor& broadcast__functionalize(at::Tensor& input, int64_t src, string_view group_name) {
  check_if_lazy(broadcast__handle(), group_name, input, src, group_name);
  const at::Tensor value = functional_value(input);
  at::AutoDispatchSkipFunctionalize below_functionalize;
  replace_value(input, traced_wait(broadcast_handle().call(value, src, group_name)));
  return input;
}

Tensors broadcast_coalesced__functionalize(at::TensorList inputs, int64_t src,
                                           string_view group_name) {
  check_if_lazy(broadcast_coalesced__handle(), group_name, inputs, src, group_name);
  const Tensors values = functional_values(inputs);
  at::AutoDispatchSkipFunctionalize below_functionalize;
  replace_values(inputs, broadcast_coalesced_handle().call(values, src, group_name));
  return inputs.vec();
}

void register_kernels(torch::Library& m) {
  m.impl("broadcast", broadcast);
  m.impl("broadcast_", broadcast_);
  m.impl("broadcast_coalesced", broadcast_coalesced);
  m.impl("broadcast_coalesced_", broadcast_coalesced_);
}

constexpr auto kNames = {"broadcast", "broadcast_", "broadcast_coalesced", "broadcast_coalesced_"};

}  // namespace

TORCH_LIBRARY_FRAGMENT(c10d_ext, m) {
  m.def("broadcast(Tensor input, int src, str group_name) -> Tensor", schema_tags());
  m.def("broadcast_(Tensor(a!) input, int src, str group_name) -> Tensor(a!)", schema_tags());
  m.def("broadcast_coalesced(Tensor[] inputs, int src, str group_name) -> Tensor[]", schema_tags());
  m.def("broadcast_coalesced_(Tensor[](a!) inputs, int src, str group_name) -> Tensor[](a!)",
        schema_tags());
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
  m.impl("broadcast", broadcast_autograd);
  m.impl("broadcast_", broadcast__autograd);
  m.impl("broadcast_coalesced", broadcast_coalesced_autograd);
  m.impl("broadcast_coalesced_", broadcast_coalesced__autograd);
}

TORCH_LIBRARY_IMPL(c10d_ext, FuncTorchDynamicLayerFrontMode, m) {
  m.impl("broadcast_coalesced_", broadcast_coalesced__transformed);
}

TORCH_LIBRARY_IMPL(c10d_ext, Functionalize, m) {
  m.impl("broadcast_", broadcast__functionalize);
  m.impl("broadcast_coalesced_", broadcast_coalesced__functionalize);
}

TORCH_LIBRARY_IMPL(c10d_ext, Conjugate, m) {
  keep_lazy_bits(m, kNames);
}

TORCH_LIBRARY_IMPL(c10d_ext, Negative, m) {
  keep_lazy_bits(m, kNames);
}

}  // namespace c10d_ext
