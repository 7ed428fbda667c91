#include "backends/shm/algorithms/algorithms.h"

namespace c10d_ext::shm {

namespace {

// all_reduce and reduce of much data. Chunk k has a part for every rank; iteration k writes chunk
// k + 1, reduces chunk k and collects the results of chunk k. A step is published after each.
class TwoShot {
 public:
  explicit TwoShot(const Collective& c) : c_(c), n_(static_cast<size_t>(c.n_)) {
    bytes_ = c.source(0).bytes();
    const size_t most =
        c.memory_.layout().bulk_bytes() / (2 * n_ + 2) / kCacheLinePair * kCacheLinePair;
    const size_t wanted = round_up(chunks(bytes_, 4 * n_), kCacheLinePair);
    part_ = std::min({std::max(wanted, kMinChunk), kChunk, most});
    chunk_count = chunks(bytes_, part_ * n_);
    collects_ = c.type() == OpType::AllReduce || c.is_root();
    streaming_ = bytes_ >= kStreaming && collects_ && !shares_memory(c.source(0), c.target(0));
  }

  uint64_t written(size_t k) const {
    return stage_of(c_.seq_, 3 * k + 2);
  }
  uint64_t reduced(size_t k) const {
    return stage_of(c_.seq_, 3 * k + 6);
  }

  void write_chunk(size_t k) const {
    for (size_t step = 1; step < n_; ++step) {
      const size_t to = (static_cast<size_t>(c_.me_) + step) % n_;
      const auto [offset, bytes] = range(k, to);
      c_.source(0).read(offset, bytes, contribution(c_.me_, k, to));
    }
  }
  void reduce_chunk(size_t k) const {
    const size_t me = static_cast<size_t>(c_.me_);
    const auto [offset, bytes] = range(k, me);
    const bool for_others = c_.type() == OpType::AllReduce || !c_.is_root();
    c_.reduce_range(
        c_.source(0), offset, bytes, collects_ ? &c_.target(0) : nullptr,
        for_others ? result(c_.me_, k) : nullptr, [&](int p) { return contribution(p, k, me); },
        streaming_);
  }
  void collect_chunk(size_t k) const {
    for (size_t step = 1; step < n_ && collects_; ++step) {
      const size_t from = (static_cast<size_t>(c_.me_) + step) % n_;
      const auto [offset, bytes] = range(k, from);
      c_.target(0).write(offset, bytes, result(static_cast<int>(from), k), streaming_);
    }
  }

  size_t chunk_count;

 private:
  // The part of chunk k that rank q reduces. The last chunk is divided evenly too.
  std::pair<size_t, size_t> range(size_t k, size_t q) const {
    const size_t begin = k * part_ * n_;
    const size_t whole = std::min(part_ * n_, bytes_ - begin);
    const size_t each = round_up(chunks(whole, n_), kCacheLinePair);
    const size_t offset = std::min(q * each, whole);
    return {begin + offset, std::min(each, whole - offset)};
  }
  std::byte* contribution(int from, size_t k, size_t to) const {
    return c_.memory_.bulk(from) + ((k & 1) * n_ + to) * part_;
  }
  std::byte* result(int from, size_t k) const {
    return c_.memory_.bulk(from) + (2 * n_ + (k & 1)) * part_;
  }

  const Collective& c_;
  size_t n_, bytes_, part_;
  bool collects_, streaming_;
};

}  // namespace

Task run_two_shot(const Collective& c) {
  const TwoShot t(c);
  // Room is reused every other chunk. Contribution k - 1 has been read by all when all have
  // reduced it, and result k - 2 when all have written chunk k: both are waited for anyway.
  if (t.chunk_count > 0) {
    t.write_chunk(0);
    c.memory_.publish(t.written(0));
  }
  for (size_t k = 0; k < t.chunk_count; ++k) {
    if (k + 1 < t.chunk_count) {
      t.write_chunk(k + 1);
      c.memory_.publish(t.written(k + 1));
    }
    co_await c.memory_.until(GroupMemory::kAll, t.written(k));
    t.reduce_chunk(k);
    c.memory_.publish(t.reduced(k));
    co_await std::suspend_always{};
    co_await c.memory_.until(GroupMemory::kAll, t.reduced(k));
    t.collect_chunk(k);
  }
  co_return std::nullopt;
}

}  // namespace c10d_ext::shm
