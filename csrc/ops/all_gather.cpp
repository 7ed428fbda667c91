// all_gather: every rank gets all ranks' rows, of which each rank may have another number.

#include "frontend/op.h"

namespace c10d_ext {
namespace {

// Kernels: CPU, CUDA and Meta.

at::Tensor all_gather(const at::Tensor& input, c10::SymIntArrayRef sizes, string_view group_name) {
  constexpr string_view op = "all_gather";
  const Group group = resolve_group(op, group_name);
  check_strided(op, group, "input", input);
  check_has_rows(op, group, input);
  check_sizes(op, group, "sizes", sizes);
  C10D_EXT_CHECK_VALUE(input.sym_size(0).sym_eq(sizes[group.rank()]), op, group,
                       "input's dim 0 must be this rank's size, ", sizes[group.rank()], ", got ",
                       input.sym_size(0));
  at::Tensor out = empty_of(with_rows(input, sum_of(sizes)), input);
  submit(group, CollectiveRequest::all_gather_uneven(op, input, out, concrete(input, sizes)));
  return out;
}

struct Op {
  static constexpr const char* stem = "all_gather";
  static constexpr auto functional = &all_gather;

  // Derivatives: the adjoint sums what all ranks say of this rank's rows.
  static Derivative derivative(string_view /*op*/, at::TensorList /*inputs*/,
                               c10::SymIntArrayRef sizes, string_view group_name) {
    Derivative d{"AllGatherBackward", Constants(sizes, group_name)};
    d.adjoint = [sizes = sizes.vec(), name = std::string(group_name)](const Tensors& grads,
                                                                      const Tensors&) {
      return Tensors{call::reduce_scatter(grads[0], kSum, sizes, name)};
    };
    d.tangent = [sizes = sizes.vec(), name = std::string(group_name)](const Tensors& tangents,
                                                                      const Tensors&) {
      return Tensors{call::all_gather(tangents[0], sizes, name)};
    };
    return d;
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(c10d_ext, m) {
  m.def("all_gather(Tensor input, SymInt[] sizes, str group_name) -> Tensor", schema_tags());
}

C10D_EXT_COLLECTIVE(Op)

}  // namespace c10d_ext
