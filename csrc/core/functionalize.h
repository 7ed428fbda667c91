#pragma once

#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy.h>
#include <c10/util/FunctionRef.h>

#include <vector>

#include "core/calls.h"

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

// `target` <- `value`, keeping target's strides.
inline void replace_value(const at::Tensor& target, const at::Tensor& value) {
  TORCH_CHECK(
      at::functionalization::impl::isFunctionalTensor(target),
      "c10d_ext: a collective under functionalization must write a functional tensor, got a "
      "plain one");
  const at::Tensor old = at::functionalization::impl::from_functional_tensor(target);
  const at::Tensor fresh = at::copy(old, value.view_symint(old.sym_sizes()));
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
