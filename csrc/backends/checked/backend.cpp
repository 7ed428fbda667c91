// Agreement before data, liveness and the names of who is missing, around another backend.

#include "backends/checked/backend.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "backends/adapter/capabilities.h"
#include "backends/adapter/lowering.h"
#include "backends/adapter/messages.h"
#include "backends/checked/protocol.h"
#include "backends/process_group/inner_backend.h"
#include "base/call_site.h"
#include "base/gil.h"
#include "base/memory.h"
#include "base/sync_scope.h"
#include "base/timeouts.h"
#include "base/wait_timer.h"
#include "control/meeting.h"
#include "control/open_groups.h"
#include "control/rendezvous.h"
#include "work/coalesced.h"

namespace c10d_ext {

namespace {

using std::string_view;

// How long a group that is destroyed with work in flight waits for it.
constexpr std::chrono::milliseconds kCloseGrace{5000};

// The request with aliases of what it writes and of `sources`, that nobody else can release. One
// tensor stays one.
HeldRequest aliased(const CollectiveRequest& request, at::TensorList sources) {
  const auto outs = aliases_of(request.outs);
  HeldRequest kept(request, {}, HeldRequest::Tensors(outs.begin(), outs.end()));
  for (size_t i = 0; i < sources.size(); ++i) {
    const bool is_out = i < request.outs.size() && request.sources[i].is_same(request.outs[i]);
    kept.sources.push_back(is_out ? kept.outs[i] : alias_of(sources[i]));
  }
  return kept;
}

// Whether it begins in less than a millisecond: few bytes are copied at most.
bool is_quick(const HeldRequest& request) {
  constexpr size_t kQuick = size_t{1} << 20;
  if (request.type == OpType::SparseAllReduce) {
    return false;
  }
  size_t bytes = 0;
  for (const auto& out : request.outs) {
    bytes += out.nbytes();
  }
  for (size_t i = 0; i < request.sources.size(); ++i) {
    const bool is_out = i < request.outs.size() && request.sources[i].is_same(request.outs[i]);
    bytes += is_out ? 0 : request.sources[i].nbytes();
  }
  return bytes <= kQuick;
}

// No data, but the ranks meet.
AgreedCall meeting(string_view op, std::chrono::milliseconds timeout, Fingerprint&& called) {
  return {op, std::move(called), timeout, [] { return Started(); }, /*quick=*/true};
}

// What requests are lowered to.
Capabilities capabilities_inside(const c10d::Backend& inner) {
  Capabilities can = capabilities_of(inner);
  // As over shared memory: NaN where one of them is, and parts that may differ in size.
  can.keeps_nan = false;
  can.exchanges_rooted_parts = true;
  can.sums_in_rank_order = false;  // not what is made of other methods
  return can;
}

Capabilities capabilities_outside(Capabilities inside) {
  inside.has_blocking_messages = false;
  return inside;
}

// `given`: by the user.
Little little_of(const Capabilities& inner, std::optional<size_t> given,
                 const Agreement& agreement) {
  const size_t hosts = agreement.led_hosts().size();
  const size_t usual = usual_piggyback(agreement.told_by_one(), hosts > 0);
  const bool can = inner.methods.has(Method::AllToAllSingle);
  return {can ? std::min(given.value_or(usual), kMostData) : 0, usual, hosts};
}

// Whether the backend has the tag, as far as is known. Others are for it to refuse, whatever a
// message's size.
bool has_tag(const Capabilities& inner, int64_t tag) {
  constexpr int64_t kEveryMpis = 32767;  // the largest that each of them has
  return tag >= 0 &&
         tag <= (inner.has_every_tag ? std::numeric_limits<int>::max() - 1 : kEveryMpis);
}

// So many bytes of a message may travel with what is said of it.
size_t most_of_message(const Capabilities& inner, int64_t tag, std::optional<size_t> given) {
  return inner.methods.has(Method::AllToAllSingle) && has_tag(inner, tag)
             ? given.value_or(inner.sends_over_sockets ? kLittleMessage : kLittleAmongWords)
             : 0;
}

std::unique_ptr<Agreement> meet(const Rendezvous& expected, const Group& group,
                                std::chrono::milliseconds timeout, const c10d::Backend& inner,
                                const std::shared_ptr<MessagesInFlight>& messages) {
  const auto* own = dynamic_cast<const InnerBackend*>(&inner);
  const auto lose = [messages, losses = own != nullptr ? own->losses() : Agreement::Lose()](
                        const std::vector<int>& ranks) {
    if (ranks.empty()) {
      messages->abort();
    } else if (losses) {
      losses(ranks);
    }
  };
  return expected.joined([&] {
    return Agreement::join(
        expected.part_of_store("agreement"),
        {static_cast<int>(group.rank()), static_cast<int>(group.size()), group.name()}, timeout, {},
        lose);
  });
}

// Attaches the work to what it writes. A caller who waits at once takes part in the agreement
// first: little data is there then, and there is nothing left to attach.
void attach_agreed(const Group& group, const CollectiveRequest& request,
                   const c10::intrusive_ptr<c10d::Work>& work) {
  const auto attach_it = [&] {
    attach(request.op, group, request.outs, work, Finish(), &subscribe_to_future);
  };
  if (SyncScope::is_on()) {
    try {
      take_part(*work);
    } catch (...) {  // Ctrl-C, or another signal: it goes on
      const SyncScope goes_on(false);
      attach_it();
      throw;
    }
  }
  attach_it();
}

// For a backend that `inner` makes of itself: options of its own class. Who splits a group writes
// into what this returns.
c10::intrusive_ptr<c10d::Backend::Options> inner_options(c10d::Backend& inner,
                                                         std::chrono::milliseconds timeout,
                                                         const std::string& name,
                                                         std::vector<uint64_t> global_ranks) {
  auto options = inner.getBackendOptions();
  options->timeout = timeout;
  options->group_name = name;
  options->global_ranks_in_group = std::move(global_ranks);
  return options;
}

}  // namespace

CheckedBackend::CheckedBackend(c10::intrusive_ptr<c10d::Backend> inner,
                               c10::intrusive_ptr<c10d::Store> store, const Options& options,
                               GlobalRanks global_ranks, int strict,
                               std::optional<size_t> piggyback, Connect connect,
                               const std::string& counted_as)
    : RequestBackend(inner->getRank(), inner->getSize(), options, std::move(store),
                     std::move(global_ranks), group_),
      strict_(strict),
      connect_(std::move(connect)),
      inner_(std::move(inner)),
      inner_can_(capabilities_inside(*inner_)),
      can_(capabilities_outside(inner_can_)),
      piggyback_given_(piggyback),
      inner_info_{counted_as.empty() ? inner_->getBackendName() : counted_as,
                  inner_can_.futures == Capabilities::Futures::Always},
      group_({}, options.group_name, rank_, size_),
      agreement_(meet(Rendezvous(group_, store_, global_ranks_, options.backend), group_,
                      options.timeout, *inner_, messages_)),
      membership_(std::make_shared<Membership>(agreement_, messages_)),
      little_(little_of(inner_can_, piggyback, *agreement_)),
      little_can_(capabilities_for_little(inner_can_, agreement_->led_hosts())),
      piggyback_(make_piggyback_backend(group_)),
      known_group_(
          known_group(global_ranks_, [a = agreement_](int rank) { return a->gone(rank); })) {
  OpenGroups<Membership>::of_this_process().add(membership_);
  WaitTimer::expect(inner_info_.name);
  init();
}

void CheckedBackend::close_all(Milliseconds grace) {
  OpenGroups<Membership>::of_this_process().close_all(
      grace, [](Membership& group, Milliseconds left) { group.leave(left); });
}

void CheckedBackend::end_service(Milliseconds grace) {
  constexpr Milliseconds kService{5000}, kLook{50};
  Agreement::end_service(grace > Milliseconds(0) ? kService : grace);
  while (Agreement::serves(kLook)) {
    check_signals();
  }
}

CheckedBackend::~CheckedBackend() {
  // gloo's threads, which are waited for, may be at a callback written in Python.
  without_gil([this] {
    batch_.clear();
    membership_->leave(kCloseGrace);
    if (agreement_->has_abandoned() || *inner_info_.abandoned || agreement_->is_foreign()) {
      // What waits for ranks that are gone nobody can end, and gloo's end would wait for it, or for
      // threads that a fork has left behind.
      (void)c10::intrusive_ptr<c10d::Backend>(inner_).release();
    }
    inner_.reset();
  });
}

// --- Calls
// ----------------------------------------------------------------------------------------

Adapter CheckedBackend::inner(string_view op, Milliseconds timeout, bool for_little) const {
  const bool is_own = timeout > Milliseconds(0);
  return Adapter(op, group_, inner_, for_little ? little_can_ : inner_can_,
                 is_own ? std::optional(std::min(timeout, kLongestWait)) : std::nullopt);
}

CheckedBackend::WorkPtr CheckedBackend::run(const MethodCall& call,
                                            const CollectiveRequest& request) {
  const auto outs = request.type == OpType::Barrier ? at::TensorList() : request.outs;
  Fingerprint called = fingerprint_of(request, rank_, size_);
  if (request.type != OpType::AllToAll && request.type != OpType::Gather &&
      request.type != OpType::Scatter && request.is_empty()) {
    return run(call, outs, meeting(call.op, call.timeout, std::move(called)));
  }
  return run(
      call, outs,
      agreed_call(call.op, call.timeout, std::move(called), aliased(request, request.sources)));
}

AgreedCall CheckedBackend::agreed_call(string_view op, Milliseconds timeout, Fingerprint&& called,
                                       HeldRequest&& request) const {
  const auto kept = std::make_shared<HeldRequest>(std::move(request));
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  AgreedCall call{op, std::move(called), timeout, {}, is_quick(*kept)};
  call.called.manner = manner_of(*kept, group_, little_);
  call.begin = [kept, adapter = inner(op, timeout, reduces_little(*kept, group_, little_))] {
    return lowering::start(adapter, *kept);
  };
  // What is read now is what it is to read only where nothing is in flight that may write it.
  if (!agreement_->has_collectives()) {
    call.piggyback = piggyback_of(*kept, group_, little_, piggyback_);
  }
  return call;
}

CheckedBackend::WorkPtr CheckedBackend::run(const MethodCall& call, at::TensorList outputs,
                                            AgreedCall&& agreed) {
  const auto begun = std::chrono::steady_clock::now();
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto work = work_for_caller(call.op, group_, outputs, agree(std::move(agreed)),
                                    &subscribe_to_future, call.type, begun);
  if (size_ == 1) {
    work->wait(kNoTimeout);  // the ops do what comes next without asking anybody
  }
  return deliver(call, work);
}

CheckedBackend::WorkPtr CheckedBackend::deliver(const MethodCall& call, const WorkPtr& work) {
  if (is_coalescing()) {
    const std::lock_guard lock(coalescing_mutex_);
    batch_.push_back(work);
    return call.async ? work : nullptr;
  }
  if (call.async) {
    return work;
  }
  work->wait(kNoTimeout);
  return {};
}

// That all ranks call it is agreed on, and nothing else is to be done. The failure names all that
// are missing, whether asked for all or one. A barrier, which waits for what is in flight, is
// another.
void CheckedBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool /*wait_all_ranks*/) {
  Fingerprint monitored;
  monitored.details = "monitored";
  auto call = MethodCall::of("monitored_barrier", c10d::OpType::BARRIER, opts);
  call.async = false;
  run(call, {}, meeting(call.op, call.timeout, std::move(monitored)));
}

void CheckedBackend::post(const Group& group, const CollectiveRequest& request) {
  const HeldRequest now = held(request, rank_);
  const auto work =
      agree(agreed_call(request.op, c10d::kUnsetTimeout, fingerprint_of(request, rank_, size_),
                        aliased(request, now.sources)));
  attach_agreed(group, request, work);
}

CheckedBackend::WorkPtr CheckedBackend::agree(AgreedCall&& call) {
  if (strict_ == 0) {
    call.called.shapes = 0;
  }
  if (strict_ > 1) {
    call.called.call_site = call_site();
  }
  if (call.timeout <= Milliseconds(0)) {
    call.timeout = timeout_.load();
  }
  return start_agreed(agreement_, group_, inner_info_, std::move(call));
}

CheckedBackend::WorkPtr CheckedBackend::post_message(const Message& message, const at::Tensor& wire,
                                                     Start start) {
  const size_t most = most_of_message(inner_can_, message.tag, piggyback_given_);
  auto begin = [inner = inner_, start = std::move(start)](int peer) { return start(*inner, peer); };
  auto started = start_granted(agreement_, group_, inner_info_,
                               {message, wire, most, timeout_, std::move(begin)});
  messages_->add(started.end);
  return started.work;
}

CheckedBackend::WorkPtr CheckedBackend::run(const MethodCall& call, const Message& message) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Adapter self(call.op, group_, c10::intrusive_ptr<c10d::Backend>::reclaim_copy(this),
                     capabilities(), std::nullopt);
  // Nobody but the caller waits for it.
  return deliver(call, start_messages(self, call.op, group_, message, call.type)[0]);
}

CheckedBackend::WorkPtr CheckedBackend::endCoalescing() {
  const std::lock_guard lock(coalescing_mutex_);
  end_block();
  std::vector<WorkPtr> works;
  works.swap(batch_);
  return works.empty() ? nullptr : c10::make_intrusive<CoalescedWork>(std::move(works), rank_);
}

// --- Groups
// ---------------------------------------------------------------------------------------

c10::intrusive_ptr<c10d::Backend> CheckedBackend::make_backend(
    std::string_view /*op*/, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    Milliseconds timeout, const std::string& name, const GlobalRanks& global_ranks) const {
  return connect_(store, rank, size, timeout, name, global_ranks);
}

bool CheckedBackend::supportsSplitting() const {
  return connect_ || inner_->supportsSplitting();
}

bool CheckedBackend::supportsShrinking() const {
  return connect_ || inner_->supportsShrinking();
}

c10::intrusive_ptr<c10d::Backend> CheckedBackend::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<Options>& opts) {
  if (connect_) {
    return SplittableBackend::split(store, ranks, opts);
  }
  check_inner(supportsSplitting(), "split");
  const bool is_in = std::find(ranks.begin(), ranks.end(), rank_) != ranks.end();
  const GlobalRanks global_ranks = is_in ? global_ranks_.part(ranks) : GlobalRanks();
  // On all ranks: it may be collective over them.
  return checked(
      inner_->split(store, ranks,
                    inner_options(*inner_, opts->timeout, opts->group_name, global_ranks.ranks)),
      c10::make_intrusive<c10d::PrefixStore>("checked", store), opts->timeout, opts->group_name,
      global_ranks);
}

c10::intrusive_ptr<c10d::Backend> CheckedBackend::merge(
    const c10::intrusive_ptr<c10d::Store>& store, const c10::intrusive_ptr<Options>& opts,
    const int& rank, const int& size) {
  if (connect_) {
    return SplittableBackend::merge(store, opts, rank, size);
  }
  return checked(
      inner_->merge(store, inner_options(*inner_, opts->timeout, opts->group_name, {}), rank, size),
      c10::make_intrusive<c10d::PrefixStore>("checked", store), opts->timeout, opts->group_name,
      {});
}

c10::intrusive_ptr<c10d::Backend> CheckedBackend::shrink(
    const std::vector<int64_t>& ranks_to_exclude, int flags,
    const c10::intrusive_ptr<Options>& opts) {
  if (connect_) {
    return SplittableBackend::shrink(ranks_to_exclude, flags, opts);
  }
  check_inner(supportsShrinking(), "shrink");
  const Shrunk rest = shrunk(ranks_to_exclude, opts);
  if (flags == kShrinkAbort) {
    without_gil([this] { membership_->abort(); });  // the inner backend ends its own
  }
  const GlobalRanks global_ranks = global_ranks_.part(rest.ranks);
  return checked(
      inner_->shrink(ranks_to_exclude, flags,
                     inner_options(*inner_, rest.timeout, rest.name, global_ranks.ranks)),
      c10::make_intrusive<c10d::PrefixStore>("checked", rest.store), rest.timeout, rest.name,
      global_ranks);
}

void CheckedBackend::check_inner(bool can, string_view op) const {
  C10D_EXT_CHECK_VALUE(can, op, group_, "the backend that is checked must be able to, got '",
                       inner_->getBackendName(), "', which is not");
}

c10::intrusive_ptr<c10d::Backend> CheckedBackend::checked(
    c10::intrusive_ptr<c10d::Backend> inner, const c10::intrusive_ptr<c10d::Store>& store,
    Milliseconds timeout, const std::string& name, GlobalRanks global_ranks) const {
  if (!inner) {
    return {};
  }
  Options options(options_.backend, timeout);
  options.group_name = name;
  return c10::make_intrusive<CheckedBackend>(std::move(inner), store, options,
                                             std::move(global_ranks), strict_, piggyback_given_);
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
  without_gil([this] { membership_->abort(); });
  inner_->abort();
}

void CheckedBackend::shutdown() {
  without_gil([this] { membership_->leave(kCloseGrace); });
  inner_->shutdown();
}

// --- Python
// ---------------------------------------------------------------------------------------

namespace {

// A Python function as a Connect. A group may outlive Python, and the function with it then.
CheckedBackend::Connect connect_by(const pybind11::object& function) {
  namespace py = pybind11;
  if (function.is_none()) {
    return {};
  }
  std::shared_ptr<py::object> kept(new py::object(function), [](py::object* f) {
    if (python_is_up()) {
      const py::gil_scoped_acquire gil;
      delete f;
    }
  });
  return [kept](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                std::chrono::milliseconds timeout, const std::string& name,
                const GlobalRanks& global_ranks) {
    const py::gil_scoped_acquire gil;
    return (*kept)(store, rank, size, timeout, name, global_ranks)
        .cast<c10::intrusive_ptr<c10d::Backend>>();
  };
}

}  // namespace

void bind_checked(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<CheckedBackend, c10::intrusive_ptr<CheckedBackend>, SplittableBackend>(
      m, "CheckedBackend")
      .def(py::init([](c10::intrusive_ptr<c10d::Backend> inner,
                       c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds timeout,
                       const std::string& group_name, const GlobalRanks& global_ranks, int strict,
                       const std::string& name, const py::object& connect,
                       const std::string& counted_as, std::optional<size_t> piggyback) {
             c10d::Backend::Options options(name, timeout);
             options.group_name = group_name;
             auto connect_part = connect_by(connect);
             const py::gil_scoped_release waits;
             return c10::make_intrusive<CheckedBackend>(std::move(inner), std::move(store), options,
                                                        global_ranks, strict, piggyback,
                                                        std::move(connect_part), counted_as);
           }),
           py::arg("inner"), py::arg("store"), py::arg("timeout"), py::arg("group_name"),
           py::arg("global_ranks"), py::arg("strict"), py::arg("name"),
           py::arg("connect") = py::none(), py::arg("counted_as") = "",
           py::arg("piggyback") = py::none())
      .def_property_readonly("inner", &CheckedBackend::inner_backend,
                             "The backend that does the work.");
  m.def("usual_piggyback", &usual_piggyback, py::arg("told"), py::arg("by_leaders"));
  m.attr("MOST_PIGGYBACK") = kMostData;
  m.attr("LITTLE_MESSAGE") = kLittleMessage;
  m.attr("MOST_LEADERS") = kMostLeaders;
  m.def("close_checked_groups", &CheckedBackend::close_all, py::arg("grace"),
        py::call_guard<py::gil_scoped_release>());
  m.def("end_service_of_checked_groups", &CheckedBackend::end_service, py::arg("grace"),
        py::call_guard<py::gil_scoped_release>());
}

}  // namespace c10d_ext
