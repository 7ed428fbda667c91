#include "python/coalescing.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#include "base/sync_scope.h"
#include "control/resolve_group.h"
#include "frontend/op.h"

namespace c10d_ext {

namespace {

// Lazy tensors have to pass the dispatcher.
bool may_write(const Tensors& tensors) {
  return fast_call::is_plain(tensors) &&
         std::none_of(tensors.begin(), tensors.end(), [](const auto& t) { return t.is_lazy(); });
}

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
  PyObject* function = nullptr;
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
    now.gathers = PyUnicode_CompareWithASCIIString(now.function, "all_gather_into_tensor") == 0;
    for (PyObject* kept : {now.function, now.op, now.group, now.inputs, now.outputs}) {
      Py_INCREF(kept);
    }
  }
  // Last: releasing these may run Python code.
  for (PyObject* kept : {before.function, before.op, before.group, before.inputs, before.outputs}) {
    Py_XDECREF(kept);
  }
  Py_RETURN_NONE;
}

PyObject* hold_again(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  const Remembered& known = remembered();
  PyObject* const input = given == 5 ? arguments[3] : nullptr;
  PyObject* const output = given == 5 ? arguments[4] : nullptr;
  if (output == nullptr || arguments[0] != known.function || arguments[1] != known.op ||
      arguments[2] != known.group || fast_call::is_watched()) {
    Py_RETURN_FALSE;
  }
  const at::Tensor& like = THPVariable_Unpack(PyList_GET_ITEM(known.outputs, 0));
  // An output of other strides may have two elements in one place.
  if (!is_tensor_of(output, like) || !THPVariable_Unpack(output).is_contiguous()) {
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

void check_held(const std::string& op, const std::string& group_name, const std::string& reduce_op,
                const std::optional<c10::Scalar>& factor, const at::Tensor& input,
                const at::Tensor& output) {
  const Group group = resolve_group(op, group_name);
  check_strided(op, group, "input", input);
  check_same_kind(op, group, output, input);
  if (!reduce_op.empty()) {
    static_cast<void>(parse_reduction(op, group, reduce_op, factor, input.scalar_type()));
  }
}

namespace {

// What a call of a block reads or writes.
struct Touched {
  const char* begin;
  const char* end;
  size_t call;
  bool written;
};

// The same of a tensor that is traced, which has a storage but no memory.
struct Traced {
  const at::Tensor* tensor;
  size_t call;
  bool written;
};

struct AllTouched {
  std::vector<Touched> memory;
  std::vector<Traced> traced;
};

template <class T>
bool must_be_apart(const T& a, const T& b) {
  return a.call != b.call && (a.written || b.written);
}

bool add_touched(PyObject* list, size_t first_call, bool written, AllTouched& all) {
  if (!PyList_Check(list)) {
    PyErr_SetString(PyExc_TypeError, "check_apart: must be called with lists");
    return false;
  }
  all.memory.reserve(all.memory.size() + PyList_GET_SIZE(list));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    PyObject* const item = PyList_GET_ITEM(list, i);
    if (!THPVariable_Check(item)) {
      continue;
    }
    const at::Tensor& t = THPVariable_Unpack(item);
    const size_t call = first_call + static_cast<size_t>(i);
    // Lazy tensors have one storage for all, which is none.
    if (t.layout() != c10::kStrided || t.is_lazy() || !t.has_storage()) {
      continue;
    }
    if (!c10d_ext::is_plain(t)) {
      all.traced.push_back({&t, call, written});
    } else if (t.is_non_overlapping_and_dense() && t.numel() != 0) {
      const auto* data = static_cast<const char*>(t.const_data_ptr());
      all.memory.push_back({data, data + t.nbytes(), call, written});
    }
  }
  return true;
}

using Pair = std::optional<std::pair<size_t, size_t>>;

// Two calls of which one writes what the other one touches.
Pair find_in_memory(std::vector<Touched>& all) {
  std::sort(all.begin(), all.end(),
            [](const Touched& a, const Touched& b) { return a.begin < b.begin; });
  if (std::adjacent_find(all.begin(), all.end(), [](const Touched& a, const Touched& b) {
        return a.end > b.begin;
      }) == all.end()) {
    return {};
  }
  std::vector<Touched> open;
  for (const Touched& next : all) {
    open.erase(std::remove_if(open.begin(), open.end(),
                              [&](const Touched& t) { return t.end <= next.begin; }),
               open.end());
    for (const Touched& other : open) {
      if (must_be_apart(other, next)) {
        return std::minmax(other.call, next.call);
      }
    }
    open.push_back(next);
  }
  return {};
}

const c10::Storage& storage_of(const at::Tensor& t) {
  return t.unsafeGetTensorImpl()->unsafe_storage();
}

// Whether a tensor has elements, and they fill their part of the storage.
bool is_dense(const at::Tensor& t) {
  c10::SymInt span = 1;
  for (int64_t i = 0; i < t.dim(); ++i) {
    span += (t.sym_size(i) - 1) * t.sym_stride(i);
  }
  return TORCH_GUARD_OR_FALSE(t.sym_numel().sym_ne(0)) &&
         TORCH_GUARD_OR_FALSE(span.sym_eq(t.sym_numel()));
}

bool begins_before_the_end_of(const at::Tensor& b, const at::Tensor& a) {
  return TORCH_GUARD_OR_FALSE(
      (b.sym_storage_offset() * b.element_size())
          .sym_lt((a.sym_storage_offset() + a.sym_numel()) * a.element_size()));
}

Pair find_in_storages(const std::vector<Traced>& all) {
  for (auto b = all.begin(); b != all.end(); ++b) {
    for (auto a = all.begin(); a != b; ++a) {
      // What may guard comes last.
      if (storage_of(*a->tensor).is_alias_of(storage_of(*b->tensor)) && must_be_apart(*a, *b) &&
          is_dense(*a->tensor) && is_dense(*b->tensor) &&
          begins_before_the_end_of(*a->tensor, *b->tensor) &&
          begins_before_the_end_of(*b->tensor, *a->tensor)) {
        return std::minmax(a->call, b->call);
      }
    }
  }
  return {};
}

}  // namespace

PyObject* check_apart(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  AllTouched all;
  size_t calls = 0;
  for (Py_ssize_t i = 1; i + 1 < given; i += 2) {
    // Of an all_reduce they are one list.
    if ((arguments[i] != arguments[i + 1] && !add_touched(arguments[i], calls, false, all)) ||
        !add_touched(arguments[i + 1], calls, true, all)) {
      return nullptr;
    }
    calls += std::max(PyList_GET_SIZE(arguments[i]), PyList_GET_SIZE(arguments[i + 1]));
  }
  std::string_view name;
  const bool known = given > 0 && fast_call::read(arguments[0], name);
  const bool apart = fast_call::run([&] {
    Pair found = find_in_memory(all.memory);
    if (!found) {
      found = find_in_storages(all.traced);
    }
    if (found) {
      constexpr std::string_view op = "coalescing_manager";
      value_error(op, resolve_group(op, known ? name : ""),
                  "calls of a block have no order, so none may touch what another writes, got "
                  "memory in common of its calls ",
                  found->first, " and ", found->second, " (messages counted last)");
    }
  });
  if (!apart) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

bool write_all_gather_block(bool async_op, const Tensors& inputs, const Tensors& outputs,
                            const std::string& group_name) {
  if (!may_write(inputs) || !may_write(outputs)) {
    return false;
  }
  constexpr std::string_view op = "all_gather_into_tensor_coalesced";
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const SyncScope manner(!async_op);
  const Group group = resolve_group(op, group_name);
  submit(group, CollectiveRequest::all_gather_coalesced(op, prepared(op, group, inputs, outputs),
                                                        outputs));
  return true;
}

bool write_reduce_scatter_block(bool async_op, const Tensors& inputs, const Tensors& outputs,
                                const std::string& reduce_op,
                                const std::optional<c10::Scalar>& factor,
                                const std::string& group_name) {
  if (!may_write(inputs) || !may_write(outputs)) {
    return false;
  }
  constexpr std::string_view op = "reduce_scatter_tensor_coalesced";
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const SyncScope manner(!async_op);
  const Group group = resolve_group(op, group_name);
  const Tensors sources = prepared(op, group, inputs, outputs);
  const Reduction reduction =
      parse_reduction(op, group, reduce_op, factor, inputs[0].scalar_type());
  submit(group, CollectiveRequest::reduce_scatter_coalesced(op, sources, outputs, reduction));
  return true;
}

}  // namespace c10d_ext
