// reduce_scatter_tensor: rank r gets the reduction of all ranks' r-th equal part along dim 0.

#include "frontend/op.h"

namespace c10d_ext {
namespace {

// The shape of one rank's part, or an error.
SymSizes part_of(string_view op, const Group& group, const at::Tensor& input) {
  check_has_rows(op, group, input);
  C10D_EXT_CHECK_VALUE((input.sym_size(0) % group.size()).sym_eq(0), op, group,
                       "input's dim 0 must be a multiple of the group's size ", group.size(),
                       ", got ", input.sym_size(0));
  return with_rows(input, input.sym_size(0) / group.size());
}

// Kernels: CPU, CUDA and Meta.

at::Tensor reduce_scatter_tensor(const at::Tensor& input, string_view reduce_op, int64_t group_size,
                                 string_view group_name, const Factor& factor) {
  constexpr string_view op = "reduce_scatter_tensor";
  const Group group = resolve_group(op, group_name);
  check_strided(op, group, "input", input);
  check_group_size(op, group, group_size);
  const Reduction reduction = parse_reduction(op, group, reduce_op, factor, input.scalar_type());
  at::Tensor out = empty_of(part_of(op, group, input), input);
  submit(group, CollectiveRequest::reduce_scatter(op, input, out, reduction));
  return out;
}

at::Tensor& reduce_scatter_tensor_out(const at::Tensor& input, string_view reduce_op,
                                      int64_t group_size, string_view group_name,
                                      const Factor& factor, at::Tensor& out) {
  constexpr string_view op = "reduce_scatter_tensor";
  const Group group = resolve_group(op, group_name);
  check_strided(op, group, "input", input);
  check_group_size(op, group, group_size);
  check_same_kind(op, group, out, input);
  const Reduction reduction = parse_reduction(op, group, reduce_op, factor, input.scalar_type());
  // The parts lie one after the other along dim 0, or each at its own index of an extra first dim.
  const SymSizes concatenated = with_rows(out, rows_of(out) * group_size);
  SymSizes stacked = out.sym_sizes().vec();
  stacked.insert(stacked.begin(), group_size);
  C10D_EXT_CHECK_VALUE(
      same_sizes(input.sym_sizes(), input.dim() == out.dim() ? concatenated : stacked), op, group,
      "input must have shape ", c10::SymIntArrayRef(concatenated), " or ",
      c10::SymIntArrayRef(stacked), " for out of shape ", out.sym_sizes(), ", got ",
      input.sym_sizes());
  submit(group, CollectiveRequest::reduce_scatter(op, input, out, reduction));
  return out;
}

Tensors reduce_scatter_tensor_coalesced(at::TensorList inputs, string_view reduce_op,
                                        int64_t group_size, string_view group_name,
                                        const Factor& factor) {
  constexpr string_view op = "reduce_scatter_tensor_coalesced";
  const Group group = resolve_group(op, group_name);
  check_list(op, group, inputs);
  check_group_size(op, group, group_size);
  const Reduction reduction =
      parse_reduction(op, group, reduce_op, factor, inputs[0].scalar_type());
  Tensors outs;
  for (const auto& input : inputs) {
    outs.push_back(empty_of(part_of(op, group, input), input));
  }
  submit(group, CollectiveRequest::reduce_scatter_coalesced(op, inputs, outs, reduction));
  return outs;
}

C10D_EXT_HANDLE(reduce_scatter_tensor, "reduce_scatter_tensor")
C10D_EXT_HANDLE(reduce_scatter_tensor_out, "reduce_scatter_tensor_out")
C10D_EXT_HANDLE(reduce_scatter_tensor_coalesced, "reduce_scatter_tensor_coalesced")

// Derivatives: every rank needs all parts' gradients.

Derivative derivative(string_view reduce_op, int64_t group_size, string_view group_name,
                      const Factor& factor, c10::ScalarType dtype) {
  const Group group = resolve_group("reduce_scatter_tensor", group_name);
  const Reduction reduction =
      parse_reduction("reduce_scatter_tensor", group, reduce_op, factor, dtype);
  const ReductionRule rule{reduction, group.name(), group.rank(), group_size};
  // The whole result, of which this rank has a part.
  const auto whole = [](const ReductionRule& rule, const at::Tensor& part) {
    return call::all_gather_into_tensor(part, rule.group_size, rule.group);
  };
  Derivative d{"ReduceScatterTensorBackward", Constants(rule)};
  d.save = !reduction.is_linear();
  d.adjoint = [rule, whole](const Tensors& grads, const Tensors& saved) {
    const Tensors gathered =
        call::all_gather_into_tensor_coalesced(grads, rule.group_size, rule.group);
    Tensors results;
    for (size_t i = 0; i < gathered.size(); ++i) {
      results.push_back(rule.pull_back(gathered[i], saved.empty() ? at::Tensor() : saved[i],
                                       [&] { return whole(rule, saved[gathered.size() + i]); }));
    }
    return results;
  };
  d.tangent = [rule, whole](const Tensors& tangents, const Tensors& saved) {
    if (saved.empty()) {
      return call::reduce_scatter_tensor_coalesced(tangents, rule.reduction, rule.group_size,
                                                   rule.group);
    }
    Tensors shares;
    for (size_t i = 0; i < tangents.size(); ++i) {
      shares.push_back(rule.push_forward(tangents[i], saved[i],
                                         [&] { return whole(rule, saved[tangents.size() + i]); }));
    }
    return call::reduce_scatter_tensor_coalesced(shares, kSum, rule.group_size, rule.group);
  };
  return d;
}

at::Tensor reduce_scatter_tensor_autograd(c10::DispatchKeySet keys, const at::Tensor& input,
                                          string_view reduce_op, int64_t group_size,
                                          string_view group_name, const Factor& factor) {
  return differentiable(
      input,
      [&] {
        return reduce_scatter_tensor_handle().redispatch(below_autograd(keys), input, reduce_op,
                                                         group_size, group_name, factor);
      },
      [&] { return derivative(reduce_op, group_size, group_name, factor, input.scalar_type()); });
}

at::Tensor& reduce_scatter_tensor_out_autograd(c10::DispatchKeySet keys, const at::Tensor& input,
                                               string_view reduce_op, int64_t group_size,
                                               string_view group_name, const Factor& factor,
                                               at::Tensor& out) {
  forward_out("reduce_scatter_tensor_out", group_name, input, out, [&] {
    reduce_scatter_tensor_out_handle().redispatch(below_autograd(keys), input, reduce_op,
                                                  group_size, group_name, factor, out);
  });
  return out;
}

Tensors reduce_scatter_tensor_coalesced_autograd(c10::DispatchKeySet keys, at::TensorList inputs,
                                                 string_view reduce_op, int64_t group_size,
                                                 string_view group_name, const Factor& factor) {
  return differentiable(
      inputs,
      [&] {
        return reduce_scatter_tensor_coalesced_handle().redispatch(
            below_autograd(keys), inputs, reduce_op, group_size, group_name, factor);
      },
      [&] {
        return derivative(reduce_op, group_size, group_name, factor, inputs[0].scalar_type());
      });
}

// Functionalization.

at::Tensor& reduce_scatter_tensor_out_functionalize(const at::Tensor& input, string_view reduce_op,
                                                    int64_t group_size, string_view group_name,
                                                    const Factor& factor, at::Tensor& out) {
  check_if_lazy(reduce_scatter_tensor_out_handle(), group_name, input, reduce_op, group_size,
                group_name, factor, out);
  const at::Tensor value = functional_value(input);
  at::AutoDispatchSkipFunctionalize below_functionalize;
  // Parts stacked along an extra first dim are the same memory as parts along dim 0.
  const at::Tensor flat = input.dim() == out.dim() ? value : reshaped(value, {value.sym_numel()});
  replace_value(out, traced_wait(reduce_scatter_tensor_handle().call(flat, reduce_op, group_size,
                                                                     group_name, factor)));
  return out;
}

void register_kernels(torch::Library& m) {
  m.impl("reduce_scatter_tensor", reduce_scatter_tensor);
  m.impl("reduce_scatter_tensor_out", reduce_scatter_tensor_out);
  m.impl("reduce_scatter_tensor_coalesced", reduce_scatter_tensor_coalesced);
}

constexpr auto kNames = {"reduce_scatter_tensor", "reduce_scatter_tensor_out",
                         "reduce_scatter_tensor_coalesced"};

}  // namespace

TORCH_LIBRARY_FRAGMENT(c10d_ext, m) {
  m.def(
      "reduce_scatter_tensor(Tensor input, str reduce_op, int group_size, str group_name, *, "
      "Scalar? factor=None) -> Tensor",
      schema_tags());
  m.def(
      "reduce_scatter_tensor_out(Tensor input, str reduce_op, int group_size, str group_name, *, "
      "Scalar? factor=None, Tensor(a!) out) -> Tensor(a!)",
      schema_tags());
  m.def(
      "reduce_scatter_tensor_coalesced(Tensor[] inputs, str reduce_op, int group_size, str "
      "group_name, *, Scalar? factor=None) -> Tensor[]",
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
  m.impl("reduce_scatter_tensor", reduce_scatter_tensor_autograd);
  m.impl("reduce_scatter_tensor_out", reduce_scatter_tensor_out_autograd);
  m.impl("reduce_scatter_tensor_coalesced", reduce_scatter_tensor_coalesced_autograd);
}

TORCH_LIBRARY_IMPL(c10d_ext, Functionalize, m) {
  m.impl("reduce_scatter_tensor_out", reduce_scatter_tensor_out_functionalize);
}

TORCH_LIBRARY_IMPL(c10d_ext, Conjugate, m) {
  keep_lazy_bits(m, kNames);
}

TORCH_LIBRARY_IMPL(c10d_ext, Negative, m) {
  keep_lazy_bits(m, kNames);
}

}  // namespace c10d_ext
