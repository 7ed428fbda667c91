#include "python/capabilities.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <optional>
#include <string>
#include <vector>

#include "backends/adapter/capabilities.h"

namespace c10d_ext {

void bind_capabilities(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<Capabilities>(m, "Capabilities")
      .def_readonly("sums_in_rank_order", &Capabilities::sums_in_rank_order)
      .def_readonly("moves_nothing", &Capabilities::moves_nothing);
  m.def("capabilities_of",
        [](const c10::intrusive_ptr<c10d::Backend>& backend) { return capabilities_of(*backend); });
  m.def(
      "register_backend_capabilities",
      [](const std::string& name, const std::optional<std::vector<std::string>>& methods,
         bool futures, bool reduces_avg, bool reduces_low_precision, bool reduces_bitwise,
         bool gathers_uneven, bool keeps_inputs, bool sends_any_tensor,
         bool starts_messages_together, bool has_blocking_messages) {
        Capabilities can;
        if (methods) {
          can.methods = methods_of(*methods);
        }
        can.futures = futures ? Capabilities::Futures::Always : Capabilities::Futures::None;
        can.reduces_avg = can.reduces_avg_to_one = reduces_avg;
        can.reduces_low_precision = reduces_low_precision;
        can.reduces_bitwise = reduces_bitwise;
        can.gathers_uneven = gathers_uneven;
        can.keeps_inputs = keeps_inputs;
        can.sends_any_tensor = sends_any_tensor;
        can.starts_messages_together = starts_messages_together;
        can.has_blocking_messages = has_blocking_messages;
        register_capabilities(name, can);
      },
      py::arg("name"), py::kw_only(), py::arg("methods"), py::arg("futures"),
      py::arg("reduces_avg"), py::arg("reduces_low_precision"), py::arg("reduces_bitwise"),
      py::arg("gathers_uneven"), py::arg("keeps_inputs"), py::arg("sends_any_tensor"),
      py::arg("starts_messages_together"), py::arg("has_blocking_messages"));
}

}  // namespace c10d_ext
