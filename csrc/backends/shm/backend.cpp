// shm: CPU tensors between ranks on one machine, through memory they share.

#include "backends/shm/backend.h"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "backends/shm/bootstrap.h"
#include "backends/shm/layout.h"
#include "backends/shm/live_group.h"
#include "backends/shm/operation.h"
#include "backends/shm/select.h"
#include "backends/shm/work.h"
#include "base/exceptions.h"
#include "control/open_groups.h"
#include "control/rendezvous.h"
#include "work/coalesced.h"
#include "work/future.h"

namespace c10d_ext {

using std::string_view;
using Milliseconds = std::chrono::milliseconds;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

namespace {

// How long a group that is destroyed with work in flight waits for it.
constexpr Milliseconds kCloseGrace{5000};

// The operations that the calls of a coalescing block become: neighbours of one kind travel as one,
// alike on all ranks. Sends and receives run beside collectives, so they do not part neighbours.
std::vector<ShmBackend::OperationPtr> joined(const std::vector<ShmBackend::OperationPtr>& calls) {
  std::vector<ShmBackend::OperationPtr> operations;
  ShmBackend::OperationPtr last;
  for (const auto& call : calls) {
    const auto type = call->request.type;
    const bool collective = type != OpType::Send && type != OpType::Recv;
    if (collective && last && last->can_carry(*call)) {
      last->carry(call);
      call->release(last);
    } else {
      call->release(nullptr);
      operations.push_back(call);
      if (collective) {
        last = call;
      }
    }
  }
  return operations;
}

c10d::ErrorType error_type_of(const Failure& failure) {
  switch (failure.kind) {
    case ErrorKind::Timeout:
      return c10d::ErrorType::TIMEOUT;
    case ErrorKind::RankLost:
      return c10d::ErrorType::REMOTE_ERROR;
    default:
      return c10d::ErrorType::COMM_ERROR;
  }
}

}  // namespace

// --- Coalescing
// -----------------------------------------------------------------------------------

ShmBackend::WorkPtr ShmBackend::endCoalescing() {
  std::vector<OperationPtr> calls;
  {
    const std::lock_guard lock(coalescing_mutex_);
    end_block();
    calls.swap(batch_);
  }
  if (calls.empty()) {
    return {};
  }
  const auto operations = joined(calls);
  std::vector<WorkPtr> works;
  for (const auto& call : calls) {
    works.push_back(c10::make_intrusive<ShmWork>(live_, call, rank_, c10d::OpType::COALESCED));
  }
  for (const auto& operation : operations) {
    live_->engine().submit(operation);
  }
  return c10::make_intrusive<CoalescedWork>(std::move(works), rank_);
}

// --- Groups
// ---------------------------------------------------------------------------------------

ShmBackend::ShmBackend(int rank, int size, const Options& options, const Settings& settings,
                       c10::intrusive_ptr<c10d::Store> store, GlobalRanks global_ranks,
                       std::shared_ptr<LiveGroup> live)
    : RequestBackend(rank, size, options, std::move(store), std::move(global_ranks), live->place()),
      settings_(settings),
      live_(std::move(live)),
      known_group_(known_group(global_ranks_, [peers = live_->peers()](int rank) {
        const auto& peer = peers[static_cast<size_t>(rank)];
        return has_ended(peer) ? std::optional(peer.pid) : std::nullopt;
      })) {
  init();
}

ShmBackend::~ShmBackend() {
  live_->close(Milliseconds(0));
}

ShmBackend::Connected ShmBackend::connect(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                          int size, const Options& options,
                                          const Settings& settings,
                                          const GlobalRanks& global_ranks) {
  const bool fits = size <= shm::Layout::kMaxSize;
  const Group place({}, options.group_name, rank, size);
  const Rendezvous expected(place, store, global_ranks, kPublicName);
  auto shared = expected.joined([&] {
    return shm::join(expected.part_of_store(kPublicName), rank, size,
                     fits ? shm::Engine::mapping_bytes(size, settings.arena) : 0, options.timeout,
                     {settings.build, fits ? ""
                                           : c10::str("a group has at most ", shm::Layout::kMaxSize,
                                                      " ranks on shared memory, got ", size)});
  });
  if (!shared.membership) {
    return {{}, shared.why_not, shared.session};
  }
  auto live = LiveGroup::start(std::move(shared.membership), settings, place);
  return {c10::make_intrusive<ShmBackend>(rank, size, options, settings, store, global_ranks,
                                          std::move(live)),
          {},
          shared.session};
}

void ShmBackend::close_all(Milliseconds grace) {
  OpenGroups<LiveGroup>::of_this_process().close_all(
      grace, [](LiveGroup& group, Milliseconds left) { group.close(left); });
}

c10::intrusive_ptr<c10d::Backend> ShmBackend::make_backend(
    std::string_view op, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    Milliseconds timeout, const std::string& name, const GlobalRanks& global_ranks) const {
  Options options(kPublicName, timeout);
  options.group_name = name;
  auto connected = connect(store, rank, size, options, settings_, global_ranks);
  C10D_EXT_CHECK_VALUE(
      connected.backend, op, place_,
      "ranks that share memory must be able to share some more, got: ", connected.why_not);
  return connected.backend;
}

uint64_t ShmBackend::getSequenceNumberForGroup() {
  return live_->engine().seq();
}

c10d::ErrorType ShmBackend::getError() {
  const auto failure = live_->engine().broken();
  return failure ? error_type_of(*failure) : c10d::ErrorType::SUCCESS;
}

void ShmBackend::abort() {
  live_->engine().abort("abort: the group must be alive, got an abort of it");
  live_->close(Milliseconds(0));
}

void ShmBackend::shutdown() {
  live_->close(kCloseGrace);
}

// --- Python
// ---------------------------------------------------------------------------------------

void bind_shm(pybind11::module_& m) {
  namespace py = pybind11;
  bind_work<ShmWork>(m, "ShmWork");
  // What torch's own code, and its users', ask of a gloo backend.
  py::class_<SplittableBackend, c10::intrusive_ptr<SplittableBackend>, c10d::Backend>(
      m, "SplittableBackend")
      .def_property_readonly("options", &SplittableBackend::getBackendOptions,
                             "A copy of the options, with the timeout as it is now.")
      .def("_set_default_timeout", &SplittableBackend::setTimeout, py::arg("timeout"),
           py::call_guard<py::gil_scoped_release>());
  py::class_<ShmBackend, c10::intrusive_ptr<ShmBackend>, SplittableBackend>(m, "ShmBackend");
  m.def(
      "connect_shm",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Milliseconds timeout,
         const std::string& group_name, const GlobalRanks& global_ranks, size_t arena,
         std::chrono::microseconds spin_time, std::chrono::microseconds inline_time,
         bool progress_thread, int strict, const std::string& algorithms, const std::string& build)
          -> std::tuple<c10::intrusive_ptr<c10d::Backend>, std::string, std::string> {
        c10d::Backend::Options options(ShmBackend::kPublicName, timeout);
        options.group_name = group_name;
        ShmBackend::Settings settings;
        settings.arena = arena;
        settings.engine.spin_time = spin_time;
        settings.engine.inline_time = inline_time;
        settings.engine.progress_thread = progress_thread;
        settings.engine.strict = strict > 0;
        settings.call_sites = strict > 1;
        static_cast<void>(shm::parse_rules(algorithms));  // a mistake is told before ranks meet
        settings.engine.algorithms = algorithms;
        settings.build = build;
        auto connected = ShmBackend::connect(store, rank, size, options, settings, global_ranks);
        return {connected.backend, connected.why_not, connected.session};
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("group_name"),
      py::arg("global_ranks"), py::kw_only(), py::arg("arena"), py::arg("spin_time"),
      py::arg("inline_time"), py::arg("progress_thread"), py::arg("strict"), py::arg("algorithms"),
      py::arg("build"), py::call_guard<py::gil_scoped_release>());
  m.def("close_shm_groups", &ShmBackend::close_all, py::arg("grace"),
        py::call_guard<py::gil_scoped_release>());
  m.def("shm_mapping_bytes", &shm::Engine::mapping_bytes, py::arg("size"), py::arg("arena"));
  m.attr("SHM_MIN_ARENA") = shm::Layout::kMinArena;
}

}  // namespace c10d_ext
