#include "backends/shm/algorithms/algorithms.h"

namespace c10d_ext::shm {

namespace {

// Who writes what for whom, in chunks. Iteration i writes chunk i and reads chunk i - 1; steps
// count these, so that a stage tells what a rank has done.
class Pipeline {
 public:
  static constexpr size_t kDepth = 4;

  explicit Pipeline(const Collective& c) : c_(c) {
    const OpType type = c.type();
    personal_ =
        type == OpType::Scatter || type == OpType::AllToAll || type == OpType::ReduceScatter;
    const bool rooted =
        type == OpType::Broadcast || type == OpType::Scatter || type == OpType::Gather;
    const bool to_root = type == OpType::Gather;
    sends_ = !rooted || c.is_root() != to_root;
    receives_ = !rooted || c.is_root() == to_root;
    readers = !sends_ ? GroupMemory::kNobody : to_root ? c.request_.root : GroupMemory::kAll;
    writers = !receives_           ? GroupMemory::kNobody
              : rooted && !to_root ? c.request_.root
                                   : GroupMemory::kAll;

    const size_t room = c.memory_.layout().bulk_bytes() / kDepth;
    chunk_ = std::min(kChunk, (personal_ ? room / static_cast<size_t>(c.n_) : room)) /
             kCacheLinePair * kCacheLinePair;
    size_t received = 0;
    for (int p = 0; p < c.n_; ++p) {
      if (p != c.me_ && sends_) {
        writes = std::max(writes, chunks(c.source(p).bytes(), chunk_));
      }
      if (p != c.me_ && reads_from(p)) {
        reads = std::max(reads, chunks(c.target(p).bytes(), chunk_));
        received += c.target(p).bytes();
      }
    }
    if (keeps_own()) {
      own = chunks(c.target(c.me_).bytes(), chunk_);
      received += c.target(c.me_).bytes();
    }
    streaming_ = type == OpType::ReduceScatter ? c.target(0).bytes() >= kStreaming &&
                                                     !shares_memory(c.source(c.me_), c.target(0))
                                               : received >= kStreaming;
  }

  // The stage at which a rank has written, or has read, chunk i.
  uint64_t written(size_t i) const {
    return stage_of(c_.seq_, 2 * i + 2);
  }
  uint64_t read(size_t i) const {
    return stage_of(c_.seq_, 2 * i + 5);
  }
  // The stage of a rank that is through with iteration i.
  uint64_t through(size_t i) const {
    return stage_of(c_.seq_, 2 * i + 3);
  }

  void write_chunk(size_t i) const {
    if (!personal_) {
      const auto [offset, bytes] = range(c_.source(c_.me_), i);
      c_.source(c_.me_).read(offset, bytes, slot(c_.me_, i, 0));
      return;
    }
    for (int step = 1; step < c_.n_; ++step) {
      const int to = (c_.me_ + step) % c_.n_;
      const auto [offset, bytes] = range(c_.source(to), i);
      c_.source(to).read(offset, bytes, slot(c_.me_, i, to));
    }
  }

  void read_chunk(size_t i) const {
    if (c_.type() == OpType::ReduceScatter) {
      const auto [offset, bytes] = range(c_.target(0), i);
      c_.reduce_range(
          c_.source(c_.me_), offset, bytes, &c_.target(0), nullptr,
          [&](int p) { return slot(p, i, c_.me_); }, streaming_);
      return;
    }
    for (int step = 1; step < c_.n_; ++step) {
      const int from = (c_.me_ + step) % c_.n_;
      if (reads_from(from)) {
        const auto [offset, bytes] = range(c_.target(from), i);
        c_.target(from).write(offset, bytes, slot(from, i, c_.me_), streaming_);
      }
    }
  }

  // This rank's part for itself does not travel.
  void keep_chunk(size_t i) const {
    const auto [offset, bytes] = range(c_.target(c_.me_), i);
    copy_view(c_.source(c_.me_), c_.target(c_.me_), offset, bytes, streaming_);
  }

  int readers, writers;
  size_t writes = 0, reads = 0, own = 0;

 private:
  bool reads_from(int rank) const {
    return receives_ && (writers == GroupMemory::kAll || writers == rank);
  }
  bool keeps_own() const {
    return c_.type() != OpType::ReduceScatter && !c_.request_.sources.empty() && c_.has_targets();
  }
  std::pair<size_t, size_t> range(const BufferView& span, size_t i) const {
    const size_t offset = std::min(i * chunk_, span.bytes());
    return {offset, std::min(chunk_, span.bytes() - offset)};
  }
  std::byte* slot(int from, size_t i, int to) const {
    const size_t width = personal_ ? chunk_ * static_cast<size_t>(c_.n_) : chunk_;
    return c_.memory_.bulk(from) + (i % kDepth) * width +
           (personal_ ? static_cast<size_t>(to) * chunk_ : 0);
  }

  const Collective& c_;
  bool personal_, sends_, receives_, streaming_;
  size_t chunk_;
};

}  // namespace

Task run_pipelined(const Collective& c) {
  const Pipeline p(c);
  const size_t iterations = std::max({p.writes, p.reads + 1, p.own});
  for (size_t i = 0; i < iterations; ++i) {
    if (i < p.writes) {
      if (i >= Pipeline::kDepth) {
        co_await c.memory_.until(p.readers, p.read(i - Pipeline::kDepth));
      }
      p.write_chunk(i);
      c.memory_.publish(p.written(i));
    }
    if (i < p.own) {
      p.keep_chunk(i);
    }
    if (i >= 1 && i - 1 < p.reads) {
      co_await c.memory_.until(p.writers, p.written(i - 1));
      p.read_chunk(i - 1);
    }
    c.memory_.publish(p.through(i));
    co_await std::suspend_always{};
  }
  co_return std::nullopt;
}

}  // namespace c10d_ext::shm
