#include "frontend/calls.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>

namespace c10d_ext::call {

namespace {

using Factor = std::optional<c10::Scalar>;

// One lookup per op and process: `static` at each use.
template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

at::Tensor wait_tensor(const at::Tensor& tensor) {
  static const auto op = find<at::Tensor(const at::Tensor&)>("c10d_ext::wait_tensor");
  return op.call(tensor);
}

Tensors waited(Tensors tensors) {
  for (auto& tensor : tensors) {
    tensor = wait_tensor(tensor);
  }
  return tensors;
}

at::Tensor all_reduce(const at::Tensor& input, const Reduction& reduction,
                      const std::string& group) {
  static const auto op =
      find<at::Tensor(const at::Tensor&, std::string_view, std::string_view, const Factor&)>(
          "c10d_ext::all_reduce");
  return wait_tensor(op.call(input, name_of(reduction.op), group, reduction.factor));
}

Tensors all_reduce_coalesced(const Tensors& inputs, const Reduction& reduction,
                             const std::string& group) {
  if (inputs.size() == 1) {
    return {all_reduce(inputs[0], reduction, group)};
  }
  static const auto op =
      find<Tensors(at::TensorList, std::string_view, std::string_view, const Factor&)>(
          "c10d_ext::all_reduce_coalesced");
  return waited(op.call(inputs, name_of(reduction.op), group, reduction.factor));
}

at::Tensor all_gather_into_tensor(const at::Tensor& input, int64_t group_size,
                                  const std::string& group) {
  static const auto op = find<at::Tensor(const at::Tensor&, int64_t, std::string_view)>(
      "c10d_ext::all_gather_into_tensor");
  return wait_tensor(op.call(input, group_size, group));
}

Tensors all_gather_into_tensor_coalesced(const Tensors& inputs, int64_t group_size,
                                         const std::string& group) {
  if (inputs.size() == 1) {
    return {all_gather_into_tensor(inputs[0], group_size, group)};
  }
  static const auto op = find<Tensors(at::TensorList, int64_t, std::string_view)>(
      "c10d_ext::all_gather_into_tensor_coalesced");
  return waited(op.call(inputs, group_size, group));
}

at::Tensor reduce_scatter_tensor(const at::Tensor& input, const Reduction& reduction,
                                 int64_t group_size, const std::string& group) {
  static const auto op =
      find<at::Tensor(const at::Tensor&, std::string_view, int64_t, std::string_view,
                      const Factor&)>("c10d_ext::reduce_scatter_tensor");
  return wait_tensor(op.call(input, name_of(reduction.op), group_size, group, reduction.factor));
}

Tensors reduce_scatter_tensor_coalesced(const Tensors& inputs, const Reduction& reduction,
                                        int64_t group_size, const std::string& group) {
  if (inputs.size() == 1) {
    return {reduce_scatter_tensor(inputs[0], reduction, group_size, group)};
  }
  static const auto op =
      find<Tensors(at::TensorList, std::string_view, int64_t, std::string_view, const Factor&)>(
          "c10d_ext::reduce_scatter_tensor_coalesced");
  return waited(op.call(inputs, name_of(reduction.op), group_size, group, reduction.factor));
}

at::Tensor all_to_all_single(const at::Tensor& input, c10::SymIntArrayRef output_split_sizes,
                             c10::SymIntArrayRef input_split_sizes, const std::string& group) {
  static const auto op =
      find<at::Tensor(const at::Tensor&, c10::SymIntArrayRef, c10::SymIntArrayRef,
                      std::string_view)>("c10d_ext::all_to_all_single");
  return wait_tensor(op.call(input, output_split_sizes, input_split_sizes, group));
}

at::Tensor broadcast(const at::Tensor& input, int64_t src, const std::string& group) {
  static const auto op =
      find<at::Tensor(const at::Tensor&, int64_t, std::string_view)>("c10d_ext::broadcast");
  return wait_tensor(op.call(input, src, group));
}

Tensors broadcast_coalesced(const Tensors& inputs, int64_t src, const std::string& group) {
  if (inputs.size() == 1) {
    return {broadcast(inputs[0], src, group)};
  }
  static const auto op =
      find<Tensors(at::TensorList, int64_t, std::string_view)>("c10d_ext::broadcast_coalesced");
  return waited(op.call(inputs, src, group));
}

at::Tensor reduce(const at::Tensor& input, const Reduction& reduction, int64_t dst,
                  const std::string& group) {
  static const auto op = find<at::Tensor(const at::Tensor&, std::string_view, int64_t,
                                         std::string_view, const Factor&)>("c10d_ext::reduce");
  return wait_tensor(op.call(input, name_of(reduction.op), dst, group, reduction.factor));
}

Tensors reduce_coalesced(const Tensors& inputs, const Reduction& reduction, int64_t dst,
                         const std::string& group) {
  if (inputs.size() == 1) {
    return {reduce(inputs[0], reduction, dst, group)};
  }
  Tensors flat;
  std::vector<c10::SymInt> sizes;
  for (const auto& input : inputs) {
    flat.push_back(input.reshape(-1));
    sizes.push_back(input.sym_numel());
  }
  const at::Tensor reduced = reduce(at::cat(flat), reduction, dst, group);
  Tensors results;
  c10::SymInt offset = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {  // torch's lazy split is not lazy
    results.push_back(
        reduced.narrow_symint(0, offset, sizes[i]).view_symint(inputs[i].sym_sizes()));
    offset = offset + sizes[i];
  }
  return results;
}

at::Tensor gather(const at::Tensor& input, int64_t dst, const std::string& group) {
  static const auto op =
      find<at::Tensor(const at::Tensor&, int64_t, std::string_view)>("c10d_ext::gather");
  return wait_tensor(op.call(input, dst, group));
}

at::Tensor scatter(const at::Tensor& input, int64_t src, const std::string& group,
                   const std::optional<c10::SymInt>& size) {
  static const auto op =
      find<at::Tensor(const at::Tensor&, int64_t, std::string_view, std::optional<c10::SymInt>)>(
          "c10d_ext::scatter");
  return wait_tensor(op.call(input, src, group, size));
}

at::Tensor permute_tensor(const at::Tensor& input, c10::IntArrayRef src_dst,
                          const std::string& group) {
  static const auto op = find<at::Tensor(const at::Tensor&, c10::IntArrayRef, std::string_view)>(
      "c10d_ext::permute_tensor");
  return wait_tensor(op.call(input, src_dst, group));
}

at::Tensor all_gather(const at::Tensor& input, c10::SymIntArrayRef sizes,
                      const std::string& group) {
  static const auto op = find<at::Tensor(const at::Tensor&, c10::SymIntArrayRef, std::string_view)>(
      "c10d_ext::all_gather");
  return wait_tensor(op.call(input, sizes, group));
}

at::Tensor reduce_scatter(const at::Tensor& input, const Reduction& reduction,
                          c10::SymIntArrayRef sizes, const std::string& group) {
  static const auto op =
      find<at::Tensor(const at::Tensor&, std::string_view, c10::SymIntArrayRef, std::string_view,
                      const Factor&)>("c10d_ext::reduce_scatter");
  return wait_tensor(op.call(input, name_of(reduction.op), sizes, group, reduction.factor));
}

}  // namespace c10d_ext::call
