#include "base/call_site.h"

#include <pybind11/pybind11.h>

#include <utility>

namespace c10d_ext {

namespace {

pybind11::object*& provider() {
  // Leaked on purpose: it may be asked while the interpreter goes down.
  static pybind11::object* provider = nullptr;
  return provider;
}

}  // namespace

std::string call_site() {
  if (Py_IsInitialized() == 0) {
    return {};
  }
  const pybind11::gil_scoped_acquire gil;
  return provider() == nullptr ? std::string() : (*provider())().cast<std::string>();
}

void bind_call_site(pybind11::module_& m) {
  m.def("set_call_site_provider",
        [](pybind11::object function) { provider() = new pybind11::object(std::move(function)); });
}

}  // namespace c10d_ext
