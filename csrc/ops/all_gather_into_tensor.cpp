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

C10D_EXT_HANDLE(all_gather_into_tensor, "all_gather_into_tensor")
C10D_EXT_HANDLE(all_gather_into_tensor_out, "all_gather_into_tensor_out")
C10D_EXT_HANDLE(all_gather_into_tensor_coalesced, "all_gather_into_tensor_coalesced")

// Derivatives: the adjoint sums what all ranks say of this rank's rows.

Derivative derivative(int64_t group_size, string_view group_name, at::TensorList inputs) {
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

at::Tensor all_gather_into_tensor_autograd(c10::DispatchKeySet keys, const at::Tensor& input,
                                           int64_t group_size, string_view group_name) {
  return differentiable(
      input,
      [&] {
        return all_gather_into_tensor_handle().redispatch(below_autograd(keys), input, group_size,
                                                          group_name);
      },
      [&] { return derivative(group_size, group_name, input); });
}

at::Tensor& all_gather_into_tensor_out_autograd(c10::DispatchKeySet keys, const at::Tensor& input,
                                                int64_t group_size, string_view group_name,
                                                at::Tensor& out) {
  forward_out("all_gather_into_tensor_out", group_name, input, out, [&] {
    all_gather_into_tensor_out_handle().redispatch(below_autograd(keys), input, group_size,
                                                   group_name, out);
  });
  return out;
}

Tensors all_gather_into_tensor_coalesced_autograd(c10::DispatchKeySet keys, at::TensorList inputs,
                                                  int64_t group_size, string_view group_name) {
  return differentiable(
      inputs,
      [&] {
        return all_gather_into_tensor_coalesced_handle().redispatch(below_autograd(keys), inputs,
                                                                    group_size, group_name);
      },
      [&] { return derivative(group_size, group_name, inputs); });
}

// Functionalization.

at::Tensor& all_gather_into_tensor_out_functionalize(const at::Tensor& input, int64_t group_size,
                                                     string_view group_name, at::Tensor& out) {
  check_if_lazy(all_gather_into_tensor_out_handle(), group_name, input, group_size, group_name,
                out);
  const at::Tensor value = functional_value(input);
  at::AutoDispatchSkipFunctionalize below_functionalize;
  replace_value(out,
                traced_wait(all_gather_into_tensor_handle().call(value, group_size, group_name)));
  return out;
}

void register_kernels(torch::Library& m) {
  m.impl("all_gather_into_tensor", all_gather_into_tensor);
  m.impl("all_gather_into_tensor_out", all_gather_into_tensor_out);
  m.impl("all_gather_into_tensor_coalesced", all_gather_into_tensor_coalesced);
}

constexpr auto kNames = {"all_gather_into_tensor", "all_gather_into_tensor_out",
                         "all_gather_into_tensor_coalesced"};

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
  m.impl("all_gather_into_tensor", all_gather_into_tensor_autograd);
  m.impl("all_gather_into_tensor_out", all_gather_into_tensor_out_autograd);
  m.impl("all_gather_into_tensor_coalesced", all_gather_into_tensor_coalesced_autograd);
}

TORCH_LIBRARY_IMPL(c10d_ext, Functionalize, m) {
  m.impl("all_gather_into_tensor_out", all_gather_into_tensor_out_functionalize);
}

TORCH_LIBRARY_IMPL(c10d_ext, Conjugate, m) {
  keep_lazy_bits(m, kNames);
}

TORCH_LIBRARY_IMPL(c10d_ext, Negative, m) {
  keep_lazy_bits(m, kNames);
}

}  // namespace c10d_ext
