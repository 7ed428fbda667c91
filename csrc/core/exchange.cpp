#include "core/exchange.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <tuple>
#include <typeinfo>
#include <utility>
#include <vector>

#include "backends/fallback.h"
#include "backends/shm.h"
#include "core/memory.h"
#include "core/messages.h"
#include "core/patience.h"
#include "core/pending.h"

// torch 2.13 renamed _allgather_base, alltoall_base and their kin; 2.11 has the old names alone.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace c10d_ext {

namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

// getBackend() throws where there is none. The direct question is new in torch 2.13.
template <class ProcessGroup>
bool serves_cpu(ProcessGroup& pg) {
  if constexpr (requires { pg.hasBackendForDeviceType(c10::DeviceType::CPU); }) {
    return pg.hasBackendForDeviceType(c10::DeviceType::CPU);
  } else {
    const auto devices = pg.getDeviceTypes();
    return std::any_of(devices.begin(), devices.end(), [](const auto& d) { return d.is_cpu(); });
  }
}

// Our own backend, which does all of this natively, or null where another serves the group.
ShmBackend* shm_of(const Group& group, const at::Tensor& t) {
  auto* pg = static_cast<c10d::ProcessGroup*>(group.process_group());
  if (!t.is_cpu() || !serves_cpu(*pg)) {
    return nullptr;
  }
  const auto backend = pg->getBackend(c10::DeviceType::CPU);  // which the process group holds
  auto* found = backend.get();
  return typeid(*found) == typeid(ShmBackend) ? static_cast<ShmBackend*>(found) : nullptr;
}

// Whether this rank does it all by itself, and no backend is asked. One that was asked keeps to the
// order of its calls.
bool is_alone(const Group& group) {
  if (!single_rank_shortcut(group) || Claim::here() != nullptr) {
    return false;
  }
  note_over(at::Tensor(), Facts());
  return true;
}

// Of what shm_of() started; null: complete already.
void attach_started(std::string_view op, const Group& group, at::TensorList outs,
                    const WorkPtr& work) {
  if (work) {
    attach(op, group, outs, work, Finish(), &ShmBackend::when_settled);
  } else {
    note_over(outs.front(), ShmBackend::last_settled());
  }
}

// A backend and what it can do; a ProcessGroup without backends (one written in Python, say) is
// used through its own virtual methods, which have the same names. Copies may outlive the call.
class Carrier {
 public:
  Carrier(std::string_view op, const Group& group, const at::Tensor& t)
      : op_(op), place_({}, group.name(), group.rank(), group.size()) {
    auto* pg = static_cast<c10d::ProcessGroup*>(group.process_group());
    const Claim* claim = Claim::here();
    if (claim != nullptr) {
      timeout_ = claim->timeout();
    }
    if (!pg->hasBackends()) {
      process_group_ = pg;
      has_future_ = t.is_cpu();
      return;
    }
    try {
      backend_ = pg->getBackend(t.device().type());
    } catch (const c10::Error&) {
      value_error(op, group, "the group must have a backend for the tensor's device, got ",
                  t.device());
    }
    if (claim != nullptr) {
      over_gloo_ = &claim->backend();
    } else if (auto* found = backend_.get(); typeid(*found) == typeid(OverGloo)) {
      over_gloo_ = static_cast<OverGloo*>(found);
      backend_ = over_gloo_->gloo();
    }
    const std::string name = backend_->getBackendName();
    gloo_ = name == "gloo";
    nccl_ = name == "nccl";
    complete_ = name == "shm" || name == "fake";
    timed_ = name == "shm";
    has_future_ = gloo_ || timed_;
  }

  // A process group without backends passes most of what it was not given on to the backends that
  // it does not have.
  template <class Verb>
  WorkPtr start(Verb&& verb) const {
    if (backend_) {
      return verb(*backend_);
    }
    try {
      return verb(*process_group_);
    } catch (const c10::Error& error) {
      if (std::string_view(error.what()).find("No backend type associated") ==
          std::string_view::npos) {
        throw;
      }
      value_error(op_, place_,
                  "a process group without backends must define allreduce, broadcast and "
                  "all_to_all_single (or alltoall_base), got one that lacks what this call needs");
    }
  }

  // A verb's options, with the timeout of the call that it serves.
  template <class Options>
  Options options() const {
    Options options;
    if (timeout_) {
      options.timeout = *timeout_;
    }
    return options;
  }

  ReductionPlan plan(const Reduction& reduction, c10::ScalarType dtype) const {
    // shm's min and max are NaN where a rank's value is, and so they are over gloo.
    return plan_reduction(reduction.op, dtype, nccl_ || complete_, !nccl_, over_gloo_ == nullptr);
  }

  // gloo's own reduce-scatter is an all-reduce without a future.
  bool has_reduce_scatter() const {
    return !gloo_ && !process_group_;
  }
  // Of a process group written in Python C++ reaches a few verbs alone: neither those with a root
  // nor the gather into one tensor. They are made of all_reduce and all_to_all.
  bool has_rooted() const {
    return !process_group_;
  }
  // Parts to or from one rank. The verbs of torch.distributed exchange them, which can be of any
  // sizes there, and are to be met.
  bool has_rooted_parts() const {
    return has_rooted() && over_gloo_ == nullptr;
  }
  bool has_all_gather() const {
    return !process_group_;
  }
  // Uneven lists of tensors in all_gather and reduce_scatter.
  bool has_uneven_lists() const {
    return nccl_ || complete_;
  }
  bool has_avg(bool reduce_to_one) const {
    return nccl_ || complete_ || (gloo_ && !reduce_to_one);
  }
  bool has_coalesced() const {
    return nccl_ || complete_;
  }
  // The wait for nccl's blocks the host, which no capture allows. It is an all_reduce of one float,
  // with or without the name.
  bool has_barrier() const {
    return !nccl_ || may_query_device();
  }

  // Messages of any dtype and strides.
  bool has_any_message() const {
    return complete_;
  }
  // One message is not done before its peer's is started, so several must start as one.
  bool starts_messages_together() const {
    return nccl_;
  }
  // A message as a work that any number of threads can ask and wait for.
  WorkPtr askable(WorkPtr work) const {
    return gloo_ && over_gloo_ == nullptr ? with_patience(std::move(work)) : work;
  }

  // Works know how long they took.
  bool is_timed() const {
    return timed_;
  }

  // Gloo and nccl keep a collective's inputs alive themselves; of others nothing is known.
  Finish keep(const at::Tensor& t) const {
    return gloo_ || nccl_ ? Finish() : Finish([t = alias_of(t)] {});
  }

  int64_t rank() const {
    return place_.rank();
  }
  int64_t size() const {
    return place_.size();
  }

 protected:
  // Ranks agree before they send anything, and what they call in flight begins in its turn.
  OverGloo* over_gloo() const {
    return over_gloo_;
  }
  // Around calls that start as one, which the work of the second holds.
  void begin_batch(c10::DeviceType device) const {
    backend_ ? backend_->startCoalescing() : process_group_->startCoalescing(device);
  }
  WorkPtr end_batch(c10::DeviceType device) const {
    return backend_ ? backend_->endCoalescing() : process_group_->endCoalescing(device);
  }
  Subscribe subscribe() const {
    return !has_future_ ? nullptr : process_group_ ? &subscribe_if_possible : &subscribe_to_future;
  }

 private:
  std::string_view op_;  // the names of ops are literals
  Group place_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  c10d::ProcessGroup* process_group_ = nullptr;
  OverGloo* over_gloo_ = nullptr;
  std::optional<std::chrono::milliseconds> timeout_;
  bool gloo_ = false;
  bool nccl_ = false;
  bool complete_ = false;
  bool has_future_ = false;
  bool timed_ = false;
};

struct Held {
  at::Tensor source;
  at::Tensor out;
};

// How one call reaches the backend that serves a device in a group.
class Channel : public Carrier {
 public:
  Channel(std::string_view op, const Group& group, const at::Tensor& t)
      : Carrier(op, group, t), op_(op), group_(group) {
    if (!t.is_cpu()) {
      device_guard_.reset_device(t.device());
    }
  }

  // What the ranks must agree on before run(), where the group is one in which they are asked.
  template <class Say>
  void say(Say&& what) {
    if (over_gloo() != nullptr) {
      const auto* claim = Claim::here();
      called_ = claim != nullptr ? *claim->called() : what();
    }
  }

  // A tensor as run() may keep it.
  at::Tensor hold(const at::Tensor& t) {
    if (!called_) {
      return t;
    }
    bytes_ += t.nbytes();
    return alias_of(t);
  }
  Tensors hold(at::TensorList tensors) {
    Tensors held;
    held.reserve(tensors.size());
    for (const auto& t : tensors) {
      held.push_back(hold(t));
    }
    return held;
  }
  // One tensor stays one.
  Held hold(const at::Tensor& source, const at::Tensor& out) {
    const at::Tensor held = hold(out);
    return {source.is_same(out) ? held : hold(source), held};
  }

  // Starts what `begin`, given the carrier, does, and attaches it to `outs`. Where the ranks have
  // to agree that is later and on another thread, in the order of their calls: `begin` then finds
  // in the tensors what the calls before it have left there.
  template <class Begin>
  void run(at::TensorList outs, Begin&& begin) {
    if (called_) {
      const WorkPtr work =
          over_gloo()->agree(op_, std::move(*called_), bytes_ <= kQuick,
                             [carrier = static_cast<const Carrier&>(*this),
                              begin = std::forward<Begin>(begin)] { return begin(carrier); });
      attach(op_, group_, outs, work, Finish(), &subscribe_to_future);
      return;
    }
    Started started = begin(static_cast<const Carrier&>(*this));
    attach(op_, group_, outs, started.work, std::move(started.finish), subscribe());
  }

  // Messages start at once. `verb` is told who has the message's other end.
  template <class Verb>
  WorkPtr start_message(const Message& message, Verb&& verb) const {
    if (over_gloo() != nullptr) {
      return over_gloo()->agree(
          message, [carrier = static_cast<const Carrier&>(*this), verb](int peer) mutable {
            return carrier.start([&](auto& backend) { return verb(backend, peer); });
          });
    }
    const auto peer = static_cast<int>(message.peer);
    return start([&](auto& backend) { return verb(backend, peer); });
  }
  using Carrier::begin_batch;
  using Carrier::end_batch;

 private:
  std::string_view op_;
  const Group& group_;
  c10::OptionalDeviceGuard device_guard_;
  std::optional<Called> called_;
  static constexpr size_t kQuick = size_t{1} << 20;
  size_t bytes_ = 0;  // held, and to be copied at most
};

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

// A dense tensor to receive `out`'s data in, and the copy into `out` where they differ.
std::pair<at::Tensor, Finish> landing(const at::Tensor& out) {
  if (is_dense(out)) {
    return {out, Finish()};
  }
  at::Tensor buffer = at::empty(out.sizes(), out.options());
  return {buffer, [buffer, out = alias_of(out)] { copy_values(out, buffer); }};
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

// One rank alone: its own value, times the factor.
void reduce_alone(const at::Tensor& source, const at::Tensor& out, const Reduction& reduction) {
  if (reduction.factor) {
    ReductionPlan plan = plan_reduction(ReduceOp::Sum, source.scalar_type(), false, true);
    const at::Tensor wire = scaled(source, reduction, plan);
    decode(wire, plan, out);
  } else if (!source.is_same(out)) {
    copy_values(out, source);
  }
}

using Sizes = Called::Sizes;
using shm::Verb;

Sizes counts_of(at::TensorList tensors) {
  Sizes counts;
  for (const auto& t : tensors) {
    counts.push_back(t.numel());
  }
  return counts;
}

int64_t count_of(c10::IntArrayRef sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

// Elements of each rank, whose rows have `row` of them.
std::vector<int64_t> elements_of(c10::IntArrayRef rows, int64_t row) {
  std::vector<int64_t> elements(rows.begin(), rows.end());
  for (auto& count : elements) {
    count *= row;
  }
  return elements;
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

Started all_reduce(const Carrier& carrier, const at::Tensor& source, const at::Tensor& out,
                   const Reduction& reduction) {
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

// `chunk_bytes`: what each rank receives of this rank's contribution, rank by rank, in bytes.
Started exchange_and_reduce(const Carrier& carrier, const at::Tensor& source, const at::Tensor& out,
                            const Reduction& reduction, c10::IntArrayRef chunk_elements) {
  const int64_t ranks = carrier.size();
  ReductionPlan plan = carrier.plan(reduction, out.scalar_type());
  const Contribution sent = contribution(source, reduction, plan);
  const at::Tensor in = bytes_of(sent.values);
  const int64_t elements = count_of(chunk_elements);
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

Started reduce_scatter(const Carrier& carrier, const at::Tensor& source, const at::Tensor& out,
                       const Reduction& reduction) {
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

// The verb that torch.distributed.barrier calls, so that the ranks that call that are met.
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
    int64_t offset = 0;
    for (const auto& out : outs) {
      const at::Tensor part = span_of(flat, offset, out.numel());
      copy_values(is_dense(out) ? span_of(out, 0, out.numel()) : out, part);
      offset += out.numel();
    }
  };
}

bool all_empty(at::TensorList tensors) {
  for (const auto& t : tensors) {
    if (t.numel() != 0) {
      return false;
    }
  }
  return true;
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
  if (plan.local_only && !carrier.has_rooted()) {
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
      finish = then(std::move(finish), std::move(copy));
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
  const int64_t width = all.numel() / count_of(sizes);
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

}  // namespace

void start_all_reduce(std::string_view op, const Group& group, const at::Tensor& source,
                      const at::Tensor& out, const Reduction& reduction) {
  if (out.is_meta() || out.numel() == 0) {
    return;
  }
  if (is_alone(group)) {
    reduce_alone(source, out, reduction);
    return;
  }
  if (auto* shm = shm_of(group, out)) {
    attach_started(op, group, out, shm->start_all_reduce(op, source, out, reduction));
    return;
  }
  Channel channel(op, group, out);
  channel.say(
      [&] { return called(Verb::AllReduce, out, out.numel()).reduced_by(name_of(reduction.op)); });
  const Held held = channel.hold(source, out);
  channel.run(out, [=](const Carrier& carrier) {
    return all_reduce(carrier, held.source, held.out, reduction);
  });
}

void start_all_reduce_coalesced(std::string_view op, const Group& group, at::TensorList sources,
                                at::TensorList outs, const Reduction& reduction) {
  if (outs.empty() || outs.front().is_meta() || all_empty(outs)) {
    return;
  }
  if (is_alone(group)) {
    for (size_t i = 0; i < outs.size(); ++i) {
      reduce_alone(sources[i], outs[i], reduction);
    }
    return;
  }
  if (auto* shm = shm_of(group, outs.front())) {
    attach_started(op, group, outs, shm->start_all_reduce(op, sources, outs, reduction));
    return;
  }
  Channel channel(op, group, outs.front());
  channel.say([&] {
    return called(Verb::AllReduce, outs)
        .of_members(counts_of(outs))
        .reduced_by(name_of(reduction.op));
  });
  const Tensors ins = channel.hold(sources);
  const Tensors results = channel.hold(outs);
  channel.run(outs, [=](const Carrier& carrier) {
    return all_reduce_coalesced(carrier, ins, results, reduction);
  });
}

void start_reduce(std::string_view op, const Group& group, const at::Tensor& source,
                  const at::Tensor& out, const Reduction& reduction, int64_t dst) {
  if (out.is_meta() || out.numel() == 0) {
    return;
  }
  if (is_alone(group)) {
    reduce_alone(source, out, reduction);
    return;
  }
  if (auto* shm = shm_of(group, out)) {
    attach_started(op, group, out, shm->start_reduce(op, source, out, reduction, dst));
    return;
  }
  Channel channel(op, group, out);
  channel.say([&] {
    return called(Verb::Reduce, out, out.numel()).reduced_by(name_of(reduction.op)).rooted_at(dst);
  });
  const Held held = channel.hold(source, out);
  channel.run(out, [=](const Carrier& carrier) {
    return reduce(carrier, held.source, held.out, reduction, dst);
  });
}

void start_all_gather(std::string_view op, const Group& group, const at::Tensor& source,
                      const at::Tensor& out) {
  if (out.is_meta() || out.numel() == 0) {
    return;
  }
  if (is_alone(group)) {
    copy_values(out, source);
    return;
  }
  if (auto* shm = shm_of(group, out)) {
    attach_started(op, group, out, shm->start_all_gather(op, source, out));
    return;
  }
  Channel channel(op, group, out);
  channel.say([&] {
    return called(Verb::AllGather, source)
        .gathered(source.numel(), Sizes(group.size(), source.numel()));
  });
  const Held held = channel.hold(source, out);
  channel.run(out, [=](const Carrier& carrier) {
    auto [buffer, finish] = landing(held.out);
    Started started = all_gather_bytes(carrier, bytes_of(dense(held.source)), bytes_of(buffer));
    started.finish = then(std::move(started.finish), std::move(finish));
    return started;
  });
}

void start_all_gather_coalesced(std::string_view op, const Group& group, at::TensorList sources,
                                at::TensorList outs) {
  if (outs.empty() || outs.front().is_meta() || all_empty(outs)) {
    return;
  }
  if (is_alone(group)) {
    for (size_t i = 0; i < outs.size(); ++i) {
      copy_values(outs[i], sources[i]);
    }
    return;
  }
  if (auto* shm = shm_of(group, outs.front())) {
    attach_started(op, group, outs, shm->start_all_gather(op, sources, outs));
    return;
  }
  Channel channel(op, group, outs.front());
  channel.say([&] { return called(Verb::AllGather, sources).of_members(counts_of(sources)); });
  const Tensors ins = channel.hold(sources);
  const Tensors results = channel.hold(outs);
  channel.run(outs,
              [=](const Carrier& carrier) { return all_gather_coalesced(carrier, ins, results); });
}

void start_all_gather_uneven(std::string_view op, const Group& group, const at::Tensor& source,
                             const at::Tensor& out, c10::IntArrayRef sizes) {
  if (out.is_meta() || out.numel() == 0) {
    return;
  }
  if (is_alone(group)) {
    copy_values(out, source);
    return;
  }
  if (auto* shm = shm_of(group, out)) {
    attach_started(op, group, out,
                   shm->start_all_gather_uneven(op, source, out,
                                                elements_of(sizes, out.numel() / count_of(sizes))));
    return;
  }
  Channel channel(op, group, out);
  channel.say([&] {
    return called(Verb::AllGather, source)
        .gathered(source.numel(), elements_of(sizes, out.numel() / count_of(sizes)));
  });
  const Held held = channel.hold(source, out);
  channel.run(out, [=, rows = sizes.vec()](const Carrier& carrier) {
    return all_gather_uneven(carrier, held.source, held.out, rows);
  });
}

void start_reduce_scatter(std::string_view op, const Group& group, const at::Tensor& source,
                          const at::Tensor& out, const Reduction& reduction) {
  if (out.is_meta() || out.numel() == 0) {
    return;
  }
  if (is_alone(group)) {
    reduce_alone(source.reshape(out.sizes()), out, reduction);
    return;
  }
  if (auto* shm = shm_of(group, out)) {
    attach_started(op, group, out, shm->start_reduce_scatter(op, source, out, reduction));
    return;
  }
  Channel channel(op, group, out);
  channel.say([&] {
    return called(Verb::ReduceScatter, out)
        .scattered(Sizes(group.size(), out.numel()), out.numel())
        .reduced_by(name_of(reduction.op));
  });
  const Held held = channel.hold(source, out);
  channel.run(out, [=](const Carrier& carrier) {
    return reduce_scatter(carrier, held.source, held.out, reduction);
  });
}

void start_reduce_scatter_coalesced(std::string_view op, const Group& group, at::TensorList sources,
                                    at::TensorList outs, const Reduction& reduction) {
  if (outs.empty() || outs.front().is_meta() || all_empty(outs)) {
    return;
  }
  if (is_alone(group)) {
    for (size_t i = 0; i < outs.size(); ++i) {
      reduce_alone(sources[i].reshape(outs[i].sizes()), outs[i], reduction);
    }
    return;
  }
  if (auto* shm = shm_of(group, outs.front())) {
    attach_started(op, group, outs, shm->start_reduce_scatter(op, sources, outs, reduction));
    return;
  }
  Channel channel(op, group, outs.front());
  channel.say([&] {
    return called(Verb::ReduceScatter, outs)
        .of_members(counts_of(outs))
        .reduced_by(name_of(reduction.op));
  });
  const Tensors ins = channel.hold(sources);
  const Tensors results = channel.hold(outs);
  channel.run(outs, [=](const Carrier& carrier) {
    return reduce_scatter_coalesced(carrier, ins, results, reduction);
  });
}

void start_reduce_scatter_uneven(std::string_view op, const Group& group, const at::Tensor& source,
                                 const at::Tensor& out, const Reduction& reduction,
                                 c10::IntArrayRef sizes) {
  if (source.is_meta() || source.numel() == 0) {
    return;
  }
  if (is_alone(group)) {
    reduce_alone(source, out, reduction);
    return;
  }
  const auto elements = elements_of(sizes, source.numel() / count_of(sizes));
  if (auto* shm = shm_of(group, out)) {
    attach_started(op, group, out,
                   shm->start_reduce_scatter_uneven(op, source, out, reduction, elements));
    return;
  }
  Channel channel(op, group, out);
  channel.say([&] {
    return called(Verb::ReduceScatter, out)
        .scattered(elements, elements[group.rank()])
        .reduced_by(name_of(reduction.op));
  });
  const Held held = channel.hold(source, out);
  channel.run(out, [=](const Carrier& carrier) {
    return exchange_and_reduce(carrier, held.source, held.out, reduction, elements);
  });
}

void start_all_to_all(std::string_view op, const Group& group, const at::Tensor& source,
                      const at::Tensor& out, c10::IntArrayRef output_splits,
                      c10::IntArrayRef input_splits) {
  if (source.is_meta()) {
    return;
  }
  int64_t width = source.element_size();
  for (int64_t dim = 1; dim < source.dim(); ++dim) {
    width *= source.size(dim);
  }
  if (width == 0) {
    return;
  }
  if (is_alone(group)) {
    copy_values(out, source);
    return;
  }
  const auto row = width / static_cast<int64_t>(source.element_size());
  if (auto* shm = shm_of(group, out)) {
    attach_started(op, group, out,
                   shm->start_all_to_all(op, source, out, elements_of(input_splits, row),
                                         elements_of(output_splits, row)));
    return;
  }
  Channel channel(op, group, out);
  channel.say([&] {
    return called(Verb::AllToAll, out)
        .exchanged(elements_of(input_splits, row), elements_of(output_splits, row));
  });
  std::vector<int64_t> out_splits(output_splits.begin(), output_splits.end());
  std::vector<int64_t> in_splits(input_splits.begin(), input_splits.end());
  for (auto* splits : {&out_splits, &in_splits}) {
    for (auto& split : *splits) {
      split *= width;
    }
  }
  const Held held = channel.hold(source, out);
  channel.run(out, [=](const Carrier& carrier) {
    auto [buffer, finish] = landing(held.out);
    Started started = all_to_all_bytes(carrier, bytes_of(dense(held.source)), bytes_of(buffer),
                                       out_splits, in_splits);
    started.finish = then(std::move(started.finish), std::move(finish));
    return started;
  });
}

void start_broadcast(std::string_view op, const Group& group, const at::Tensor& source,
                     const at::Tensor& out, int64_t src) {
  if (out.is_meta() || out.numel() == 0) {
    return;
  }
  if (is_alone(group)) {
    if (!source.is_same(out)) {
      copy_values(out, source);
    }
    return;
  }
  if (auto* shm = shm_of(group, out)) {
    attach_started(op, group, out, shm->start_broadcast(op, source, out, src));
    return;
  }
  Channel channel(op, group, out);
  channel.say([&] { return called(Verb::Broadcast, out, out.numel()).rooted_at(src); });
  const Held held = channel.hold(source, out);
  channel.run(
      out, [=](const Carrier& carrier) { return broadcast(carrier, held.source, held.out, src); });
}

void start_broadcast_coalesced(std::string_view op, const Group& group, at::TensorList sources,
                               at::TensorList outs, int64_t src) {
  if (outs.empty() || outs.front().is_meta() || all_empty(outs)) {
    return;
  }
  if (is_alone(group)) {
    for (size_t i = 0; i < outs.size(); ++i) {
      if (!sources[i].is_same(outs[i])) {
        copy_values(outs[i], sources[i]);
      }
    }
    return;
  }
  if (auto* shm = shm_of(group, outs.front())) {
    attach_started(op, group, outs, shm->start_broadcast(op, sources, outs, src));
    return;
  }
  Channel channel(op, group, outs.front());
  channel.say(
      [&] { return called(Verb::Broadcast, outs).of_members(counts_of(outs)).rooted_at(src); });
  const Tensors ins = channel.hold(sources);
  const Tensors results = channel.hold(outs);
  channel.run(outs, [=](const Carrier& carrier) {
    const at::Tensor flat = flattened(ins);
    Started started = broadcast(carrier, flat, flat, src);
    started.finish = then(std::move(started.finish), unflatten_later(flat, results));
    return started;
  });
}

void start_gather(std::string_view op, const Group& group, const at::Tensor& source,
                  const at::Tensor& out, int64_t dst) {
  if (source.is_meta() || source.numel() == 0) {
    return;
  }
  if (is_alone(group)) {
    copy_values(out, source);
    return;
  }
  if (auto* shm = shm_of(group, source)) {
    attach_started(op, group, out, shm->start_gather(op, source, out, dst));
    return;
  }
  Channel channel(op, group, source);
  channel.say([&] {
    const Sizes parts(group.rank() == dst ? group.size() : 0, source.numel());
    return called(Verb::Gather, source).gathered_at(dst, source.numel(), parts, group.size());
  });
  const Held held = channel.hold(source, out);
  channel.run(out,
              [=](const Carrier& carrier) { return gather(carrier, held.source, held.out, dst); });
}

void start_scatter(std::string_view op, const Group& group, const at::Tensor& source,
                   const at::Tensor& out, int64_t src) {
  if (out.is_meta() || out.numel() == 0) {
    return;
  }
  if (is_alone(group)) {
    copy_values(out, source);
    return;
  }
  if (auto* shm = shm_of(group, out)) {
    attach_started(op, group, out, shm->start_scatter(op, source, out, src));
    return;
  }
  Channel channel(op, group, out);
  channel.say([&] {
    const Sizes parts(group.rank() == src ? group.size() : 0, out.numel());
    return called(Verb::Scatter, out).scattered_from(src, out.numel(), parts, group.size());
  });
  const Held held = channel.hold(source, out);
  channel.run(out,
              [=](const Carrier& carrier) { return scatter(carrier, held.source, held.out, src); });
}

void start_barrier(std::string_view op, const Group& group, const at::Tensor& source,
                   const at::Tensor& out) {
  if (out.is_meta()) {
    return;
  }
  copy_values(out, source);
  if (is_alone(group)) {
    return;
  }
  if (auto* shm = shm_of(group, out)) {
    attach_started(op, group, out, shm->start_barrier(op));
    return;
  }
  Channel channel(op, group, out);
  channel.say([&] { return Called(); });
  channel.run(out,
              [device = out.device()](const Carrier& carrier) { return barrier(carrier, device); });
}

std::vector<WorkPtr> start_messages(std::string_view op, const Group& group,
                                    c10::ArrayRef<Message> messages) {
  const Channel channel(op, group, messages.front().tensor);
  // What travels, all of it at hand before the first one goes out.
  std::vector<Tensors> wires;
  std::vector<Finish> finishes;
  for (const auto& message : messages) {
    at::Tensor wire = message.tensor;
    Finish finish;
    if (channel.has_any_message()) {
      // As torch sends it, so that its functions may be at the other end.
      if (wire.is_complex()) {
        if (message.sends) {
          wire = wire.resolve_conj().resolve_neg();
        } else if (wire.is_conj() || wire.is_neg()) {
          std::tie(wire, finish) = landing(wire);
        }
        wire = at::view_as_real(wire);
      }
      wire = alias_of(wire);
    } else if (message.sends) {
      wire = bytes_of(dense(wire));
    } else {
      std::tie(wire, finish) = landing(wire);
      wire = bytes_of(wire);
    }
    wires.push_back({wire});
    finishes.push_back(std::move(finish));
  }
  const bool together = channel.starts_messages_together() && messages.size() > 1;
  if (together) {
    channel.begin_batch(messages.front().tensor.device().type());
  }
  std::vector<WorkPtr> started;
  for (size_t i = 0; i < messages.size(); ++i) {
    const auto tag = static_cast<int>(messages[i].tag);
    started.push_back(channel.start_message(
        messages[i],
        [wire = wires[i], sends = messages[i].sends, tag](auto& backend, int peer) mutable {
          return sends                ? backend.send(wire, peer, tag)
                 : peer == kAnySource ? backend.recvAnysource(wire, tag)
                                      : backend.recv(wire, peer, tag);
        }));
  }
  if (together) {
    const WorkPtr all = channel.end_batch(messages.front().tensor.device().type());
    std::fill(started.begin(), started.end(), all);
  }
  std::vector<WorkPtr> works;
  for (size_t i = 0; i < messages.size(); ++i) {
    const Message& message = messages[i];
    Finish finish = then(channel.keep(wires[i][0]), std::move(finishes[i]));
    works.push_back(follow(op, group, alias_of(message.tensor), channel.askable(started[i]),
                           std::move(finish), message.sends ? group.rank() : message.peer,
                           channel.is_timed()));
  }
  return works;
}

}  // namespace c10d_ext
