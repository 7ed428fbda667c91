// How requests and calls are started and delivered.

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <utility>

#include "backends/shm/backend.h"
#include "backends/shm/live_group.h"
#include "backends/shm/operation.h"
#include "backends/shm/operation_builder.h"
#include "backends/shm/work.h"
#include "base/call_site.h"
#include "work/pending.h"
#include "work/snapshot.h"

namespace c10d_ext {

using Tensors = std::vector<at::Tensor>;

ShmBackend::OperationBuilder ShmBackend::builder() const {
  return {place_, timeout_};
}

ShmBackend::WorkPtr ShmBackend::launch(const Call& call, OperationPtr operation) {
  using Delivery = Call::Delivery;
  const auto in_place = [](const shm::Request& r) {
    return r.sources.size() == 1 && r.targets.size() == 1 && r.sources[0].size() == 1 &&
           r.targets[0].size() == 1 && r.sources[0][0].data == r.targets[0][0].data;
  };
  if (!in_place(operation->request)) {
    operation->separate();
  }
  if (C10_UNLIKELY(settings_.call_sites)) {
    operation->request.call_site = call_site();
  }
  if (C10_UNLIKELY(is_coalescing()) && call.delivery != Delivery::Op) {
    const std::lock_guard lock(coalescing_mutex_);
    operation->hold();
    operation->note_writes();
    operation->request.async = true;
    batch_.push_back(operation);
    return call.delivery == Delivery::Sync
               ? nullptr
               : c10::make_intrusive<ShmWork>(live_, std::move(operation), rank_, call.type);
  }
  if (call.delivery == Delivery::Async) {
    operation->note_writes();
  }
  live_->engine().submit(operation);
  switch (call.delivery) {
    case Delivery::Op:
      // That the ranks disagree is for the wait, however soon it is found out: they go on.
      if (operation->settled() && !operation->disagrees()) {
        operation->state().report();
        if (call.done != nullptr) {
          *call.done = {call.type, static_cast<int64_t>(operation->number()),
                        operation->state().milliseconds()};
        }
        OperationBuilder::recycle(std::move(operation));
        return {};
      }
      break;
    case Delivery::Sync:
      live_->wait(*operation, kNoTimeout);
      operation->state().report();
      OperationBuilder::recycle(std::move(operation));
      return {};
    case Delivery::Async:
      break;
  }
  return c10::make_intrusive<ShmWork>(live_, std::move(operation), rank_, call.type);
}

namespace {

// Whether the engine reads `source` at the address it has now, or it is written, too.
bool is_read_in_place(const at::Tensor& source, const at::Tensor& out) {
  return source.is_same(out) || (is_dense(source) && can_share(source)) ||
         source.storage().is_alias_of(out.storage());
}

// What its work says it is.
c10d::OpType type_of(const CollectiveRequest& request) {
  switch (request.type) {
    case OpType::AllReduce:
      return c10d::OpType::ALLREDUCE;
    case OpType::Reduce:
      return c10d::OpType::REDUCE;
    case OpType::Broadcast:
      return c10d::OpType::BROADCAST;
    case OpType::AllGather:
      return request.out_sizes.empty() ? c10d::OpType::_ALLGATHER_BASE : c10d::OpType::ALLGATHER;
    case OpType::ReduceScatter:
      return request.source_sizes.empty() ? c10d::OpType::_REDUCE_SCATTER_BASE
                                          : c10d::OpType::REDUCE_SCATTER;
    case OpType::AllToAll:
      return c10d::OpType::ALLTOALL_BASE;
    case OpType::Gather:
      return c10d::OpType::GATHER;
    case OpType::Scatter:
      return c10d::OpType::SCATTER;
    case OpType::Barrier:
      return c10d::OpType::BARRIER;
    case OpType::SparseAllReduce:
      return c10d::OpType::_ALLREDUCE_SPARSE;
    case OpType::Send:
    case OpType::Recv:
      break;
  }
  return c10d::OpType::UNKNOWN;
}

bool tell_when_settled(c10d::Work& work, std::function<void(std::exception_ptr)> over) {
  static_cast<ShmWork&>(work).operation().state().when_settled(std::move(over));
  return true;
}

Capabilities native_capabilities() {
  Capabilities can;
  can.methods =
      kMethodsOfC10d.with(Method::AllReduceCoalesced).with(Method::AllGatherIntoTensorCoalesced);
  can.futures = Capabilities::Futures::Always;
  can.reduces_avg = can.reduces_avg_to_one = true;
  can.reduces_low_precision = true;
  can.gathers_uneven = true;
  can.sums_in_rank_order = true;
  can.times_works = true;
  can.sends_any_tensor = true;
  return can;
}

}  // namespace

const Capabilities& ShmBackend::capabilities() const {
  static const Capabilities native = native_capabilities();
  return native;
}

ShmBackend::WorkPtr ShmBackend::post_message(const Message& message, const at::Tensor& /*wire*/,
                                             Start start) {
  return start(*this, static_cast<int>(message.peer));
}

// The engine is given the sources as it may read them until the end.
void ShmBackend::post(const Group& group, const CollectiveRequest& request) {
  at::TensorList sources = request.type == OpType::Barrier ? at::TensorList() : request.sources;
  const at::TensorList outs = request.outs;
  Tensors snapshots;
  for (size_t i = 0; i < sources.size(); ++i) {
    if (C10_UNLIKELY(!is_read_in_place(sources[i], outs[i]))) {
      if (snapshots.empty()) {
        snapshots = sources.vec();
      }
      snapshots[i] = snapshot_of(sources[i], outs);
    }
  }
  WorkInfo done;
  const WorkPtr work =
      start({request.op, type_of(request), Call::Delivery::Op, c10d::kUnsetTimeout, &done}, request,
            snapshots.empty() ? sources : at::TensorList(snapshots));
  if (!work) {
    note_over(outs.front(), done);
    return;
  }
  // What the engine reads by address is kept from now on: nobody else has run since.
  std::vector<std::shared_ptr<void>> kept;
  for (size_t i = 0; i < sources.size(); ++i) {
    const bool is_own = !snapshots.empty() && !snapshots[i].is_same(sources[i]);
    if (!is_own && !sources[i].storage().is_alias_of(outs[i].storage())) {
      kept.push_back(keep_values(sources[i]));
    }
  }
  Finish finish;
  if (!kept.empty()) {
    finish = [kept = std::move(kept)] {};
  }
  attach(request.op, group, outs, work, std::move(finish), &tell_when_settled);
}

// Who calls leaves the sources alone until the end, but for collectives that follow this one: they
// may move a source that has a snapshot, whose end is not this one's.
ShmBackend::WorkPtr ShmBackend::run(const MethodCall& call, const CollectiveRequest& request) {
  const at::TensorList sources = request.sources;
  if (call.async && C10_UNLIKELY(std::any_of(sources.begin(), sources.end(), may_move))) {
    settle_memory(request.outs);
    Tensors kept = sources.vec();
    std::transform(kept.begin(), kept.end(), kept.begin(), [&](const at::Tensor& source) {
      return may_move(source) ? snapshot_of(source, request.outs) : source;
    });
    return start(Call::of(call), request, kept);
  }
  return start(Call::of(call), request, sources);
}

ShmBackend::WorkPtr ShmBackend::start(const Call& call, const CollectiveRequest& request,
                                      at::TensorList sources) {
  settle_memory(request.outs);  // sources may be parts of them
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return launch(call, builder().of(call, request, sources));
}

ShmBackend::WorkPtr ShmBackend::run(const MethodCall& call, const Message& message) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Call mine = Call::of(call);
  return launch(mine, builder().of(mine, message));
}

// The failure of a barrier names all the ranks that are missing, whether asked for all or one.
void ShmBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool /*wait_all_ranks*/) {
  const Call call{"monitored_barrier", c10d::OpType::BARRIER, Call::Delivery::Sync, opts.timeout};
  launch(call, builder().barrier(call));
}

}  // namespace c10d_ext
