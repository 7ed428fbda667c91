#pragma once

#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/view_copy.h>

#include <tuple>
#include <type_traits>
#include <vector>

#include "base/group.h"
#include "control/resolve_group.h"
#include "frontend/calls.h"

// In-place and out= collectives as the functionalization pass sees them: the functional op, its
// wait, and the result in place of the old value. Waiting at once keeps every later read after the
// data's arrival; the compiler moves the wait down to the first use where that pays.
namespace c10d_ext {

inline at::Tensor functional_value(const at::Tensor& t) {
  if (!at::functionalization::impl::isFunctionalTensor(t)) {
    return t;
  }
  at::functionalization::impl::sync(t);
  return at::functionalization::impl::from_functional_tensor(t);
}

inline std::vector<at::Tensor> functional_values(at::TensorList tensors) {
  std::vector<at::Tensor> values;
  for (const auto& t : tensors) {
    values.push_back(functional_value(t));
  }
  return values;
}

// Graph passes (Inductor's scheduling and AOTInductor, the partitioner, bucketing) know torch's
// wait op by name, so that one is what traces record. A lazy graph records ours: torch's has no
// meaning there.
inline at::Tensor traced_wait(const at::Tensor& t) {
  if (t.is_lazy()) {
    return call::wait_tensor(t);
  }
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("_c10d_functional::wait_tensor", "")
                             .typed<at::Tensor(const at::Tensor&)>();
  return op.call(t);
}

// Of a value below functionalization. Lazy tensors have no views there, and no strides.
inline at::Tensor reshaped(const at::Tensor& value, c10::SymIntArrayRef sizes) {
  return value.is_lazy() ? at::view_copy_symint(value, sizes) : value.reshape_symint(sizes);
}

inline at::Tensor as_meta(const at::Tensor& t) {
  return at::empty_strided_symint(t.sym_sizes(), t.sym_strides(), t.options().device(c10::kMeta));
}
inline std::vector<at::Tensor> as_meta(at::TensorList tensors) {
  std::vector<at::Tensor> metas;
  for (const auto& t : tensors) {
    metas.push_back(as_meta(t));
  }
  return metas;
}
template <class Plain>
const Plain& as_meta(const Plain& value) {
  return value;
}

// The checks of an op that writes, where functionalization takes its place before its Meta kernel
// has seen the call: on lazy tensors.
template <class Return, class... Parameters>
void check_if_lazy(const c10::TypedOperatorHandle<Return(Parameters...)>& op,
                   std::string_view group_name,
                   const std::type_identity_t<std::decay_t<Parameters>>&... arguments) {
  std::vector<at::Tensor> tensors;
  const auto collect = [&](const auto& value) {
    using Value = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<Value, at::Tensor>) {
      tensors.push_back(value);
    } else if constexpr (std::is_same_v<Value, at::TensorList>) {
      tensors.insert(tensors.end(), value.begin(), value.end());
    }
  };
  (collect(arguments), ...);
  bool any = false;
  for (const auto& t : tensors) {
    any = any || t.is_lazy();
  }
  if (!any) {
    return;
  }
  for (const auto& t : tensors) {
    if (t.device() != tensors[0].device()) {
      const std::string_view name = std::string_view(op.operator_name().name).substr(10);
      value_error(name, resolve_group(name, group_name), "all tensors must be on one device, got ",
                  tensors[0].device(), " and ", t.device());
    }
  }
  std::tuple<decltype(as_meta(arguments))...> metas(as_meta(arguments)...);
  std::apply([&](auto&... meta) { op.call(meta...); }, metas);
}

// `target` <- `value`, keeping target's strides.
inline void replace_value(const at::Tensor& target, const at::Tensor& value) {
  TORCH_CHECK(
      at::functionalization::impl::isFunctionalTensor(target),
      "c10d_ext: a collective under functionalization must write a functional tensor, got a "
      "plain one");
  const at::Tensor old = at::functionalization::impl::from_functional_tensor(target);
  const at::Tensor fresh = old.is_lazy() ? reshaped(value, old.sym_sizes())
                                         : at::copy(old, value.view_symint(old.sym_sizes()));
  at::functionalization::impl::replace_(target, fresh);
  at::functionalization::impl::commit_update(target);
  at::functionalization::impl::sync(target);
}

inline void replace_values(at::TensorList targets, const std::vector<at::Tensor>& values) {
  for (size_t i = 0; i < targets.size(); ++i) {
    replace_value(targets[i], traced_wait(values[i]));
  }
}

}  // namespace c10d_ext
