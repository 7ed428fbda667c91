// c10d's methods, as requests.

#include "backends/process_group/request_backend.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <cstdint>

namespace c10d_ext {

using std::string_view;
using WorkPtr = RequestBackend::WorkPtr;
using Tensors = std::vector<at::Tensor>;
using Request = CollectiveRequest;

namespace {

int64_t bytes_in(at::TensorList tensors) {
  int64_t count = 0;
  for (const auto& t : tensors) {
    count += static_cast<int64_t>(t.nbytes());
  }
  return count;
}

}  // namespace

WorkPtr RequestBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  constexpr string_view op = "broadcast";
  const at::Tensor& tensor = only(op, "tensor", tensors);
  check_root(op, opts.rootRank);
  if (rank_ == opts.rootRank) {
    check_tensor(op, "tensor", tensor);
  } else {
    check_written(op, "tensor", tensor);
  }
  return run(MethodCall::of(op, c10d::OpType::BROADCAST, opts),
             Request::broadcast(op, tensor, tensor, opts.rootRank));
}

WorkPtr RequestBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  constexpr string_view op = "all_reduce";
  const at::Tensor& tensor = only(op, "tensor", tensors);
  if (C10_UNLIKELY(tensor.defined() && tensor.layout() != c10::kStrided)) {
    return allreduce_sparse(tensors, opts);
  }
  check_written(op, "tensor", tensor);
  const auto reduction = reduction_of(op, opts.reduceOp, tensor.scalar_type());
  return run(MethodCall::of(op, c10d::OpType::ALLREDUCE, opts),
             Request::all_reduce(op, tensor, tensor, reduction));
}

WorkPtr RequestBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  constexpr string_view op = "all_reduce";
  const at::Tensor& tensor = only(op, "tensor", tensors);
  const auto reduction = check_sparse(op, tensor, opts.reduceOp);
  return run(MethodCall::of(op, c10d::OpType::_ALLREDUCE_SPARSE, opts),
             Request::all_reduce_sparse(op, tensor, reduction));
}

WorkPtr RequestBackend::allreduce_coalesced(Tensors& tensors,
                                            const c10d::AllreduceCoalescedOptions& opts) {
  constexpr string_view op = "all_reduce_coalesced";
  check_list(op, tensors);
  const auto reduction = reduction_of(op, opts.reduceOp, tensors[0].scalar_type());
  return run(MethodCall::of(op, c10d::OpType::ALLREDUCE_COALESCED, opts),
             Request::all_reduce_coalesced(op, tensors, tensors, reduction));
}

WorkPtr RequestBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  constexpr string_view op = "reduce";
  const at::Tensor& tensor = only(op, "tensor", tensors);
  check_root(op, opts.rootRank);
  check_written(op, "tensor", tensor);
  const auto reduction = reduction_of(op, opts.reduceOp, tensor.scalar_type());
  return run(MethodCall::of(op, c10d::OpType::REDUCE, opts),
             Request::reduce(op, tensor, tensor, reduction, opts.rootRank));
}

WorkPtr RequestBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                  const c10d::AllgatherOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "all_gather";
  const at::Tensor& input = only(op, "input", inputs);
  const Tensors& parts = only_list(op, "outputs", outputs);
  check_tensor(op, "input", input);
  check_parts(op, "outputs", parts, input, "input");
  check_all_written(op, parts);
  return run(MethodCall::of(op, c10d::OpType::ALLGATHER, opts),
             Request::all_gather_parts(op, inputs, parts));
}

WorkPtr RequestBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                        const c10d::AllgatherOptions& opts) {
  constexpr string_view op = "all_gather_into_tensor";
  check_tensor(op, "input", input);
  check_written(op, "output", output);
  check_whole(op, "output", output, "input", input);
  return run(MethodCall::of(op, c10d::OpType::_ALLGATHER_BASE, opts),
             Request::all_gather(op, input, output));
}

WorkPtr RequestBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                            const c10d::AllgatherOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "all_gather_coalesced";
  check_lists(op, outputs, inputs);
  Tensors parts;
  for (const auto& list : outputs) {
    parts.insert(parts.end(), list.begin(), list.end());
  }
  C10D_EXT_CHECK_VALUE(bytes_in(inputs) == bytes_in(outputs[rank_]), op, place_, "outputs[", rank_,
                       "], this rank's, must have as many elements as the inputs, got others");
  auto request = Request::all_gather_parts(op, inputs, parts);
  request.is_list = true;
  return run(MethodCall::of(op, c10d::OpType::ALLGATHER_COALESCED, opts), request);
}

WorkPtr RequestBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                        const c10d::AllgatherOptions& opts) {
  constexpr string_view op = "all_gather_into_tensor_coalesced";
  check_pairs(op, outputs, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_whole(op, "each output", outputs[i], "its input", inputs[i]);
  }
  return run(MethodCall::of(op, c10d::OpType::ALLGATHER_COALESCED, opts),
             Request::all_gather_coalesced(op, inputs, outputs));
}

WorkPtr RequestBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                               const c10d::GatherOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "gather";
  const at::Tensor& input = only(op, "input", inputs);
  check_root(op, opts.rootRank);
  check_tensor(op, "input", input);
  at::TensorList parts;
  if (rank_ == opts.rootRank) {
    const Tensors& list = only_list(op, "outputs", outputs);
    check_parts(op, "outputs", list, input, "input");
    check_all_written(op, list);
    parts = list;
  } else {
    check_no_lists(op, "outputs", outputs, opts.rootRank);
  }
  return run(MethodCall::of(op, c10d::OpType::GATHER, opts),
             Request::gather_parts(op, inputs, parts, opts.rootRank));
}

WorkPtr RequestBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                const c10d::ScatterOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "scatter";
  const at::Tensor& output = only(op, "output", outputs);
  check_root(op, opts.rootRank);
  check_written(op, "output", output);
  at::TensorList parts;
  if (rank_ == opts.rootRank) {
    const Tensors& list = only_list(op, "inputs", inputs);
    check_parts(op, "inputs", list, output, "output");
    parts = list;
  } else {
    check_no_lists(op, "inputs", inputs, opts.rootRank);
  }
  return run(MethodCall::of(op, c10d::OpType::SCATTER, opts),
             Request::scatter_parts(op, parts, outputs, opts.rootRank));
}

WorkPtr RequestBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                       const c10d::ReduceScatterOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "reduce_scatter";
  const at::Tensor& output = only(op, "output", outputs);
  const Tensors& parts = only_list(op, "inputs", inputs);
  check_written(op, "output", output);
  check_parts(op, "inputs", parts, output, "output");
  const auto reduction = reduction_of(op, opts.reduceOp, output.scalar_type());
  return run(MethodCall::of(op, c10d::OpType::REDUCE_SCATTER, opts),
             Request::reduce_scatter_parts(op, parts, outputs, reduction));
}

WorkPtr RequestBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                             const c10d::ReduceScatterOptions& opts) {
  constexpr string_view op = "reduce_scatter_tensor";
  check_tensor(op, "input", input);
  check_written(op, "output", output);
  check_whole(op, "input", input, "output", output);
  const auto reduction = reduction_of(op, opts.reduceOp, output.scalar_type());
  return run(MethodCall::of(op, c10d::OpType::_REDUCE_SCATTER_BASE, opts),
             Request::reduce_scatter(op, input, output, reduction));
}

WorkPtr RequestBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                        const c10d::ReduceScatterOptions& opts) {
  constexpr string_view op = "reduce_scatter_tensor_coalesced";
  check_pairs(op, outputs, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_whole(op, "each input", inputs[i], "its output", outputs[i]);
  }
  check_list(op, outputs);
  const auto reduction = reduction_of(op, opts.reduceOp, outputs[0].scalar_type());
  return run(MethodCall::of(op, c10d::OpType::REDUCE_SCATTER, opts),
             Request::reduce_scatter_coalesced(op, inputs, outputs, reduction));
}

WorkPtr RequestBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                      std::vector<int64_t>& output_splits,
                                      std::vector<int64_t>& input_splits,
                                      const c10d::AllToAllOptions& opts) {
  constexpr string_view op = "all_to_all_single";
  check_tensor(op, "input", input);
  check_written(op, "output", output);
  C10D_EXT_CHECK_VALUE(output.scalar_type() == input.scalar_type(), op, place_,
                       "output must have input's dtype, ", input.scalar_type(), ", got ",
                       output.scalar_type());
  return run(MethodCall::of(op, c10d::OpType::ALLTOALL_BASE, opts),
             Request::all_to_all_elements(op, input, output,
                                          elements_of(op, "output", output, output_splits),
                                          elements_of(op, "input", input, input_splits)));
}

WorkPtr RequestBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                 const c10d::AllToAllOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "all_to_all";
  const auto ranks = static_cast<size_t>(size_);
  C10D_EXT_CHECK_VALUE(outputs.size() == ranks && inputs.size() == ranks, op, place_,
                       "inputs and outputs must be one tensor for each of the ", size_,
                       " ranks, got ", inputs.size(), " inputs and ", outputs.size(), " outputs");
  for (const auto& input : inputs) {
    check_tensor(op, "each input", input);
  }
  check_all_written(op, outputs);
  C10D_EXT_CHECK_VALUE(inputs[rank_].nbytes() == outputs[rank_].nbytes(), op, place_, "outputs[",
                       rank_, "], which inputs[", rank_, "] goes to, must have its size, ",
                       inputs[rank_].sizes(), ", got ", outputs[rank_].sizes());
  return run(MethodCall::of(op, c10d::OpType::ALLTOALL, opts),
             Request::all_to_all_parts(op, inputs, outputs));
}

WorkPtr RequestBackend::send(Tensors& tensors, int dst, int tag) {
  constexpr string_view op = "send";
  const at::Tensor& tensor = only(op, "tensor", tensors);
  check_tensor(op, "tensor", tensor);
  check_peer(op, "destination", dst);
  return run({op, c10d::OpType::SEND, true, c10d::kUnsetTimeout},
             Message{tensor, /*sends=*/true, dst, tag});
}

WorkPtr RequestBackend::recv(Tensors& tensors, int src, int tag) {
  constexpr string_view op = "recv";
  check_peer(op, "source", src);
  const at::Tensor& tensor = only(op, "tensor", tensors);
  check_written(op, "tensor", tensor);
  return run({op, c10d::OpType::RECV, true, c10d::kUnsetTimeout},
             Message{tensor, /*sends=*/false, src, tag});
}

WorkPtr RequestBackend::recvAnysource(Tensors& tensors, int tag) {
  constexpr string_view op = "recv";
  const at::Tensor& tensor = only(op, "tensor", tensors);
  check_written(op, "tensor", tensor);
  return run({op, c10d::OpType::RECVANYSOURCE, true, c10d::kUnsetTimeout},
             Message{tensor, /*sends=*/false, kAnySource, tag});
}

WorkPtr RequestBackend::barrier(const c10d::BarrierOptions& opts) {
  const auto call = MethodCall::of("barrier", c10d::OpType::BARRIER, opts);
  const at::Tensor nothing = at::empty({0}, at::kByte);
  return run(call, Request::barrier(call.op, nothing, nothing));
}

void RequestBackend::startCoalescing() {
  const std::lock_guard lock(coalescing_mutex_);
  C10D_EXT_CHECK_VALUE(!is_coalescing_, "start_coalescing", place_,
                       "coalescing blocks must not be nested, got a second one");
  is_coalescing_ = true;
}

void RequestBackend::end_block() {
  C10D_EXT_CHECK_VALUE(is_coalescing_, "end_coalescing", place_,
                       "a coalescing block must be open, got none");
  is_coalescing_ = false;
}

}  // namespace c10d_ext
