// The shm backend's verbs over gloo.

#include "backends/fallback.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_to_copy.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <exception>
#include <numeric>
#include <type_traits>
#include <utility>

#include "backends/coalesced.h"
#include "backends/fallback/agreed_works.h"
#include "backends/joining.h"
#include "backends/open_groups.h"
#include "backends/parts.h"
#include "backends/shm.h"
#include "backends/sparse.h"
#include "core/bounded.h"
#include "core/call_site.h"
#include "core/exchange.h"
#include "core/gil.h"
#include "core/memory.h"
#include "core/messages.h"

namespace c10d_ext {

namespace {

using std::string_view;
using Tensors = std::vector<at::Tensor>;
using Sizes = std::vector<int64_t>;
using shm::Verb;

OverGloo::Connect& connect_backend() {
  // Never destroyed: it holds a Python function, and a group may outlive Python.
  static auto* instance = new OverGloo::Connect;
  return *instance;
}

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

// How long a group that is destroyed with work in flight waits for it.
constexpr std::chrono::milliseconds kGrace{5000};

}  // namespace

Called called(Verb verb, at::TensorList like, int64_t count) {
  const auto scalar_type = like.front().scalar_type();
  const auto dtype = dtype_of(scalar_type);
  Called called;
  called.verb = verb;
  called.unit = dtype == shm::DType::Bytes ? c10::toString(scalar_type) : shm::name_of(dtype);
  called.count = count;
  for (const auto& t : like) {
    called.shapes = shm::add_shape(called.shapes, t.sizes().data(), static_cast<size_t>(t.dim()));
  }
  return called;
}

void OverGloo::set_connect(Connect connect) {
  connect_backend() = std::move(connect);
}

OverGloo::OverGloo(c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<c10d::Store> store,
                   const Options& options, Seats seats, int strict)
    : DivisibleBackend(gloo->getRank(), gloo->getSize(), options, std::move(store),
                       std::move(seats)),
      VerbChecks(group_),
      strict_(strict),
      gloo_(std::move(gloo)),
      group_(
          [this] {
            auto pg = c10::make_intrusive<c10d::ProcessGroup>(rank_, size_);
            pg->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO, gloo_);
            return pg;
          }(),
          options.group_name, rank_, size_),
      agreement_([&] {
        const Expected expected(group_, store_, seats_);
        return expected.joined([&] {
          return Agreement::join(expected.part_of_store("agreement"),
                                 {rank_, size_, options.group_name}, options.timeout);
        });
      }()),
      acquaintance_(acquaintance(seats_, [a = agreement_](int rank) { return a->gone(rank); })) {
  OpenGroups<Agreement>::of_this_process().add(agreement_);
  init();
}

void OverGloo::close_all(Milliseconds grace) {
  OpenGroups<Agreement>::of_this_process().close_all(
      grace, [](Agreement& group, Milliseconds left) { group.leave(left); });
}

OverGloo::~OverGloo() {
  // gloo's threads, which are waited for, may be at a callback written in Python.
  without_gil([this] {
    batch_.clear();
    leave();
    if (agreement_->has_abandoned() || agreement_->is_foreign()) {
      // What waits for ranks that are gone nobody can end, and gloo's end would wait for it, or for
      // threads that a fork has left behind.
      (void)c10::intrusive_ptr<c10d::Backend>(gloo_).release();
    }
    group_ = Group({}, {}, rank_, size_);
    gloo_.reset();
  });
}

// --- Calls
// ----------------------------------------------------------------------------------------

template <class Start>
OverGloo::WorkPtr OverGloo::run(const Call& call, Tensors outputs, Claim::Around around,
                                Start&& start) {
  WorkPtr work;
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    Claim claim(*this, call.called ? &*call.called : nullptr, call.type, std::move(outputs),
                std::move(around), call.timeout);
    if constexpr (std::is_void_v<decltype(start())>) {
      start();
      if (!claim.has_work()) {
        // No data, but the ranks meet.
        attach(call.op, group_, {}, agree(call.op, *call.called, true, [] { return Started(); }),
               Finish(), &subscribe_to_future);
      }
      work = claim.take();
      if (size_ == 1) {
        work->wait(kNoTimeout);  // the ops do what comes next without asking anybody
      }
    } else {
      work = start();  // of a message, which nobody else waits for
    }
  }
  if (batching_) {
    std::lock_guard lock(batch_mutex_);
    batch_.push_back(work);
    return call.async ? work : nullptr;
  }
  if (call.async) {
    return work;
  }
  work->wait(kNoTimeout);
  return {};
}

OverGloo::WorkPtr OverGloo::agree(string_view op, Called called, bool quick, Begin begin) {
  auto own = c10d::kUnsetTimeout;
  if (auto* claim = Claim::here()) {
    own = claim->timeout();
    begin = claim->around(std::move(begin));
  }
  if (strict_ == 0) {
    called.shapes = 0;
  }
  if (strict_ > 1) {
    called.rest += ", at " + call_site();
  }
  return start_agreed(agreement_, group_, op, std::move(called),
                      own > Milliseconds(0) ? own : timeout_.load(), quick, std::move(begin));
}

OverGloo::WorkPtr OverGloo::agree(const Message& message, std::function<WorkPtr(int peer)> begin) {
  auto started = start_granted(agreement_, group_, message, timeout_, std::move(begin));
  {
    std::lock_guard lock(messages_mutex_);
    if (messages_.size() >= messages_limit_) {
      std::erase_if(messages_, [](const auto& weak) {
        const auto known = weak.lock();
        return !known || known->isCompleted();
      });
      messages_limit_ = std::max(kFewMessages, 2 * messages_.size());
    }
    messages_.emplace_back(started.end);
  }
  return started.work;
}

void OverGloo::leave() {
  agreement_->leave(kGrace);
  std::vector<c10::weak_intrusive_ptr<c10d::Work>> messages;
  {
    std::lock_guard lock(messages_mutex_);
    messages.swap(messages_);
  }
  for (const auto& weak : messages) {
    if (const auto work = weak.lock()) {
      work->abort();
    }
  }
}

// The values of tensors of any dtypes, one after the other, in memory of their own.
OverGloo::Source OverGloo::packed(const Tensors& tensors) {
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

OverGloo::Source OverGloo::bytes_in(const at::Tensor& tensor) {
  return is_dense(tensor) ? Source{bytes_of(tensor), {}} : packed({tensor});
}

// The values of `source` in memory that nobody writes while they travel to `out`.
OverGloo::Source OverGloo::apart(const at::Tensor& source, const at::Tensor& out) {
  if (is_dense(source) && !source.is_alias_of(out)) {
    return {source, {}};
  }
  const at::Tensor values = at::empty(source.sizes(), source.options());
  return {values, [values, source = alias_of(source)] { copy_values(values, source); }};
}

OverGloo::WorkPtr OverGloo::all_gather_bytes(const Call& call, const Source& own, Sizes sizes,
                                             const Tensors& outputs) {
  const at::Tensor all = empty_bytes(sum_of(sizes));
  // All ranks have the same sizes, and so start the same.
  const bool even = std::equal(sizes.begin() + 1, sizes.end(), sizes.begin());
  return run(call, outputs, {own.fill, unpack_later(all, outputs)}, [&] {
    if (even) {
      start_all_gather(call.op, group_, own.values, all);
    } else {
      start_all_gather_uneven(call.op, group_, own.values, all, sizes);
    }
  });
}

OverGloo::WorkPtr OverGloo::exchange_bytes(const Call& call, const Source& source,
                                           const Tensors& outputs, const Sizes& in,
                                           const Sizes& out) {
  const at::Tensor received = empty_bytes(sum_of(out));
  return run(call, outputs, {source.fill, unpack_later(received, outputs)},
             [&] { start_all_to_all(call.op, group_, source.values, received, out, in); });
}

OverGloo::WorkPtr OverGloo::message(string_view op, c10d::OpType type, const at::Tensor& tensor,
                                    int peer, int tag) {
  const Call call{op, type, true, c10d::kUnsetTimeout, std::nullopt};
  return run(call, {tensor}, {}, [&] {
    return start_messages(op, group_, Message{tensor, type == c10d::OpType::SEND, peer, tag})[0];
  });
}

// --- c10d's verbs
// ---------------------------------------------------------------------------------

OverGloo::WorkPtr OverGloo::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
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
  return run(Call::of(op, c10d::OpType::BROADCAST, opts,
                      called(Verb::Broadcast, tensor, tensor.numel()).rooted_at(opts.rootRank)),
             tensors, {buffer.fill, {}},
             [&] { start_broadcast(op, group_, buffer.values, buffer.values, opts.rootRank); });
}

OverGloo::WorkPtr OverGloo::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  constexpr string_view op = "all_reduce";
  const at::Tensor& tensor = only(op, "tensor", tensors);
  if (C10_UNLIKELY(tensor.defined() && tensor.layout() != c10::kStrided)) {
    return allreduce_sparse(tensors, opts);
  }
  check_written(op, "tensor", tensor);
  const auto reduction = reduction_of(op, opts.reduceOp, tensor.scalar_type());
  return run(
      Call::of(op, c10d::OpType::ALLREDUCE, opts,
               called(Verb::AllReduce, tensor, tensor.numel()).reduced_by(name_of(reduction.op))),
      tensors, {}, [&] { start_all_reduce(op, group_, tensor, tensor, reduction); });
}

OverGloo::WorkPtr OverGloo::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "all_reduce";
  const at::Tensor& tensor = only(op, "tensor", tensors);
  const auto reduction = check_sparse(op, tensor, opts.reduceOp);
  std::ostringstream shape;
  shape << " of shape " << tensor.sizes() << " with " << tensor.sparse_dim()
        << " sparse dimensions";
  Called said = called(Verb::AllReduce, tensor);
  said.rest = shape.str();
  const auto call = Call::of(op, c10d::OpType::_ALLREDUCE_SPARSE, opts,
                             std::move(said).reduced_by(name_of(reduction.op)));
  const int64_t divisor = reduction.op == ReduceOp::Avg ? size_ : 1;
  c10d::AllreduceOptions options;
  options.timeout = std::min(call.timeout, kLongestWait);
  const auto begin = [gloo = gloo_, tensor, options, divisor] {
    Tensors sums{to_wire(tensor)};
    const WorkPtr work = gloo->allreduce(sums, options);
    return Started{work, [sum = sums[0], tensor, divisor] {
                     if (divisor != 1) {
                       sum._values().div_(divisor);
                     }
                     tensor.copy_(from_wire(sum, tensor));
                   }};
  };
  return run(call, tensors, {}, [&] {
    attach(op, group_, tensors, agree(op, *call.called, false, begin), Finish(),
           &subscribe_to_future);
  });
}

OverGloo::WorkPtr OverGloo::allreduce_coalesced(Tensors& tensors,
                                                const c10d::AllreduceCoalescedOptions& opts) {
  constexpr string_view op = "all_reduce_coalesced";
  check_list(op, tensors);
  const auto reduction = reduction_of(op, opts.reduceOp, tensors[0].scalar_type());
  return run(Call::of(op, c10d::OpType::ALLREDUCE_COALESCED, opts,
                      called(Verb::AllReduce, tensors)
                          .of_members(counts_of(tensors))
                          .reduced_by(name_of(reduction.op))),
             tensors, {},
             [&] { start_all_reduce_coalesced(op, group_, tensors, tensors, reduction); });
}

OverGloo::WorkPtr OverGloo::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  constexpr string_view op = "reduce";
  const at::Tensor& tensor = only(op, "tensor", tensors);
  check_root(op, opts.rootRank);
  check_written(op, "tensor", tensor);
  const auto reduction = reduction_of(op, opts.reduceOp, tensor.scalar_type());
  return run(Call::of(op, c10d::OpType::REDUCE, opts,
                      called(Verb::Reduce, tensor, tensor.numel())
                          .reduced_by(name_of(reduction.op))
                          .rooted_at(opts.rootRank)),
             tensors, {},
             [&] { start_reduce(op, group_, tensor, tensor, reduction, opts.rootRank); });
}

OverGloo::WorkPtr OverGloo::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
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
               called(Verb::AllGather, parts).gathered(input.numel(), counts_of(parts)));
  return all_gather_bytes(call, bytes_in(input), sizes_of(parts), parts);
}

OverGloo::WorkPtr OverGloo::_allgather_base(at::Tensor& output, at::Tensor& input,
                                            const c10d::AllgatherOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "all_gather_into_tensor";
  check_tensor(op, "input", input);
  check_written(op, "output", output);
  check_whole(op, "output", output, "input", input);
  const Source source = apart(input, output);
  return run(
      Call::of(op, c10d::OpType::_ALLGATHER_BASE, opts,
               called(Verb::AllGather, input).gathered(input.numel(), Sizes(size_, input.numel()))),
      {output}, {source.fill, {}}, [&] { start_all_gather(op, group_, source.values, output); });
}

OverGloo::WorkPtr OverGloo::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
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
  Called said = called(Verb::AllGather, parts);
  said.rest = c10::str(" in ", inputs.size(), " tensors for each rank");
  const auto call =
      Call::of(op, c10d::OpType::ALLGATHER_COALESCED, opts,
               std::move(said).gathered(sum_of(counts_of(inputs)), std::move(counts)));
  return all_gather_bytes(call, own, std::move(sizes), parts);
}

OverGloo::WorkPtr OverGloo::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                            const c10d::AllgatherOptions& opts) {
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
  const auto call = Call::of(op, c10d::OpType::ALLGATHER_COALESCED, opts,
                             called(Verb::AllGather, inputs).of_members(counts_of(inputs)));
  return run(call, outputs, {own.fill, std::move(finish)},
             [&] { start_all_gather(op, group_, own.values, all); });
}

// As an exchange, for the ranks' parts may differ in size, which the root alone knows.
OverGloo::WorkPtr OverGloo::gather(std::vector<Tensors>& outputs, Tensors& inputs,
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
               called(Verb::Gather, input)
                   .gathered_at(opts.rootRank, input.numel(), counts_of(parts), size_));
  return exchange_bytes(call, bytes_in(input), parts, in,
                        parts.empty() ? Sizes(size_, 0) : sizes_of(parts));
}

OverGloo::WorkPtr OverGloo::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
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
               called(Verb::Scatter, output)
                   .scattered_from(opts.rootRank, output.numel(), counts_of(parts), size_));
  return exchange_bytes(call, packed(parts), {output},
                        parts.empty() ? Sizes(size_, 0) : sizes_of(parts), out);
}

OverGloo::WorkPtr OverGloo::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
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
                      called(Verb::ReduceScatter, output)
                          .scattered(counts, output.numel())
                          .reduced_by(name_of(reduction.op))),
             outputs, {bytes.fill, {}}, [&] {
               if (even) {
                 start_reduce_scatter(op, group_, source, output, reduction);
               } else {
                 start_reduce_scatter_uneven(op, group_, source, output, reduction, counts);
               }
             });
}

OverGloo::WorkPtr OverGloo::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::ReduceScatterOptions& opts) {
  constexpr string_view op = "reduce_scatter_tensor";
  check_tensor(op, "input", input);
  check_written(op, "output", output);
  check_whole(op, "input", input, "output", output);
  const auto reduction = reduction_of(op, opts.reduceOp, output.scalar_type());
  const Source source = apart(input, output);
  return run(Call::of(op, c10d::OpType::_REDUCE_SCATTER_BASE, opts,
                      called(Verb::ReduceScatter, output)
                          .scattered(Sizes(size_, output.numel()), output.numel())
                          .reduced_by(name_of(reduction.op))),
             {output}, {source.fill, {}},
             [&] { start_reduce_scatter(op, group_, source.values, output, reduction); });
}

OverGloo::WorkPtr OverGloo::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  constexpr string_view op = "reduce_scatter_tensor_coalesced";
  check_pairs(op, outputs, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_whole(op, "each input", inputs[i], "its output", outputs[i]);
  }
  check_list(op, outputs);
  const auto reduction = reduction_of(op, opts.reduceOp, outputs[0].scalar_type());
  return run(Call::of(op, c10d::OpType::REDUCE_SCATTER, opts,
                      called(Verb::ReduceScatter, outputs)
                          .of_members(counts_of(outputs))
                          .reduced_by(name_of(reduction.op))),
             outputs, {},
             [&] { start_reduce_scatter_coalesced(op, group_, inputs, outputs, reduction); });
}

OverGloo::WorkPtr OverGloo::alltoall_base(at::Tensor& output, at::Tensor& input,
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
                             called(Verb::AllToAll, output).exchanged(in, out));
  const Source from = apart(input, output);
  const at::Tensor source = from.values.view({-1});
  const bool direct = is_dense(output);
  const at::Tensor received =
      direct ? span_of(output, 0, output.numel()) : at::empty({output.numel()}, output.options());
  return run(call, {output},
             {from.fill, direct ? Finish() : unpack_later(bytes_of(received), {output})},
             [&] { start_all_to_all(op, group_, source, received, out, in); });
}

OverGloo::WorkPtr OverGloo::alltoall(Tensors& outputs, Tensors& inputs,
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
  const auto call =
      Call::of(op, c10d::OpType::ALLTOALL, opts,
               called(Verb::AllToAll, outputs[0]).exchanged(counts_of(inputs), counts_of(outputs)));
  return exchange_bytes(call, packed(inputs), outputs, sizes_of(inputs), sizes_of(outputs));
}

OverGloo::WorkPtr OverGloo::send(Tensors& tensors, int dst, int tag) {
  constexpr string_view op = "send";
  const at::Tensor& tensor = only(op, "tensor", tensors);
  check_tensor(op, "tensor", tensor);
  check_peer(op, "destination", dst);
  return message(op, c10d::OpType::SEND, tensor, dst, tag);
}

OverGloo::WorkPtr OverGloo::recv(Tensors& tensors, int src, int tag) {
  constexpr string_view op = "recv";
  const at::Tensor& tensor = only(op, "tensor", tensors);
  check_peer(op, "source", src);
  check_written(op, "tensor", tensor);
  return message(op, c10d::OpType::RECV, tensor, src, tag);
}

OverGloo::WorkPtr OverGloo::recvAnysource(Tensors& tensors, int tag) {
  constexpr string_view op = "recv";
  const at::Tensor& tensor = only(op, "tensor", tensors);
  check_written(op, "tensor", tensor);
  return message(op, c10d::OpType::RECVANYSOURCE, tensor, kAnySource, tag);
}

OverGloo::WorkPtr OverGloo::barrier(const c10d::BarrierOptions& opts) {
  const auto call = Call::of("barrier", c10d::OpType::BARRIER, opts, Called());
  return run(call, {}, {}, [&] {
    const at::Tensor nothing = empty_bytes(0);
    start_barrier(call.op, group_, nothing, nothing);
  });
}

// That all ranks call it is agreed on, and nothing else is to be done. The failure names all that
// are missing, whether asked for all or one. A barrier, which waits for what is in flight, is
// another.
void OverGloo::monitoredBarrier(const c10d::BarrierOptions& opts, bool /*wait_all_ranks*/) {
  Called monitored;
  monitored.rest = "monitored";
  auto call = Call::of("monitored_barrier", c10d::OpType::BARRIER, opts, std::move(monitored));
  call.async = false;
  run(call, {}, {}, [] {});
}

// --- Coalescing
// -----------------------------------------------------------------------------------

void OverGloo::startCoalescing() {
  std::lock_guard lock(batch_mutex_);
  C10D_EXT_CHECK_VALUE(!batching_, "start_coalescing", group_,
                       "coalescing blocks must not be nested, got a second one");
  batching_ = true;
}

OverGloo::WorkPtr OverGloo::endCoalescing() {
  std::lock_guard lock(batch_mutex_);
  C10D_EXT_CHECK_VALUE(batching_, "end_coalescing", group_,
                       "a coalescing block must be open, got none");
  batching_ = false;
  std::vector<WorkPtr> works;
  works.swap(batch_);
  return works.empty() ? nullptr : c10::make_intrusive<CoalescedWork>(std::move(works), rank_);
}

// --- Groups
// ---------------------------------------------------------------------------------------

c10::intrusive_ptr<c10d::Backend> OverGloo::make_backend(
    std::string_view /*op*/, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    Milliseconds timeout, const std::string& name, const Seats& seats) const {
  return connect_backend()(store, rank, size, timeout, name, seats);
}

void OverGloo::setTimeout(Milliseconds timeout) {
  DivisibleBackend::setTimeout(timeout);
  gloo_->setTimeout(bounded(timeout));
}

uint64_t OverGloo::getSequenceNumberForGroup() {
  return agreement_->count();
}

c10d::ErrorType OverGloo::getError() {
  return agreement_->failure({}, 0, Milliseconds(0)) ? c10d::ErrorType::COMM_ERROR
                                                     : c10d::ErrorType::SUCCESS;
}

void OverGloo::abort() {
  without_gil([this] { agreement_->abort(); });
  gloo_->abort();
}

void OverGloo::shutdown() {
  without_gil([this] { leave(); });
  gloo_->shutdown();
}

// --- Python
// ---------------------------------------------------------------------------------------

void bind_fallback(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<OverGloo, c10::intrusive_ptr<OverGloo>, DivisibleBackend>(m, "OverGloo")
      .def(py::init([](c10::intrusive_ptr<c10d::Backend> gloo,
                       c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds timeout,
                       const std::string& group_name, const Seats& seats, int strict) {
             c10d::Backend::Options options("shm", timeout);
             options.group_name = group_name;
             const py::gil_scoped_release waits;
             return c10::make_intrusive<OverGloo>(std::move(gloo), std::move(store), options, seats,
                                                  strict);
           }),
           py::arg("gloo"), py::arg("store"), py::arg("timeout"), py::arg("group_name"),
           py::arg("seats"), py::arg("strict"))
      .def_property_readonly("gloo", &OverGloo::gloo, "The backend that does the work.");
  m.def("set_fallback_connect", &OverGloo::set_connect, py::arg("connect"));
  m.def("close_fallback_groups", &OverGloo::close_all, py::arg("grace"),
        py::call_guard<py::gil_scoped_release>());
}

}  // namespace c10d_ext
