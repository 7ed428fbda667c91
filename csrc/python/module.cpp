// torch_c10d_ext._C: what Python needs beside the ops themselves.

#include <c10/core/GradMode.h>
#include <pybind11/complex.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>

#include "backends/checked/backend.h"
#include "backends/hierarchical/backend.h"
#include "backends/mpi/backend.h"
#include "backends/shm/backend.h"
#include "base/call_site.h"
#include "base/exceptions.h"
#include "base/group.h"
#include "base/kept_memory.h"
#include "collectives/p2p.h"
#include "control/rendezvous.h"
#include "control/resolve_group.h"
#include "frontend/async_tensor.h"
#include "frontend/devices.h"
#include "frontend/dispatch_state.h"
#include "frontend/fast_call.h"
#include "frontend/fast_collectives.h"
#include "frontend/fast_message.h"
#include "frontend/lazy/lazy.h"
#include "frontend/older_vmap.h"
#include "frontend/result_memory.h"
#include "kernels/kernels.h"
#include "python/capabilities.h"
#include "python/coalescing.h"
#include "python/tally.h"
#include "work/future.h"
#include "work/pending.h"

namespace c10d_ext {
namespace {

// Whether nobody but the kernel needs to know that `output` becomes a function of `input`.
bool is_eager(const at::Tensor& output, const at::Tensor& input) {
  for (const at::Tensor* t : {&output, &input}) {
    if (!is_plain(*t) || (c10::GradMode::is_enabled() && t->requires_grad())) {
      return false;
    }
  }
  return output.scalar_type() == input.scalar_type();
}

// What every eager call asks, without the 200 ns that pybind11 takes for a call.

bool are_tensors(const char* name, PyObject* const* arguments, Py_ssize_t given,
                 Py_ssize_t wanted) {
  const bool right = given == wanted && std::all_of(arguments, arguments + given, [](PyObject* a) {
                       return THPVariable_Check(a);
                     });
  if (!right) {
    PyErr_Format(PyExc_TypeError, "%s: must be called with %zd tensors", name, wanted);
  }
  return right;
}

PyObject* is_eager_method(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  if (!are_tensors("is_eager", arguments, given, 2)) {
    return nullptr;
  }
  return PyBool_FromLong(
      is_eager(THPVariable_Unpack(arguments[0]), THPVariable_Unpack(arguments[1])));
}

// Functions of one tensor. Those that ask about a wrapper return None for one made in Python.

template <class Function>
PyObject* with_tensor(const char* name, PyObject* argument, Function&& function) {
  if (!are_tensors(name, &argument, 1, 1)) {
    return nullptr;
  }
  const at::Tensor& t = THPVariable_Unpack(argument);
  PyObject* result = nullptr;
  try {
    result = function(t);
  } catch (...) {
    return fast_call::raise(std::current_exception());
  }
  return result;
}

PyObject* deliver_method(PyObject*, PyObject* argument) {
  return with_tensor("deliver", argument, deliver);
}

PyObject* deliver_complete_method(PyObject*, PyObject* argument) {
  return with_tensor("deliver_complete", argument, deliver_complete);
}

PyObject* wrap_async_method(PyObject*, PyObject* argument) {
  return with_tensor("wrap_async", argument, wrap_async);
}

PyObject* elem_of_method(PyObject*, PyObject* argument) {
  return with_tensor("elem_of", argument, [](const at::Tensor& t) -> PyObject* {
    if (!is_async_tensor(t)) {
      Py_RETURN_NONE;
    }
    return THPVariable_Wrap(elem_of(t));
  });
}

PyObject* is_waited_method(PyObject*, PyObject* argument) {
  return with_tensor("is_waited", argument,
                     [](const at::Tensor& t) { return PyBool_FromLong(is_waited(t)); });
}

PyObject* finished_elem_method(PyObject*, PyObject* argument) {
  return with_tensor("finished_elem", argument, [](const at::Tensor& t) -> PyObject* {
    if (!is_async_tensor(t)) {
      Py_RETURN_NONE;
    }
    if (!is_waited(t) && !fast_call::run([&] { wait_async(t); })) {
      return nullptr;
    }
    return THPVariable_Wrap(elem_of(t));
  });
}

PyObject* plain_of_method(PyObject*, PyObject* argument) {
  return with_tensor("plain_of", argument, [](const at::Tensor& t) -> PyObject* {
    std::optional<at::Tensor> plain;
    if (!fast_call::run([&] { plain = plain_of(t); })) {
      return nullptr;
    }
    if (!plain) {
      Py_RETURN_NONE;
    }
    return THPVariable_Wrap(*plain);
  });
}

PyObject* follow_elem_method(PyObject*, PyObject* argument) {
  return with_tensor("follow_elem", argument, [](const at::Tensor& t) -> PyObject* {
    follow_elem(t);
    Py_RETURN_NONE;
  });
}

template <class Method>
PyCFunction fastcall(Method method) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(method));
}

PyMethodDef quick_methods[] = {
    {"is_eager", fastcall(is_eager_method), METH_FASTCALL, nullptr},
    {"deliver", deliver_method, METH_O, nullptr},
    {"deliver_complete", deliver_complete_method, METH_O, nullptr},
    {"wrap_async", wrap_async_method, METH_O, nullptr},
    {"elem_of", elem_of_method, METH_O, nullptr},
    {"is_waited", is_waited_method, METH_O, nullptr},
    {"finished_elem", finished_elem_method, METH_O, nullptr},
    {"plain_of", plain_of_method, METH_O, nullptr},
    {"follow_elem", follow_elem_method, METH_O, nullptr},
    {"remember", fastcall(remember), METH_FASTCALL, nullptr},
    {"hold_again", fastcall(hold_again), METH_FASTCALL, nullptr},
    {"check_apart", fastcall(check_apart), METH_FASTCALL, nullptr},
    {"pass_message", fastcall(fast_call::pass_message), METH_FASTCALL, nullptr},
    {"write_all_gather", fastcall(fast_call::write_all_gather), METH_FASTCALL, nullptr},
    {"write_reduce_scatter", fastcall(fast_call::write_reduce_scatter), METH_FASTCALL, nullptr},
    {"write_all_to_all", fastcall(fast_call::write_all_to_all), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

// pybind11 does not know scalars.
std::optional<c10::Scalar> factor_of(pybind11::handle factor) {
  if (factor.is_none()) {
    return std::nullopt;
  }
  if (PyComplex_Check(factor.ptr())) {
    return c10::Scalar(c10::complex<double>(factor.cast<std::complex<double>>()));
  }
  if (PyLong_Check(factor.ptr())) {
    return c10::Scalar(factor.cast<int64_t>());
  }
  return c10::Scalar(factor.cast<double>());
}

const char* class_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::RankLost:
      return "RankLost";
    case ErrorKind::Timeout:
      return "CollectiveTimeout";
    case ErrorKind::Mismatch:
      return "CollectiveMismatch";
    case ErrorKind::Closed:
      return "GroupClosed";
  }
  return "CollectiveError";
}

// Out of torch's own functions too: all modules of a process share the translators.
void translate(std::exception_ptr thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const CollectiveError& e) {
    const auto type = pybind11::module_::import("torch_c10d_ext.errors").attr(class_of(e.kind()));
    const auto error = type(e.what_without_backtrace(), e.ranks(), e.op(), e.seq(), e.group());
    PyErr_SetObject(type.ptr(), error.ptr());
  } catch (const InvalidArgument& e) {
    const auto type = pybind11::module_::import("torch_c10d_ext.errors").attr("InvalidArgument");
    PyErr_SetString(type.ptr(), e.what_without_backtrace());
  }
}

}  // namespace
}  // namespace c10d_ext

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  using namespace c10d_ext;

  py::register_exception_translator(translate);
  bind_futures(m);
  bind_rendezvous(m);
  bind_shm(m);
  bind_checked(m);
  bind_mpi(m);
  bind_hierarchical(m);
  bind_works(m);
  bind_capabilities(m);
  bind_tally(m);
  bind_call_site(m);
  lazy::register_kernels();
  register_kernels_of_devices();
  // What torch's cast does to values too large for float8_e4m3fn differs between its versions.
  kernels::set_float8_e4m3fn_saturates(static_cast<float>(c10::Float8_e4m3fn(1e6f)) == 448);

  m.attr("torch_version") = C10D_EXT_TORCH_VERSION;
  m.attr("has_lazy") = lazy::is_built();

  // The ops by name, for eager callers.
  m.attr("ops") = py::reinterpret_steal<py::dict>(fast_call::all(fast_call::Manner::Call));
  m.attr("starts") = py::reinterpret_steal<py::dict>(fast_call::all(fast_call::Manner::Start));
  m.def("know_reduction", [](const py::object& object, const std::string& name) {
    fast_call::know_reduction(object.ptr(), name);
  });
  m.attr("writes") = py::reinterpret_steal<py::dict>(fast_call::all(fast_call::Manner::Write));

  if (PyModule_AddFunctions(m.ptr(), quick_methods) != 0) {
    throw py::error_already_set();
  }
  m.def("set_async_tensor_type",
        [](py::handle type, py::handle wait) { set_async_tensor_type(type.ptr(), wait.ptr()); });
  m.def("set_elem", &set_elem);
  m.def("work_of", &work_of);
  m.def("work_behind", &work_behind);
  m.def("started_work_of", &started_work_of);
  m.def("start_messages", &start_messages_of, pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("check_held",
        [](const std::string& op, const std::string& group, const std::string& reduce_op,
           py::handle factor, const at::Tensor& input, const at::Tensor& output) {
          check_held(op, group, reduce_op, factor_of(factor), input, output);
        });
  m.def("attach_message", &attach_message, pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("write_all_gather_block", &write_all_gather_block,
        pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("write_reduce_scatter_block",
        [](bool async_op, const std::vector<at::Tensor>& inputs,
           const std::vector<at::Tensor>& outputs, const std::string& reduce_op, py::handle factor,
           const std::string& group) {
          const auto scalar = factor_of(factor);
          const py::gil_scoped_release no_gil;
          return write_reduce_scatter_block(async_op, inputs, outputs, reduce_op, scalar, group);
        });
  m.def("peel_batch", &peel_batch);
  m.def("add_batch", &add_batch);
  m.def("sweep", &sweep, pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("pending_count", &pending_count);
  m.def("most_kept", &most_kept);
  m.def("idle_result_bytes", &idle_result_bytes);
  m.def("release_idle_results", &release_idle_results,
        pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("group_size",
        [](const std::string& name) { return resolve_group("group_size", name).size(); });
  m.def("where",
        [](const std::string& name) { return c10d_ext::where(resolve_group("where", name)); });
  m.def("set_single_rank_shortcut", &set_single_rank_shortcut);
  m.def("set_group_names_provider", [](py::object provider) {
    // Leaked on purpose: it may be asked while the interpreter goes down.
    auto* names = new py::object(std::move(provider));
    set_group_names_provider([names]() -> std::string {
      if (!Py_IsInitialized()) {
        return "not listed here";
      }
      py::gil_scoped_acquire gil;
      return (*names)().cast<std::string>();
    });
  });
}
