#include "backends/shm/algorithms/algorithms.h"

namespace c10d_ext::shm {

namespace {

// Two ranks that give and take: all_reduce, reduce_scatter, all_gather and all_to_all. Where a rank
// has read a piece of the peer's, it puts its own next one: a line of the cache comes over with the
// peer's data and goes back with this rank's, where two one-way streets would have it fetched by
// the reader and then taken back, empty, by the writer. Step k + 2 tells that chunk k is written.
class Swap {
 public:
  static constexpr size_t kDepth = 4;

  explicit Swap(const Collective& c) : c_(c), peer_(1 - c.me_), reduces_(c.reduces()) {
    const bool all = c.type() == OpType::AllReduce || c.type() == OpType::AllGather ||
                     c.type() == OpType::SparseAllReduce;
    gives_ = &c.source(all ? c.me_ : peer_);
    takes_ = &c.target(reduces_ ? c.me_ : peer_);
    const size_t bytes = std::max(gives_->bytes(), takes_->bytes());
    const size_t room = c.memory_.layout().bulk_bytes() / kDepth / kPiece * kPiece;
    const size_t wanted = round_up(chunks(bytes, 2 * kDepth), kPiece);
    chunk_ = std::min({std::max(wanted, kMinChunk), kChunk, room});
    const size_t own_bytes = reduces_ ? 0 : c.target(c.me_).bytes();
    swaps = chunks(bytes, chunk_);
    own = chunks(own_bytes, chunk_);
    streaming_ = takes_->bytes() + own_bytes >= kStreaming &&
                 !(reduces_ && shares_memory(c.source(c.me_), *takes_));
  }

  uint64_t written(size_t k) const {
    return stage_of(c_.seq_, k + 2);
  }

  void write_chunk(size_t k) const {
    write(k * chunk_, chunk_, place(c_.me_, k));
  }
  // Reads the peer's chunk k and writes this rank's chunk k + kDepth, piece by piece.
  void swap_chunk(size_t k) const {
    for (size_t at = 0; at < chunk_; at += kPiece) {
      std::byte* const piece = place(peer_, k) + at;
      read(k * chunk_ + at, piece);
      write((k + kDepth) * chunk_ + at, kPiece, piece);
    }
  }
  // This rank's part for itself does not travel.
  void keep_chunk(size_t k) const {
    const auto [offset, bytes] = range(c_.target(c_.me_), k * chunk_, chunk_);
    copy_view(c_.source(c_.me_), c_.target(c_.me_), offset, bytes, streaming_);
  }

  // How many chunks go over, as many on both ranks, and how many stay here.
  size_t swaps, own;

 private:
  // A few of them are in the first cache at a time.
  static constexpr size_t kPiece = 4096;
  static_assert(kChunk % kPiece == 0 && kMinChunk % kPiece == 0);

  static std::pair<size_t, size_t> range(const BufferView& span, size_t begin, size_t most) {
    const size_t offset = std::min(begin, span.bytes());
    return {offset, std::min(most, span.bytes() - offset)};
  }
  void write(size_t begin, size_t most, std::byte* to) const {
    const auto [offset, bytes] = range(*gives_, begin, most);
    gives_->read(offset, bytes, to);
  }
  void read(size_t begin, const std::byte* from) const {
    const auto [offset, bytes] = range(*takes_, begin, kPiece);
    if (reduces_) {
      const auto contribution = [from](int) { return from; };
      c_.reduce_range(c_.source(c_.me_), offset, bytes, takes_, nullptr, contribution, streaming_);
    } else {
      takes_->write(offset, bytes, from, streaming_);
    }
  }
  // Where `rank` writes chunk k: each of the two in the other's last but kDepth.
  std::byte* place(int rank, size_t k) const {
    const int side = rank ^ static_cast<int>(k / kDepth & 1);
    return c_.memory_.bulk(side) + k % kDepth * chunk_;
  }

  const Collective& c_;
  const int peer_;
  const bool reduces_;
  const BufferView *gives_, *takes_;
  size_t chunk_;
  bool streaming_;
};

}  // namespace

Task run_swap(const Collective& c) {
  const Swap s(c);
  for (size_t k = 0; k < std::min(Swap::kDepth, s.swaps); ++k) {
    s.write_chunk(k);
    c.memory_.publish(s.written(k));
  }
  for (size_t k = 0; k < std::max(s.swaps, s.own); ++k) {
    if (k < s.swaps) {
      co_await c.memory_.until(GroupMemory::kAll, s.written(k));
      s.swap_chunk(k);
      if (k + Swap::kDepth < s.swaps) {
        c.memory_.publish(s.written(k + Swap::kDepth));
      }
    }
    if (k < s.own) {
      s.keep_chunk(k);
    }
    co_await std::suspend_always{};
  }
  co_return std::nullopt;
}

}  // namespace c10d_ext::shm
