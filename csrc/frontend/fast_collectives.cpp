#include "frontend/fast_collectives.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <string_view>
#include <vector>

#include "control/resolve_group.h"
#include "frontend/fast_call.h"

namespace c10d_ext::fast_call {

namespace {

using at::Tensor;
using std::string_view;

template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

struct Exchange {
  Tensor output;
  Tensor input;
  string_view reduction;  // where it reduces
  string_view group;
};

bool has_plain_sizes(const Tensor& t) {
  return is_plain(t) && !t.is_nested();
}

bool is_divisible(const Tensor& t, int64_t ranks) {
  return t.dim() > 0 && t.size(0) % ranks == 0;
}

// `call`, told the number of ranks, makes the call of the op; false where the tensors do not fit.
PyObject* write(PyObject* const* arguments, Py_ssize_t count, bool reduces,
                c10::function_ref<bool(Exchange&, int64_t)> call) {
  if (count != (reduces ? 4 : 3) || is_watched()) {
    Py_RETURN_FALSE;
  }
  PyObject* const reduction = reduces ? arguments[2] : nullptr;
  PyObject* const group = arguments[count - 1];
  Exchange one;
  if (!are_in_place(reduction, group) || !read(arguments[0], one.output) ||
      !read(arguments[1], one.input) || (reduces && !read(reduction, one.reduction)) ||
      !read(group, one.group) || !has_plain_sizes(one.output) || !has_plain_sizes(one.input) ||
      one.output.scalar_type() != one.input.scalar_type()) {
    Py_RETURN_FALSE;
  }
  bool fits = false;
  const bool done = run([&] {
    const c10::AutoGradMode no_grad(false);
    const SyncScope manner(true);
    fits = call(one, resolve_group("group_size", one.group).size());
  });
  return done ? PyBool_FromLong(fits ? 1 : 0) : nullptr;
}

}  // namespace

PyObject* write_all_gather(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count) {
  return write(arguments, count, false, [](Exchange& one, int64_t ranks) {
    static const auto op = find<Tensor&(const Tensor&, int64_t, string_view, Tensor&)>(
        "c10d_ext::all_gather_into_tensor_out");
    if (one.output.numel() != ranks * one.input.numel()) {
      return false;
    }
    op.call(one.input, ranks, one.group, one.output);
    return true;
  });
}

PyObject* write_reduce_scatter(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count) {
  return write(arguments, count, true, [](Exchange& one, int64_t ranks) {
    using Factor = std::optional<c10::Scalar>;
    static const auto op =
        find<Tensor&(const Tensor&, string_view, int64_t, string_view, const Factor&, Tensor&)>(
            "c10d_ext::reduce_scatter_tensor_out");
    if (one.input.numel() != ranks * one.output.numel() || !is_divisible(one.input, ranks)) {
      return false;
    }
    op.call(one.input, one.reduction, ranks, one.group, Factor(), one.output);
    return true;
  });
}

PyObject* write_all_to_all(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count) {
  return write(arguments, count, false, [](Exchange& one, int64_t ranks) {
    using Sizes = c10::SymIntArrayRef;
    static const auto op = find<Tensor&(const Tensor&, Sizes, Sizes, string_view, Tensor&)>(
        "c10d_ext::all_to_all_single_out");
    if (one.output.sizes() != one.input.sizes() || !is_divisible(one.input, ranks)) {
      return false;
    }
    const std::vector<c10::SymInt> rows(ranks, one.input.size(0) / ranks);
    op.call(one.input, rows, rows, one.group, one.output);
    return true;
  });
}

}  // namespace c10d_ext::fast_call
