// c10d's methods of what moves the data of our backends.

#include "backends/process_group/inner_backend.h"

#include <utility>

#include "backends/process_group/argument_checks.h"

namespace c10d_ext {

using WorkPtr = InnerBackend::WorkPtr;
using Tensors = std::vector<at::Tensor>;
using Sizes = std::vector<int64_t>;

namespace {

// Elements of `t` for each of `ranks`, of as many rows; of equal parts where `rows` is empty.
Sizes elements_of(const at::Tensor& t, const Sizes& rows, int ranks) {
  return rows.empty() ? Sizes(static_cast<size_t>(ranks), t.numel() / ranks)
                      : c10d_ext::elements_of(rows, t);
}

}  // namespace

InnerBackend::InnerBackend(int rank, int size, const std::string& group_name, std::string title)
    : c10d::Backend(rank, size), group_({}, group_name, rank, size), title_(std::move(title)) {}

const Capabilities& InnerBackend::capabilities() const {
  static const Capabilities can = [] {
    Capabilities methods_above;
    methods_above.methods = {Method::AllReduce,
                             Method::Reduce,
                             Method::Broadcast,
                             Method::AllGatherIntoTensor,
                             Method::AllToAllSingle,
                             Method::ReduceScatterTensor,
                             Method::Barrier,
                             Method::Send,
                             Method::Recv};
    methods_above.futures = Capabilities::Futures::Always;
    methods_above.keeps_inputs = true;
    return methods_above;
  }();
  return can;
}

InnerBackend::InnerWork InnerBackend::begin_work(c10d::OpType type, OpType op,
                                                 const at::Tensor& input) const {
  auto span = ProfilerSpan::open(title_, name_of(op));
  if (span && input.defined()) {
    span->add_input(input);
  }
  return make_work(type, name_of(op), std::move(span));
}

InnerBackend::InnerWork InnerBackend::make_work(c10d::OpType type, std::string_view op,
                                                std::unique_ptr<ProfilerSpan> span) const {
  return c10::make_intrusive<SignalledWork>(rank_, type, op, std::move(span));
}

WorkPtr InnerBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const auto work = begin_work(c10d::OpType::BROADCAST, OpType::Broadcast, tensors[0]);
  start_broadcast(work, tensors[0], static_cast<int>(opts.rootRank));
  return work;
}

WorkPtr InnerBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (tensors[0].is_sparse()) {
    return all_reduce_sparse(tensors[0], opts.timeout);
  }
  const auto work = begin_work(c10d::OpType::ALLREDUCE, OpType::AllReduce, tensors[0]);
  start_all_reduce(work, tensors[0], reduce_op_of(opts.reduceOp));
  return work;
}

WorkPtr InnerBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const auto work = begin_work(c10d::OpType::REDUCE, OpType::Reduce, tensors[0]);
  start_reduce(work, tensors[0], reduce_op_of(opts.reduceOp), static_cast<int>(opts.rootRank));
  return work;
}

WorkPtr InnerBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::AllgatherOptions& /*opts*/) {
  const auto work = begin_work(c10d::OpType::_ALLGATHER_BASE, OpType::AllGather, input);
  start_all_gather(work, input, output);
  return work;
}

WorkPtr InnerBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::ReduceScatterOptions& opts) {
  const auto work = begin_work(c10d::OpType::_REDUCE_SCATTER_BASE, OpType::ReduceScatter, input);
  start_reduce_scatter(work, input, output, reduce_op_of(opts.reduceOp));
  return work;
}

WorkPtr InnerBackend::alltoall_base(at::Tensor& output, at::Tensor& input, Sizes& output_splits,
                                    Sizes& input_splits, const c10d::AllToAllOptions& /*opts*/) {
  const auto work = begin_work(c10d::OpType::ALLTOALL_BASE, OpType::AllToAll, input);
  start_all_to_all(work, input, output, elements_of(input, input_splits, size_),
                   elements_of(output, output_splits, size_));
  return work;
}

WorkPtr InnerBackend::send(Tensors& tensors, int dst, int tag) {
  return start_message({tensors[0], /*sends=*/true, dst, tag});
}

WorkPtr InnerBackend::recv(Tensors& tensors, int src, int tag) {
  return start_message({tensors[0], /*sends=*/false, src, tag});
}

WorkPtr InnerBackend::barrier(const c10d::BarrierOptions& /*opts*/) {
  const auto work = begin_work(c10d::OpType::BARRIER, OpType::Barrier, {});
  start_barrier(work);
  return work;
}

}  // namespace c10d_ext
