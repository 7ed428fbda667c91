#pragma once

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Scalar.h>
#include <c10/core/SymInt.h>
#include <c10/util/FunctionRef.h>

#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "base/sync_scope.h"
#include "frontend/dispatch_state.h"
#include "work/snapshot.h"

// A shorter way into the ops from eager Python than torch.ops: same arguments, same dispatcher
// call, so that modes, autograd and transforms see it. torch.ops looks up overloads, asks for
// __torch_function__ and boxes every argument, which takes longer than the rest of a call.
//
// It reads plain arguments alone: tensors and results of other collectives, not other subclasses,
// and numbers, not symbolic ones. A call with any other, and one under a torch function mode or
// torch.jit.trace, goes on to torch.ops.
//
// A second way in is for callers whose tensors are written and nobody differentiates it: see
// enter_to_write.
namespace c10d_ext::fast_call {

// False where `object` is not plain. Null is an argument left out. In place of the name of a
// reduction or a group it may be c10d's own object.
bool read(PyObject* object, at::Tensor& value);
bool read(PyObject* object, std::vector<at::Tensor>& value);
bool read(PyObject* object, std::string_view& value);
bool read(PyObject* object, int64_t& value);
bool read(PyObject* object, c10::SymInt& value);
bool read(PyObject* object, std::vector<int64_t>& value);
bool read(PyObject* object, std::vector<c10::SymInt>& value);
bool read(PyObject* object, std::optional<c10::SymInt>& value);
bool read(PyObject* object, std::optional<c10::Scalar>& value);

// Whether c10d's objects, where they are given for these, are where their names belong. Null is an
// argument left out.
bool are_in_place(PyObject* reduction, PyObject* group);

// Lets c10d's `object` stand for the reduction `name` from here on, and keeps it.
void know_reduction(PyObject* object, std::string name);

PyObject* wrap(const at::Tensor& value);
PyObject* wrap(const std::vector<at::Tensor>& value);
// The same as users get it from a functional collective: see deliver().
PyObject* wrap_delivered(const at::Tensor& value);
PyObject* wrap_delivered(const std::vector<at::Tensor>& value);
// Of what torch.ops returned, which it takes over; null stays null.
PyObject* delivered(PyObject* returned);

// What a parameter's argument is kept in during the call.
template <class Parameter>
struct Kept {
  using type = std::decay_t<Parameter>;
};
template <class Element>
struct Kept<c10::ArrayRef<Element>> {
  using type = std::vector<Element>;
};

// One call, its arguments as CPython's vectorcall hands them over.
struct Call {
  PyObject* const* arguments;
  Py_ssize_t positional;
  PyObject* keywords;
};

class Entry {
 public:
  explicit Entry(const c10::OperatorHandle& op);

  // The arguments by their place in the schema, null where left out; false where they do not fit.
  bool bind(const Call& call, PyObject** places) const;

  // The same call of torch.ops.
  PyObject* call_torch_ops(const Call& call);

 private:
  std::string name_;
  std::vector<PyObject*> parameters_;  // interned names
  // Places of the names that c10d's objects may stand for; behind all, where there is none.
  size_t reduction_place_ = 0, group_place_ = 0;
  size_t positional_ = 0;
  PyObject* overload_ = nullptr;
};

// Whether anything wants to see calls of torch.ops as such.
bool is_watched();

// Runs `body` without the GIL; false, with the Python error set, where it throws.
bool run(c10::function_ref<void()> body);
// Sets the Python error; returns null.
PyObject* raise(const std::exception_ptr& error);

// `deliver`: the result as users get it from a functional collective, else as the op returns it.
template <bool deliver, class Return, class... Parameters, size_t... I>
PyObject* enter(const c10::TypedOperatorHandle<Return(Parameters...)>& handle, Entry& entry,
                const Call& call, std::index_sequence<I...>) {
  std::array<PyObject*, sizeof...(Parameters)> places{};
  std::tuple<typename Kept<Parameters>::type...> kept;
  if (is_watched() || !entry.bind(call, places.data()) ||
      !(read(places[I], std::get<I>(kept)) && ...)) {
    PyObject* returned = entry.call_torch_ops(call);
    return deliver ? delivered(returned) : returned;
  }
  std::optional<std::decay_t<Return>> result;
  const auto call_handle = [&] { result = handle.call(std::get<I>(kept)...); };
  const bool done = run([&] {
    if constexpr (deliver) {
      const FunctionalCall functional;
      call_handle();
    } else {
      call_handle();
    }
  });
  if (!done) {
    return nullptr;
  }
  return deliver ? wrap_delivered(*result) : wrap(*result);
}

template <bool deliver, class Return, class... Parameters>
PyObject* enter(const c10::TypedOperatorHandle<Return(Parameters...)>& handle, Entry& entry,
                const Call& call) {
  return enter<deliver>(handle, entry, call, std::index_sequence_for<Parameters...>());
}

template <class T>
bool is_plain(const T&) {
  return true;
}
inline bool is_plain(const at::Tensor& value) {
  return value.layout() == c10::kStrided && c10d_ext::is_plain(value);
}
inline bool is_plain(const std::vector<at::Tensor>& values) {
  return std::all_of(values.begin(), values.end(),
                     [](const at::Tensor& value) { return is_plain(value); });
}

// As enter(), without a gradient, and complete on return unless the first argument, async_op, is
// True. Returns True; False where any argument is not plain, or anything but the kernel needs to
// know of the call: then nothing has happened.
template <class Return, class... Parameters, size_t... I>
PyObject* enter_to_write(const c10::TypedOperatorHandle<Return(Parameters...)>& handle,
                         const Entry& entry, const Call& call, std::index_sequence<I...>) {
  std::array<PyObject*, sizeof...(Parameters)> places{};
  std::tuple<typename Kept<Parameters>::type...> kept;
  const bool is_sync = call.arguments[0] != Py_True;
  if (is_watched() ||
      !entry.bind({call.arguments + 1, call.positional - 1, call.keywords}, places.data()) ||
      !(read(places[I], std::get<I>(kept)) && ...) || !(is_plain(std::get<I>(kept)) && ...)) {
    Py_RETURN_FALSE;
  }
  const bool done = run([&] {
    const c10::AutoGradMode no_grad(false);
    const SyncScope manner(is_sync);
    handle.call(std::get<I>(kept)...);
  });
  if (!done) {
    return nullptr;
  }
  Py_RETURN_TRUE;
}

template <class Return, class... Parameters>
PyObject* enter_to_write(const c10::TypedOperatorHandle<Return(Parameters...)>& handle,
                         const Entry& entry, const Call& call) {
  return enter_to_write(handle, entry, call, std::index_sequence_for<Parameters...>());
}

enum class Manner { Call, Start, Write };

// The Python function of the op that `handle()` returns.
template <const auto& (*handle)(), Manner manner>
PyObject* method(PyObject*, PyObject* const* arguments, Py_ssize_t positional, PyObject* keywords) {
  static auto* entry = new Entry(handle());
  const Call call{arguments, positional, keywords};
  switch (manner) {
    case Manner::Call:
      return enter<false>(handle(), *entry, call);
    case Manner::Start:
      return enter<true>(handle(), *entry, call);
    case Manner::Write:
      return enter_to_write(handle(), *entry, call);
  }
}

using Function = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);

// Lists the functions of an op under its name; returns true for the sake of static initialization.
bool add(const char* name, Function call, Function start, Function write);

template <const auto& (*handle)()>
bool add(const char* name) {
  return add(name, method<handle, Manner::Call>, method<handle, Manner::Start>,
             method<handle, Manner::Write>);
}

// Everything listed: name -> Python function. A new reference.
PyObject* all(Manner manner);

}  // namespace c10d_ext::fast_call
