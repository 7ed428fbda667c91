// c10d's methods, checked and as requests to the inner backend.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_to_copy.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <numeric>
#include <sstream>
#include <utility>

#include "backends/checked/backend.h"
#include "base/memory.h"
#include "base/sparse.h"
#include "base/timeouts.h"

namespace c10d_ext {

namespace {

using std::string_view;
using Tensors = std::vector<at::Tensor>;
using Sizes = std::vector<int64_t>;

at::Tensor empty_bytes(int64_t count) {
  return at::empty({count}, at::kByte);
}

int64_t sum_of(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

// Bytes of each tensor.
Sizes sizes_of(const Tensors& tensors) {
  Sizes sizes;
  for (const auto& t : tensors) {
    sizes.push_back(static_cast<int64_t>(t.nbytes()));
  }
  return sizes;
}

void put(const at::Tensor& bytes, const at::Tensor& out) {
  if (is_dense(out)) {
    bytes_of(out).copy_(bytes);
    return;
  }
  // The bytes may lie at an odd address for the dtype.
  const at::Tensor values = at::empty(out.sizes(), out.options());
  bytes_of(values).copy_(bytes);
  copy_values(out, values);
}

Finish unpack_later(const at::Tensor& bytes, const Tensors& outs) {
  return [bytes, outs = aliases_of(outs)] {
    int64_t offset = 0;
    for (const auto& out : outs) {
      const auto count = static_cast<int64_t>(out.nbytes());
      put(span_of(bytes, offset, count), out);
      offset += count;
    }
  };
}

// Elements of each tensor.
Sizes counts_of(const Tensors& tensors) {
  Sizes counts;
  for (const auto& t : tensors) {
    counts.push_back(t.numel());
  }
  return counts;
}

// A copy of a sparse tensor whose values gloo gathers. A complex value is two real ones there.
at::Tensor to_wire(const at::Tensor& tensor) {
  const at::Tensor sparse = added_up(tensor);
  const auto dtype = sum_dtype(sparse.scalar_type());
  if (sparse.is_complex()) {
    auto sizes = sparse.sizes().vec();
    sizes.push_back(2);
    return at::_sparse_coo_tensor_unsafe(sparse._indices().clone(),
                                         at::view_as_real(at::_to_copy(sparse._values(), dtype)),
                                         sizes)
        ._coalesced_(true);
  }
  return at::_to_copy(sparse, c10::isFloatingType(dtype) ? dtype : c10::kLong);
}

// What comes of it, as values of `like`.
at::Tensor from_wire(const at::Tensor& sparse, const at::Tensor& like) {
  if (!like.is_complex()) {
    return sparse.to(like.scalar_type());
  }
  const at::Tensor values = at::view_as_complex(sparse._values().contiguous());
  return at::_sparse_coo_tensor_unsafe(sparse._indices(), values.to(like.scalar_type()),
                                       like.sizes())
      ._coalesced_(sparse.is_coalesced());
}

}  // namespace

// The values of tensors of any dtypes, one after the other, in memory of their own.
CheckedBackend::Source CheckedBackend::packed(const Tensors& tensors) {
  const at::Tensor bytes = empty_bytes(sum_of(sizes_of(tensors)));
  return {bytes, [bytes, tensors = aliases_of(tensors)] {
            int64_t offset = 0;
            for (const auto& t : tensors) {
              const auto count = static_cast<int64_t>(t.nbytes());
              span_of(bytes, offset, count).copy_(bytes_of(dense(t)));
              offset += count;
            }
          }};
}

CheckedBackend::Source CheckedBackend::bytes_in(const at::Tensor& tensor) {
  return is_dense(tensor) ? Source{bytes_of(tensor), {}} : packed({tensor});
}

// The values of `source` in memory that nobody writes while they travel to `out`.
CheckedBackend::Source CheckedBackend::apart(const at::Tensor& source, const at::Tensor& out) {
  if (is_dense(source) && !source.is_alias_of(out)) {
    return {source, {}};
  }
  const at::Tensor values = at::empty(source.sizes(), source.options());
  return {values, [values, source = alias_of(source)] { copy_values(values, source); }};
}

CheckedBackend::WorkPtr CheckedBackend::all_gather_bytes(const Call& call, const Source& own,
                                                         Sizes sizes, const Tensors& outputs) {
  const at::Tensor all = empty_bytes(sum_of(sizes));
  // All ranks have the same sizes, and so start the same.
  const bool even = std::equal(sizes.begin() + 1, sizes.end(), sizes.begin());
  return run(call, outputs, {own.fill, unpack_later(all, outputs)},
             even ? CollectiveRequest::all_gather(call.op, own.values, all)
                  : CollectiveRequest::all_gather_uneven(call.op, own.values, all, sizes));
}

CheckedBackend::WorkPtr CheckedBackend::exchange_bytes(const Call& call, const Source& source,
                                                       const Tensors& outputs, const Sizes& in,
                                                       const Sizes& out) {
  const at::Tensor received = empty_bytes(sum_of(out));
  return run(call, outputs, {source.fill, unpack_later(received, outputs)},
             CollectiveRequest::all_to_all(call.op, source.values, received, out, in));
}

CheckedBackend::WorkPtr CheckedBackend::broadcast(Tensors& tensors,
                                                  const c10d::BroadcastOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "broadcast";
  const at::Tensor& tensor = only(op, "tensor", tensors);
  check_root(op, opts.rootRank);
  Source buffer{tensor, {}};
  if (rank_ == opts.rootRank) {
    check_tensor(op, "tensor", tensor);
    if (!is_dense(tensor)) {
      buffer = apart(tensor, tensor);  // its elements may share a place
    }
  } else {
    check_written(op, "tensor", tensor);
  }
  return run(
      Call::of(op, c10d::OpType::BROADCAST, opts,
               fingerprint_of(OpType::Broadcast, tensor, tensor.numel()).rooted_at(opts.rootRank)),
      tensors, {buffer.fill, {}},
      CollectiveRequest::broadcast(op, buffer.values, buffer.values, opts.rootRank));
}

CheckedBackend::WorkPtr CheckedBackend::allreduce(Tensors& tensors,
                                                  const c10d::AllreduceOptions& opts) {
  constexpr string_view op = "all_reduce";
  const at::Tensor& tensor = only(op, "tensor", tensors);
  if (C10_UNLIKELY(tensor.defined() && tensor.layout() != c10::kStrided)) {
    return allreduce_sparse(tensors, opts);
  }
  check_written(op, "tensor", tensor);
  const auto reduction = reduction_of(op, opts.reduceOp, tensor.scalar_type());
  return run(
      Call::of(op, c10d::OpType::ALLREDUCE, opts,
               fingerprint_of(OpType::AllReduce, tensor, tensor.numel()).reduced_by(reduction.op)),
      tensors, {}, CollectiveRequest::all_reduce(op, tensor, tensor, reduction));
}

CheckedBackend::WorkPtr CheckedBackend::allreduce_sparse(Tensors& tensors,
                                                         const c10d::AllreduceOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "all_reduce";
  const at::Tensor& tensor = only(op, "tensor", tensors);
  const auto reduction = check_sparse(op, tensor, opts.reduceOp);
  std::ostringstream shape;
  shape << " of shape " << tensor.sizes() << " with " << tensor.sparse_dim()
        << " sparse dimensions";
  Fingerprint said = fingerprint_of(OpType::AllReduce, tensor);
  said.details = shape.str();
  const auto call =
      Call::of(op, c10d::OpType::_ALLREDUCE_SPARSE, opts, std::move(said).reduced_by(reduction.op));
  const int64_t divisor = reduction.op == ReduceOp::Avg ? size_ : 1;
  c10d::AllreduceOptions options;
  options.timeout = std::min(call.timeout, kLongestWait);
  const auto begin = [inner = inner_, tensor, options, divisor] {
    Tensors sums{to_wire(tensor)};
    const WorkPtr work = inner->allreduce(sums, options);
    return Started{work, [sum = sums[0], tensor, divisor] {
                     if (divisor != 1) {
                       sum._values().div_(divisor);
                     }
                     tensor.copy_(from_wire(sum, tensor));
                   }};
  };
  return run(call, tensors, {}, begin, /*quick=*/false);
}

CheckedBackend::WorkPtr CheckedBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  constexpr string_view op = "all_reduce_coalesced";
  check_list(op, tensors);
  const auto reduction = reduction_of(op, opts.reduceOp, tensors[0].scalar_type());
  return run(Call::of(op, c10d::OpType::ALLREDUCE_COALESCED, opts,
                      fingerprint_of(OpType::AllReduce, tensors)
                          .of_members(counts_of(tensors))
                          .reduced_by(reduction.op)),
             tensors, {}, CollectiveRequest::all_reduce_coalesced(op, tensors, tensors, reduction));
}

CheckedBackend::WorkPtr CheckedBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  constexpr string_view op = "reduce";
  const at::Tensor& tensor = only(op, "tensor", tensors);
  check_root(op, opts.rootRank);
  check_written(op, "tensor", tensor);
  const auto reduction = reduction_of(op, opts.reduceOp, tensor.scalar_type());
  return run(Call::of(op, c10d::OpType::REDUCE, opts,
                      fingerprint_of(OpType::Reduce, tensor, tensor.numel())
                          .reduced_by(reduction.op)
                          .rooted_at(opts.rootRank)),
             tensors, {}, CollectiveRequest::reduce(op, tensor, tensor, reduction, opts.rootRank));
}

CheckedBackend::WorkPtr CheckedBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                  const c10d::AllgatherOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "all_gather";
  const at::Tensor& input = only(op, "input", inputs);
  const Tensors& parts = only_list(op, "outputs", outputs);
  check_tensor(op, "input", input);
  check_parts(op, "outputs", parts, input, "input");
  check_all_written(op, parts);
  const auto call =
      Call::of(op, c10d::OpType::ALLGATHER, opts,
               fingerprint_of(OpType::AllGather, parts).gathered(input.numel(), counts_of(parts)));
  return all_gather_bytes(call, bytes_in(input), sizes_of(parts), parts);
}

CheckedBackend::WorkPtr CheckedBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                        const c10d::AllgatherOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "all_gather_into_tensor";
  check_tensor(op, "input", input);
  check_written(op, "output", output);
  check_whole(op, "output", output, "input", input);
  const Source source = apart(input, output);
  return run(Call::of(op, c10d::OpType::_ALLGATHER_BASE, opts,
                      fingerprint_of(OpType::AllGather, input)
                          .gathered(input.numel(), Sizes(size_, input.numel()))),
             {output}, {source.fill, {}}, CollectiveRequest::all_gather(op, source.values, output));
}

CheckedBackend::WorkPtr CheckedBackend::allgather_coalesced(std::vector<Tensors>& outputs,
                                                            Tensors& inputs,
                                                            const c10d::AllgatherOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "all_gather_coalesced";
  check_lists(op, outputs, inputs);
  Sizes sizes, counts;
  Tensors parts;
  for (const auto& list : outputs) {
    sizes.push_back(sum_of(sizes_of(list)));
    counts.push_back(sum_of(counts_of(list)));
    parts.insert(parts.end(), list.begin(), list.end());
  }
  const Source own = packed(inputs);
  C10D_EXT_CHECK_VALUE(own.values.numel() == sizes[rank_], op, group_, "outputs[", rank_,
                       "], this rank's, must have as many elements as the inputs, got others");
  Fingerprint said = fingerprint_of(OpType::AllGather, parts);
  said.details = c10::str(" in ", inputs.size(), " tensors for each rank");
  const auto call =
      Call::of(op, c10d::OpType::ALLGATHER_COALESCED, opts,
               std::move(said).gathered(sum_of(counts_of(inputs)), std::move(counts)));
  return all_gather_bytes(call, own, std::move(sizes), parts);
}

CheckedBackend::WorkPtr CheckedBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "all_gather_into_tensor_coalesced";
  check_pairs(op, outputs, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_whole(op, "each output", outputs[i], "its input", inputs[i]);
  }
  // Row r: what rank r has of every tensor.
  const Source own = packed(inputs);
  const at::Tensor all = at::empty({size_, own.values.numel()}, at::kByte);
  Finish finish = [all, outs = aliases_of(outputs), ranks = size_] {
    int64_t offset = 0;
    for (const auto& out : outs) {
      const auto width = static_cast<int64_t>(out.nbytes()) / ranks;
      put(all.narrow(1, offset, width).reshape({-1}), out);
      offset += width;
    }
  };
  const auto call =
      Call::of(op, c10d::OpType::ALLGATHER_COALESCED, opts,
               fingerprint_of(OpType::AllGather, inputs).of_members(counts_of(inputs)));
  return run(call, outputs, {own.fill, std::move(finish)},
             CollectiveRequest::all_gather(op, own.values, all));
}

// As an exchange, for the ranks' parts may differ in size, which the root alone knows.
CheckedBackend::WorkPtr CheckedBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                               const c10d::GatherOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "gather";
  const at::Tensor& input = only(op, "input", inputs);
  check_root(op, opts.rootRank);
  check_tensor(op, "input", input);
  Tensors parts;
  if (rank_ == opts.rootRank) {
    parts = only_list(op, "outputs", outputs);
    check_parts(op, "outputs", parts, input, "input");
    check_all_written(op, parts);
  } else {
    check_no_lists(op, "outputs", outputs, opts.rootRank);
  }
  Sizes in(size_, 0);
  in[opts.rootRank] = static_cast<int64_t>(input.nbytes());
  const auto call =
      Call::of(op, c10d::OpType::GATHER, opts,
               fingerprint_of(OpType::Gather, input)
                   .gathered_at(opts.rootRank, input.numel(), counts_of(parts), size_));
  return exchange_bytes(call, bytes_in(input), parts, in,
                        parts.empty() ? Sizes(size_, 0) : sizes_of(parts));
}

CheckedBackend::WorkPtr CheckedBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                const c10d::ScatterOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "scatter";
  const at::Tensor& output = only(op, "output", outputs);
  check_root(op, opts.rootRank);
  check_written(op, "output", output);
  Tensors parts;
  if (rank_ == opts.rootRank) {
    parts = only_list(op, "inputs", inputs);
    check_parts(op, "inputs", parts, output, "output");
  } else {
    check_no_lists(op, "inputs", inputs, opts.rootRank);
  }
  Sizes out(size_, 0);
  out[opts.rootRank] = static_cast<int64_t>(output.nbytes());
  const auto call =
      Call::of(op, c10d::OpType::SCATTER, opts,
               fingerprint_of(OpType::Scatter, output)
                   .scattered_from(opts.rootRank, output.numel(), counts_of(parts), size_));
  return exchange_bytes(call, packed(parts), {output},
                        parts.empty() ? Sizes(size_, 0) : sizes_of(parts), out);
}

CheckedBackend::WorkPtr CheckedBackend::reduce_scatter(Tensors& outputs,
                                                       std::vector<Tensors>& inputs,
                                                       const c10d::ReduceScatterOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "reduce_scatter";
  const at::Tensor& output = only(op, "output", outputs);
  const Tensors& parts = only_list(op, "inputs", inputs);
  check_written(op, "output", output);
  check_parts(op, "inputs", parts, output, "output");
  const auto reduction = reduction_of(op, opts.reduceOp, output.scalar_type());
  Sizes counts;
  for (const auto& part : parts) {
    counts.push_back(part.numel());
  }
  const bool even = std::equal(counts.begin() + 1, counts.end(), counts.begin());
  const Source bytes = packed(parts);
  const at::Tensor source = span_of(bytes.values, output.dtype(), 0, sum_of(counts));
  return run(Call::of(op, c10d::OpType::REDUCE_SCATTER, opts,
                      fingerprint_of(OpType::ReduceScatter, output)
                          .scattered(counts, output.numel())
                          .reduced_by(reduction.op)),
             outputs, {bytes.fill, {}},
             even
                 ? CollectiveRequest::reduce_scatter(op, source, output, reduction)
                 : CollectiveRequest::reduce_scatter_uneven(op, source, output, reduction, counts));
}

CheckedBackend::WorkPtr CheckedBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  constexpr string_view op = "reduce_scatter_tensor";
  check_tensor(op, "input", input);
  check_written(op, "output", output);
  check_whole(op, "input", input, "output", output);
  const auto reduction = reduction_of(op, opts.reduceOp, output.scalar_type());
  const Source source = apart(input, output);
  return run(Call::of(op, c10d::OpType::_REDUCE_SCATTER_BASE, opts,
                      fingerprint_of(OpType::ReduceScatter, output)
                          .scattered(Sizes(size_, output.numel()), output.numel())
                          .reduced_by(reduction.op)),
             {output}, {source.fill, {}},
             CollectiveRequest::reduce_scatter(op, source.values, output, reduction));
}

CheckedBackend::WorkPtr CheckedBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  constexpr string_view op = "reduce_scatter_tensor_coalesced";
  check_pairs(op, outputs, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_whole(op, "each input", inputs[i], "its output", outputs[i]);
  }
  check_list(op, outputs);
  const auto reduction = reduction_of(op, opts.reduceOp, outputs[0].scalar_type());
  return run(Call::of(op, c10d::OpType::REDUCE_SCATTER, opts,
                      fingerprint_of(OpType::ReduceScatter, outputs)
                          .of_members(counts_of(outputs))
                          .reduced_by(reduction.op)),
             outputs, {},
             CollectiveRequest::reduce_scatter_coalesced(op, inputs, outputs, reduction));
}

CheckedBackend::WorkPtr CheckedBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                      Sizes& output_splits, Sizes& input_splits,
                                                      const c10d::AllToAllOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "all_to_all_single";
  check_tensor(op, "input", input);
  check_written(op, "output", output);
  C10D_EXT_CHECK_VALUE(output.scalar_type() == input.scalar_type(), op, group_,
                       "output must have input's dtype, ", input.scalar_type(), ", got ",
                       output.scalar_type());
  const auto in = elements_of(op, "input", input, input_splits);
  const auto out = elements_of(op, "output", output, output_splits);
  const auto call = Call::of(op, c10d::OpType::ALLTOALL_BASE, opts,
                             fingerprint_of(OpType::AllToAll, output).exchanged(in, out));
  const Source from = apart(input, output);
  const at::Tensor source = from.values.view({-1});
  const bool direct = is_dense(output);
  const at::Tensor received =
      direct ? span_of(output, 0, output.numel()) : at::empty({output.numel()}, output.options());
  return run(call, {output},
             {from.fill, direct ? Finish() : unpack_later(bytes_of(received), {output})},
             CollectiveRequest::all_to_all(op, source, received, out, in));
}

CheckedBackend::WorkPtr CheckedBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                                 const c10d::AllToAllOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "all_to_all";
  const auto ranks = static_cast<size_t>(size_);
  C10D_EXT_CHECK_VALUE(outputs.size() == ranks && inputs.size() == ranks, op, group_,
                       "inputs and outputs must be one tensor for each of the ", size_,
                       " ranks, got ", inputs.size(), " inputs and ", outputs.size(), " outputs");
  for (const auto& input : inputs) {
    check_tensor(op, "each input", input);
  }
  check_all_written(op, outputs);
  C10D_EXT_CHECK_VALUE(inputs[rank_].nbytes() == outputs[rank_].nbytes(), op, group_, "outputs[",
                       rank_, "], which inputs[", rank_, "] goes to, must have its size, ",
                       inputs[rank_].sizes(), ", got ", outputs[rank_].sizes());
  const auto call = Call::of(op, c10d::OpType::ALLTOALL, opts,
                             fingerprint_of(OpType::AllToAll, outputs[0])
                                 .exchanged(counts_of(inputs), counts_of(outputs)));
  return exchange_bytes(call, packed(inputs), outputs, sizes_of(inputs), sizes_of(outputs));
}

CheckedBackend::WorkPtr CheckedBackend::send(Tensors& tensors, int dst, int tag) {
  constexpr string_view op = "send";
  const at::Tensor& tensor = only(op, "tensor", tensors);
  check_tensor(op, "tensor", tensor);
  check_peer(op, "destination", dst);
  return message(op, c10d::OpType::SEND, tensor, dst, tag);
}

CheckedBackend::WorkPtr CheckedBackend::recv(Tensors& tensors, int src, int tag) {
  constexpr string_view op = "recv";
  const at::Tensor& tensor = only(op, "tensor", tensors);
  check_peer(op, "source", src);
  check_written(op, "tensor", tensor);
  return message(op, c10d::OpType::RECV, tensor, src, tag);
}

CheckedBackend::WorkPtr CheckedBackend::recvAnysource(Tensors& tensors, int tag) {
  constexpr string_view op = "recv";
  const at::Tensor& tensor = only(op, "tensor", tensors);
  check_written(op, "tensor", tensor);
  return message(op, c10d::OpType::RECVANYSOURCE, tensor, kAnySource, tag);
}

CheckedBackend::WorkPtr CheckedBackend::barrier(const c10d::BarrierOptions& opts) {
  const auto call = Call::of("barrier", c10d::OpType::BARRIER, opts, Fingerprint());
  const at::Tensor nothing = empty_bytes(0);
  return run(call, {}, {}, CollectiveRequest::barrier(call.op, nothing, nothing));
}

// That all ranks call it is agreed on, and nothing else is to be done. The failure names all that
// are missing, whether asked for all or one. A barrier, which waits for what is in flight, is
// another.
void CheckedBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool /*wait_all_ranks*/) {
  Fingerprint monitored;
  monitored.details = "monitored";
  auto call = Call::of("monitored_barrier", c10d::OpType::BARRIER, opts, std::move(monitored));
  call.async = false;
  run(call, {}, {}, [] { return Started(); }, /*quick=*/true);
}

}  // namespace c10d_ext
