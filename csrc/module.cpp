// torch_c10d_ext._C: what Python needs beside the ops themselves.

#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "core/group.h"
#include "core/pending.h"

namespace c10d_ext {
namespace {

// How the Python layer must hand out the result of a started collective.
enum Delivery : int64_t {
  kReady = 0,     // complete already: the tensor itself
  kInFlight = 1,  // eager: to be wrapped so that it waits on first use
  kTraced = 2,    // under a trace, a mode, a transform or forward mode: an explicit wait
};

int64_t delivery(const at::Tensor& result) {
  constexpr c10::DispatchKeySet special({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                         c10::DispatchKey::FuncTorchGradWrapper,
                                         c10::DispatchKey::FuncTorchBatched});
  constexpr c10::DispatchKeySet modes({c10::DispatchKey::Python, c10::DispatchKey::PythonDispatcher,
                                       c10::DispatchKey::FuncTorchDynamicLayerFrontMode});
  if (result.is_meta() || result.key_set().has_any(special) ||
      c10::impl::tls_local_dispatch_key_set().included_.has_any(modes)) {
    return kTraced;
  }
  if (!is_pending(result)) {
    return kReady;
  }
  // A wrapper cannot carry a tangent.
  const bool dual = c10::AutogradState::get_tls_state().get_fw_grad_mode() &&
                    result._fw_grad(/*level=*/0).defined();
  return dual ? kTraced : kInFlight;
}

// A wrapper has no memory of its own: whoever asks for its data pointer, from C or C++ code that
// knows nothing of wrappers, gets this error instead of a null pointer to read from.
void seal(const at::Tensor& wrapper) {
  wrapper.storage().unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(
      "AsyncCollectiveTensor: its memory must be reached through .wait(), got a request for its "
      "data "
      "pointer");
}

}  // namespace
}  // namespace c10d_ext

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  using namespace c10d_ext;

  m.attr("torch_version") = C10D_EXT_TORCH_VERSION;
  m.attr("READY") = static_cast<int64_t>(kReady);
  m.attr("IN_FLIGHT") = static_cast<int64_t>(kInFlight);
  m.attr("TRACED") = static_cast<int64_t>(kTraced);

  m.def("delivery", &delivery);
  m.def("seal", &seal);
  m.def("wait", &wait, pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("work_of", &work_of);
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
