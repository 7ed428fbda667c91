#include <memory>

#include "backends/shm/algorithms/algorithms.h"

namespace c10d_ext::shm::eager {

namespace {

// A rank reads at most this much without checking its deadline.
constexpr size_t kMostAtOnce = size_t{1} << 20;

// Whether a source is this rank's part for itself, which it reads from the source directly.
bool is_kept(const Collective& c, const BufferView& source) {
  const auto& sources = c.sources();
  return sources.size() > 1 && &source == &sources[static_cast<size_t>(c.me_)] &&
         (c.type() != OpType::ReduceScatter || c.request_.targets[0].size() == 1);
}

void read_and_reduce(const Collective& c, size_t offset, size_t part) {
  const auto contribution = [&](int rank) { return c.memory_.eager(rank, c.seq_) + offset; };
  if (c.request_.targets[0].size() == 1) {
    c.reduce_range(c.source(c.me_), 0, part, &c.target(0), nullptr, contribution,
                   /*streaming=*/false);
    return;
  }
  // One reduction for all pieces.
  std::vector<const void*> all;
  for (int p = 0; p < c.n_; ++p) {
    all.push_back(contribution(p));
  }
  const std::unique_ptr<std::byte[]> result(new std::byte[part]);
  kernels::reduce(c.request_.dtype, c.request_.reduce_op, result.get(), nullptr, all.data(), c.n_,
                  part / size_of(c.request_.dtype), c.factors_or_null(), /*streaming=*/false);
  c.target(0).write(0, part, result.get(), /*streaming=*/false);
}

}  // namespace

bool fits(const Collective& c) {
  size_t most = c.memory_.layout().eager_bytes();
  if (c.type() == OpType::AllGather || c.type() == OpType::Gather) {
    most = std::min(most, kMostAtOnce / static_cast<size_t>(c.n_));
  }
  return c.input_bytes() <= most;
}

void write(const Collective& c) {
  std::byte* to = c.memory_.eager(c.me_, c.seq_);
  for (const BufferView& source : c.sources()) {
    if (!is_kept(c, source)) {
      source.read(0, source.bytes(), to);
    }
    to += source.bytes();
  }
}

void read(const Collective& c) {
  const size_t part = c.part_bytes();
  const size_t mine = static_cast<size_t>(c.me_) * part;
  const auto from = [&c](int rank) { return c.memory_.eager(rank, c.seq_); };
  switch (c.type()) {
    case OpType::Reduce:
      if (c.is_root()) {
        read_and_reduce(c, 0, part);
      }
      return;
    case OpType::AllReduce:
      read_and_reduce(c, 0, part);
      return;
    case OpType::ReduceScatter:
      read_and_reduce(c, mine, part);
      return;
    case OpType::Broadcast:
      if (c.has_targets()) {
        c.target(0).write(0, part, from(c.request_.root), false);
      }
      return;
    case OpType::Scatter:
      if (c.is_root()) {
        copy_view(c.source(c.me_), c.target(0), 0, part, false);
      } else {
        c.target(0).write(0, part, from(c.request_.root) + mine, false);
      }
      return;
    case OpType::AllGather:
    case OpType::Gather:
    case OpType::AllToAll:
      if (!c.has_targets()) {
        return;
      }
      copy_view(c.source(c.me_), c.target(c.me_), 0, part, false);
      for (int p = 0; p < c.n_; ++p) {
        if (p != c.me_) {
          c.target(p).write(0, part, from(p) + (c.type() == OpType::AllToAll ? mine : 0), false);
        }
      }
      return;
    default:
      return;
  }
}

}  // namespace c10d_ext::shm::eager
