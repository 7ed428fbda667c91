// copy_to_group: the identity, whose gradient is summed over the group (Megatron-LM's f).

#include <ATen/ops/alias.h>

#include "frontend/op.h"

namespace c10d_ext {
namespace {

// Nothing to communicate forward: below autograd there is an alias left.
at::Tensor copy_to_group(const at::Tensor& input, string_view group_name) {
  resolve_group("copy_to_group", group_name);
  return at::alias(input);
}

at::Tensor copy_to_group_autograd(const at::Tensor& input, string_view group_name) {
  return differentiable(
      input, [&] { return copy_to_group(input, group_name); },
      [&] {
        return Derivative{"CopyToGroupBackward", Constants(group_name),
                          [name = std::string(group_name)](const Tensors& grads, const Tensors&) {
                            return Tensors{call::all_reduce(grads[0], kSum, name)};
                          },
                          [](const Tensors& tangents, const Tensors&) { return tangents; }};
      });
}

C10D_EXT_HANDLE(copy_to_group, "copy_to_group")

}  // namespace

TORCH_LIBRARY_FRAGMENT(c10d_ext, m) {
  m.def("copy_to_group(Tensor(a) input, str group_name) -> Tensor(a)", schema_tags());
}

C10D_EXT_ON_DEVICES([](torch::Library& m) { m.impl("copy_to_group", copy_to_group); })

// A trace in inference mode comes here without having met autograd.
TORCH_LIBRARY_IMPL(c10d_ext, Functionalize, m) {
  m.impl("copy_to_group", copy_to_group);
}

TORCH_LIBRARY_IMPL(c10d_ext, Autograd, m) {
  m.impl("copy_to_group", copy_to_group_autograd);
}

C10D_EXT_KEEP_LAZY_BITS([](torch::Library& m) { keep_lazy_bits(m, "copy_to_group"); })

}  // namespace c10d_ext
