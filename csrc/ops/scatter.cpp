// scatter: rank r gets the r-th equal part of rank src's input along dim 0.

#include <ATen/ops/cat.h>

#include "frontend/op.h"

namespace c10d_ext {
namespace {

// Kernels: CPU, CUDA and Meta.

at::Tensor scatter(const at::Tensor& input, int64_t src, string_view group_name,
                   std::optional<c10::SymInt> size) {
  constexpr string_view op = "scatter";
  const Group group = resolve_group(op, group_name);
  check_strided(op, group, "input", input);
  check_rank(op, group, "src", src);
  check_has_rows(op, group, input);
  c10::SymInt rows;
  if (size.has_value()) {
    rows = *size;
    C10D_EXT_CHECK_VALUE(rows.sym_ge(0), op, group, "size must not be negative, got ", rows);
    if (group.rank() == src) {
      C10D_EXT_CHECK_VALUE(input.sym_size(0).sym_eq(rows * group.size()), op, group,
                           "input's dim 0 on rank src must be size times the group's size, ", rows,
                           " * ", group.size(), ", got ", input.sym_size(0));
    }
  } else {
    C10D_EXT_CHECK_VALUE((input.sym_size(0) % group.size()).sym_eq(0), op, group,
                         "input's dim 0 must be a multiple of the group's size ", group.size(),
                         " where size= is not given, got ", input.sym_size(0));
    rows = input.sym_size(0) / group.size();
  }
  at::Tensor out = empty_of(with_rows(input, rows), input);
  submit(group, CollectiveRequest::scatter(op, input, out, src));
  return out;
}

struct Op {
  static constexpr const char* stem = "scatter";
  static constexpr auto functional = &scatter;

  // Derivatives: the parts' gradients return to src; the other ranks' inputs reached nobody.
  static Derivative derivative(string_view op, at::TensorList inputs, int64_t src,
                               string_view group_name, const std::optional<c10::SymInt>& size) {
    const Group group = resolve_group(op, group_name);
    Derivative d{"ScatterBackward",
                 Constants(src, inputs[0].sym_sizes(), group.rank(), group_name)};
    d.adjoint = [src, is_src = group.rank() == src, sizes = inputs[0].sym_sizes().vec(),
                 name = group.name()](const Tensors& grads, const Tensors&) {
      const at::Tensor grad = call::gather(grads[0], src, name);
      if (is_src) {
        return Tensors{grad};
      }
      // Zeros that hang on the gather's empty result: src waits for this rank in every
      // derivative, and in as large a batch. (cat would drop an empty vector.)
      return Tensors{grads[0].new_zeros_symint(sizes).add(grad.sum())};
    };
    d.tangent = [src, size, name = group.name()](const Tensors& tangents, const Tensors&) {
      return Tensors{call::scatter(tangents[0], src, name, size)};
    };
    return d;
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(c10d_ext, m) {
  m.def("scatter(Tensor input, int src, str group_name, *, SymInt? size=None) -> Tensor",
        schema_tags());
}

C10D_EXT_COLLECTIVE(Op)

}  // namespace c10d_ext
