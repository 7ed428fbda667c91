// all_reduce: every rank gets the reduction of all ranks' inputs.

#include "frontend/op.h"

namespace c10d_ext {
namespace {

// Kernels: CPU, CUDA and Meta.

at::Tensor all_reduce(const at::Tensor& input, string_view reduce_op, string_view group_name,
                      const Factor& factor) {
  constexpr string_view op = "all_reduce";
  const Group group = resolve_group(op, group_name);
  check_strided(op, group, "input", input);
  const Reduction reduction = parse_reduction(op, group, reduce_op, factor, input.scalar_type());
  at::Tensor out = empty_of_shape(input);
  submit(group, CollectiveRequest::all_reduce(op, input, out, reduction));
  return out;
}

at::Tensor& all_reduce_(at::Tensor& input, string_view reduce_op, string_view group_name,
                        const Factor& factor) {
  constexpr string_view op = "all_reduce";
  const Group group = resolve_group(op, group_name);
  check_strided(op, group, "input", input);
  check_written(op, group, "input", input);
  const Reduction reduction = parse_reduction(op, group, reduce_op, factor, input.scalar_type());
  submit(group, CollectiveRequest::all_reduce(op, input, input, reduction));
  return input;
}

at::Tensor& all_reduce_out(const at::Tensor& input, string_view reduce_op, string_view group_name,
                           const Factor& factor, at::Tensor& out) {
  constexpr string_view op = "all_reduce";
  const Group group = resolve_group(op, group_name);
  check_strided(op, group, "input", input);
  check_same_kind(op, group, out, input);
  C10D_EXT_CHECK_VALUE(same_sizes(out.sym_sizes(), input.sym_sizes()), op, group,
                       "out must have input's shape ", input.sym_sizes(), ", got ",
                       out.sym_sizes());
  const Reduction reduction = parse_reduction(op, group, reduce_op, factor, input.scalar_type());
  submit(group, CollectiveRequest::all_reduce(op, input, out, reduction));
  return out;
}

Tensors all_reduce_coalesced(at::TensorList inputs, string_view reduce_op, string_view group_name,
                             const Factor& factor) {
  constexpr string_view op = "all_reduce_coalesced";
  const Group group = resolve_group(op, group_name);
  check_list(op, group, inputs);
  const Reduction reduction =
      parse_reduction(op, group, reduce_op, factor, inputs[0].scalar_type());
  Tensors outs = empty_of_shapes(inputs);
  submit(group, CollectiveRequest::all_reduce_coalesced(op, inputs, outs, reduction));
  return outs;
}

Tensors all_reduce_coalesced_(at::TensorList inputs, string_view reduce_op, string_view group_name,
                              const Factor& factor) {
  constexpr string_view op = "all_reduce_coalesced";
  const Group group = resolve_group(op, group_name);
  check_list(op, group, inputs);
  for (const auto& input : inputs) {
    check_written(op, group, "each input", input);
  }
  const Reduction reduction =
      parse_reduction(op, group, reduce_op, factor, inputs[0].scalar_type());
  submit(group, CollectiveRequest::all_reduce_coalesced(op, inputs, inputs, reduction));
  return inputs.vec();
}

C10D_EXT_HANDLE(all_reduce, "all_reduce")
C10D_EXT_HANDLE(all_reduce_, "all_reduce_")
C10D_EXT_HANDLE(all_reduce_out, "all_reduce_out")
C10D_EXT_HANDLE(all_reduce_coalesced, "all_reduce_coalesced")
C10D_EXT_HANDLE(all_reduce_coalesced_, "all_reduce_coalesced_")

// Derivatives: y = op over ranks of x. The gradients of all ranks' y are summed, then pulled back.

Derivative derivative(string_view op, string_view reduce_op, string_view group_name,
                      const Factor& factor, c10::ScalarType dtype) {
  const Group group = resolve_group(op, group_name);
  const Reduction reduction = parse_reduction(op, group, reduce_op, factor, dtype);
  const ReductionRule rule{reduction, group.name(), group.rank(), group.size()};
  Derivative d{"AllReduceBackward", Constants(rule)};
  d.save = !reduction.is_linear();
  d.adjoint = [rule](const Tensors& grads, const Tensors& saved) -> Tensors {
    if (rule.reduction.op == ReduceOp::Avg) {
      return call::all_reduce_coalesced(grads, rule.reduction, rule.group);
    }
    const Tensors totals = call::all_reduce_coalesced(grads, kSum, rule.group);
    Tensors results;
    for (size_t i = 0; i < totals.size(); ++i) {
      results.push_back(rule.pull_back(totals[i], saved.empty() ? at::Tensor() : saved[i],
                                       [&] { return saved[totals.size() + i]; }));
    }
    return results;
  };
  d.tangent = [rule](const Tensors& tangents, const Tensors& saved) -> Tensors {
    if (saved.empty()) {
      return call::all_reduce_coalesced(tangents, rule.reduction, rule.group);
    }
    Tensors shares;
    for (size_t i = 0; i < tangents.size(); ++i) {
      shares.push_back(
          rule.push_forward(tangents[i], saved[i], [&] { return saved[tangents.size() + i]; }));
    }
    return call::all_reduce_coalesced(shares, kSum, rule.group);
  };
  return d;
}

at::Tensor all_reduce_autograd(c10::DispatchKeySet keys, const at::Tensor& input,
                               string_view reduce_op, string_view group_name,
                               const Factor& factor) {
  return differentiable(
      input,
      [&] {
        return all_reduce_handle().redispatch(below_autograd(keys), input, reduce_op, group_name,
                                              factor);
      },
      [&] { return derivative("all_reduce", reduce_op, group_name, factor, input.scalar_type()); });
}

// What the functional op may save where the inputs are overwritten next.
Tensors copies(at::TensorList inputs) {
  Tensors copied;
  for (const auto& input : inputs) {
    copied.push_back(input.clone());
  }
  return copied;
}

at::Tensor& all_reduce__autograd(c10::DispatchKeySet keys, at::Tensor& input, string_view reduce_op,
                                 string_view group_name, const Factor& factor) {
  differentiable_in_place(
      "all_reduce_", group_name, input,
      [&] {
        all_reduce__handle().redispatch(below_autograd(keys), input, reduce_op, group_name, factor);
      },
      [&] {
        return Tensors{call::wait_tensor(
            all_reduce_handle().call(input.clone(), reduce_op, group_name, factor))};
      },
      [&] { return derivative("all_reduce", reduce_op, group_name, factor, input.scalar_type()); });
  return input;
}

at::Tensor& all_reduce_out_autograd(c10::DispatchKeySet keys, const at::Tensor& input,
                                    string_view reduce_op, string_view group_name,
                                    const Factor& factor, at::Tensor& out) {
  forward_out("all_reduce_out", group_name, input, out, [&] {
    all_reduce_out_handle().redispatch(below_autograd(keys), input, reduce_op, group_name, factor,
                                       out);
  });
  return out;
}

Tensors all_reduce_coalesced_autograd(c10::DispatchKeySet keys, at::TensorList inputs,
                                      string_view reduce_op, string_view group_name,
                                      const Factor& factor) {
  return differentiable(
      inputs,
      [&] {
        return all_reduce_coalesced_handle().redispatch(below_autograd(keys), inputs, reduce_op,
                                                        group_name, factor);
      },
      [&] {
        return derivative("all_reduce_coalesced", reduce_op, group_name, factor,
                          inputs[0].scalar_type());
      });
}

Tensors all_reduce_coalesced__autograd(c10::DispatchKeySet keys, at::TensorList inputs,
                                       string_view reduce_op, string_view group_name,
                                       const Factor& factor) {
  differentiable_in_place(
      "all_reduce_coalesced_", group_name, inputs,
      [&] {
        all_reduce_coalesced__handle().redispatch(below_autograd(keys), inputs, reduce_op,
                                                  group_name, factor);
      },
      [&] {
        return call::waited(
            all_reduce_coalesced_handle().call(copies(inputs), reduce_op, group_name, factor));
      },
      [&] {
        return derivative("all_reduce_coalesced", reduce_op, group_name, factor,
                          inputs[0].scalar_type());
      });
  return inputs.vec();
}

// torch.func.

Tensors all_reduce_coalesced__transformed(at::TensorList inputs, string_view reduce_op,
                                          string_view group_name, const Factor& factor) {
  return replaced(inputs, call::waited(all_reduce_coalesced_handle().call(copies(inputs), reduce_op,
                                                                          group_name, factor)));
}

// Functionalization.

at::Tensor& all_reduce__functionalize(at::Tensor& input, string_view reduce_op,
                                      string_view group_name, const Factor& factor) {
  check_if_lazy(all_reduce__handle(), group_name, input, reduce_op, group_name, factor);
  const at::Tensor value = functional_value(input);
  at::AutoDispatchSkipFunctionalize below_functionalize;
  replace_value(input, traced_wait(all_reduce_handle().call(value, reduce_op, group_name, factor)));
  return input;
}

at::Tensor& all_reduce_out_functionalize(const at::Tensor& input, string_view reduce_op,
                                         string_view group_name, const Factor& factor,
                                         at::Tensor& out) {
  check_if_lazy(all_reduce_out_handle(), group_name, input, reduce_op, group_name, factor, out);
  const at::Tensor value = functional_value(input);
  at::AutoDispatchSkipFunctionalize below_functionalize;
  replace_value(out, traced_wait(all_reduce_handle().call(value, reduce_op, group_name, factor)));
  return out;
}

Tensors all_reduce_coalesced__functionalize(at::TensorList inputs, string_view reduce_op,
                                            string_view group_name, const Factor& factor) {
  check_if_lazy(all_reduce_coalesced__handle(), group_name, inputs, reduce_op, group_name, factor);
  const Tensors values = functional_values(inputs);
  at::AutoDispatchSkipFunctionalize below_functionalize;
  replace_values(inputs, all_reduce_coalesced_handle().call(values, reduce_op, group_name, factor));
  return inputs.vec();
}

void register_kernels(torch::Library& m) {
  m.impl("all_reduce", all_reduce);
  m.impl("all_reduce_", all_reduce_);
  m.impl("all_reduce_out", all_reduce_out);
  m.impl("all_reduce_coalesced", all_reduce_coalesced);
  m.impl("all_reduce_coalesced_", all_reduce_coalesced_);
}

constexpr auto kNames = {"all_reduce", "all_reduce_", "all_reduce_out", "all_reduce_coalesced",
                         "all_reduce_coalesced_"};

}  // namespace

TORCH_LIBRARY_FRAGMENT(c10d_ext, m) {
  m.def("all_reduce(Tensor input, str reduce_op, str group_name, *, Scalar? factor=None) -> Tensor",
        schema_tags());
  m.def(
      "all_reduce_(Tensor(a!) input, str reduce_op, str group_name, *, Scalar? factor=None) -> "
      "Tensor(a!)",
      schema_tags());
  m.def(
      "all_reduce_out(Tensor input, str reduce_op, str group_name, *, Scalar? factor=None, "
      "Tensor(a!) out) -> Tensor(a!)",
      schema_tags());
  m.def(
      "all_reduce_coalesced(Tensor[] inputs, str reduce_op, str group_name, *, Scalar? "
      "factor=None) -> Tensor[]",
      schema_tags());
  m.def(
      "all_reduce_coalesced_(Tensor[](a!) inputs, str reduce_op, str group_name, *, Scalar? "
      "factor=None) -> Tensor[](a!)",
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
  m.impl("all_reduce", all_reduce_autograd);
  m.impl("all_reduce_", all_reduce__autograd);
  m.impl("all_reduce_out", all_reduce_out_autograd);
  m.impl("all_reduce_coalesced", all_reduce_coalesced_autograd);
  m.impl("all_reduce_coalesced_", all_reduce_coalesced__autograd);
}

TORCH_LIBRARY_IMPL(c10d_ext, FuncTorchDynamicLayerFrontMode, m) {
  m.impl("all_reduce_coalesced_", all_reduce_coalesced__transformed);
}

TORCH_LIBRARY_IMPL(c10d_ext, Functionalize, m) {
  m.impl("all_reduce_", all_reduce__functionalize);
  m.impl("all_reduce_out", all_reduce_out_functionalize);
  m.impl("all_reduce_coalesced_", all_reduce_coalesced__functionalize);
}

TORCH_LIBRARY_IMPL(c10d_ext, Conjugate, m) {
  keep_lazy_bits(m, kNames);
}

TORCH_LIBRARY_IMPL(c10d_ext, Negative, m) {
  keep_lazy_bits(m, kNames);
}

}  // namespace c10d_ext
