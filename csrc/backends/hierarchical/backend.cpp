// Groups of ranks on several hosts: how a schedule runs, and what Python sees.

#include "backends/hierarchical/backend.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <utility>

#include "backends/hierarchical/collectives.h"
#include "backends/hierarchical/sizes.h"
#include "control/global_ranks.h"
#include "control/host.h"

namespace c10d_ext {

using WorkPtr = InnerBackend::WorkPtr;

HierarchicalBackend::HierarchicalBackend(int rank, int size, const std::string& group_name,
                                         std::vector<std::vector<int>> hosts, BackendPtr local,
                                         BackendPtr rail, BackendPtr flat, std::string title)
    : InnerBackend(rank, size, group_name, std::move(title)),
      parts_(std::make_shared<const hierarchical::Parts>(
          hierarchical::Parts{.hosts = hierarchical::Hosts(rank, size, std::move(hosts)),
                              .size = size,
                              .local = hierarchical::Part(std::move(local), group_name),
                              .rail = hierarchical::Part(std::move(rail), group_name),
                              .flat = hierarchical::Part(std::move(flat), group_name)})),
      schedules_(TaskQueue::start("c10d_ext_hosts")),
      can_(InnerBackend::capabilities()) {
  can_.has_blocking_messages = true;
  can_.sends_over_sockets = parts_->flat.sends_over_sockets();
  init();
}

HierarchicalBackend::~HierarchicalBackend() {
  schedules_->stop();
}

const Capabilities& HierarchicalBackend::capabilities() const {
  return can_;
}

void HierarchicalBackend::setTimeout(std::chrono::milliseconds timeout) {
  for (const auto* part : {&parts_->local, &parts_->rail, &parts_->flat}) {
    if (part->is_there()) {
      part->backend()->setTimeout(timeout);
    }
  }
}

void HierarchicalBackend::abort() {
  for (const auto* part : {&parts_->local, &parts_->rail, &parts_->flat}) {
    if (part->is_there()) {
      part->backend()->abort();
    }
  }
}

void HierarchicalBackend::shutdown() {
  for (const auto* part : {&parts_->local, &parts_->rail, &parts_->flat}) {
    if (part->is_there()) {
      part->backend()->shutdown();
    }
  }
}

HierarchicalBackend::TellLosses HierarchicalBackend::losses() const {
  const auto of = [](const hierarchical::Part& part) {
    const auto* inner = dynamic_cast<const InnerBackend*>(part.backend().get());
    return inner != nullptr ? inner->losses() : TellLosses();
  };
  TellLosses all = of(parts_->flat), rail = of(parts_->rail);
  if (!all && !rail) {
    return {};
  }
  return [all, rail, hosts = parts_->hosts](const std::vector<int>& ranks) {
    if (all) {
      all(ranks);
    }
    std::vector<int> on_rail;
    for (const int rank : ranks) {
      if (hosts.is_on_rail(rank)) {
        on_rail.push_back(hosts.host_of(rank));
      }
    }
    if (rail && !on_rail.empty()) {
      rail(on_rail);
    }
  };
}

// --- Calls ---------------------------------------------------------------------------------------

void HierarchicalBackend::start(const InnerWork& work, InnerCollective collective) {
  schedules_->submit(
      [parts = parts_, work, collective = std::move(collective), ends = ends_]() mutable {
        std::exception_ptr error;
        try {
          const at::AutoDispatchBelowADInplaceOrView below_autograd;
          hierarchical::kSchedules.of(collective.op)(*parts, collective);
        } catch (...) {
          error = std::current_exception();
        }
        parts.reset();  // whoever waits may be about to destroy the group, on a thread of its own
        // A callback may wait for a schedule behind this one.
        ends->run([work, error] { work->end(error); });
      });
}

WorkPtr HierarchicalBackend::all_reduce_sparse(const at::Tensor& tensor, Milliseconds timeout) {
  c10d::AllreduceOptions options;
  options.timeout = timeout;
  Tensors tensors{tensor};
  return engine()->allreduce(tensors, options);
}

WorkPtr HierarchicalBackend::start_message(const Message& message) {
  const auto peer = static_cast<int>(message.peer);
  const bool is_here = parts_->hosts.is_here(peer);
  c10d::Backend& backend = is_here ? *parts_->local.backend() : *engine();
  const int there = is_here ? parts_->hosts.place_of(peer) : peer;
  const auto tag = static_cast<int>(message.tag);
  C10D_EXT_CHECK_VALUE(is_here || !parts_->flat.has_own_tag() || tag != hierarchical::kOwnTag,
                       name_of(message.sends ? OpType::Send : OpType::Recv), group_,
                       "a tag between hosts must be less than ", hierarchical::kOwnTag, ", got ",
                       message.tag);
  Tensors tensors{message.tensor};
  return message.sends ? backend.send(tensors, there, tag) : backend.recv(tensors, there, tag);
}

// --- Python --------------------------------------------------------------------------------------

void bind_hierarchical(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<HierarchicalBackend, c10::intrusive_ptr<HierarchicalBackend>, c10d::Backend>(
      m, "HierarchicalBackend", "Shared memory inside each host, another engine between them.")
      .def(py::init<int, int, const std::string&, std::vector<std::vector<int>>,
                    c10::intrusive_ptr<c10d::Backend>, c10::intrusive_ptr<c10d::Backend>,
                    c10::intrusive_ptr<c10d::Backend>, std::string>(),
           py::arg("rank"), py::arg("size"), py::arg("group_name"), py::arg("hosts"),
           py::arg("local"), py::arg("rail"), py::arg("flat"), py::arg("title"))
      .def_property_readonly("hosts", &HierarchicalBackend::hosts,
                             "The group's ranks of each host.")
      .def_property_readonly("title", &HierarchicalBackend::title,
                             "What it is in profilers and reports: \"shm+gloo\".")
      .def_property_readonly("engine", &HierarchicalBackend::engine,
                             "A backend of all ranks, of the kind that goes between hosts.");
  m.attr("ALL_REDUCE_BY_MESSAGES") = hierarchical::kByMessages;
  m.attr("ALL_REDUCE_BY_LEADERS") = hierarchical::kByLeaders;
  m.def("goes_at_once", &hierarchical::goes_at_once, py::arg("bytes"), py::arg("hosts"));
  m.def("all_reduce_parts", &hierarchical::all_reduce_parts, py::arg("bytes"), py::arg("hosts"));
  m.def("all_gather_parts", &hierarchical::all_gather_parts, py::arg("bytes"));
  m.def("reduce_scatter_parts", &hierarchical::reduce_scatter_parts, py::arg("bytes"));
  m.def("reduces_rows_apart", &hierarchical::reduces_rows_apart, py::arg("bytes"),
        py::arg("hosts"));
  m.def("pays_round", &hierarchical::pays_round, py::arg("part_bytes"), py::arg("hosts"));
  m.def("round_parts", &hierarchical::round_parts, py::arg("part_bytes"));
  m.def("chain_parts", &hierarchical::chain_parts, py::arg("bytes"));
  m.def("this_host", &this_host, "The same text in processes that may be able to share memory.");
  m.def(
      "part_of_global_ranks",
      [](const GlobalRanks& global_ranks, const std::vector<int>& ranks) {
        return global_ranks.part(ranks);
      },
      py::arg("global_ranks"), py::arg("ranks"), "Where some of a group's ranks are in the world.");
}

}  // namespace c10d_ext
