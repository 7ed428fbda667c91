// Agreement before data, liveness and the names of who is missing, around another backend.

#include "backends/checked/backend.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <exception>
#include <map>
#include <utility>

#include "backends/adapter/capabilities.h"
#include "backends/adapter/lowering.h"
#include "backends/adapter/messages.h"
#include "backends/checked/works.h"
#include "backends/process_group/splittable_backend.h"
#include "base/call_site.h"
#include "base/gil.h"
#include "base/memory.h"
#include "base/timeouts.h"
#include "control/open_groups.h"
#include "control/rendezvous.h"
#include "work/coalesced.h"

namespace c10d_ext {

namespace {

using std::string_view;
using Tensors = std::vector<at::Tensor>;

CheckedBackend::Connect& connect_backend(const std::string& backend) {
  // Never destroyed: they hold Python functions, and a group may outlive Python.
  static auto* instance = new std::map<std::string, CheckedBackend::Connect>;
  return (*instance)[backend];
}

// How long a group that is destroyed with work in flight waits for it.
constexpr std::chrono::milliseconds kGrace{5000};

// The request with aliases of what it writes and of `sources`, that nobody else can release. One
// tensor stays one.
HeldRequest aliased(const CollectiveRequest& request, at::TensorList sources) {
  HeldRequest kept{request.op,
                   request.type,
                   {},
                   aliases_of(request.outs),
                   request.reduction != nullptr ? std::optional(*request.reduction) : std::nullopt,
                   request.root,
                   request.source_sizes,
                   request.out_sizes,
                   request.is_list};
  for (size_t i = 0; i < sources.size(); ++i) {
    const bool is_out = request.sources[i].is_same(request.outs[i]);
    kept.sources.push_back(is_out ? kept.outs[i] : alias_of(sources[i]));
  }
  return kept;
}

// Whether it begins in less than a millisecond: few bytes are copied at most.
bool is_quick(const HeldRequest& request) {
  constexpr size_t kQuick = size_t{1} << 20;
  size_t bytes = 0;
  for (size_t i = 0; i < request.sources.size(); ++i) {
    const bool is_out = request.sources[i].is_same(request.outs[i]);
    bytes += request.outs[i].nbytes() + (is_out ? 0 : request.sources[i].nbytes());
  }
  return bytes <= kQuick;
}

}  // namespace

void CheckedBackend::set_connect(Connect connect, const std::string& backend) {
  connect_backend(backend) = std::move(connect);
}

CheckedBackend::CheckedBackend(c10::intrusive_ptr<c10d::Backend> inner,
                               c10::intrusive_ptr<c10d::Store> store, const Options& options,
                               GlobalRanks global_ranks, int strict)
    : SplittableBackend(inner->getRank(), inner->getSize(), options, std::move(store),
                        std::move(global_ranks)),
      ArgumentChecks(group_),
      strict_(strict),
      inner_(std::move(inner)),
      inner_can_([&] {
        Capabilities can = capabilities_of(inner_->getBackendName());
        // As over shared memory: NaN where one of them is, and parts that may differ in size.
        can.keeps_nan = false;
        can.exchanges_rooted_parts = true;
        return can;
      }()),
      can_([&] {
        Capabilities can = inner_can_;
        can.has_blocking_messages = false;
        return can;
      }()),
      group_({}, options.group_name, rank_, size_),
      agreement_([&] {
        const Rendezvous expected(group_, store_, global_ranks_);
        return expected.joined([&] {
          return Agreement::join(expected.part_of_store("agreement"),
                                 {rank_, size_, options.group_name}, options.timeout);
        });
      }()),
      known_group_(
          known_group(global_ranks_, [a = agreement_](int rank) { return a->gone(rank); })) {
  OpenGroups<Agreement>::of_this_process().add(agreement_);
  init();
}

void CheckedBackend::close_all(Milliseconds grace) {
  OpenGroups<Agreement>::of_this_process().close_all(
      grace, [](Agreement& group, Milliseconds left) { group.leave(left); });
}

CheckedBackend::~CheckedBackend() {
  // gloo's threads, which are waited for, may be at a callback written in Python.
  without_gil([this] {
    batch_.clear();
    leave();
    if (agreement_->has_abandoned() || agreement_->is_foreign()) {
      // What waits for ranks that are gone nobody can end, and gloo's end would wait for it, or for
      // threads that a fork has left behind.
      (void)c10::intrusive_ptr<c10d::Backend>(inner_).release();
    }
    inner_.reset();
  });
}

// --- Calls
// ----------------------------------------------------------------------------------------

Adapter CheckedBackend::inner(string_view op, Milliseconds timeout) const {
  const bool is_own = timeout > Milliseconds(0);
  return Adapter(op, group_, inner_, inner_can_, is_own ? std::optional(timeout) : std::nullopt);
}

CheckedBackend::WorkPtr CheckedBackend::run(const Call& call, Tensors outputs, Around around,
                                            const CollectiveRequest& request) {
  if (request.is_empty()) {
    // No data, but the ranks meet.
    return run(
        call, std::move(outputs), std::move(around), [] { return Started(); },
        /*quick=*/true);
  }
  const auto kept = std::make_shared<HeldRequest>(aliased(request, request.sources));
  return run(
      call, std::move(outputs), std::move(around),
      [kept, adapter = inner(call.op, call.timeout)] { return lowering::start(adapter, *kept); },
      is_quick(*kept));
}

CheckedBackend::WorkPtr CheckedBackend::run(const Call& call, Tensors outputs, Around around,
                                            Begin begin, bool quick) {
  const auto begun = std::chrono::steady_clock::now();
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Begin wrapped = [around = std::move(around), begin = std::move(begin)] {
    if (around.before) {
      around.before();
    }
    Started started = begin();
    started.finish = then(std::move(started.finish), around.after);
    return started;
  };
  const auto work =
      work_for_caller(call.op, group_, outputs,
                      agree(call.op, *call.called, call.timeout, quick, std::move(wrapped)),
                      &subscribe_to_future, call.type, begun);
  if (size_ == 1) {
    work->wait(kNoTimeout);  // the ops do what comes next without asking anybody
  }
  return deliver(call, work);
}

CheckedBackend::WorkPtr CheckedBackend::deliver(const Call& call, const WorkPtr& work) {
  if (batching_) {
    std::lock_guard lock(batch_mutex_);
    batch_.push_back(work);
    return call.async ? work : nullptr;
  }
  if (call.async) {
    return work;
  }
  work->wait(kNoTimeout);
  return {};
}

void CheckedBackend::post(const Group& group, const CollectiveRequest& request) {
  const HeldRequest now = held(request);
  const auto kept = std::make_shared<HeldRequest>(aliased(request, now.sources));
  const auto work =
      agree(request.op, fingerprint_of(request, rank_, size_), c10d::kUnsetTimeout, is_quick(*kept),
            [kept, adapter = inner(request.op, c10d::kUnsetTimeout)] {
              return lowering::start(adapter, *kept);
            });
  attach(request.op, group, request.outs, work, Finish(), &subscribe_to_future);
}

CheckedBackend::WorkPtr CheckedBackend::agree(string_view op, Fingerprint called,
                                              Milliseconds timeout, bool quick, Begin begin) {
  if (strict_ == 0) {
    called.shapes = 0;
  }
  if (strict_ > 1) {
    called.call_site = call_site();
  }
  return start_agreed(agreement_, group_, op, std::move(called),
                      timeout > Milliseconds(0) ? timeout : timeout_.load(), quick,
                      inner_can_.futures == Capabilities::Futures::Always, std::move(begin));
}

CheckedBackend::WorkPtr CheckedBackend::post_message(
    const Message& message, std::function<WorkPtr(c10d::Backend& backend, int peer)> start) {
  auto started = start_granted(
      agreement_, group_, message, timeout_,
      [backend = inner_, start = std::move(start)](int peer) { return start(*backend, peer); });
  {
    std::lock_guard lock(messages_mutex_);
    if (messages_.size() >= messages_limit_) {
      std::erase_if(messages_, [](const auto& weak) {
        const auto known = weak.lock();
        return !known || known->isCompleted();
      });
      messages_limit_ = std::max(kFewMessages, 2 * messages_.size());
    }
    messages_.emplace_back(started.end);
  }
  return started.work;
}

void CheckedBackend::leave() {
  agreement_->leave(kGrace);
  std::vector<c10::weak_intrusive_ptr<c10d::Work>> messages;
  {
    std::lock_guard lock(messages_mutex_);
    messages.swap(messages_);
  }
  for (const auto& weak : messages) {
    if (const auto work = weak.lock()) {
      work->abort();
    }
  }
}

CheckedBackend::WorkPtr CheckedBackend::message(string_view op, c10d::OpType type,
                                                const at::Tensor& tensor, int peer, int tag) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Call call{op, type, true, c10d::kUnsetTimeout, std::nullopt};
  const Adapter self(op, group_, c10::intrusive_ptr<c10d::Backend>::reclaim_copy(this),
                     capabilities(), std::nullopt);
  const Message message{tensor, type == c10d::OpType::SEND, peer, tag};
  // Nobody but the caller waits for it.
  return deliver(call, start_messages(self, op, group_, message, type)[0]);
}

// --- Coalescing
// -----------------------------------------------------------------------------------

void CheckedBackend::startCoalescing() {
  std::lock_guard lock(batch_mutex_);
  C10D_EXT_CHECK_VALUE(!batching_, "start_coalescing", group_,
                       "coalescing blocks must not be nested, got a second one");
  batching_ = true;
}

CheckedBackend::WorkPtr CheckedBackend::endCoalescing() {
  std::lock_guard lock(batch_mutex_);
  C10D_EXT_CHECK_VALUE(batching_, "end_coalescing", group_,
                       "a coalescing block must be open, got none");
  batching_ = false;
  std::vector<WorkPtr> works;
  works.swap(batch_);
  return works.empty() ? nullptr : c10::make_intrusive<CoalescedWork>(std::move(works), rank_);
}

// --- Groups
// ---------------------------------------------------------------------------------------

c10::intrusive_ptr<c10d::Backend> CheckedBackend::make_backend(
    std::string_view /*op*/, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    Milliseconds timeout, const std::string& name, const GlobalRanks& global_ranks) const {
  return connect_backend(options_.backend)(store, rank, size, timeout, name, global_ranks);
}

void CheckedBackend::setTimeout(Milliseconds timeout) {
  SplittableBackend::setTimeout(timeout);
  inner_->setTimeout(bounded(timeout));
}

uint64_t CheckedBackend::getSequenceNumberForGroup() {
  return agreement_->count();
}

c10d::ErrorType CheckedBackend::getError() {
  return agreement_->failure({}, 0, Milliseconds(0)) ? c10d::ErrorType::COMM_ERROR
                                                     : c10d::ErrorType::SUCCESS;
}

void CheckedBackend::abort() {
  without_gil([this] { agreement_->abort(); });
  inner_->abort();
}

void CheckedBackend::shutdown() {
  without_gil([this] { leave(); });
  inner_->shutdown();
}

// --- Python
// ---------------------------------------------------------------------------------------

void bind_fallback(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<CheckedBackend, c10::intrusive_ptr<CheckedBackend>, SplittableBackend>(
      m, "CheckedBackend")
      .def(py::init([](c10::intrusive_ptr<c10d::Backend> inner,
                       c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds timeout,
                       const std::string& group_name, const GlobalRanks& global_ranks, int strict,
                       const std::string& name) {
             c10d::Backend::Options options(name, timeout);
             options.group_name = group_name;
             const py::gil_scoped_release waits;
             return c10::make_intrusive<CheckedBackend>(std::move(inner), std::move(store), options,
                                                        global_ranks, strict);
           }),
           py::arg("inner"), py::arg("store"), py::arg("timeout"), py::arg("group_name"),
           py::arg("global_ranks"), py::arg("strict"), py::arg("name") = "shm")
      .def_property_readonly("inner", &CheckedBackend::inner_backend,
                             "The backend that does the work.");
  m.def("set_fallback_connect", &CheckedBackend::set_connect, py::arg("connect"),
        py::arg("backend") = "shm");
  m.def("close_fallback_groups", &CheckedBackend::close_all, py::arg("grace"),
        py::call_guard<py::gil_scoped_release>());
}

}  // namespace c10d_ext
