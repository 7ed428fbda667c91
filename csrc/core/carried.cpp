#include "core/carried.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace c10d_ext::carried {

namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

c10d::ReduceOp wire_op_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::Avg:
      return c10d::ReduceOp::AVG;
    case ReduceOp::Product:
      return c10d::ReduceOp::PRODUCT;
    case ReduceOp::Min:
      return c10d::ReduceOp::MIN;
    case ReduceOp::Max:
      return c10d::ReduceOp::MAX;
    case ReduceOp::Band:
      return c10d::ReduceOp::BAND;
    case ReduceOp::Bor:
      return c10d::ReduceOp::BOR;
    case ReduceOp::Bxor:
      return c10d::ReduceOp::BXOR;
    case ReduceOp::Sum:
    case ReduceOp::PremulSum:
      break;
  }
  return c10d::ReduceOp::SUM;
}

Tensors rows_of(const at::Tensor& flat, int64_t rows) {
  const int64_t width = flat.numel() / rows;
  Tensors parts;
  parts.reserve(rows);
  for (int64_t row = 0; row < rows; ++row) {
    parts.push_back(span_of(flat, row * width, width));
  }
  return parts;
}

at::Tensor empty_bytes(int64_t count, const at::Tensor& like) {
  return at::empty({count}, like.options().dtype(at::kByte));
}

// premul_sum: a rank's values times its factor, ready for the wire.
at::Tensor scaled(const at::Tensor& source, const Reduction& reduction, ReductionPlan& plan) {
  if (reduction.factor->isComplex()) {
    const auto dtype = source.scalar_type() == c10::ScalarType::ComplexHalf
                           ? c10::ScalarType::ComplexFloat
                           : source.scalar_type();
    at::Tensor values = at::empty(source.sizes(), source.options().dtype(dtype));
    values.copy_(source).mul_(*reduction.factor);
    plan = plan_reduction(ReduceOp::Sum, dtype, false, true);
    return encode(values, plan, /*may_alias=*/true);
  }
  if (c10::isReducedFloatingType(plan.wire_dtype)) {
    // nccl reduces halves itself, but the product must not be rounded to one before that.
    plan = plan_reduction(ReduceOp::Sum, source.scalar_type(), false, true);
  }
  return encode(source, plan, /*may_alias=*/false).mul_(*reduction.factor);
}

// This rank's values on the wire; in `out` itself where that saves a copy, which `in_place` then
// tells.
std::pair<at::Tensor, bool> to_wire(const at::Tensor& source, const at::Tensor& out,
                                    const Reduction& reduction, ReductionPlan& plan) {
  const bool in_place =
      plan.encoding == ReductionPlan::Encoding::Reinterpret && is_dense(out) && !reduction.factor;
  if (in_place) {
    if (!source.is_same(out)) {
      copy_values(out, source);
    }
    return {encode(alias_of(out), plan, /*may_alias=*/true), true};
  }
  if (reduction.factor) {
    return {scaled(source, reduction, plan), false};
  }
  return {encode(source, plan, /*may_alias=*/false), false};
}

Finish decode_later(const at::Tensor& wire, const ReductionPlan& plan, const at::Tensor& out,
                    int64_t divisor) {
  return [wire, plan, out = alias_of(out), divisor] {
    used_here(wire);
    if (divisor != 1) {
      wire.div_(divisor);
    }
    decode(wire, plan, out);
  };
}

// The values a rank contributes to a reduction that happens on the receiving rank: its own dtype,
// which is the smaller one to send, or the wire's when a factor has been applied at full precision.
struct Contribution {
  at::Tensor values;
  bool encoded;
};

Contribution contribution(const at::Tensor& source, const Reduction& reduction,
                          ReductionPlan& plan) {
  if (reduction.factor) {
    return {scaled(source, reduction, plan), true};
  }
  return {dense(source), false};
}

// Reduces the `ranks` contributions in `bytes` in rank order into `out`: the same bits whoever does
// it.
Finish reduce_rows_later(const at::Tensor& bytes, const Contribution& sent,
                         const Reduction& reduction, const ReductionPlan& plan,
                         const at::Tensor& out, int64_t ranks) {
  const auto dtype = sent.values.dtype();
  const bool encoded = sent.encoded;
  return [bytes, dtype, encoded, reduction, plan, out = alias_of(out), ranks] {
    used_here(bytes);
    const auto count = bytes.numel() / static_cast<int64_t>(dtype.itemsize());
    const Tensors rows = rows_of(span_of(bytes, dtype, 0, count), ranks);
    const auto wire = [&](int64_t rank) {
      return encoded ? rows[rank] : encode(rows[rank], plan, /*may_alias=*/true);
    };
    at::Tensor sum = wire(0);
    // The wire's values are out's: the last sum goes there at once.
    const bool direct = ranks > 1 && is_dense(out) && sum.scalar_type() == out.scalar_type() &&
                        plan.encoding == ReductionPlan::Encoding::Reinterpret;
    for (int64_t rank = 1; rank < ranks; ++rank) {
      const bool last = direct && rank == ranks - 1;
      const at::Tensor target = last ? span_of(out, 0, out.numel()) : sum;
      combine(sum, wire(rank), plan.wire_op, target);
      sum = target;
    }
    if (reduction.op == ReduceOp::Avg) {
      sum.div_(ranks);
    }
    if (!direct) {
      // Encoded complex values travelled as flat pairs of reals.
      const bool pairs = out.is_complex() && !c10::isComplexType(plan.wire_dtype);
      decode(pairs ? sum.view({-1, 2}) : sum, plan, out);
    }
  };
}

Started all_to_all_bytes(const Carrier& carrier, const at::Tensor& source_bytes,
                         const at::Tensor& out_bytes, std::vector<int64_t> out_splits,
                         std::vector<int64_t> in_splits) {
  at::Tensor in = source_bytes;
  at::Tensor out = out_bytes;
  const auto options = carrier.options<c10d::AllToAllOptions>();
  WorkPtr work = carrier.start([&](auto& backend) {
    return backend.alltoall_base(out, in, out_splits, in_splits, options);
  });
  return {work, carrier.keep(in)};
}

Started all_gather_bytes(const Carrier& carrier, const at::Tensor& source_bytes,
                         const at::Tensor& out_bytes) {
  const int64_t ranks = carrier.size();
  if (!carrier.has_all_gather()) {
    const std::vector<int64_t> splits(ranks, source_bytes.numel());
    return all_to_all_bytes(carrier, source_bytes.repeat({ranks}), out_bytes, splits, splits);
  }
  at::Tensor in = source_bytes;
  at::Tensor out = out_bytes;
  const auto options = carrier.options<c10d::AllgatherOptions>();
  WorkPtr work =
      carrier.start([&](auto& backend) { return backend._allgather_base(out, in, options); });
  return {work, carrier.keep(in)};
}

Started gather_and_reduce(const Carrier& carrier, const at::Tensor& source, const at::Tensor& out,
                          const Reduction& reduction, ReductionPlan plan) {
  const int64_t ranks = carrier.size();
  const Contribution sent = contribution(source, reduction, plan);
  const at::Tensor in = bytes_of(sent.values);
  const at::Tensor all = empty_bytes(ranks * in.numel(), in);
  Started started = all_gather_bytes(carrier, in, all);
  started.finish =
      then(std::move(started.finish), reduce_rows_later(all, sent, reduction, plan, out, ranks));
  return started;
}

// The values of several tensors of one dtype, one after the other.
at::Tensor flattened(at::TensorList tensors) {
  Tensors parts;
  parts.reserve(tensors.size());
  int64_t count = 0;
  for (const auto& t : tensors) {
    parts.push_back(bytes_of(dense(t)));
    count += t.numel();
  }
  return span_of(at::cat(parts), tensors.front().dtype(), 0, count);
}

Finish unflatten_later(const at::Tensor& flat, at::TensorList outs) {
  return [flat, outs = aliases_of(outs)] {
    used_here(flat);
    int64_t offset = 0;
    for (const auto& out : outs) {
      const at::Tensor part = span_of(flat, offset, out.numel());
      copy_values(is_dense(out) ? span_of(out, 0, out.numel()) : out, part);
      offset += out.numel();
    }
  };
}

Tensors columns(const at::Tensor& matrix, at::TensorList widths_of, int64_t divisor) {
  Tensors parts;
  int64_t offset = 0;
  for (const auto& t : widths_of) {
    const int64_t width = t.numel() / divisor;
    parts.push_back(matrix.narrow(1, offset, width));
    offset += width;
  }
  return parts;
}

}  // namespace

void reduce_alone(const at::Tensor& source, const at::Tensor& out, const Reduction& reduction) {
  if (reduction.factor) {
    ReductionPlan plan = plan_reduction(ReduceOp::Sum, source.scalar_type(), false, true);
    const at::Tensor wire = scaled(source, reduction, plan);
    decode(wire, plan, out);
  } else if (!source.is_same(out)) {
    copy_values(out, apart_from(source, out));
  }
}

std::pair<at::Tensor, Finish> landing(const at::Tensor& out) {
  if (is_dense(out)) {
    return {out, Finish()};
  }
  at::Tensor buffer = at::empty(out.sizes(), out.options());
  return {buffer, [buffer, out = alias_of(out)] {
            used_here(buffer);
            copy_values(out, buffer);
          }};
}

Started all_reduce(const Carrier& carrier, const at::Tensor& input, const at::Tensor& out,
                   const Reduction& reduction) {
  const at::Tensor source = apart_from(input, out);
  ReductionPlan plan = carrier.plan(reduction, out.scalar_type());
  if (plan.local_only) {
    return gather_and_reduce(carrier, source, out, reduction, plan);
  }
  const auto [wire, in_place] = to_wire(source, out, reduction, plan);
  const bool divide = reduction.op == ReduceOp::Avg && !carrier.has_avg(false);
  auto options = carrier.options<c10d::AllreduceOptions>();
  options.reduceOp = wire_op_of(divide ? ReduceOp::Sum : plan.wire_op);
  Tensors tensors{wire};
  WorkPtr work = carrier.start([&](auto& backend) { return backend.allreduce(tensors, options); });
  Finish finish;
  if (!in_place || divide) {
    finish = decode_later(wire, plan, out, divide ? carrier.size() : 1);
  }
  return {work, std::move(finish)};
}

Started exchange_and_reduce(const Carrier& carrier, const at::Tensor& source, const at::Tensor& out,
                            const Reduction& reduction, c10::IntArrayRef chunk_elements) {
  const int64_t ranks = carrier.size();
  ReductionPlan plan = carrier.plan(reduction, out.scalar_type());
  const Contribution sent = contribution(source, reduction, plan);
  const at::Tensor in = bytes_of(sent.values);
  const int64_t elements = c10::sum_integers(chunk_elements);
  const int64_t width = elements == 0 ? 0 : in.numel() / elements;
  std::vector<int64_t> in_splits(ranks);
  for (int64_t i = 0; i < ranks; ++i) {
    in_splits[i] = chunk_elements[i] * width;
  }
  const int64_t mine = in_splits[carrier.rank()];
  const at::Tensor received = empty_bytes(ranks * mine, in);
  Started started = all_to_all_bytes(carrier, in, received, std::vector<int64_t>(ranks, mine),
                                     std::move(in_splits));
  if (mine != 0) {
    started.finish = then(std::move(started.finish),
                          reduce_rows_later(received, sent, reduction, plan, out, ranks));
  }
  return started;
}

Started reduce_scatter(const Carrier& carrier, const at::Tensor& input, const at::Tensor& out,
                       const Reduction& reduction) {
  const at::Tensor source = apart_from(input, out);
  const int64_t ranks = carrier.size();
  ReductionPlan plan = carrier.plan(reduction, out.scalar_type());
  if (!carrier.has_reduce_scatter() || plan.local_only) {
    return exchange_and_reduce(carrier, source, out, reduction,
                               std::vector<int64_t>(ranks, out.numel()));
  }
  at::Tensor in =
      reduction.factor ? scaled(source, reduction, plan) : encode(source, plan, /*may_alias=*/true);
  const bool divide = reduction.op == ReduceOp::Avg && !carrier.has_avg(false);
  const bool direct = plan.encoding == ReductionPlan::Encoding::Reinterpret && is_dense(out) &&
                      out.is_complex() == source.is_complex() && !reduction.factor && !divide;
  in = in.view({-1});
  at::Tensor wire = direct ? encode(out, plan, /*may_alias=*/true).view({-1})
                           : at::empty({in.numel() / ranks}, in.options());
  auto options = carrier.options<c10d::ReduceScatterOptions>();
  options.reduceOp = wire_op_of(divide ? ReduceOp::Sum : plan.wire_op);
  WorkPtr work =
      carrier.start([&](auto& backend) { return backend._reduce_scatter_base(wire, in, options); });
  Finish finish = carrier.keep(in);
  if (!direct) {
    const bool pairs = out.is_complex() && !c10::isComplexType(plan.wire_dtype);
    finish = then(std::move(finish),
                  decode_later(pairs ? wire.view({-1, 2}) : wire, plan, out, divide ? ranks : 1));
  }
  return {work, std::move(finish)};
}

Started barrier(const Carrier& carrier, const at::Device& device) {
  if (carrier.has_barrier()) {
    auto options = carrier.options<c10d::BarrierOptions>();
    options.device = device;
    if (device.has_index()) {
      options.device_ids = {device.index()};
    }
    try {
      return {carrier.start([&](auto& backend) { return backend.barrier(options); }), Finish()};
    } catch (const InvalidArgument&) {
      if (carrier.has_rooted()) {
        throw;
      }
      // A process group written in Python that does not define it.
    }
  }
  Tensors token{at::zeros({1}, at::dtype(at::kFloat).device(device))};
  WorkPtr work = carrier.start([&](auto& backend) { return backend.allreduce(token); });
  return {work, carrier.keep(token[0])};
}

Started all_reduce_coalesced(const Carrier& carrier, at::TensorList sources, at::TensorList outs,
                             const Reduction& reduction) {
  const ReductionPlan plan = carrier.plan(reduction, outs.front().scalar_type());
  if (carrier.has_coalesced() && !plan.local_only) {
    Tensors wires;
    Finish finish;
    for (size_t i = 0; i < outs.size(); ++i) {
      ReductionPlan own = plan;
      const auto [wire, in_place] = to_wire(sources[i], outs[i], reduction, own);
      wires.push_back(wire);
      if (!in_place) {
        finish = then(std::move(finish), decode_later(wire, own, outs[i], 1));
      }
    }
    auto options = carrier.options<c10d::AllreduceCoalescedOptions>();
    options.reduceOp = wire_op_of(plan.wire_op);
    WorkPtr work =
        carrier.start([&](auto& backend) { return backend.allreduce_coalesced(wires, options); });
    return {work, std::move(finish)};
  }
  const at::Tensor flat = flattened(sources);
  Started started = all_reduce(carrier, flat, flat, reduction);
  started.finish = then(std::move(started.finish), unflatten_later(flat, outs));
  return started;
}

Started reduce(const Carrier& carrier, const at::Tensor& source, const at::Tensor& out,
               const Reduction& reduction, int64_t dst) {
  const bool receives = carrier.rank() == dst;
  ReductionPlan plan = carrier.plan(reduction, out.scalar_type());
  if (plan.local_only && !carrier.gathers_in_order()) {
    return gather_and_reduce(carrier, source, receives ? out : at::empty_like(out), reduction,
                             plan);
  }
  if (plan.local_only) {
    const Contribution sent = contribution(source, reduction, plan);
    Tensors in{bytes_of(sent.values)};
    const at::Tensor all = receives ? empty_bytes(carrier.size() * in[0].numel(), in[0]) : in[0];
    std::vector<Tensors> lists;
    if (receives) {
      lists.push_back(rows_of(all, carrier.size()));
    }
    auto options = carrier.options<c10d::GatherOptions>();
    options.rootRank = dst;
    WorkPtr work = carrier.start([&](auto& backend) { return backend.gather(lists, in, options); });
    Finish finish = carrier.keep(in[0]);
    if (receives) {
      finish = then(std::move(finish),
                    reduce_rows_later(all, sent, reduction, plan, out, carrier.size()));
    }
    return {work, std::move(finish)};
  }
  // A backend may scribble over the buffers of the ranks that only send.
  const auto [wire, in_place] =
      receives ? to_wire(source, out, reduction, plan)
               : std::pair<at::Tensor, bool>(reduction.factor
                                                 ? scaled(source, reduction, plan)
                                                 : encode(source, plan, /*may_alias=*/false),
                                             false);
  const bool divide = reduction.op == ReduceOp::Avg && !carrier.has_avg(true);
  auto to_all = carrier.options<c10d::AllreduceOptions>();
  auto to_one = carrier.options<c10d::ReduceOptions>();
  to_all.reduceOp = to_one.reduceOp = wire_op_of(divide ? ReduceOp::Sum : plan.wire_op);
  to_one.rootRank = dst;
  Tensors tensors{wire};
  WorkPtr work = carrier.start([&](auto& backend) {
    return carrier.has_rooted() ? backend.reduce(tensors, to_one)
                                : backend.allreduce(tensors, to_all);
  });
  Finish finish;
  if (!receives) {
    finish = carrier.keep(wire);
  } else if (!in_place || divide) {
    finish = decode_later(wire, plan, out, divide ? carrier.size() : 1);
  }
  return {work, std::move(finish)};
}

Started all_gather(const Carrier& carrier, const at::Tensor& source, const at::Tensor& out) {
  auto [buffer, finish] = landing(out);
  Started started =
      all_gather_bytes(carrier, bytes_of(dense(apart_from(source, out))), bytes_of(buffer));
  started.finish = then(std::move(started.finish), std::move(finish));
  return started;
}

Started all_gather_coalesced(const Carrier& carrier, at::TensorList sources, at::TensorList outs) {
  if (carrier.has_coalesced()) {
    Tensors ins;
    Tensors buffers;
    Finish finish;
    for (size_t i = 0; i < outs.size(); ++i) {
      if (outs[i].numel() == 0) {
        continue;
      }
      ins.push_back(bytes_of(dense(sources[i])));
      auto [buffer, copy] = landing(outs[i]);
      buffers.push_back(bytes_of(buffer));
      finish = then(then(std::move(finish), carrier.keep(ins.back())), std::move(copy));
    }
    WorkPtr work = carrier.start(
        [&](auto& backend) { return backend.allgather_into_tensor_coalesced(buffers, ins); });
    return {work, std::move(finish)};
  }
  const int64_t ranks = carrier.size();
  const at::Tensor flat = flattened(sources);
  const at::Tensor all = at::empty({ranks, flat.numel()}, flat.options());
  Started started = all_gather_bytes(carrier, bytes_of(flat), bytes_of(all));
  started.finish = then(std::move(started.finish), [all, outs = aliases_of(outs), ranks] {
    used_here(all);
    const Tensors parts = columns(all, outs, ranks);
    for (size_t i = 0; i < outs.size(); ++i) {
      const at::Tensor& out = outs[i];
      copy_values(is_dense(out) ? out.view({ranks, -1}) : out, parts[i]);
    }
  });
  return started;
}

Started all_gather_uneven(const Carrier& carrier, const at::Tensor& source, const at::Tensor& out,
                          c10::IntArrayRef sizes) {
  auto [buffer, finish] = landing(out);
  const at::Tensor in = bytes_of(dense(source));
  const at::Tensor all = bytes_of(buffer);
  const int64_t width = all.numel() / c10::sum_integers(sizes);
  std::vector<int64_t> splits(sizes.begin(), sizes.end());
  for (auto& split : splits) {
    split *= width;
  }
  Started started;
  if (carrier.has_all_gather() && std::equal(splits.begin() + 1, splits.end(), splits.begin())) {
    // Other ranks may have called what takes no sizes.
    started = all_gather_bytes(carrier, in, all);
  } else if (carrier.has_uneven_lists()) {
    std::vector<Tensors> lists{all.split_with_sizes(splits)};
    Tensors ins{in};
    started.work = carrier.start([&](auto& backend) { return backend.allgather(lists, ins); });
    started.finish = carrier.keep(in);
  } else {
    // Everyone sends its rows to everyone: exactly the bytes needed on the wire, no padding.
    const at::Tensor copies = in.repeat({carrier.size()});
    started = all_to_all_bytes(carrier, copies, all, splits,
                               std::vector<int64_t>(carrier.size(), in.numel()));
  }
  started.finish = then(std::move(started.finish), std::move(finish));
  return started;
}

Started reduce_scatter_coalesced(const Carrier& carrier, at::TensorList sources,
                                 at::TensorList outs, const Reduction& reduction) {
  // Row i: what rank i receives of every tensor. One exchange whatever the number of tensors.
  const int64_t ranks = carrier.size();
  int64_t width = 0;
  for (const auto& out : outs) {
    width += out.numel();
  }
  const at::Tensor flat = at::empty({ranks, width}, sources.front().options());
  const Tensors parts = columns(flat, outs, 1);
  for (size_t i = 0; i < sources.size(); ++i) {
    parts[i].copy_(dense(sources[i]).view({ranks, -1}));
  }
  const at::Tensor reduced = at::empty({width}, flat.options());
  Started started = reduce_scatter(carrier, flat, reduced, reduction);
  started.finish = then(std::move(started.finish), unflatten_later(reduced, outs));
  return started;
}

Started broadcast(const Carrier& carrier, const at::Tensor& source, const at::Tensor& out,
                  int64_t src) {
  auto [buffer, finish] = landing(out);
  if (carrier.rank() == src && !source.is_same(buffer)) {
    copy_values(buffer, source);
  }
  auto options = carrier.options<c10d::BroadcastOptions>();
  options.rootRank = src;
  Tensors tensors{bytes_of(buffer)};
  WorkPtr work = carrier.start([&](auto& backend) { return backend.broadcast(tensors, options); });
  return {work, std::move(finish)};
}

Started broadcast_coalesced(const Carrier& carrier, at::TensorList sources, at::TensorList outs,
                            int64_t src) {
  const at::Tensor flat = flattened(sources);
  Started started = broadcast(carrier, flat, flat, src);
  started.finish = then(std::move(started.finish), unflatten_later(flat, outs));
  return started;
}

Started all_to_all(const Carrier& carrier, const at::Tensor& source, const at::Tensor& out,
                   c10::IntArrayRef out_bytes, c10::IntArrayRef in_bytes) {
  const at::Tensor from = source.is_same(out) ? clone_of(source) : apart_from(source, out);
  auto [buffer, finish] = landing(out);
  Started started = all_to_all_bytes(carrier, bytes_of(dense(from)), bytes_of(buffer),
                                     out_bytes.vec(), in_bytes.vec());
  started.finish = then(std::move(started.finish), std::move(finish));
  return started;
}

Started gather(const Carrier& carrier, const at::Tensor& source, const at::Tensor& out,
               int64_t dst) {
  const int64_t ranks = carrier.size();
  const bool receives = carrier.rank() == dst;
  Tensors in{bytes_of(dense(source))};
  if (!carrier.has_rooted_parts()) {
    // Everyone sends to one rank, and nothing to the others.
    std::vector<int64_t> in_splits(ranks, 0);
    in_splits[dst] = in[0].numel();
    auto [buffer, copy] = landing(out);
    Started started =
        all_to_all_bytes(carrier, in[0], bytes_of(buffer),
                         std::vector<int64_t>(ranks, receives ? in[0].numel() : 0), in_splits);
    started.finish = then(std::move(started.finish), std::move(copy));
    return started;
  }
  std::vector<Tensors> lists;
  Finish finish = carrier.keep(in[0]);
  if (receives) {
    auto [buffer, copy] = landing(out);
    lists.push_back(rows_of(bytes_of(buffer), ranks));
    finish = then(std::move(finish), std::move(copy));
  }
  auto options = carrier.options<c10d::GatherOptions>();
  options.rootRank = dst;
  WorkPtr work = carrier.start([&](auto& backend) { return backend.gather(lists, in, options); });
  return {work, std::move(finish)};
}

Started scatter(const Carrier& carrier, const at::Tensor& source, const at::Tensor& out,
                int64_t src) {
  const int64_t ranks = carrier.size();
  const bool sends = carrier.rank() == src;
  auto [buffer, finish] = landing(out);
  Tensors received{bytes_of(buffer)};
  if (!carrier.has_rooted_parts()) {
    // One rank sends to everyone, the others send nothing.
    std::vector<int64_t> out_splits(ranks, 0);
    out_splits[src] = received[0].numel();
    const at::Tensor in = sends ? bytes_of(dense(source)) : empty_bytes(0, received[0]);
    Started started =
        all_to_all_bytes(carrier, in, received[0], std::move(out_splits),
                         std::vector<int64_t>(ranks, sends ? received[0].numel() : 0));
    started.finish = then(std::move(started.finish), std::move(finish));
    return started;
  }
  std::vector<Tensors> lists;
  if (sends) {
    const at::Tensor in = dense(source);
    lists.push_back(rows_of(bytes_of(in), ranks));
    finish = then(carrier.keep(in), std::move(finish));
  }
  auto options = carrier.options<c10d::ScatterOptions>();
  options.rootRank = src;
  WorkPtr work =
      carrier.start([&](auto& backend) { return backend.scatter(received, lists, options); });
  return {work, std::move(finish)};
}

}  // namespace c10d_ext::carried
