#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <string_view>
#include <vector>

#include "base/group.h"
#include "base/memory.h"
#include "base/reduction.h"
#include "collectives/submit.h"
#include "control/resolve_group.h"
#include "frontend/autograd.h"
#include "frontend/calls.h"
#include "frontend/fast_call.h"
#include "frontend/forms.h"
#include "frontend/functionalize.h"
#include "frontend/result_memory.h"

// What every csrc/ops/<collective>.cpp is written with. One kernel serves CPU, CUDA and Meta: it
// checks, allocates and starts, and starting does nothing on meta tensors. So a fake tensor meets
// the same checks and the same shape formula as a real one.
namespace c10d_ext {

using std::string_view;
using Factor = std::optional<c10::Scalar>;
using SymSizes = std::vector<c10::SymInt>;

// The schemas hold plain data alone, so that graphs with them can be saved and compared.
inline const std::vector<at::Tag>& schema_tags() {
  static const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  return tags;
}

inline void check_strided(string_view op, const Group& group, string_view name,
                          const at::Tensor& t) {
  C10D_EXT_CHECK_TYPE(t.layout() == c10::kStrided, op, group, name,
                      " must be a dense (strided) tensor, got layout ", t.layout());
}

inline void check_rank(string_view op, const Group& group, string_view name, int64_t rank) {
  C10D_EXT_CHECK_VALUE(rank >= 0 && rank < group.size(), op, group, name,
                       " must be a rank of the group, 0 to ", group.size() - 1, ", got ", rank);
}

inline void check_group_size(string_view op, const Group& group, int64_t group_size) {
  C10D_EXT_CHECK_VALUE(group_size == group.size(), op, group,
                       "group_size must be the size of the group, ", group.size(), ", got ",
                       group_size);
}

inline void check_has_rows(string_view op, const Group& group, const at::Tensor& t) {
  C10D_EXT_CHECK_VALUE(t.dim() > 0, op, group,
                       "input must have at least one dimension, got a scalar");
}

// Memory that a collective writes must hold every element once.
inline void check_written(string_view op, const Group& group, string_view name,
                          const at::Tensor& t) {
  C10D_EXT_CHECK_VALUE(at::has_internal_overlap(t) != at::MemOverlap::Yes, op, group, name,
                       " must hold each element at a place of its own, got shape ", t.sym_sizes(),
                       " with strides ", t.sym_strides());
}

inline void check_same_kind(string_view op, const Group& group, const at::Tensor& out,
                            const at::Tensor& input) {
  check_strided(op, group, "out", out);
  check_written(op, group, "out", out);
  C10D_EXT_CHECK_TYPE(out.scalar_type() == input.scalar_type(), op, group,
                      "out must have input's dtype, ", input.scalar_type(), ", got ",
                      out.scalar_type());
  C10D_EXT_CHECK_VALUE(out.device() == input.device(), op, group, "out must be on input's device, ",
                       input.device(), ", got ", out.device());
}

// A coalesced list travels as one message: one dtype, one device.
inline void check_list(string_view op, const Group& group, at::TensorList inputs) {
  C10D_EXT_CHECK_VALUE(!inputs.empty(), op, group,
                       "inputs must hold at least one tensor, got an empty list");
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_strided(op, group, "each input", inputs[i]);
    C10D_EXT_CHECK_TYPE(inputs[i].scalar_type() == inputs[0].scalar_type(), op, group,
                        "inputs must have one dtype, got ", inputs[0].scalar_type(), " and ",
                        inputs[i].scalar_type(), " (inputs[", i, "])");
    C10D_EXT_CHECK_VALUE(inputs[i].device() == inputs[0].device(), op, group,
                         "inputs must be on one device, got ", inputs[0].device(), " and ",
                         inputs[i].device(), " (inputs[", i, "])");
  }
}

inline at::Tensor empty_of(c10::SymIntArrayRef sizes, const at::Tensor& like) {
  return empty_result(sizes, like);
}

inline at::Tensor empty_of_shape(const at::Tensor& like) {
  return empty_of(like.sym_sizes(), like);
}

inline std::vector<at::Tensor> empty_of_shapes(at::TensorList likes) {
  std::vector<at::Tensor> outs;
  outs.reserve(likes.size());
  for (const auto& like : likes) {
    outs.push_back(empty_of_shape(like));
  }
  return outs;
}

// input's shape with `rows` in dim 0; a scalar counts as one row.
inline SymSizes with_rows(const at::Tensor& input, const c10::SymInt& rows) {
  SymSizes sizes = input.sym_sizes().vec();
  if (sizes.empty()) {
    sizes.push_back(rows);
  } else {
    sizes[0] = rows;
  }
  return sizes;
}

inline c10::SymInt rows_of(const at::Tensor& t) {
  return t.dim() == 0 ? c10::SymInt(1) : t.sym_size(0);
}

inline bool same_sizes(c10::SymIntArrayRef a, c10::SymIntArrayRef b) {
  if (a.size() != b.size()) {
    return false;
  }
  for (size_t i = 0; i < a.size(); ++i) {
    if (!a[i].sym_eq(b[i]).expect_true(__FILE__, __LINE__)) {
      return false;
    }
  }
  return true;
}

inline c10::SymInt sum_of(c10::SymIntArrayRef sizes) {
  c10::SymInt sum = 0;
  for (const auto& size : sizes) {
    sum = sum + size;
  }
  return sum;
}

// Per-rank sizes: one for each rank, none negative.
inline void check_sizes(string_view op, const Group& group, string_view name,
                        c10::SymIntArrayRef sizes) {
  C10D_EXT_CHECK_VALUE(static_cast<int64_t>(sizes.size()) == group.size(), op, group, name,
                       " must hold one size for each of the ", group.size(), " ranks, got ", sizes);
  for (const auto& size : sizes) {
    C10D_EXT_CHECK_VALUE(size.sym_ge(0), op, group, name, " must not be negative, got ", sizes);
  }
}

// Concrete sizes for a kernel that is about to communicate.
inline std::vector<int64_t> concrete(const at::Tensor& input, c10::SymIntArrayRef sizes) {
  std::vector<int64_t> values;
  if (!input.is_meta()) {
    for (const auto& size : sizes) {
      values.push_back(size.guard_int(__FILE__, __LINE__));
    }
  }
  return values;
}

}  // namespace c10d_ext

// Defines `<function>_handle()`, the dispatcher's handle of c10d_ext::<name>, typed like
// `function`, and lists the op's short way in from Python.
#define C10D_EXT_HANDLE(function, name)                                      \
  const c10::TypedOperatorHandle<decltype(function)>& function##_handle() {  \
    static const auto handle = c10::Dispatcher::singleton()                  \
                                   .findSchemaOrThrow("c10d_ext::" name, "") \
                                   .typed<decltype(function)>();             \
    return handle;                                                           \
  }                                                                          \
  [[maybe_unused]] const bool function##_listed = fast_call::add<function##_handle>(name);
