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

struct Op {
  static constexpr const char* stem = "all_reduce";
  static constexpr auto functional = &all_reduce;
  static constexpr auto in_place = &all_reduce_;
  static constexpr auto out = &all_reduce_out;
  static constexpr auto coalesced = &all_reduce_coalesced;
  static constexpr auto coalesced_in_place = &all_reduce_coalesced_;

  // Derivatives: y = op over ranks of x. The gradients of all ranks' y are summed, then pulled
  // back.
  static Derivative derivative(string_view op, at::TensorList inputs, string_view reduce_op,
                               string_view group_name, const Factor& factor) {
    const Group group = resolve_group(op, group_name);
    const Reduction reduction =
        parse_reduction(op, group, reduce_op, factor, inputs[0].scalar_type());
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
};

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

C10D_EXT_COLLECTIVE(Op)

}  // namespace c10d_ext
