#include "core/blocks.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include "core/at_once.h"
#include "core/op.h"

namespace c10d_ext {

namespace {

// The inputs, apart from what is about to be written.
Tensors prepared(std::string_view op, const Group& group, const Tensors& inputs,
                 const Tensors& outputs) {
  check_list(op, group, inputs);
  Tensors sources;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_same_kind(op, group, outputs.at(i), inputs[i]);
    sources.push_back(apart_from(inputs[i], outputs[i]));
  }
  for (const auto& output : outputs) {
    if (!output.is_inference()) {
      output.unsafeGetTensorImpl()->bump_version();
    }
  }
  return sources;
}

}  // namespace

bool write_all_gather_block(bool async_op, const Tensors& inputs, const Tensors& outputs,
                            const std::string& group_name) {
  if (!entry::is_plain(inputs) || !entry::is_plain(outputs)) {
    return false;
  }
  constexpr std::string_view op = "all_gather_into_tensor_coalesced";
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const AtOnce manner(!async_op);
  const Group group = resolve_group(op, group_name);
  start_all_gather_coalesced(op, group, prepared(op, group, inputs, outputs), outputs);
  return true;
}

bool write_reduce_scatter_block(bool async_op, const Tensors& inputs, const Tensors& outputs,
                                const std::string& reduce_op,
                                const std::optional<c10::Scalar>& factor,
                                const std::string& group_name) {
  if (!entry::is_plain(inputs) || !entry::is_plain(outputs)) {
    return false;
  }
  constexpr std::string_view op = "reduce_scatter_tensor_coalesced";
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const AtOnce manner(!async_op);
  const Group group = resolve_group(op, group_name);
  const Tensors sources = prepared(op, group, inputs, outputs);
  const Reduction reduction =
      parse_reduction(op, group, reduce_op, factor, inputs[0].scalar_type());
  start_reduce_scatter_coalesced(op, group, sources, outputs, reduction);
  return true;
}

}  // namespace c10d_ext
