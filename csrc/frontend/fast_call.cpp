#include "frontend/fast_call.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <deque>
#include <exception>

#include "frontend/async_tensor.h"

namespace c10d_ext::fast_call {

namespace {

namespace py = pybind11;

// Method definitions outlive the functions made of them; a deque keeps them in place.
std::deque<PyMethodDef>& listed(Manner manner) {
  static auto* definitions = new std::deque<PyMethodDef>[3];
  return definitions[static_cast<size_t>(manner)];
}

std::vector<std::pair<PyObject*, std::string>>& known_reductions() {
  static auto* known = new std::vector<std::pair<PyObject*, std::string>>();
  return *known;
}

const std::string* name_of_reduction(PyObject* object) {
  for (const auto& [known, name] : known_reductions()) {
    if (known == object) {
      return &name;
    }
  }
  return nullptr;
}

const py::detail::type_info* type_of_groups() {
  static const auto* type = py::detail::get_type_info(
      reinterpret_cast<PyTypeObject*>(py::type::of<c10d::ProcessGroup>().ptr()));
  return type;
}

bool is_group(PyObject* object) {
  const auto* type = type_of_groups();
  return type != nullptr && Py_TYPE(object) == type->type;
}

// As long as the group lives.
const std::string* name_of_group(PyObject* object) {
  if (!is_group(object)) {
    return nullptr;
  }
  auto* instance = reinterpret_cast<py::detail::instance*>(object);
  const auto* group =
      instance->get_value_and_holder(type_of_groups()).value_ptr<c10d::ProcessGroup>();
  try {
    return group != nullptr ? &group->getGroupName() : nullptr;
  } catch (const std::exception&) {
    return nullptr;  // it has none yet
  }
}

template <class Value>
bool read_list(PyObject* object, std::vector<Value>& values) {
  if (object == nullptr || !(PyList_Check(object) || PyTuple_Check(object))) {
    return false;
  }
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(object);
  PyObject** items = PySequence_Fast_ITEMS(object);
  values.reserve(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    Value value;
    if (!read(items[i], value)) {
      return false;
    }
    values.push_back(std::move(value));
  }
  return true;
}

}  // namespace

bool read(PyObject* object, at::Tensor& value) {
  if (object == nullptr || !(THPVariable_CheckExact(object) || is_async_object(object))) {
    return false;
  }
  value = THPVariable_Unpack(object);
  return true;
}

bool read(PyObject* object, std::vector<at::Tensor>& value) {
  return read_list(object, value);
}

bool read(PyObject* object, std::string_view& value) {
  if (object == nullptr) {
    return false;
  }
  if (!PyUnicode_Check(object)) {
    const auto* reduction = name_of_reduction(object);
    const auto* name = reduction != nullptr ? reduction : name_of_group(object);
    value = name != nullptr ? std::string_view(*name) : std::string_view();
    return name != nullptr;
  }
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object, &size);
  if (text == nullptr) {
    PyErr_Clear();
    return false;
  }
  value = {text, static_cast<size_t>(size)};
  return true;
}

bool read(PyObject* object, int64_t& value) {
  if (object == nullptr || !PyLong_CheckExact(object)) {
    return false;
  }
  int overflow = 0;
  value = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0;
}

bool read(PyObject* object, c10::SymInt& value) {
  int64_t number = 0;
  if (!read(object, number)) {
    return false;
  }
  value = number;
  return true;
}

bool read(PyObject* object, std::vector<int64_t>& value) {
  return read_list(object, value);
}

bool read(PyObject* object, std::vector<c10::SymInt>& value) {
  return read_list(object, value);
}

bool read(PyObject* object, std::optional<c10::SymInt>& value) {
  return object == nullptr || object == Py_None || read(object, value.emplace());
}

bool read(PyObject* object, std::optional<c10::Scalar>& value) {
  if (object == nullptr || object == Py_None) {
    return true;
  }
  if (PyFloat_CheckExact(object)) {
    value = PyFloat_AS_DOUBLE(object);
    return true;
  }
  int64_t number = 0;
  if (!read(object, number)) {
    return false;
  }
  value = number;
  return true;
}

bool are_in_place(PyObject* reduction, PyObject* group) {
  return (reduction == nullptr || !is_group(reduction)) &&
         (group == nullptr || name_of_reduction(group) == nullptr);
}

void know_reduction(PyObject* object, std::string name) {
  Py_INCREF(object);
  known_reductions().emplace_back(object, std::move(name));
}

PyObject* wrap(const at::Tensor& value) {
  return THPVariable_Wrap(value);
}

namespace {

PyObject* wrap_list(const std::vector<at::Tensor>& value,
                    c10::function_ref<PyObject*(const at::Tensor&)> wrap_one) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(value.size()));
  for (size_t i = 0; list != nullptr && i < value.size(); ++i) {
    PyObject* item = wrap_one(value[i]);
    if (item == nullptr) {
      Py_CLEAR(list);
      break;
    }
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), item);
  }
  return list;
}

}  // namespace

PyObject* wrap(const std::vector<at::Tensor>& value) {
  return wrap_list(value, [](const at::Tensor& t) { return wrap(t); });
}

PyObject* wrap_delivered(const at::Tensor& value) {
  return deliver(value);
}

PyObject* wrap_delivered(const std::vector<at::Tensor>& value) {
  return wrap_list(value, deliver);
}

PyObject* delivered(PyObject* returned) {
  PyObject* result = nullptr;
  if (returned != nullptr && THPVariable_Check(returned)) {
    result = deliver(THPVariable_Unpack(returned));
  } else if (std::vector<at::Tensor> list; returned != nullptr && PyList_Check(returned)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(returned); ++i) {
      list.push_back(THPVariable_Unpack(PyList_GET_ITEM(returned, i)));
    }
    result = wrap_delivered(list);
  }
  Py_XDECREF(returned);
  return result;
}

Entry::Entry(const c10::OperatorHandle& op) : name_(op.schema().name()) {
  const auto& arguments = op.schema().arguments();
  const auto place_of = [&](std::string_view name) {
    const auto found = std::find_if(arguments.begin(), arguments.end(),
                                    [&](const auto& argument) { return argument.name() == name; });
    return static_cast<size_t>(found - arguments.begin());
  };
  for (const auto& argument : arguments) {
    parameters_.push_back(PyUnicode_InternFromString(argument.name().c_str()));
    positional_ += argument.kwarg_only() ? 0 : 1;
  }
  reduction_place_ = place_of("reduce_op");
  group_place_ = place_of("group_name");
}

bool Entry::bind(const Call& call, PyObject** places) const {
  if (call.positional > static_cast<Py_ssize_t>(positional_)) {
    return false;
  }
  std::copy(call.arguments, call.arguments + call.positional, places);
  const Py_ssize_t named = call.keywords == nullptr ? 0 : PyTuple_GET_SIZE(call.keywords);
  for (Py_ssize_t i = 0; i < named; ++i) {
    // Names written in source code are interned: the same name is the same object.
    const auto found = std::find(parameters_.begin() + call.positional, parameters_.end(),
                                 PyTuple_GET_ITEM(call.keywords, i));
    if (found == parameters_.end()) {
      return false;
    }
    places[found - parameters_.begin()] = call.arguments[call.positional + i];
  }
  const auto at = [&](size_t place) {
    return place < parameters_.size() ? places[place] : nullptr;
  };
  return are_in_place(at(reduction_place_), at(group_place_));
}

PyObject* Entry::call_torch_ops(const Call& call) {
  if (overload_ == nullptr) {
    try {
      const py::object ops = py::module_::import("torch").attr("ops").attr("c10d_ext");
      const std::string op = name_.substr(name_.find("::") + 2);
      overload_ = py::object(ops.attr(op.c_str()).attr("default")).release().ptr();
    } catch (py::error_already_set& error) {
      error.restore();
      return nullptr;
    }
  }
  return PyObject_Vectorcall(overload_, call.arguments, call.positional, call.keywords);
}

bool is_watched() {
  return at::impl::torch_function_mode_enabled() ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Tracer);
}

bool run(c10::function_ref<void()> body) {
  std::exception_ptr error;
  PyThreadState* state = PyEval_SaveThread();
  try {
    body();
  } catch (...) {
    error = std::current_exception();
  }
  PyEval_RestoreThread(state);
  if (!error) {
    return true;
  }
  raise(error);
  return false;
}

PyObject* raise(const std::exception_ptr& error) {
  // Thrown once more through pybind11, which knows how torch's errors look in Python.
  const py::cpp_function rethrow([error] { std::rethrow_exception(error); });
  Py_XDECREF(PyObject_CallNoArgs(rethrow.ptr()));
  return nullptr;
}

bool add(const char* name, Function call, Function start, Function write) {
  const auto list = [name](Manner manner, Function function) {
    listed(manner).push_back({name,
                              reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
                              METH_FASTCALL | METH_KEYWORDS, nullptr});
  };
  list(Manner::Call, call);
  list(Manner::Start, start);
  const std::string_view op = name;
  if (op.ends_with("_") || op.ends_with("_out")) {
    list(Manner::Write, write);
  }
  return true;
}

PyObject* all(Manner manner) {
  PyObject* functions = PyDict_New();
  for (auto& definition : listed(manner)) {
    PyObject* function = PyCFunction_New(&definition, nullptr);
    if (function == nullptr || PyDict_SetItemString(functions, definition.ml_name, function) != 0) {
      Py_XDECREF(function);
      Py_CLEAR(functions);
      break;
    }
    Py_DECREF(function);
  }
  return functions;
}

}  // namespace c10d_ext::fast_call
