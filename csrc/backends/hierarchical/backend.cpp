// Groups of ranks on several hosts: their parts, how a schedule runs, and what Python sees.

#include "backends/hierarchical/backend.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <utility>

#include "backends/adapter/adapter.h"
#include "backends/adapter/capabilities.h"
#include "backends/adapter/lowering.h"
#include "backends/backend.h"
#include "control/global_ranks.h"
#include "control/host.h"

namespace c10d_ext {

using WorkPtr = InnerBackend::WorkPtr;

// --- Schedules -----------------------------------------------------------------------------------

HierarchicalBackend::Step::Step(Started started)
    : work_(std::move(started.work)), finish_(std::move(started.finish)) {}

void HierarchicalBackend::Step::wait() {
  if (work_) {
    work_->wait(kNoTimeout);
    work_.reset();
  }
  if (finish_) {
    std::exchange(finish_, nullptr)();
  }
}

HierarchicalBackend::Part::Part(BackendPtr of) : backend(std::move(of)) {
  if (backend) {
    can = capabilities_of(*backend);
  }
}

HierarchicalBackend::Step HierarchicalBackend::start(const Part& part,
                                                     const CollectiveRequest& request) const {
  const HeldRequest held(request, request.sources.vec(), request.outs.vec());
  const Group place({}, group_.name(), part.backend->getRank(), part.backend->getSize());
  return Step(
      lowering::start(Adapter(request.op, place, part.backend, part.can, std::nullopt), held));
}

void HierarchicalBackend::schedule(const InnerWork& work, std::function<void()> steps) {
  schedules_->submit([work, steps = std::move(steps), ends = ends_] {
    std::exception_ptr error;
    try {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      steps();
    } catch (...) {
      error = std::current_exception();
    }
    // A callback may wait for a schedule behind this one.
    ends->run([work, error] { work->end(error); });
  });
}

// --- Groups --------------------------------------------------------------------------------------

HierarchicalBackend::HierarchicalBackend(int rank, int size, const std::string& group_name,
                                         std::vector<std::vector<int>> hosts, BackendPtr local,
                                         BackendPtr rail, BackendPtr flat, std::string title)
    : InnerBackend(rank, size, group_name, std::move(title)),
      hosts_(std::move(hosts)),
      host_of_(static_cast<size_t>(size), -1),
      place_of_(static_cast<size_t>(size), -1),
      local_(std::move(local)),
      rail_(std::move(rail)),
      flat_(std::move(flat)),
      schedules_(TaskQueue::start("c10d_ext_hosts")) {
  for (size_t host = 0; host < hosts_.size(); ++host) {
    is_even_ = is_even_ && hosts_[host].size() == hosts_[0].size();
    for (size_t place = 0; place < hosts_[host].size(); ++place) {
      const auto at = static_cast<size_t>(hosts_[host][place]);
      host_of_.at(at) = static_cast<int>(host);
      place_of_.at(at) = static_cast<int>(place);
    }
  }
  host_ = host_of_[static_cast<size_t>(rank)];
  place_in_host_ = place_of_[static_cast<size_t>(rank)];
  init();
}

HierarchicalBackend::~HierarchicalBackend() {
  schedules_->stop();
}

const Capabilities& HierarchicalBackend::capabilities() const {
  static const Capabilities can = [inherited = InnerBackend::capabilities()]() mutable {
    inherited.has_blocking_messages = true;
    return inherited;
  }();
  return can;
}

void HierarchicalBackend::setTimeout(std::chrono::milliseconds timeout) {
  for (const auto* part : {&local_, &rail_, &flat_}) {
    if (part->is_there()) {
      part->backend->setTimeout(timeout);
    }
  }
}

void HierarchicalBackend::abort() {
  for (const auto* part : {&local_, &rail_, &flat_}) {
    if (part->is_there()) {
      part->backend->abort();
    }
  }
}

void HierarchicalBackend::shutdown() {
  for (const auto* part : {&local_, &rail_, &flat_}) {
    if (part->is_there()) {
      part->backend->shutdown();
    }
  }
}

// --- What another backend does as it is ----------------------------------------------------------

WorkPtr HierarchicalBackend::all_reduce_sparse(const at::Tensor& tensor, Milliseconds timeout) {
  c10d::AllreduceOptions options;
  options.timeout = timeout;
  Tensors tensors{tensor};
  return flat_.backend->allreduce(tensors, options);
}

WorkPtr HierarchicalBackend::start_message(const Message& message) {
  const auto peer = static_cast<int>(message.peer);
  const bool is_here = host_of(peer) == host_;
  c10d::Backend& backend = is_here ? *local_.backend : *flat_.backend;
  const int there = is_here ? place_of_[static_cast<size_t>(peer)] : peer;
  const auto tag = static_cast<int>(message.tag);
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
  m.def("this_host", &this_host, "The same text in processes that may be able to share memory.");
  m.def(
      "part_of_global_ranks",
      [](const GlobalRanks& global_ranks, const std::vector<int>& ranks) {
        return global_ranks.part(ranks);
      },
      py::arg("global_ranks"), py::arg("ranks"), "Where some of a group's ranks are in the world.");
}

}  // namespace c10d_ext
