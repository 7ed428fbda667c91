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

WorkPtr InnerBackend::begin(c10d::OpType type, InnerCollective collective) {
  const auto work = begin_work(type, collective.op, collective.source);
  start(work, std::move(collective));
  return work;
}

WorkPtr InnerBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  return begin(c10d::OpType::BROADCAST, {.op = OpType::Broadcast,
                                         .source = tensors[0],
                                         .out = tensors[0],
                                         .root = static_cast<int>(opts.rootRank)});
}

WorkPtr InnerBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (tensors[0].is_sparse()) {
    return all_reduce_sparse(tensors[0], opts.timeout);
  }
  return begin(c10d::OpType::ALLREDUCE, {.op = OpType::AllReduce,
                                         .source = tensors[0],
                                         .out = tensors[0],
                                         .reduce_op = reduce_op_of(opts.reduceOp)});
}

WorkPtr InnerBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  return begin(c10d::OpType::REDUCE, {.op = OpType::Reduce,
                                      .source = tensors[0],
                                      .out = tensors[0],
                                      .reduce_op = reduce_op_of(opts.reduceOp),
                                      .root = static_cast<int>(opts.rootRank)});
}

WorkPtr InnerBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::AllgatherOptions& /*opts*/) {
  return begin(c10d::OpType::_ALLGATHER_BASE,
               {.op = OpType::AllGather, .source = input, .out = output});
}

WorkPtr InnerBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::ReduceScatterOptions& opts) {
  return begin(c10d::OpType::_REDUCE_SCATTER_BASE, {.op = OpType::ReduceScatter,
                                                    .source = input,
                                                    .out = output,
                                                    .reduce_op = reduce_op_of(opts.reduceOp)});
}

WorkPtr InnerBackend::alltoall_base(at::Tensor& output, at::Tensor& input, Sizes& output_splits,
                                    Sizes& input_splits, const c10d::AllToAllOptions& /*opts*/) {
  return begin(c10d::OpType::ALLTOALL_BASE,
               {.op = OpType::AllToAll,
                .source = input,
                .out = output,
                .sent = elements_of(input, input_splits, size_),
                .received = elements_of(output, output_splits, size_)});
}

WorkPtr InnerBackend::send(Tensors& tensors, int dst, int tag) {
  return start_message({tensors[0], /*sends=*/true, dst, tag});
}

WorkPtr InnerBackend::recv(Tensors& tensors, int src, int tag) {
  return start_message({tensors[0], /*sends=*/false, src, tag});
}

WorkPtr InnerBackend::barrier(const c10d::BarrierOptions& /*opts*/) {
  return begin(c10d::OpType::BARRIER, {.op = OpType::Barrier});
}

}  // namespace c10d_ext
