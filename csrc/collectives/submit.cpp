#include "collectives/submit.h"

#include <ATen/ops/view_as_real.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <functional>
#include <optional>
#include <tuple>
#include <typeinfo>
#include <utility>
#include <vector>

#include "backends/adapter/adapter.h"
#include "backends/adapter/lowering.h"
#include "backends/checked/backend.h"
#include "backends/shm/backend.h"
#include "base/memory.h"
#include "collectives/p2p.h"
#include "work/pending.h"
#include "work/snapshot.h"

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
  note_over(at::Tensor(), WorkInfo());
  return true;
}

// Whether shared memory's engine reads `source` at the address it has now, or it is written, too.
bool is_read_in_place(const at::Tensor& source, const at::Tensor& out) {
  return source.is_same(out) || (is_dense(source) && can_share(source)) ||
         source.storage().is_alias_of(out.storage());
}

// Starts on shared memory and attaches the work, if it is not complete already. `start` is given
// the sources as it may read them until the end.
template <class Start>
void run_on_shm(std::string_view op, const Group& group, at::TensorList sources,
                at::TensorList outs, Start&& start) {
  Tensors snapshots;
  for (size_t i = 0; i < sources.size(); ++i) {
    if (C10_UNLIKELY(!is_read_in_place(sources[i], outs[i]))) {
      if (snapshots.empty()) {
        snapshots = sources.vec();
      }
      snapshots[i] = snapshot_of(sources[i]);
    }
  }
  const WorkPtr work = start(snapshots.empty() ? sources : at::TensorList(snapshots));
  if (!work) {
    note_over(outs.front(), ShmBackend::last_settled());
    return;
  }
  // What the engine reads by address is kept from now on: nobody else has run since.
  std::vector<std::shared_ptr<void>> kept;
  for (size_t i = 0; i < sources.size(); ++i) {
    const bool is_own = !snapshots.empty() && !snapshots[i].is_same(sources[i]);
    if (!is_own && !sources[i].storage().is_alias_of(outs[i].storage())) {
      kept.push_back(keep_values(sources[i]));
    }
  }
  Finish finish;
  if (!kept.empty()) {
    finish = [kept = std::move(kept)] {};
  }
  attach(op, group, outs, work, std::move(finish), &ShmBackend::when_settled);
}

struct Held {
  at::Tensor source;
  at::Tensor out;
};
struct HeldLists {
  Tensors sources;
  Tensors outs;
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
    if (checked_backend() != nullptr) {
      const auto* claim = Claim::here();
      called_ = claim != nullptr ? *claim->called() : what();
    }
  }

  // Tensors as run() may keep them: what is written,
  at::Tensor hold(const at::Tensor& out) {
    if (!called_) {
      return out;
    }
    bytes_ += out.nbytes();
    return alias_of(out);
  }
  // and what is read, which stays as it is now whatever its owner writes. One tensor stays one.
  // `is_copied`: the verb copies the source, on a device in the order of the caller's stream.
  Held hold(const at::Tensor& source, const at::Tensor& out, bool is_copied = false) {
    const at::Tensor held = hold(out);
    if (source.is_same(out)) {
      return {held, held};
    }
    // The verbs of c10d, by a Claim, keep to the caller's memory, as all backends do.
    if (Claim::here() != nullptr || source.storage().is_alias_of(out.storage())) {
      return {hold(source), held};
    }
    bytes_ += called_ ? source.nbytes() : 0;
    if (!source.is_cpu()) {
      return {FunctionalCall::is_on() && !is_copied ? clone_of(source) : source, held};
    }
    const at::Tensor snapshot = snapshot_of(source);
    return {snapshot.is_same(source) && called_ ? alias_of(source) : snapshot, held};
  }
  HeldLists hold(at::TensorList sources, at::TensorList outs, bool is_copied = false) {
    HeldLists held;
    for (size_t i = 0; i < outs.size(); ++i) {
      auto [source, out] = hold(sources[i], outs[i], is_copied);
      held.sources.push_back(std::move(source));
      held.outs.push_back(std::move(out));
    }
    return held;
  }

  // Starts what `begin`, given the carrier, does, and attaches it to `outs`. Where the ranks have
  // to agree that is later and on another thread, in the order of their calls: `begin` then finds
  // in the tensors what the calls before it have left there.
  template <class Begin>
  void run(at::TensorList outs, Begin&& begin) {
    if (called_) {
      const WorkPtr work =
          checked_backend()->agree(op_, std::move(*called_), bytes_ <= kQuick,
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
    if (checked_backend() != nullptr) {
      return checked_backend()->agree(
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
  std::optional<Fingerprint> called_;
  static constexpr size_t kQuick = size_t{1} << 20;
  size_t bytes_ = 0;  // held, and to be copied at most
};

using Sizes = Fingerprint::Sizes;

Sizes counts_of(at::TensorList tensors) {
  Sizes counts;
  for (const auto& t : tensors) {
    counts.push_back(t.numel());
  }
  return counts;
}

// Elements of each rank, whose rows have `row` of them.
std::vector<int64_t> elements_of(c10::IntArrayRef rows, int64_t row) {
  std::vector<int64_t> elements(rows.begin(), rows.end());
  for (auto& count : elements) {
    count *= row;
  }
  return elements;
}

bool all_empty(at::TensorList tensors) {
  for (const auto& t : tensors) {
    if (t.numel() != 0) {
      return false;
    }
  }
  return true;
}

}  // namespace

void start_all_reduce(std::string_view op, const Group& group, const at::Tensor& source,
                      const at::Tensor& out, const Reduction& reduction) {
  if (out.is_meta() || out.numel() == 0) {
    return;
  }
  if (is_alone(group)) {
    lowering::reduce_alone(source, out, reduction);
    return;
  }
  if (auto* shm = shm_of(group, out)) {
    run_on_shm(op, group, source, out, [&](at::TensorList sources) {
      return shm->start_all_reduce(op, sources, out, reduction);
    });
    return;
  }
  Channel channel(op, group, out);
  channel.say(
      [&] { return fingerprint_of(OpType::AllReduce, out, out.numel()).reduced_by(reduction.op); });
  const Held held = channel.hold(source, out, /*is_copied=*/true);
  channel.run(out, [=](const Carrier& carrier) {
    return lowering::all_reduce(carrier, held.source, held.out, reduction);
  });
}

void start_all_reduce_coalesced(std::string_view op, const Group& group, at::TensorList sources,
                                at::TensorList outs, const Reduction& reduction) {
  if (outs.empty() || outs.front().is_meta() || all_empty(outs)) {
    return;
  }
  if (is_alone(group)) {
    for (size_t i = 0; i < outs.size(); ++i) {
      lowering::reduce_alone(sources[i], outs[i], reduction);
    }
    return;
  }
  if (auto* shm = shm_of(group, outs.front())) {
    run_on_shm(op, group, sources, outs,
               [&](at::TensorList ins) { return shm->start_all_reduce(op, ins, outs, reduction); });
    return;
  }
  Channel channel(op, group, outs.front());
  channel.say([&] {
    return fingerprint_of(OpType::AllReduce, outs)
        .of_members(counts_of(outs))
        .reduced_by(reduction.op);
  });
  const HeldLists held = channel.hold(sources, outs, /*is_copied=*/true);
  channel.run(outs, [=](const Carrier& carrier) {
    return lowering::all_reduce_coalesced(carrier, held.sources, held.outs, reduction);
  });
}

void start_reduce(std::string_view op, const Group& group, const at::Tensor& source,
                  const at::Tensor& out, const Reduction& reduction, int64_t dst) {
  if (out.is_meta() || out.numel() == 0) {
    return;
  }
  if (is_alone(group)) {
    lowering::reduce_alone(source, out, reduction);
    return;
  }
  if (auto* shm = shm_of(group, out)) {
    run_on_shm(op, group, source, out, [&](at::TensorList sources) {
      return shm->start_reduce(op, sources[0], out, reduction, dst);
    });
    return;
  }
  Channel channel(op, group, out);
  channel.say([&] {
    return fingerprint_of(OpType::Reduce, out, out.numel()).reduced_by(reduction.op).rooted_at(dst);
  });
  const Held held = channel.hold(source, out, /*is_copied=*/true);
  channel.run(out, [=](const Carrier& carrier) {
    return lowering::reduce(carrier, held.source, held.out, reduction, dst);
  });
}

void start_all_gather(std::string_view op, const Group& group, const at::Tensor& source,
                      const at::Tensor& out) {
  if (out.is_meta() || out.numel() == 0) {
    return;
  }
  if (is_alone(group)) {
    copy_values(out, apart_from(source, out));
    return;
  }
  if (auto* shm = shm_of(group, out)) {
    run_on_shm(op, group, source, out,
               [&](at::TensorList sources) { return shm->start_all_gather(op, sources, out); });
    return;
  }
  Channel channel(op, group, out);
  channel.say([&] {
    return fingerprint_of(OpType::AllGather, source)
        .gathered(source.numel(), Sizes(group.size(), source.numel()));
  });
  const Held held = channel.hold(source, out);
  channel.run(out, [=](const Carrier& carrier) {
    return lowering::all_gather(carrier, held.source, held.out);
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
    run_on_shm(op, group, sources, outs,
               [&](at::TensorList ins) { return shm->start_all_gather(op, ins, outs); });
    return;
  }
  Channel channel(op, group, outs.front());
  channel.say(
      [&] { return fingerprint_of(OpType::AllGather, sources).of_members(counts_of(sources)); });
  const HeldLists held = channel.hold(sources, outs);
  channel.run(outs, [=](const Carrier& carrier) {
    return lowering::all_gather_coalesced(carrier, held.sources, held.outs);
  });
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
    run_on_shm(op, group, source, out, [&](at::TensorList sources) {
      return shm->start_all_gather_uneven(
          op, sources[0], out, elements_of(sizes, out.numel() / c10::sum_integers(sizes)));
    });
    return;
  }
  Channel channel(op, group, out);
  channel.say([&] {
    return fingerprint_of(OpType::AllGather, source)
        .gathered(source.numel(), elements_of(sizes, out.numel() / c10::sum_integers(sizes)));
  });
  const Held held = channel.hold(source, out);
  channel.run(out, [=, rows = sizes.vec()](const Carrier& carrier) {
    return lowering::all_gather_uneven(carrier, held.source, held.out, rows);
  });
}

void start_reduce_scatter(std::string_view op, const Group& group, const at::Tensor& source,
                          const at::Tensor& out, const Reduction& reduction) {
  if (out.is_meta() || out.numel() == 0) {
    return;
  }
  if (is_alone(group)) {
    lowering::reduce_alone(source.reshape(out.sizes()), out, reduction);
    return;
  }
  if (auto* shm = shm_of(group, out)) {
    run_on_shm(op, group, source, out, [&](at::TensorList sources) {
      return shm->start_reduce_scatter(op, sources, out, reduction);
    });
    return;
  }
  Channel channel(op, group, out);
  channel.say([&] {
    return fingerprint_of(OpType::ReduceScatter, out)
        .scattered(Sizes(group.size(), out.numel()), out.numel())
        .reduced_by(reduction.op);
  });
  const Held held = channel.hold(source, out);
  channel.run(out, [=](const Carrier& carrier) {
    return lowering::reduce_scatter(carrier, held.source, held.out, reduction);
  });
}

void start_reduce_scatter_coalesced(std::string_view op, const Group& group, at::TensorList sources,
                                    at::TensorList outs, const Reduction& reduction) {
  if (outs.empty() || outs.front().is_meta() || all_empty(outs)) {
    return;
  }
  if (is_alone(group)) {
    for (size_t i = 0; i < outs.size(); ++i) {
      lowering::reduce_alone(sources[i].reshape(outs[i].sizes()), outs[i], reduction);
    }
    return;
  }
  if (auto* shm = shm_of(group, outs.front())) {
    run_on_shm(op, group, sources, outs, [&](at::TensorList ins) {
      return shm->start_reduce_scatter(op, ins, outs, reduction);
    });
    return;
  }
  Channel channel(op, group, outs.front());
  channel.say([&] {
    return fingerprint_of(OpType::ReduceScatter, outs)
        .of_members(counts_of(outs))
        .reduced_by(reduction.op);
  });
  const HeldLists held = channel.hold(sources, outs);
  channel.run(outs, [=](const Carrier& carrier) {
    return lowering::reduce_scatter_coalesced(carrier, held.sources, held.outs, reduction);
  });
}

void start_reduce_scatter_uneven(std::string_view op, const Group& group, const at::Tensor& source,
                                 const at::Tensor& out, const Reduction& reduction,
                                 c10::IntArrayRef sizes) {
  if (source.is_meta() || source.numel() == 0) {
    return;
  }
  if (is_alone(group)) {
    lowering::reduce_alone(source, out, reduction);
    return;
  }
  const auto elements = elements_of(sizes, source.numel() / c10::sum_integers(sizes));
  if (auto* shm = shm_of(group, out)) {
    run_on_shm(op, group, source, out, [&](at::TensorList sources) {
      return shm->start_reduce_scatter_uneven(op, sources[0], out, reduction, elements);
    });
    return;
  }
  Channel channel(op, group, out);
  channel.say([&] {
    return fingerprint_of(OpType::ReduceScatter, out)
        .scattered(elements, elements[group.rank()])
        .reduced_by(reduction.op);
  });
  const Held held = channel.hold(source, out);
  channel.run(out, [=](const Carrier& carrier) {
    return lowering::exchange_and_reduce(carrier, held.source, held.out, reduction, elements);
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
    copy_values(out, apart_from(source, out));
    return;
  }
  const auto row = width / static_cast<int64_t>(source.element_size());
  if (auto* shm = shm_of(group, out)) {
    run_on_shm(op, group, source, out, [&](at::TensorList sources) {
      return shm->start_all_to_all(op, sources[0], out, elements_of(input_splits, row),
                                   elements_of(output_splits, row));
    });
    return;
  }
  Channel channel(op, group, out);
  channel.say([&] {
    return fingerprint_of(OpType::AllToAll, out)
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
    return lowering::all_to_all(carrier, held.source, held.out, out_splits, in_splits);
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
    run_on_shm(op, group, source, out,
               [&](at::TensorList sources) { return shm->start_broadcast(op, sources, out, src); });
    return;
  }
  Channel channel(op, group, out);
  channel.say([&] { return fingerprint_of(OpType::Broadcast, out, out.numel()).rooted_at(src); });
  const Held held = channel.hold(source, out, /*is_copied=*/true);
  channel.run(out, [=](const Carrier& carrier) {
    return lowering::broadcast(carrier, held.source, held.out, src);
  });
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
    run_on_shm(op, group, sources, outs,
               [&](at::TensorList ins) { return shm->start_broadcast(op, ins, outs, src); });
    return;
  }
  Channel channel(op, group, outs.front());
  channel.say([&] {
    return fingerprint_of(OpType::Broadcast, outs).of_members(counts_of(outs)).rooted_at(src);
  });
  const HeldLists held = channel.hold(sources, outs, /*is_copied=*/true);
  channel.run(outs, [=](const Carrier& carrier) {
    return lowering::broadcast_coalesced(carrier, held.sources, held.outs, src);
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
    run_on_shm(op, group, source, out,
               [&](at::TensorList sources) { return shm->start_gather(op, sources[0], out, dst); });
    return;
  }
  Channel channel(op, group, source);
  channel.say([&] {
    const Sizes parts(group.rank() == dst ? group.size() : 0, source.numel());
    return fingerprint_of(OpType::Gather, source)
        .gathered_at(dst, source.numel(), parts, group.size());
  });
  const Held held = channel.hold(source, out);
  channel.run(out, [=](const Carrier& carrier) {
    return lowering::gather(carrier, held.source, held.out, dst);
  });
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
    run_on_shm(op, group, source, out, [&](at::TensorList sources) {
      return shm->start_scatter(op, sources[0], out, src);
    });
    return;
  }
  Channel channel(op, group, out);
  channel.say([&] {
    const Sizes parts(group.rank() == src ? group.size() : 0, out.numel());
    return fingerprint_of(OpType::Scatter, out)
        .scattered_from(src, out.numel(), parts, group.size());
  });
  const Held held = channel.hold(source, out);
  channel.run(out, [=](const Carrier& carrier) {
    return lowering::scatter(carrier, held.source, held.out, src);
  });
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
    run_on_shm(op, group, {}, out, [&](at::TensorList) { return shm->start_barrier(op); });
    return;
  }
  Channel channel(op, group, out);
  channel.say([&] { return Fingerprint(); });
  channel.run(out, [device = out.device()](const Carrier& carrier) {
    return lowering::barrier(carrier, device);
  });
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
          std::tie(wire, finish) = lowering::landing(wire);
        }
        wire = at::view_as_real(wire);
      }
      wire = alias_of(wire);
    } else if (message.sends) {
      wire = bytes_of(dense(wire));
    } else {
      std::tie(wire, finish) = lowering::landing(wire);
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
