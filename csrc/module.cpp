// torch_c10d_ext._C: what Python needs beside the ops themselves.

#include <c10/core/GradMode.h>
#include <pybind11/complex.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>

#include "backends/fallback.h"
#include "backends/joining.h"
#include "backends/shm.h"
#include "core/blocks.h"
#include "core/eager.h"
#include "core/entry.h"
#include "core/failure.h"
#include "core/future.h"
#include "core/group.h"
#include "core/messages.h"
#include "core/older_vmap.h"
#include "core/pending.h"
#include "core/wrapper.h"
#include "lazy/lazy.h"

namespace c10d_ext {
namespace {

// How the Python layer must hand out the result of a started collective.
enum Delivery : int64_t {
  kReady = 0,     // complete already: the tensor itself
  kInFlight = 1,  // eager: to be wrapped so that it waits on first use
  kTraced = 2,    // under a trace, a mode, a transform or forward mode: an explicit wait
};

int64_t delivery(const at::Tensor& result) {
  if (is_traced(result)) {
    return kTraced;
  }
  if (!is_pending(result)) {
    return kReady;
  }
  // A wrapper cannot carry a tangent.
  return has_tangent(result) ? kTraced : kInFlight;
}

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

PyObject* delivery_method(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  if (!are_tensors("delivery", arguments, given, 1)) {
    return nullptr;
  }
  return PyLong_FromLong(delivery(THPVariable_Unpack(arguments[0])));
}

PyObject* wait_method(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  if (!are_tensors("wait", arguments, given, 1)) {
    return nullptr;
  }
  const at::Tensor& t = THPVariable_Unpack(arguments[0]);
  if (!entry::run([&] { wait(t); })) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

template <class Method>
PyCFunction fastcall(Method method) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(method));
}

PyMethodDef quick_methods[] = {
    {"is_eager", fastcall(is_eager_method), METH_FASTCALL, nullptr},
    {"delivery", fastcall(delivery_method), METH_FASTCALL, nullptr},
    {"wait", fastcall(wait_method), METH_FASTCALL, nullptr},
    {"remember", fastcall(remember), METH_FASTCALL, nullptr},
    {"hold_again", fastcall(hold_again), METH_FASTCALL, nullptr},
    {"check_apart", fastcall(check_apart), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

pybind11::object wrapper_of(pybind11::handle type, pybind11::handle elem) {
  auto wrapper =
      pybind11::reinterpret_steal<pybind11::object>(make_wrapper(type.ptr(), elem.ptr()));
  if (!wrapper) {
    throw pybind11::error_already_set();
  }
  return wrapper;
}

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

const char* class_of(CollectiveError::Kind kind) {
  switch (kind) {
    case CollectiveError::Kind::RankLost:
      return "RankLost";
    case CollectiveError::Kind::Timeout:
      return "CollectiveTimeout";
    case CollectiveError::Kind::Mismatch:
      return "CollectiveMismatch";
    case CollectiveError::Kind::Closed:
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
  bind_joining(m);
  bind_shm(m);
  bind_fallback(m);
  bind_works(m);
  lazy::register_kernels();

  m.attr("torch_version") = C10D_EXT_TORCH_VERSION;
  m.attr("has_lazy") = lazy::is_built();
  m.attr("READY") = static_cast<int64_t>(kReady);
  m.attr("IN_FLIGHT") = static_cast<int64_t>(kInFlight);
  m.attr("TRACED") = static_cast<int64_t>(kTraced);

  // The ops by name, for eager callers.
  m.attr("ops") = py::reinterpret_steal<py::dict>(entry::all(entry::Manner::Call));
  m.attr("writes") = py::reinterpret_steal<py::dict>(entry::all(entry::Manner::Write));

  if (PyModule_AddFunctions(m.ptr(), quick_methods) != 0) {
    throw py::error_already_set();
  }
  m.def("make_wrapper", &wrapper_of);
  m.def("seal", &seal);
  m.def("work_of", &work_of);
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
