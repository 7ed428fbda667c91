// From requests and calls to operations of the engine.

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <utility>

#include "backends/shm/backend.h"
#include "backends/shm/live_group.h"
#include "backends/shm/operation.h"
#include "backends/shm/sparse_sum.h"
#include "backends/shm/work.h"
#include "base/call_site.h"
#include "base/dtype.h"
#include "base/sync_scope.h"
#include "work/pending.h"
#include "work/snapshot.h"

namespace c10d_ext {

using std::string_view;
using Milliseconds = std::chrono::milliseconds;
using Tensors = std::vector<at::Tensor>;

// The operation of this thread's last call that was complete on return.
ShmBackend::OperationPtr& ShmBackend::spare() {
  static thread_local OperationPtr instance;
  return instance;
}

void ShmBackend::recycle(OperationPtr operation) {
  if (operation.use_count() != 1) {
    return;
  }
  // After all that the thread that ended it did before it released its reference.
  std::atomic_thread_fence(std::memory_order_acquire);
  if (operation->is_renewable()) {
    operation->renew();
    spare() = std::move(operation);
  }
}

ShmBackend::OperationPtr ShmBackend::make(const Call& call, OpType type) const {
  const auto ranks = static_cast<size_t>(size_);
  size_t sources = 1;
  size_t targets = 1;
  switch (type) {
    case OpType::Barrier:
      sources = targets = 0;
      break;
    case OpType::AllGather:
      targets = ranks;
      break;
    case OpType::ReduceScatter:
      sources = ranks;
      break;
    case OpType::AllToAll:
      sources = targets = ranks;
      break;
    case OpType::Send:
      targets = 0;
      break;
    case OpType::Recv:
      sources = 0;
      break;
    case OpType::SparseAllReduce:
      targets = 0;  // made when it is known how large they are
      break;
    // The sides that a root has are filled in with the root.
    case OpType::Reduce:
    case OpType::Gather:
      targets = 0;
      break;
    case OpType::Broadcast:
    case OpType::Scatter:
      sources = 0;
      break;
    case OpType::AllReduce:
      break;
  }
  const Milliseconds timeout =
      call.timeout > Milliseconds(0) ? call.timeout : timeout_.load(std::memory_order_relaxed);
  OperationPtr operation = std::move(spare());
  if (!operation) {
    operation = std::make_shared<TensorOperation>();
  }
  operation->start(call.op, type, timeout, place_, sources, targets);
  operation->request.async = call.delivery == Call::Delivery::Async ||
                             (call.delivery == Call::Delivery::Op && !SyncScope::is_on());
  return operation;
}

ShmBackend::OperationPtr ShmBackend::make(const Call& call, OpType type, const Reduction& reduction,
                                          c10::ScalarType dtype) const {
  auto operation = make(call, type);
  shm::Request& request = operation->request;
  request.reduce_op = reduction.op;
  if (C10_UNLIKELY(reduction.factor.has_value())) {
    const c10::Scalar& factor = *reduction.factor;
    if (factor.isComplex()) {
      const auto value = factor.toComplexDouble();
      request.factor = {value.real(), value.imag()};
    } else {
      constexpr int64_t kExact = int64_t{1} << 53;
      C10D_EXT_CHECK_VALUE(
          factor.isFloatingPoint() || std::abs(factor.toLong()) <= kExact, call.op, place_,
          "an integer factor must be at most 2^53 on the shm backend, got ", factor);
      request.factor = {factor.toDouble(), 0};
    }
  }
  if (C10_UNLIKELY(dtype == c10::ScalarType::Float8_e8m0fnu)) {
    // A scale, which no kernel reduces.
    operation->travel_as(c10::kFloat);
    dtype = c10::kFloat;
  }
  request.dtype = dtype_of(dtype);
  return operation;
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
        recycle(std::move(operation));
        return {};
      }
      break;
    case Delivery::Sync:
      live_->wait(*operation, kNoTimeout);
      operation->state().report();
      recycle(std::move(operation));
      return {};
    case Delivery::Async:
      break;
  }
  return c10::make_intrusive<ShmWork>(live_, std::move(operation), rank_, call.type);
}

ShmBackend::WorkPtr ShmBackend::all_reduce(const Call& call, at::TensorList sources,
                                           at::TensorList outs, const Reduction& reduction) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto operation = make(call, OpType::AllReduce, reduction, outs.front().scalar_type());
  for (size_t i = 0; i < outs.size(); ++i) {
    if (sources[i].is_same(outs[i])) {
      operation->replace(0, outs[i]);
    } else {
      operation->read(0, sources[i]);
      operation->write(0, outs[i]);
    }
    operation->add_shape(outs[i]);
  }
  operation->add_members(outs);
  return launch(call, std::move(operation));
}

ShmBackend::WorkPtr ShmBackend::reduce_to(const Call& call, const at::Tensor& source,
                                          const at::Tensor& out, const Reduction& reduction,
                                          int64_t root) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto operation = make(call, OpType::Reduce, reduction, source.scalar_type());
  operation->request.root = static_cast<int>(root);
  operation->read(0, source);
  operation->add_shape(source);
  if (rank_ == root) {
    operation->request.targets.resize(1);
    operation->write(0, out);
  } else {
    operation->add_output(out);
  }
  return launch(call, std::move(operation));
}

ShmBackend::WorkPtr ShmBackend::broadcast_from(const Call& call, at::TensorList sources,
                                               at::TensorList outs, int64_t root) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto operation = make(call, OpType::Broadcast);
  operation->request.root = static_cast<int>(root);
  const bool sends = rank_ == root;
  const bool in_place =
      sends && std::equal(sources.begin(), sources.end(), outs.begin(), outs.end(),
                          [](const auto& s, const auto& o) { return s.is_same(o); });
  if (sends) {
    operation->request.sources.resize(1);
  }
  if (in_place) {
    operation->request.targets.clear();
  }
  operation->add_members(outs);
  for (size_t i = 0; i < outs.size(); ++i) {
    operation->set_dtype(outs[i]);
    operation->add_shape(outs[i]);
    if (sends) {
      operation->read(0, sources[i]);
    }
    if (in_place) {
      operation->add_output(outs[i]);
    } else {
      operation->write(0, outs[i]);
    }
  }
  return launch(call, std::move(operation));
}

// What has parts, which are not all the same: each is read and written where it is.
ShmBackend::WorkPtr ShmBackend::move(const Call& call, const CollectiveRequest& request,
                                     at::TensorList sources) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::TensorList outs = request.outs;
  const OpType type = request.type;
  auto operation = request.reduction != nullptr
                       ? make(call, type, *request.reduction, outs.front().scalar_type())
                       : make(call, type);
  shm::Request& moved = operation->request;
  const bool is_root = rank_ == request.root;
  moved.root = static_cast<int>(request.root);
  // What comes from all ranks, or goes to all of them, is divided; so is what the root has of all.
  const bool divides_sources =
      type == OpType::ReduceScatter || type == OpType::AllToAll || type == OpType::Scatter;
  const bool divides_outs =
      type == OpType::AllGather || type == OpType::AllToAll || type == OpType::Gather;
  const bool reads = type != OpType::Scatter || is_root;
  const bool writes = type != OpType::Gather || is_root;
  if (is_root && divides_sources) {
    moved.sources.resize(size_);
  }
  if (is_root && divides_outs) {
    moved.targets.resize(size_);
  }
  if (request.reduction == nullptr) {
    // Of what every rank has.
    for (const auto& t : type == OpType::Scatter ? outs : sources) {
      operation->set_dtype(t);
    }
  }
  if (reads) {
    operation->read_all(sources, divides_sources, request.source_parts, request.source_sizes);
  }
  if (writes) {
    operation->write_all(outs, divides_outs, request.out_parts, request.out_sizes);
  }
  // Exchanges are of rows, of which the ranks may have other numbers, as uneven parts are.
  if (type != OpType::AllToAll && request.source_sizes.empty() && request.out_sizes.empty()) {
    const bool tells_parts = type == OpType::AllGather && request.out_parts;
    const bool tells_sources = type == OpType::AllGather || type == OpType::Gather;
    for (const auto& t : tells_sources && !tells_parts ? sources : outs) {
      operation->add_shape(t);
    }
  }
  if (request.is_list) {
    operation->add_members(type == OpType::AllGather ? sources : outs);
  }
  return launch(call, std::move(operation));
}

ShmBackend::WorkPtr ShmBackend::all_reduce_sparse(const Call& call, const at::Tensor& tensor,
                                                  const Reduction& reduction) {
  auto operation = make(call, OpType::SparseAllReduce, reduction, tensor.scalar_type());
  operation->add_shape(tensor);
  operation->add_output(tensor);
  auto& request = operation->request;
  request.sparse_dims = static_cast<int>(tensor.sparse_dim());
  const auto sum = std::make_shared<SparseSum>(tensor, reduction.op);
  request.room = [sum](const std::vector<uint64_t>& bytes) { return sum->room(bytes); };
  operation->around([sum, &request] { request.sources = {sum->own()}; }, [sum] { sum->add_up(); });
  return launch(call, std::move(operation));
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

}  // namespace

const Capabilities& ShmBackend::capabilities() const {
  static const Capabilities native = [] {
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
  }();
  return native;
}

ShmBackend::WorkPtr ShmBackend::post_message(
    const Message& message, std::function<WorkPtr(c10d::Backend& backend, int peer)> start) {
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
      snapshots[i] = snapshot_of(sources[i]);
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
    std::transform(kept.begin(), kept.end(), kept.begin(), [](const at::Tensor& source) {
      return may_move(source) ? snapshot_of(source) : source;
    });
    return start(Call::of(call), request, kept);
  }
  return start(Call::of(call), request, sources);
}

ShmBackend::WorkPtr ShmBackend::start(const Call& call, const CollectiveRequest& request,
                                      at::TensorList sources) {
  const at::TensorList outs = request.outs;
  settle_memory(outs);  // sources may be parts of them
  switch (request.type) {
    case OpType::AllReduce:
      return all_reduce(call, sources, outs, *request.reduction);
    case OpType::Reduce:
      return reduce_to(call, sources[0], outs[0], *request.reduction, request.root);
    case OpType::Broadcast:
      return broadcast_from(call, sources, outs, request.root);
    case OpType::AllGather:
    case OpType::ReduceScatter:
    case OpType::AllToAll:
    case OpType::Gather:
    case OpType::Scatter:
      return move(call, request, sources);
    case OpType::Barrier:
      return launch(call, make(call, OpType::Barrier));
    case OpType::SparseAllReduce:
      return all_reduce_sparse(call, outs[0], *request.reduction);
    case OpType::Send:
    case OpType::Recv:
      break;
  }
  TORCH_INTERNAL_ASSERT(false, request.op, ": no request of this type is started");
}

ShmBackend::WorkPtr ShmBackend::run(const MethodCall& call, const Message& message) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Call mine = Call::of(call);
  auto operation = make(mine, message.sends ? OpType::Send : OpType::Recv);
  operation->request.peer = static_cast<int>(message.peer);
  operation->request.tag = static_cast<int>(message.tag);
  operation->set_dtype(message.tensor);
  if (message.sends) {
    operation->read(0, message.tensor);
  } else {
    operation->write(0, message.tensor);
  }
  return launch(mine, std::move(operation));
}

// The failure of a barrier names all the ranks that are missing, whether asked for all or one.
void ShmBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool /*wait_all_ranks*/) {
  const Call call{"monitored_barrier", c10d::OpType::BARRIER, Call::Delivery::Sync, opts.timeout};
  launch(call, make(call, OpType::Barrier));
}

}  // namespace c10d_ext
