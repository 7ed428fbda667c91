// c10d's methods, as operations of the engine.

#include <ATen/core/LegacyTypeDispatch.h>

#include <utility>

#include "backends/shm/backend.h"
#include "backends/shm/live_group.h"
#include "backends/shm/operation.h"

namespace c10d_ext {

using std::string_view;
using Milliseconds = std::chrono::milliseconds;
using Tensors = std::vector<at::Tensor>;

ShmBackend::WorkPtr ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  constexpr string_view op = "broadcast";
  const at::Tensor& tensor = only(op, "tensor", tensors);
  check_root(op, opts.rootRank);
  if (rank_ == opts.rootRank) {
    check_tensor(op, "tensor", tensor);
  } else {
    check_written(op, "tensor", tensor);
  }
  return broadcast_from(Call::of(op, c10d::OpType::BROADCAST, opts), tensors, tensors,
                        opts.rootRank);
}

ShmBackend::WorkPtr ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  constexpr string_view op = "all_reduce";
  const at::Tensor& tensor = only(op, "tensor", tensors);
  if (C10_UNLIKELY(tensor.defined() && tensor.layout() != c10::kStrided)) {
    return allreduce_sparse(tensors, opts);
  }
  check_written(op, "tensor", tensor);
  return all_reduce(Call::of(op, c10d::OpType::ALLREDUCE, opts), tensors, tensors,
                    reduction_of(op, opts.reduceOp, tensor.scalar_type()));
}

ShmBackend::WorkPtr ShmBackend::allreduce_sparse(Tensors& tensors,
                                                 const c10d::AllreduceOptions& opts) {
  constexpr string_view op = "all_reduce";
  const at::Tensor& tensor = only(op, "tensor", tensors);
  return all_reduce_sparse(Call::of(op, c10d::OpType::_ALLREDUCE_SPARSE, opts), tensor,
                           check_sparse(op, tensor, opts.reduceOp));
}

ShmBackend::WorkPtr ShmBackend::allreduce_coalesced(Tensors& tensors,
                                                    const c10d::AllreduceCoalescedOptions& opts) {
  constexpr string_view op = "all_reduce_coalesced";
  check_list(op, tensors);
  return all_reduce(Call::of(op, c10d::OpType::ALLREDUCE_COALESCED, opts), tensors, tensors,
                    reduction_of(op, opts.reduceOp, tensors[0].scalar_type()));
}

ShmBackend::WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  constexpr string_view op = "reduce";
  const at::Tensor& tensor = only(op, "tensor", tensors);
  check_root(op, opts.rootRank);
  check_written(op, "tensor", tensor);
  return reduce_to(Call::of(op, c10d::OpType::REDUCE, opts), tensor, tensor,
                   reduction_of(op, opts.reduceOp, tensor.scalar_type()), opts.rootRank);
}

ShmBackend::WorkPtr ShmBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "all_gather";
  const at::Tensor& input = only(op, "input", inputs);
  const Tensors& parts = only_list(op, "outputs", outputs);
  check_tensor(op, "input", input);
  check_parts(op, "outputs", parts, input, "input");
  check_all_written(op, parts);
  const auto call = Call::of(op, c10d::OpType::ALLGATHER, opts);
  auto operation = make(call, OpType::AllGather);
  operation->set_dtype(input);
  operation->read(0, input);
  for (int rank = 0; rank < size_; ++rank) {
    operation->write(rank, parts[rank]);
    operation->add_shape(parts[rank]);
  }
  return launch(call, std::move(operation));
}

ShmBackend::WorkPtr ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& opts) {
  constexpr string_view op = "all_gather_into_tensor";
  check_tensor(op, "input", input);
  check_written(op, "output", output);
  check_whole(op, "output", output, "input", input);
  return all_gather(Call::of(op, c10d::OpType::_ALLGATHER_BASE, opts), input, output);
}

ShmBackend::WorkPtr ShmBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "all_gather_coalesced";
  check_lists(op, outputs, inputs);
  const auto call = Call::of(op, c10d::OpType::ALLGATHER_COALESCED, opts);
  auto operation = make(call, OpType::AllGather);
  for (const auto& input : inputs) {
    operation->set_dtype(input);
    operation->read(0, input);
  }
  for (int rank = 0; rank < size_; ++rank) {
    for (const auto& output : outputs[rank]) {
      operation->write(rank, output);
      operation->add_shape(output);
    }
  }
  operation->add_members(inputs);
  C10D_EXT_CHECK_VALUE(shm::bytes_of(operation->request.sources[0]) ==
                           shm::bytes_of(operation->request.targets[rank_]),
                       op, place_, "outputs[", rank_,
                       "], this rank's, must have as many elements as the inputs, got others");
  return launch(call, std::move(operation));
}

ShmBackend::WorkPtr ShmBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  constexpr string_view op = "all_gather_into_tensor_coalesced";
  check_pairs(op, outputs, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_whole(op, "each output", outputs[i], "its input", inputs[i]);
  }
  return all_gather(Call::of(op, c10d::OpType::ALLGATHER_COALESCED, opts), inputs, outputs);
}

ShmBackend::WorkPtr ShmBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "gather";
  const at::Tensor& input = only(op, "input", inputs);
  check_root(op, opts.rootRank);
  check_tensor(op, "input", input);
  const auto call = Call::of(op, c10d::OpType::GATHER, opts);
  auto operation = make(call, OpType::Gather);
  operation->request.root = static_cast<int>(opts.rootRank);
  operation->set_dtype(input);
  operation->read(0, input);
  if (rank_ == opts.rootRank) {
    const Tensors& parts = only_list(op, "outputs", outputs);
    check_parts(op, "outputs", parts, input, "input");
    check_all_written(op, parts);
    operation->request.targets.resize(size_);
    for (int rank = 0; rank < size_; ++rank) {
      operation->write(rank, parts[rank]);
    }
  } else {
    check_no_lists(op, "outputs", outputs, opts.rootRank);
  }
  return launch(call, std::move(operation));
}

ShmBackend::WorkPtr ShmBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                        const c10d::ScatterOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "scatter";
  const at::Tensor& output = only(op, "output", outputs);
  check_root(op, opts.rootRank);
  check_written(op, "output", output);
  const auto call = Call::of(op, c10d::OpType::SCATTER, opts);
  auto operation = make(call, OpType::Scatter);
  operation->request.root = static_cast<int>(opts.rootRank);
  operation->set_dtype(output);
  if (rank_ == opts.rootRank) {
    const Tensors& parts = only_list(op, "inputs", inputs);
    check_parts(op, "inputs", parts, output, "output");
    operation->request.sources.resize(size_);
    for (int rank = 0; rank < size_; ++rank) {
      operation->read(rank, parts[rank]);
    }
  } else {
    check_no_lists(op, "inputs", inputs, opts.rootRank);
  }
  operation->write(0, output);
  return launch(call, std::move(operation));
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                               const c10d::ReduceScatterOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "reduce_scatter";
  const at::Tensor& output = only(op, "output", outputs);
  const Tensors& parts = only_list(op, "inputs", inputs);
  check_written(op, "output", output);
  check_parts(op, "inputs", parts, output, "output");
  const auto dtype = output.scalar_type();
  const auto call = Call::of(op, c10d::OpType::REDUCE_SCATTER, opts);
  auto operation = make(call, OpType::ReduceScatter, reduction_of(op, opts.reduceOp, dtype), dtype);
  for (int rank = 0; rank < size_; ++rank) {
    operation->read(rank, parts[rank]);
    operation->add_shape(parts[rank]);
  }
  operation->write(0, output);
  return launch(call, std::move(operation));
}

ShmBackend::WorkPtr ShmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& opts) {
  constexpr string_view op = "reduce_scatter_tensor";
  check_tensor(op, "input", input);
  check_written(op, "output", output);
  check_whole(op, "input", input, "output", output);
  return scatter_reduced(Call::of(op, c10d::OpType::_REDUCE_SCATTER_BASE, opts), input, output,
                         reduction_of(op, opts.reduceOp, output.scalar_type()));
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  constexpr string_view op = "reduce_scatter_tensor_coalesced";
  check_pairs(op, outputs, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_whole(op, "each input", inputs[i], "its output", outputs[i]);
    C10D_EXT_CHECK_VALUE(outputs[i].scalar_type() == outputs[0].scalar_type(), op, place_,
                         "tensors must have one dtype, got ", outputs[0].scalar_type(), " and ",
                         outputs[i].scalar_type());
  }
  return scatter_reduced(Call::of(op, c10d::OpType::REDUCE_SCATTER, opts), inputs, outputs,
                         reduction_of(op, opts.reduceOp, outputs[0].scalar_type()));
}

ShmBackend::WorkPtr ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<int64_t>& output_splits,
                                              std::vector<int64_t>& input_splits,
                                              const c10d::AllToAllOptions& opts) {
  constexpr string_view op = "all_to_all_single";
  check_tensor(op, "input", input);
  check_written(op, "output", output);
  C10D_EXT_CHECK_VALUE(output.scalar_type() == input.scalar_type(), op, place_,
                       "output must have input's dtype, ", input.scalar_type(), ", got ",
                       output.scalar_type());
  return exchange(Call::of(op, c10d::OpType::ALLTOALL_BASE, opts), input, output,
                  elements_of(op, "input", input, input_splits),
                  elements_of(op, "output", output, output_splits));
}

ShmBackend::WorkPtr ShmBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                         const c10d::AllToAllOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "all_to_all";
  const auto ranks = static_cast<size_t>(size_);
  C10D_EXT_CHECK_VALUE(outputs.size() == ranks && inputs.size() == ranks, op, place_,
                       "inputs and outputs must be one tensor for each of the ", size_,
                       " ranks, got ", inputs.size(), " inputs and ", outputs.size(), " outputs");
  check_all_written(op, outputs);
  const auto call = Call::of(op, c10d::OpType::ALLTOALL, opts);
  auto operation = make(call, OpType::AllToAll);
  for (size_t rank = 0; rank < ranks; ++rank) {
    check_tensor(op, "each input", inputs[rank]);
    operation->set_dtype(inputs[rank]);
    operation->read(rank, inputs[rank]);
    operation->write(rank, outputs[rank]);
  }
  C10D_EXT_CHECK_VALUE(inputs[rank_].nbytes() == outputs[rank_].nbytes(), op, place_, "outputs[",
                       rank_, "], which inputs[", rank_, "] goes to, must have its size, ",
                       inputs[rank_].sizes(), ", got ", outputs[rank_].sizes());
  return launch(call, std::move(operation));
}

ShmBackend::WorkPtr ShmBackend::send(Tensors& tensors, int dst, int tag) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "send";
  const at::Tensor& tensor = only(op, "tensor", tensors);
  check_tensor(op, "tensor", tensor);
  check_peer(op, "destination", dst);
  const Call call{op, c10d::OpType::SEND, Call::Delivery::Async};
  auto operation = make(call, OpType::Send);
  operation->request.peer = dst;
  operation->request.tag = tag;
  operation->set_dtype(tensor);
  operation->read(0, tensor);
  return launch(call, std::move(operation));
}

ShmBackend::WorkPtr ShmBackend::receive(string_view op, c10d::OpType type, Tensors& tensors,
                                        int src, int tag) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor& tensor = only(op, "tensor", tensors);
  check_written(op, "tensor", tensor);
  const Call call{op, type, Call::Delivery::Async};
  auto operation = make(call, OpType::Recv);
  operation->request.peer = src;
  operation->request.tag = tag;
  operation->set_dtype(tensor);
  operation->write(0, tensor);
  return launch(call, std::move(operation));
}

ShmBackend::WorkPtr ShmBackend::recv(Tensors& tensors, int src, int tag) {
  constexpr string_view op = "recv";
  check_peer(op, "source", src);
  return receive(op, c10d::OpType::RECV, tensors, src, tag);
}

ShmBackend::WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return receive("recv", c10d::OpType::RECVANYSOURCE, tensors, -1, tag);
}

ShmBackend::WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& opts) {
  const auto call = Call::of("barrier", c10d::OpType::BARRIER, opts);
  return launch(call, make(call, OpType::Barrier));
}

// The failure of a barrier names all the ranks that are missing, whether asked for all or one.
void ShmBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool /*wait_all_ranks*/) {
  const Call call{"monitored_barrier", c10d::OpType::BARRIER, Call::Delivery::Sync, opts.timeout};
  launch(call, make(call, OpType::Barrier));
}

}  // namespace c10d_ext
