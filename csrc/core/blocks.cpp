#include "core/blocks.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/python_variable.h>

#include "core/at_once.h"
#include "core/op.h"

namespace c10d_ext {

namespace {

// The inputs, apart from what is about to be written.
Tensors prepared(std::string_view op, const Group& group, const Tensors& inputs,
                 const Tensors& outputs) {
  check_list(op, group, inputs);
  Tensors sources;
  sources.reserve(inputs.size());
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

// What remember() was told last. Guarded by the GIL.
struct Remembered {
  PyObject* verb = nullptr;
  PyObject* op = nullptr;
  PyObject* group = nullptr;
  PyObject* inputs = nullptr;
  PyObject* outputs = nullptr;
  int64_t ranks = 0;
  bool gathers = false;
};

Remembered& remembered() {
  static Remembered instance;
  return instance;
}

bool is_tensor_of(PyObject* object, const at::Tensor& like) {
  if (!THPVariable_CheckExact(object)) {
    return false;
  }
  const at::Tensor& t = THPVariable_Unpack(object);
  return t.layout() == c10::kStrided && t.scalar_type() == like.scalar_type() &&
         t.device() == like.device();
}

// Whether one call can do with them: see distributed.all_gather_into_tensor, reduce_scatter_tensor.
bool are_of_one_call(const Remembered& known, const at::Tensor& input, const at::Tensor& output) {
  return known.gathers ? output.numel() == known.ranks * input.numel()
                       : input.numel() == known.ranks * output.numel() && input.dim() > 0 &&
                             input.size(0) % known.ranks == 0;
}

}  // namespace

PyObject* remember(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  const Remembered before = remembered();
  Remembered& now = remembered();
  now = {};
  if (given == 6) {
    now = {arguments[0], arguments[1], arguments[2], arguments[4], arguments[5]};
    now.ranks = PyLong_AsLongLong(arguments[3]);
    now.gathers = PyUnicode_CompareWithASCIIString(now.verb, "all_gather_into_tensor") == 0;
    for (PyObject* kept : {now.verb, now.op, now.group, now.inputs, now.outputs}) {
      Py_INCREF(kept);
    }
  }
  // Last: what is let go may run Python code.
  for (PyObject* kept : {before.verb, before.op, before.group, before.inputs, before.outputs}) {
    Py_XDECREF(kept);
  }
  Py_RETURN_NONE;
}

PyObject* hold_again(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  const Remembered& known = remembered();
  PyObject* const input = given == 5 ? arguments[3] : nullptr;
  PyObject* const output = given == 5 ? arguments[4] : nullptr;
  if (output == nullptr || arguments[0] != known.verb || arguments[1] != known.op ||
      arguments[2] != known.group || entry::is_watched()) {
    Py_RETURN_FALSE;
  }
  const at::Tensor& like = THPVariable_Unpack(PyList_GET_ITEM(known.outputs, 0));
  if (!is_tensor_of(output, like)) {
    Py_RETURN_FALSE;
  }
  if (known.inputs != known.outputs) {
    if (!is_tensor_of(input, like) ||
        !are_of_one_call(known, THPVariable_Unpack(input), THPVariable_Unpack(output))) {
      Py_RETURN_FALSE;
    }
    if (PyList_Append(known.inputs, input) != 0) {
      return nullptr;
    }
  }
  if (PyList_Append(known.outputs, output) != 0) {
    return nullptr;
  }
  Py_RETURN_TRUE;
}

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
