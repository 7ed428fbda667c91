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

struct Op {
  static constexpr const char* stem = "reduce_scatter_tensor";
  static constexpr auto functional = &reduce_scatter_tensor;
  static constexpr auto out = &reduce_scatter_tensor_out;
  static constexpr auto coalesced = &reduce_scatter_tensor_coalesced;

  // Parts stacked along an extra first dim are the same memory as parts along dim 0.
  static at::Tensor functional_input_of_out(const at::Tensor& value, const at::Tensor& input,
                                            const at::Tensor& out) {
    return input.dim() == out.dim() ? value : reshaped(value, {value.sym_numel()});
  }

  // Derivatives: every rank needs all parts' gradients.
  static Derivative derivative(string_view op, at::TensorList inputs, string_view reduce_op,
                               int64_t group_size, string_view group_name, const Factor& factor) {
    const Group group = resolve_group(op, group_name);
    const Reduction reduction =
        parse_reduction(op, group, reduce_op, factor, inputs[0].scalar_type());
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
        shares.push_back(rule.push_forward(
            tangents[i], saved[i], [&] { return whole(rule, saved[tangents.size() + i]); }));
      }
      return call::reduce_scatter_tensor_coalesced(shares, kSum, rule.group_size, rule.group);
    };
    return d;
  }
};

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

C10D_EXT_COLLECTIVE(Op)

}  // namespace c10d_ext
