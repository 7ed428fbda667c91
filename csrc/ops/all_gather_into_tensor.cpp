// all_gather_into_tensor: every rank gets all ranks' inputs, one after the other along dim 0.

#include "frontend/op.h"

namespace c10d_ext {
namespace {

// Kernels: CPU, CUDA and Meta.

at::Tensor all_gather_into_tensor(const at::Tensor& input, int64_t group_size,
                                  string_view group_name) {
  constexpr string_view op = "all_gather_into_tensor";
  const Group group = resolve_group(op, group_name);
  check_strided(op, group, "input", input);
  check_group_size(op, group, group_size);
  at::Tensor out = empty_of(with_rows(input, rows_of(input) * group_size), input);
  submit(group, CollectiveRequest::all_gather(op, input, out));
  return out;
}

at::Tensor& all_gather_into_tensor_out(const at::Tensor& input, int64_t group_size,
                                       string_view group_name, at::Tensor& out) {
  constexpr string_view op = "all_gather_into_tensor";
  const Group group = resolve_group(op, group_name);
  check_strided(op, group, "input", input);
  check_group_size(op, group, group_size);
  check_same_kind(op, group, out, input);
  const SymSizes concatenated = with_rows(input, rows_of(input) * group_size);
  SymSizes stacked = input.sym_sizes().vec();
  stacked.insert(stacked.begin(), group_size);
  C10D_EXT_CHECK_VALUE(
      same_sizes(out.sym_sizes(), out.dim() == input.dim() ? concatenated : stacked), op, group,
      "out must have shape ", c10::SymIntArrayRef(concatenated), " or ",
      c10::SymIntArrayRef(stacked), ", got ", out.sym_sizes());
  submit(group, CollectiveRequest::all_gather(op, input, out));
  return out;
}

Tensors all_gather_into_tensor_coalesced(at::TensorList inputs, int64_t group_size,
                                         string_view group_name) {
  constexpr string_view op = "all_gather_into_tensor_coalesced";
  const Group group = resolve_group(op, group_name);
  check_list(op, group, inputs);
  check_group_size(op, group, group_size);
  Tensors outs;
  for (const auto& input : inputs) {
    outs.push_back(empty_of(with_rows(input, rows_of(input) * group_size), input));
  }
  submit(group, CollectiveRequest::all_gather_coalesced(op, inputs, outs));
  return outs;
}

struct Op {
  static constexpr const char* stem = "all_gather_into_tensor";
  static constexpr auto functional = &all_gather_into_tensor;
  static constexpr auto out = &all_gather_into_tensor_out;
  static constexpr auto coalesced = &all_gather_into_tensor_coalesced;

  // Derivatives: the adjoint sums what all ranks say of this rank's rows.
  static Derivative derivative(string_view /*op*/, at::TensorList inputs, int64_t group_size,
                               string_view group_name) {
    std::vector<bool> scalars;
    for (const auto& input : inputs) {
      scalars.push_back(input.dim() == 0);
    }
    Derivative d{"AllGatherIntoTensorBackward", Constants(group_size, group_name, scalars)};
    d.adjoint = [group_size, name = std::string(group_name), scalars](const Tensors& grads,
                                                                      const Tensors&) {
      Tensors results = call::reduce_scatter_tensor_coalesced(grads, kSum, group_size, name);
      for (size_t i = 0; i < results.size(); ++i) {
        if (scalars[i]) {
          results[i] = results[i].squeeze(0);
        }
      }
      return results;
    };
    d.tangent = [group_size, name = std::string(group_name)](const Tensors& tangents,
                                                             const Tensors&) {
      return call::all_gather_into_tensor_coalesced(tangents, group_size, name);
    };
    return d;
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(c10d_ext, m) {
  m.def("all_gather_into_tensor(Tensor input, int group_size, str group_name) -> Tensor",
        schema_tags());
  m.def(
      "all_gather_into_tensor_out(Tensor input, int group_size, str group_name, *, Tensor(a!) out) "
      "-> Tensor(a!)",
      schema_tags());
  m.def(
      "all_gather_into_tensor_coalesced(Tensor[] inputs, int group_size, str group_name) -> "
      "Tensor[]",
      schema_tags());
}

C10D_EXT_COLLECTIVE(Op)

}  // namespace c10d_ext
