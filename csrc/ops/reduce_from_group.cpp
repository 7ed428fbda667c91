// reduce_from_group: all_reduce(sum), whose gradient passes as it is (Megatron-LM's g).

#include "frontend/op.h"

namespace c10d_ext {
namespace {

// An all_reduce below autograd.
at::Tensor reduce_from_group(const at::Tensor& input, string_view group_name) {
  static const auto all_reduce =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("c10d_ext::all_reduce", "")
          .typed<at::Tensor(const at::Tensor&, string_view, string_view, const Factor&)>();
  return all_reduce.call(input, "sum", group_name, std::nullopt);
}

at::Tensor reduce_from_group_autograd(const at::Tensor& input, string_view group_name) {
  return differentiable(
      input, [&] { return reduce_from_group(input, group_name); },
      [&] {
        return Derivative{
            "ReduceFromGroupBackward", Constants(group_name),
            [](const Tensors& grads, const Tensors&) { return grads; },
            [name = std::string(group_name)](const Tensors& tangents, const Tensors&) {
              return Tensors{call::all_reduce(tangents[0], kSum, name)};
            }};
      });
}

C10D_EXT_HANDLE(reduce_from_group, "reduce_from_group")

}  // namespace

TORCH_LIBRARY_FRAGMENT(c10d_ext, m) {
  m.def("reduce_from_group(Tensor input, str group_name) -> Tensor", schema_tags());
}

C10D_EXT_ON_DEVICES([](torch::Library& m) { m.impl("reduce_from_group", reduce_from_group); })

// A trace in inference mode comes here without having met autograd.
TORCH_LIBRARY_IMPL(c10d_ext, Functionalize, m) {
  m.impl("reduce_from_group", reduce_from_group);
}

TORCH_LIBRARY_IMPL(c10d_ext, Autograd, m) {
  m.impl("reduce_from_group", reduce_from_group_autograd);
}

C10D_EXT_KEEP_LAZY_BITS([](torch::Library& m) { keep_lazy_bits(m, "reduce_from_group"); })

}  // namespace c10d_ext
