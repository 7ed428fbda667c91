// all_to_all_single: every rank sends a slice of its rows to every rank.

#include "frontend/op.h"

namespace c10d_ext {
namespace {

void check(string_view op, const Group& group, const at::Tensor& input,
           c10::SymIntArrayRef output_split_sizes, c10::SymIntArrayRef input_split_sizes) {
  check_strided(op, group, "input", input);
  check_has_rows(op, group, input);
  check_sizes(op, group, "output_split_sizes", output_split_sizes);
  check_sizes(op, group, "input_split_sizes", input_split_sizes);
  C10D_EXT_CHECK_VALUE(sum_of(input_split_sizes).sym_eq(input.sym_size(0)), op, group,
                       "input_split_sizes must sum to input's dim 0, ", input.sym_size(0), ", got ",
                       input_split_sizes);
  const auto self = group.rank();
  C10D_EXT_CHECK_VALUE(output_split_sizes[self].sym_eq(input_split_sizes[self]), op, group,
                       "a rank must send itself as many rows as it receives from itself, got "
                       "output_split_sizes ",
                       output_split_sizes, " and input_split_sizes ", input_split_sizes);
}

// Kernels: CPU, CUDA and Meta.

at::Tensor all_to_all_single(const at::Tensor& input, c10::SymIntArrayRef output_split_sizes,
                             c10::SymIntArrayRef input_split_sizes, string_view group_name) {
  constexpr string_view op = "all_to_all_single";
  const Group group = resolve_group(op, group_name);
  check(op, group, input, output_split_sizes, input_split_sizes);
  at::Tensor out = empty_of(with_rows(input, sum_of(output_split_sizes)), input);
  submit(group, CollectiveRequest::all_to_all(op, input, out, concrete(input, output_split_sizes),
                                              concrete(input, input_split_sizes)));
  return out;
}

at::Tensor& all_to_all_single_out(const at::Tensor& input, c10::SymIntArrayRef output_split_sizes,
                                  c10::SymIntArrayRef input_split_sizes, string_view group_name,
                                  at::Tensor& out) {
  constexpr string_view op = "all_to_all_single";
  const Group group = resolve_group(op, group_name);
  check(op, group, input, output_split_sizes, input_split_sizes);
  check_same_kind(op, group, out, input);
  const SymSizes sizes = with_rows(input, sum_of(output_split_sizes));
  C10D_EXT_CHECK_VALUE(same_sizes(out.sym_sizes(), sizes), op, group, "out must have shape ",
                       c10::SymIntArrayRef(sizes), ", got ", out.sym_sizes());
  submit(group, CollectiveRequest::all_to_all(op, input, out, concrete(input, output_split_sizes),
                                              concrete(input, input_split_sizes)));
  return out;
}

struct Op {
  static constexpr const char* stem = "all_to_all_single";
  static constexpr auto functional = &all_to_all_single;
  static constexpr auto out = &all_to_all_single_out;

  // Derivatives: gradients travel back the way the rows came.
  static Derivative derivative(string_view /*op*/, at::TensorList /*inputs*/,
                               c10::SymIntArrayRef output_split_sizes,
                               c10::SymIntArrayRef input_split_sizes, string_view group_name) {
    Derivative d{"AllToAllSingleBackward",
                 Constants(output_split_sizes, input_split_sizes, group_name)};
    d.adjoint = [outputs = output_split_sizes.vec(), inputs = input_split_sizes.vec(),
                 name = std::string(group_name)](const Tensors& grads, const Tensors&) {
      return Tensors{call::all_to_all_single(grads[0], inputs, outputs, name)};
    };
    d.tangent = [outputs = output_split_sizes.vec(), inputs = input_split_sizes.vec(),
                 name = std::string(group_name)](const Tensors& tangents, const Tensors&) {
      return Tensors{call::all_to_all_single(tangents[0], outputs, inputs, name)};
    };
    return d;
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(c10d_ext, m) {
  m.def(
      "all_to_all_single(Tensor input, SymInt[] output_split_sizes, SymInt[] input_split_sizes, "
      "str group_name) -> Tensor",
      schema_tags());
  m.def(
      "all_to_all_single_out(Tensor input, SymInt[] output_split_sizes, SymInt[] "
      "input_split_sizes, str group_name, *, Tensor(a!) out) -> Tensor(a!)",
      schema_tags());
}

C10D_EXT_COLLECTIVE(Op)

}  // namespace c10d_ext
