#include "backends/shm/operation_builder.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <utility>

#include "backends/shm/operation.h"
#include "backends/shm/sparse_sum.h"
#include "base/sync_scope.h"

namespace c10d_ext {

using Milliseconds = std::chrono::milliseconds;

// The operation of this thread's last call that was complete on return.
ShmBackend::OperationPtr& ShmBackend::OperationBuilder::spare() {
  static thread_local OperationPtr instance;
  return instance;
}

void ShmBackend::OperationBuilder::recycle(OperationPtr operation) {
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

ShmBackend::OperationPtr ShmBackend::OperationBuilder::make(const Call& call, OpType type) const {
  const auto ranks = static_cast<size_t>(place_.size());
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

ShmBackend::OperationPtr ShmBackend::OperationBuilder::make(const Call& call, OpType type,
                                                            const Reduction& reduction,
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

ShmBackend::OperationPtr ShmBackend::OperationBuilder::of(const Call& call,
                                                          const CollectiveRequest& request,
                                                          at::TensorList sources) const {
  const at::TensorList outs = request.outs;
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
      return make(call, OpType::Barrier);
    case OpType::SparseAllReduce:
      return all_reduce_sparse(call, outs[0], *request.reduction);
    case OpType::Send:
    case OpType::Recv:
      break;
  }
  TORCH_INTERNAL_ASSERT(false, request.op, ": no request of this type is started");
}

ShmBackend::OperationPtr ShmBackend::OperationBuilder::of(const Call& call,
                                                          const Message& message) const {
  auto operation = make(call, message.sends ? OpType::Send : OpType::Recv);
  operation->request.peer = static_cast<int>(message.peer);
  operation->request.tag = static_cast<int>(message.tag);
  operation->set_dtype(message.tensor);
  if (message.sends) {
    operation->read(0, message.tensor);
  } else {
    operation->write(0, message.tensor);
  }
  return operation;
}

ShmBackend::OperationPtr ShmBackend::OperationBuilder::all_reduce(
    const Call& call, at::TensorList sources, at::TensorList outs,
    const Reduction& reduction) const {
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
  return operation;
}

ShmBackend::OperationPtr ShmBackend::OperationBuilder::reduce_to(const Call& call,
                                                                 const at::Tensor& source,
                                                                 const at::Tensor& out,
                                                                 const Reduction& reduction,
                                                                 int64_t root) const {
  auto operation = make(call, OpType::Reduce, reduction, source.scalar_type());
  operation->request.root = static_cast<int>(root);
  operation->read(0, source);
  operation->add_shape(source);
  if (place_.rank() == root) {
    operation->request.targets.resize(1);
    operation->write(0, out);
  } else {
    operation->add_output(out);
  }
  return operation;
}

ShmBackend::OperationPtr ShmBackend::OperationBuilder::broadcast_from(const Call& call,
                                                                      at::TensorList sources,
                                                                      at::TensorList outs,
                                                                      int64_t root) const {
  auto operation = make(call, OpType::Broadcast);
  operation->request.root = static_cast<int>(root);
  const bool sends = place_.rank() == root;
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
  return operation;
}

// What has parts, which are not all the same: each is read and written where it is.
ShmBackend::OperationPtr ShmBackend::OperationBuilder::move(const Call& call,
                                                            const CollectiveRequest& request,
                                                            at::TensorList sources) const {
  const at::TensorList outs = request.outs;
  const OpType type = request.type;
  auto operation = request.reduction != nullptr
                       ? make(call, type, *request.reduction, outs.front().scalar_type())
                       : make(call, type);
  shm::Request& moved = operation->request;
  const bool is_root = place_.rank() == request.root;
  moved.root = static_cast<int>(request.root);
  // What comes from all ranks, or goes to all of them, is divided; so is what the root has of all.
  const bool divides_sources =
      type == OpType::ReduceScatter || type == OpType::AllToAll || type == OpType::Scatter;
  const bool divides_outs =
      type == OpType::AllGather || type == OpType::AllToAll || type == OpType::Gather;
  const bool reads = type != OpType::Scatter || is_root;
  const bool writes = type != OpType::Gather || is_root;
  if (is_root && divides_sources) {
    moved.sources.resize(static_cast<size_t>(place_.size()));
  }
  if (is_root && divides_outs) {
    moved.targets.resize(static_cast<size_t>(place_.size()));
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
  return operation;
}

ShmBackend::OperationPtr ShmBackend::OperationBuilder::all_reduce_sparse(
    const Call& call, const at::Tensor& tensor, const Reduction& reduction) const {
  auto operation = make(call, OpType::SparseAllReduce, reduction, tensor.scalar_type());
  operation->add_shape(tensor);
  operation->add_output(tensor);
  auto& request = operation->request;
  request.sparse_dims = static_cast<int>(tensor.sparse_dim());
  const auto sum = std::make_shared<SparseSum>(tensor, reduction.op);
  request.room = [sum](const std::vector<uint64_t>& bytes) { return sum->room(bytes); };
  operation->around([sum, &request] { request.sources = {sum->own()}; }, [sum] { sum->add_up(); });
  return operation;
}

}  // namespace c10d_ext
