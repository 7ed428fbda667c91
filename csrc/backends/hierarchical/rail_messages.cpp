#include "backends/hierarchical/rail_messages.h"

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "backends/hierarchical/sizes.h"
#include "base/dtype.h"
#include "base/kept_memory.h"
#include "control/meeting.h"
#include "kernels/kernels.h"

namespace c10d_ext::hierarchical {

namespace {

constexpr int kForth = 0, kBack = 1;

void add(std::vector<Step>& steps, std::vector<Step> more) {
  std::move(more.begin(), more.end(), std::back_inserter(steps));
}

}  // namespace

bool goes_by_messages(const Parts& parts) {
  return parts.rail.has_messages() && parts.hosts.count() <= static_cast<int64_t>(kMostLeaders);
}

std::vector<Step> send_to_all(const Parts& parts, int tag, const PartOf& part_of) {
  std::vector<Step> steps;
  const auto hosts = static_cast<int>(parts.hosts.count());
  for (int apart = 1; apart < hosts; ++apart) {  // nobody is everybody's first
    const int host = (parts.hosts.host() + apart) % hosts;
    if (const at::Tensor part = part_of(host); part.numel() != 0) {
      steps.push_back(parts.rail.send(part, host, tag));
    }
  }
  return steps;
}

std::vector<Step> receive_from_all(const Parts& parts, int tag, const PartOf& part_of) {
  std::vector<Step> steps;
  const auto hosts = static_cast<int>(parts.hosts.count());
  for (int apart = 1; apart < hosts; ++apart) {
    const int host = (parts.hosts.host() + hosts - apart) % hosts;
    if (const at::Tensor part = part_of(host); part.numel() != 0) {
      steps.push_back(parts.rail.recv(part, host, tag));
    }
  }
  return steps;
}

void wait(std::vector<Step>& steps) {
  for (auto& step : steps) {
    step.wait();
  }
}

Reducing::Reducing(const Parts& parts, int tag, const at::Tensor& out)
    : host_(parts.hosts.host()),
      out_(out),
      rows_(scratch({parts.hosts.count(), out.numel()}, out.options())),
      came_(receive_from_all(parts, tag, [this](int host) { return rows_.select(0, host); })) {}

void Reducing::finish(const at::Tensor& own, ReduceOp op) {
  wait(came_);
  std::vector<const void*> sources;
  for (int64_t host = 0; host < rows_.size(0); ++host) {
    sources.push_back((host == host_ ? own : rows_.select(0, host)).const_data_ptr());
  }
  kernels::reduce(dtype_of(out_.scalar_type()), op, out_.mutable_data_ptr(), nullptr,
                  sources.data(), static_cast<int>(sources.size()),
                  static_cast<size_t>(out_.numel()), nullptr);
}

void all_reduce_on_rail(const Parts& parts, const at::Tensor& t, ReduceOp op) {
  if (goes_at_once(t.nbytes(), parts.hosts.count())) {
    Reducing reducing(parts, kForth, t);
    auto sent = send_to_all(parts, kForth, [&](int /*host*/) { return t; });
    wait(sent);  // before it is written
    reducing.finish(t, op);
    return;
  }
  const auto part_of = [&](int64_t host) {
    const int64_t hosts = parts.hosts.count(), each = t.numel() / hosts, more = t.numel() % hosts;
    return t.narrow(0, host * each + std::min(host, more), each + (host < more ? 1 : 0));
  };
  const at::Tensor own = part_of(parts.hosts.host());
  Reducing reducing(parts, kForth, own);
  auto steps = send_to_all(parts, kForth, part_of);
  // A host has taken its part before it sends it back.
  add(steps, receive_from_all(parts, kBack, part_of));
  reducing.finish(own, op);
  add(steps, send_to_all(parts, kBack, [&](int /*host*/) { return own; }));
  wait(steps);
}

}  // namespace c10d_ext::hierarchical
