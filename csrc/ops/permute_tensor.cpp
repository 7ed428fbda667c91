// permute_tensor: rank m's input goes to rank src_dst[m].

#include "frontend/op.h"

namespace c10d_ext {
namespace {

// dst -> src, or an error where src_dst is no permutation of the ranks.
std::vector<int64_t> inverse_of(string_view op, const Group& group, at::IntArrayRef src_dst) {
  std::vector<int64_t> inverse(group.size(), -1);
  bool permutes = static_cast<int64_t>(src_dst.size()) == group.size();
  for (size_t src = 0; permutes && src < src_dst.size(); ++src) {
    const int64_t dst = src_dst[src];
    permutes = dst >= 0 && dst < group.size() && inverse[dst] == -1;
    if (permutes) {
      inverse[dst] = static_cast<int64_t>(src);
    }
  }
  C10D_EXT_CHECK_VALUE(permutes, op, group, "src_dst must be a permutation of the ranks 0 to ",
                       group.size() - 1, ", got ", src_dst);
  return inverse;
}

// Kernels: CPU, CUDA and Meta.

at::Tensor permute_tensor(const at::Tensor& input, at::IntArrayRef src_dst,
                          string_view group_name) {
  constexpr string_view op = "permute_tensor";
  const Group group = resolve_group(op, group_name);
  check_strided(op, group, "input", input);
  const std::vector<int64_t> inverse = inverse_of(op, group, src_dst);
  at::Tensor out = empty_of_shape(input);
  if (!input.is_meta() && input.numel() != 0) {
    std::vector<int64_t> sends(group.size(), 0);
    std::vector<int64_t> receives(group.size(), 0);
    sends[src_dst[group.rank()]] = 1;
    receives[inverse[group.rank()]] = 1;
    // One row that is the whole tensor.
    submit(group, CollectiveRequest::all_to_all(op, input.unsqueeze(0), out.unsqueeze(0), receives,
                                                sends));
  }
  return out;
}

struct Op {
  static constexpr const char* stem = "permute_tensor";
  static constexpr auto functional = &permute_tensor;

  // Derivatives: gradients take the way back.
  static Derivative derivative(string_view op, at::TensorList /*inputs*/, at::IntArrayRef src_dst,
                               string_view group_name) {
    const Group group = resolve_group(op, group_name);
    Derivative d{"PermuteTensorBackward", Constants(src_dst, group_name)};
    d.adjoint = [inverse = inverse_of(op, group, src_dst), name = group.name()](
                    const Tensors& grads, const Tensors&) {
      return Tensors{call::permute_tensor(grads[0], inverse, name)};
    };
    d.tangent = [src_dst = src_dst.vec(), name = group.name()](const Tensors& tangents,
                                                               const Tensors&) {
      return Tensors{call::permute_tensor(tangents[0], src_dst, name)};
    };
    return d;
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(c10d_ext, m) {
  m.def("permute_tensor(Tensor input, int[] src_dst, str group_name) -> Tensor", schema_tags());
}

C10D_EXT_COLLECTIVE(Op)

}  // namespace c10d_ext
