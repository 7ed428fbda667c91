#include "backends/adapter/messages.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "backends/adapter/lowering.h"
#include "base/memory.h"
#include "base/reduction.h"
#include "work/blocking_work.h"
#include "work/pending.h"

namespace c10d_ext {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

namespace {

std::pair<at::Tensor, Finish> landing_on_host(const at::Tensor& out) {
  at::Tensor buffer = at::empty(out.sizes(), out.options().device(at::kCPU));
  return {buffer, [buffer, out = alias_of(out)] { copy_values(out, buffer); }};
}

}  // namespace

std::vector<WorkPtr> start_messages(const Adapter& adapter, std::string_view op, const Group& group,
                                    c10::ArrayRef<Message> messages,
                                    std::optional<c10d::OpType> type) {
  const at::Tensor& like = messages.front().tensor;
  const Capabilities& can = adapter.can();
  const bool by_host = can.sends_host_memory_only && !like.is_cpu();
  // What travels, all of it at hand before the first one goes out.
  std::vector<Tensors> wires;
  std::vector<Finish> finishes;
  for (const auto& message : messages) {
    at::Tensor wire = message.tensor;
    Finish finish;
    if (can.sends_any_tensor) {
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
      wire = by_host ? wire.cpu() : wire;
    } else {
      std::tie(wire, finish) = by_host ? landing_on_host(wire) : lowering::landing(wire);
      wire = bytes_of(wire);
    }
    wires.push_back({wire});
    finishes.push_back(std::move(finish));
  }
  const bool together = can.starts_messages_together && messages.size() > 1;
  if (together) {
    adapter.begin_batch(like.device().type());
  }
  std::vector<WorkPtr> started;
  for (size_t i = 0; i < messages.size(); ++i) {
    const auto tag = static_cast<int>(messages[i].tag);
    started.push_back(adapter.start_message(
        messages[i], wires[i][0],
        [wire = wires[i], sends = messages[i].sends, tag](auto& backend, int peer) mutable {
          return sends                ? backend.send(wire, peer, tag)
                 : peer == kAnySource ? backend.recvAnysource(wire, tag)
                                      : backend.recv(wire, peer, tag);
        }));
  }
  if (together) {
    const WorkPtr all = adapter.end_batch(like.device().type());
    std::fill(started.begin(), started.end(), all);
  }
  std::vector<WorkPtr> works;
  for (size_t i = 0; i < messages.size(); ++i) {
    const Message& message = messages[i];
    Finish finish = then(adapter.keep(wires[i][0]), std::move(finishes[i]));
    works.push_back(follow(op, group, alias_of(message.tensor),
                           can.has_blocking_messages ? adapt_blocking_work(started[i]) : started[i],
                           std::move(finish), message.sends ? group.rank() : message.peer,
                           can.times_works, type));
  }
  return works;
}

}  // namespace c10d_ext
