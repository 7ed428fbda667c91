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

C10D_EXT_HANDLE(gather, "gather")

// Derivatives: dst hands every rank the gradient of the rows that came from it.

at::Tensor gather_autograd(c10::DispatchKeySet keys, const at::Tensor& input, int64_t dst,
                           string_view group_name) {
  return differentiable(
      input,
      [&] { return gather_handle().redispatch(below_autograd(keys), input, dst, group_name); },
      [&] {
        Derivative d{"GatherBackward", Constants(dst, rows_of(input), input.dim(), group_name)};
        d.adjoint = [dst, rows = rows_of(input), scalar = input.dim() == 0,
                     name = std::string(group_name)](const Tensors& grads, const Tensors&) {
          const at::Tensor grad = call::scatter(grads[0], dst, name, rows);
          return Tensors{scalar ? grad.squeeze(0) : grad};
        };
        d.tangent = [dst, name = std::string(group_name)](const Tensors& tangents, const Tensors&) {
          return Tensors{call::gather(tangents[0], dst, name)};
        };
        return d;
      });
}

void register_kernels(torch::Library& m) {
  m.impl("gather", gather);
}

constexpr auto kNames = {"gather"};

}  // namespace

TORCH_LIBRARY_FRAGMENT(c10d_ext, m) {
  m.def("gather(Tensor input, int dst, str group_name) -> Tensor", schema_tags());
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
  m.impl("gather", gather_autograd);
}

TORCH_LIBRARY_IMPL(c10d_ext, Conjugate, m) {
  keep_lazy_bits(m, kNames);
}

TORCH_LIBRARY_IMPL(c10d_ext, Negative, m) {
  keep_lazy_bits(m, kNames);
}

}  // namespace c10d_ext
