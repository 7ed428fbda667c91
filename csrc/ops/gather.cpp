// gather: rank dst gets all ranks' inputs, one after the other along dim 0; the others get no rows.

#include "frontend/op.h"

namespace c10d_ext {
namespace {

// Kernels: CPU, CUDA and Meta.

at::Tensor gather(const at::Tensor& input, int64_t dst, string_view group_name) {
  constexpr string_view op = "gather";
  const Group group = resolve_group(op, group_name);
  check_strided(op, group, "input", input);
  check_rank(op, group, "dst", dst);
  const c10::SymInt rows = group.rank() == dst ? rows_of(input) * group.size() : c10::SymInt(0);
  at::Tensor out = empty_of(with_rows(input, rows), input);
  submit(group, CollectiveRequest::gather(op, input, out, dst));
  return out;
}

struct Op {
  static constexpr const char* stem = "gather";
  static constexpr auto functional = &gather;

  // Derivatives: dst hands every rank the gradient of the rows that came from it.
  static Derivative derivative(string_view /*op*/, at::TensorList inputs, int64_t dst,
                               string_view group_name) {
    Derivative d{"GatherBackward", Constants(dst, rows_of(inputs[0]), inputs[0].dim(), group_name)};
    d.adjoint = [dst, rows = rows_of(inputs[0]), scalar = inputs[0].dim() == 0,
                 name = std::string(group_name)](const Tensors& grads, const Tensors&) {
      const at::Tensor grad = call::scatter(grads[0], dst, name, rows);
      return Tensors{scalar ? grad.squeeze(0) : grad};
    };
    d.tangent = [dst, name = std::string(group_name)](const Tensors& tangents, const Tensors&) {
      return Tensors{call::gather(tangents[0], dst, name)};
    };
    return d;
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(c10d_ext, m) {
  m.def("gather(Tensor input, int dst, str group_name) -> Tensor", schema_tags());
}

C10D_EXT_COLLECTIVE(Op)

}  // namespace c10d_ext
