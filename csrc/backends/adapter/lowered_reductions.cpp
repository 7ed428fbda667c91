#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/SmallVector.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "backends/adapter/lowering.h"
#include "backends/adapter/lowering_parts.h"
#include "base/dtype.h"
#include "kernels/in_groups.h"
#include "kernels/kernels.h"

namespace c10d_ext::lowering {

namespace {

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
    case ReduceOp::None:
      break;
  }
  return c10d::ReduceOp::SUM;
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
    const at::Tensor memory = uncounted_alias_of(out);
    if (!source.is_same(out)) {
      copy_values(memory, source);
    }
    return {encode(memory, plan, /*may_alias=*/true), true};
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

// What is reduced here accumulates halves in float32, whatever the backend does with its own.
ReductionPlan plan_here(const Adapter& adapter, const Reduction& reduction, c10::ScalarType dtype) {
  return plan_reduction(reduction.op, dtype, /*low_precision_native=*/false,
                        adapter.can().reduces_bitwise, adapter.can().keeps_nan);
}

// Whose values are reduced first; null: all at once.
using Hosts = std::shared_ptr<const std::vector<std::vector<int>>>;

// The same on a CPU, of values in `out`'s own dtype.
void reduce_in_memory(const at::Tensor& bytes, ReduceOp op, const at::Tensor& out, int64_t ranks,
                      const Hosts& hosts) {
  const bool is_avg = op == ReduceOp::Avg;
  const ReduceOp plain = is_avg ? ReduceOp::Sum : op;
  const DType dtype = dtype_of(out.scalar_type());
  const bool on_hosts = hosts && kernels::reduces_in_groups(dtype, plain);
  const bool is_direct = is_dense(out) && !(on_hosts && is_avg);
  const at::Tensor target = is_direct ? out : at::empty(out.sizes(), out.options());
  const auto row = [&](int64_t rank) -> const void* {
    return static_cast<const char*>(bytes.const_data_ptr()) +
           static_cast<size_t>(rank) * target.nbytes();
  };
  void* const to = target.mutable_data_ptr();
  const auto count = static_cast<size_t>(out.numel());
  if (on_hosts) {
    kernels::GroupedRows groups;
    for (const auto& host : *hosts) {
      std::transform(host.begin(), host.end(), std::back_inserter(groups.rows), row);
      groups.ends.push_back(groups.rows.size());
    }
    kernels::reduce_in_groups(dtype, plain, to, groups, count);
    if (is_avg) {
      target.div_(ranks);
    }
  } else {
    c10::SmallVector<const void*, 16> rows;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      rows.push_back(row(rank));
    }
    kernels::reduce(dtype, op, to, nullptr, rows.data(), static_cast<int>(ranks), count, nullptr);
  }
  if (!target.is_same(out)) {
    copy_values(out, target);
  }
}

// Reduces the `ranks` contributions in `bytes` in rank order into `out`, or those of each host
// first: the same bits whoever does it.
Finish reduce_rows_later(const at::Tensor& bytes, const Contribution& sent,
                         const Reduction& reduction, const ReductionPlan& plan,
                         const at::Tensor& out, int64_t ranks, const Hosts& hosts = {}) {
  const auto dtype = sent.values.dtype();
  const bool encoded = sent.encoded;
  return [bytes, dtype, encoded, reduction, plan, out = alias_of(out), ranks, hosts] {
    used_here(bytes);
    if (out.is_cpu() && !encoded && has_meaning(reduction.op, dtype_of(out.scalar_type()))) {
      reduce_in_memory(bytes, reduction.op, out, ranks, hosts);
      return;
    }
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

Started gather_and_reduce(const Adapter& adapter, const at::Tensor& source, const at::Tensor& out,
                          const Reduction& reduction, ReductionPlan plan, const Hosts& hosts = {}) {
  const int64_t ranks = adapter.size();
  const Contribution sent = contribution(source, reduction, plan);
  const at::Tensor in = bytes_of(sent.values);
  const at::Tensor all = empty_bytes(ranks * in.numel(), in);
  Started started = all_gather_bytes(adapter, in, all);
  started.finish = then(std::move(started.finish),
                        reduce_rows_later(all, sent, reduction, plan, out, ranks, hosts));
  return started;
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

Started all_reduce(const Adapter& adapter, const at::Tensor& input, const at::Tensor& out,
                   const Reduction& reduction) {
  const at::Tensor source = apart_from(input, out);
  ReductionPlan plan = adapter.plan(reduction, out.scalar_type());
  if (plan.local_only || !adapter.has(Method::AllReduce)) {
    return gather_and_reduce(adapter, source, out, reduction, plan, adapter.can().reduces_on_hosts);
  }
  const auto [wire, in_place] = to_wire(source, out, reduction, plan);
  const bool divide = reduction.op == ReduceOp::Avg && !adapter.can().reduces_avg;
  auto options = adapter.options<c10d::AllreduceOptions>();
  options.reduceOp = wire_op_of(divide ? ReduceOp::Sum : plan.wire_op);
  Tensors tensors{wire};
  WorkPtr work = adapter.start([&](auto& backend) { return backend.allreduce(tensors, options); });
  Finish finish;
  if (!in_place || divide) {
    finish = decode_later(wire, plan, out, divide ? adapter.size() : 1);
  }
  return {work, std::move(finish)};
}

Started exchange_and_reduce(const Adapter& adapter, const at::Tensor& source, const at::Tensor& out,
                            const Reduction& reduction, c10::IntArrayRef chunk_elements) {
  const int64_t ranks = adapter.size();
  ReductionPlan plan = plan_here(adapter, reduction, out.scalar_type());
  const Contribution sent = contribution(source, reduction, plan);
  const at::Tensor in = bytes_of(sent.values);
  const int64_t elements = c10::sum_integers(chunk_elements);
  const int64_t width = elements == 0 ? 0 : in.numel() / elements;
  std::vector<int64_t> in_splits(ranks);
  for (int64_t i = 0; i < ranks; ++i) {
    in_splits[i] = chunk_elements[i] * width;
  }
  const int64_t mine = in_splits[adapter.rank()];
  const at::Tensor received = empty_bytes(ranks * mine, in);
  Started started = all_to_all_bytes(adapter, in, received, std::vector<int64_t>(ranks, mine),
                                     std::move(in_splits));
  if (mine != 0) {
    started.finish =
        then(std::move(started.finish), reduce_rows_later(received, sent, reduction, plan, out,
                                                          ranks, adapter.can().reduces_on_hosts));
  }
  return started;
}

Started reduce_scatter(const Adapter& adapter, const at::Tensor& input, const at::Tensor& out,
                       const Reduction& reduction) {
  const at::Tensor source = apart_from(input, out);
  const int64_t ranks = adapter.size();
  ReductionPlan plan = adapter.plan(reduction, out.scalar_type());
  if (!adapter.has(Method::ReduceScatterTensor) || plan.local_only) {
    return exchange_and_reduce(adapter, source, out, reduction,
                               std::vector<int64_t>(ranks, out.numel()));
  }
  at::Tensor in =
      reduction.factor ? scaled(source, reduction, plan) : encode(source, plan, /*may_alias=*/true);
  const bool divide = reduction.op == ReduceOp::Avg && !adapter.can().reduces_avg;
  const bool direct = plan.encoding == ReductionPlan::Encoding::Reinterpret && is_dense(out) &&
                      out.is_complex() == source.is_complex() && !reduction.factor && !divide;
  in = in.view({-1});
  at::Tensor wire = direct ? encode(uncounted_alias_of(out), plan, /*may_alias=*/true).view({-1})
                           : at::empty({in.numel() / ranks}, in.options());
  auto options = adapter.options<c10d::ReduceScatterOptions>();
  options.reduceOp = wire_op_of(divide ? ReduceOp::Sum : plan.wire_op);
  WorkPtr work =
      adapter.start([&](auto& backend) { return backend._reduce_scatter_base(wire, in, options); });
  Finish finish = adapter.keep(in);
  if (!direct) {
    const bool pairs = out.is_complex() && !c10::isComplexType(plan.wire_dtype);
    finish = then(std::move(finish),
                  decode_later(pairs ? wire.view({-1, 2}) : wire, plan, out, divide ? ranks : 1));
  }
  return {work, std::move(finish)};
}

Started all_reduce_coalesced(const Adapter& adapter, at::TensorList sources, at::TensorList outs,
                             const Reduction& reduction) {
  const ReductionPlan plan = adapter.plan(reduction, outs.front().scalar_type());
  if (adapter.has(Method::AllReduceCoalesced) && !plan.local_only) {
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
    auto options = adapter.options<c10d::AllreduceCoalescedOptions>();
    options.reduceOp = wire_op_of(plan.wire_op);
    WorkPtr work =
        adapter.start([&](auto& backend) { return backend.allreduce_coalesced(wires, options); });
    return {work, std::move(finish)};
  }
  const at::Tensor flat = flattened(sources);
  Started started = all_reduce(adapter, flat, flat, reduction);
  started.finish = then(std::move(started.finish), unflatten_later(flat, outs));
  return started;
}

Started reduce(const Adapter& adapter, const at::Tensor& source, const at::Tensor& out,
               const Reduction& reduction, int64_t dst) {
  const bool receives = adapter.rank() == dst;
  ReductionPlan plan = adapter.plan(reduction, out.scalar_type());
  if (!adapter.has(Method::Reduce) && !adapter.has(Method::AllReduce)) {
    plan.local_only = true;
  }
  if (plan.local_only && !adapter.has(Method::Gather)) {
    return gather_and_reduce(adapter, source, receives ? out : at::empty_like(out), reduction,
                             plan);
  }
  if (plan.local_only) {
    const Contribution sent = contribution(source, reduction, plan);
    Tensors in{bytes_of(sent.values)};
    const at::Tensor all = receives ? empty_bytes(adapter.size() * in[0].numel(), in[0]) : in[0];
    std::vector<Tensors> lists;
    if (receives) {
      lists.push_back(rows_of(all, adapter.size()));
    }
    auto options = adapter.options<c10d::GatherOptions>();
    options.rootRank = dst;
    WorkPtr work = adapter.start([&](auto& backend) { return backend.gather(lists, in, options); });
    Finish finish = adapter.keep(in[0]);
    if (receives) {
      finish = then(std::move(finish),
                    reduce_rows_later(all, sent, reduction, plan, out, adapter.size()));
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
  const bool divide = reduction.op == ReduceOp::Avg && !adapter.can().reduces_avg_to_one;
  auto to_all = adapter.options<c10d::AllreduceOptions>();
  auto to_one = adapter.options<c10d::ReduceOptions>();
  to_all.reduceOp = to_one.reduceOp = wire_op_of(divide ? ReduceOp::Sum : plan.wire_op);
  to_one.rootRank = dst;
  Tensors tensors{wire};
  WorkPtr work = adapter.start([&](auto& backend) {
    return adapter.has(Method::Reduce) ? backend.reduce(tensors, to_one)
                                       : backend.allreduce(tensors, to_all);
  });
  Finish finish;
  if (!receives) {
    finish = adapter.keep(wire);
  } else if (!in_place || divide) {
    finish = decode_later(wire, plan, out, divide ? adapter.size() : 1);
  }
  return {work, std::move(finish)};
}

Started reduce_scatter_coalesced(const Adapter& adapter, at::TensorList sources,
                                 at::TensorList outs, const Reduction& reduction) {
  // Row i: what rank i receives of every tensor. One exchange whatever the number of tensors.
  const int64_t ranks = adapter.size();
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
  Started started = reduce_scatter(adapter, flat, reduced, reduction);
  started.finish = then(std::move(started.finish), unflatten_later(reduced, outs));
  return started;
}

}  // namespace c10d_ext::lowering
