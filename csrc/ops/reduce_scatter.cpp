// reduce_scatter: rank r gets sizes[r] rows of the reduction of all ranks' inputs.

#include "frontend/op.h"

namespace c10d_ext {
namespace {

// Kernels: CPU, CUDA and Meta.

at::Tensor reduce_scatter(const at::Tensor& input, string_view reduce_op, c10::SymIntArrayRef sizes,
                          string_view group_name, const Factor& factor) {
  constexpr string_view op = "reduce_scatter";
  const Group group = resolve_group(op, group_name);
  check_strided(op, group, "input", input);
  check_has_rows(op, group, input);
  check_sizes(op, group, "sizes", sizes);
  C10D_EXT_CHECK_VALUE(input.sym_size(0).sym_eq(sum_of(sizes)), op, group,
                       "sizes must sum to input's dim 0, ", input.sym_size(0), ", got ", sizes);
  const Reduction reduction = parse_reduction(op, group, reduce_op, factor, input.scalar_type());
  at::Tensor out = empty_of(with_rows(input, sizes[group.rank()]), input);
  submit(group, CollectiveRequest::reduce_scatter_uneven(op, input, out, reduction,
                                                         concrete(input, sizes)));
  return out;
}

struct Op {
  static constexpr const char* stem = "reduce_scatter";
  static constexpr auto functional = &reduce_scatter;

  // Derivatives: every rank needs all parts' gradients.
  static Derivative derivative(string_view op, at::TensorList inputs, string_view reduce_op,
                               c10::SymIntArrayRef sizes, string_view group_name,
                               const Factor& factor) {
    const Group group = resolve_group(op, group_name);
    const Reduction reduction =
        parse_reduction(op, group, reduce_op, factor, inputs[0].scalar_type());
    const ReductionRule rule{reduction, group.name(), group.rank(), group.size()};
    Derivative d{"ReduceScatterBackward", Constants(rule, sizes)};
    d.save = !reduction.is_linear();
    d.adjoint = [rule, sizes = sizes.vec()](const Tensors& grads, const Tensors& saved) {
      return Tensors{rule.pull_back(call::all_gather(grads[0], sizes, rule.group),
                                    saved.empty() ? at::Tensor() : saved[0],
                                    [&] { return call::all_gather(saved[1], sizes, rule.group); })};
    };
    d.tangent = [rule, sizes = sizes.vec()](const Tensors& tangents, const Tensors& saved) {
      if (saved.empty()) {
        return Tensors{call::reduce_scatter(tangents[0], rule.reduction, sizes, rule.group)};
      }
      const at::Tensor share = rule.push_forward(
          tangents[0], saved[0], [&] { return call::all_gather(saved[1], sizes, rule.group); });
      return Tensors{call::reduce_scatter(share, kSum, sizes, rule.group)};
    };
    return d;
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(c10d_ext, m) {
  m.def(
      "reduce_scatter(Tensor input, str reduce_op, SymInt[] sizes, str group_name, *, Scalar? "
      "factor=None) -> Tensor",
      schema_tags());
}

C10D_EXT_COLLECTIVE(Op)

}  // namespace c10d_ext
