#pragma once

// The layout of the memory that the ranks of a group share, and which rank writes what.

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace c10d_ext::shm {

// What different ranks write is this far apart, against false sharing: x86 prefetches cache lines
// in pairs.
constexpr size_t kCacheLinePair = 128;
constexpr size_t kPage = 4096;

constexpr size_t round_up(size_t value, size_t unit) {
  return (value + unit - 1) / unit * unit;
}

static_assert(std::atomic<uint64_t>::is_always_lock_free &&
              std::atomic<uint32_t>::is_always_lock_free);

// What a rank announces about the collective it has entered. Peers copy the header and compare the
// copy with their own before they touch data; nothing in it is used as a bound or an index.
struct CollectiveHeader {
  uint64_t seq;
  uint8_t type;
  uint8_t dtype;
  uint8_t reduce_op;
  // 1: all parts of this rank have `bytes` bytes. 0: the table of sizes has them.
  uint8_t even;
  int32_t root;
  uint64_t bytes;
  uint64_t shapes;
  double factor_real;
  double factor_imaginary;
  // Of a call with several tensors: their number, and their sizes in elements, encoded as a shape.
  // Of a sparse all_reduce: its sparse dimensions, and its shape.
  uint32_t members;
  // Selection::digest(): ranks must choose the same algorithms.
  uint32_t algorithms;
  uint64_t members_sizes;
};
// Small data follows it, and it is full. For one more field, narrow another one (a root is below
// Layout::kMaxSize), or take two cache lines by alignas(kCacheLinePair), and see what `make bench`
// says of 8 B.
static_assert(sizeof(CollectiveHeader) == 64, "small data follows: it must fill whole cache lines");

// The words of one rank on which other ranks wait, or that they ring.
struct Control {
  // The progress of the rank: (collective << kStepBits) | step. Only grows. Written by the rank,
  // polled by the others.
  alignas(kCacheLinePair) std::atomic<uint64_t> stage;
  // The core on which the rank last ran, plus 1; 0: not known. A hint for CpuPlacement.
  std::atomic<int32_t> cpu;
  // A futex on which the rank's threads sleep. Any rank rings it (adds one, then wakes) when
  // `sleepers` is not 0.
  alignas(kCacheLinePair) std::atomic<uint32_t> bell;
  std::atomic<uint32_t> sleepers;
  // 1 once the rank has destroyed the group in good order.
  alignas(kCacheLinePair) std::atomic<uint32_t> left;
  // How the rank overrides the choice of algorithms, for texts; ends with a zero. Written before
  // the rank enters its first collective.
  static constexpr size_t kMaxOverrides = 252;
  char overrides[kMaxOverrides];
};

// The first failure that ends the group on all ranks: an abort, or a collective that timed out.
struct Poison {
  // 0: no failure, 1: a rank writes it, 2: valid.
  std::atomic<uint32_t> state;
  uint32_t kind;
  int32_t rank;
  uint32_t type;
  uint64_t seq;
  // The ranks at fault, a bit each.
  uint64_t ranks[4];
};

struct Header {
  alignas(kCacheLinePair) Poison poison;
};

// A message announced by a sender.
struct Envelope {
  uint64_t bytes;
  int64_t tag;
  uint8_t dtype;
  uint8_t reserved[47];
};
static_assert(sizeof(Envelope) == 64);

// Messages of one rank to another. The sender announces envelopes; the receiver matches one of them
// with a receive and grants it; then the data flows through the two halves of the mailbox' buffer.
// Each counter has one writer.
struct Mailbox {
  static constexpr size_t kEnvelopes = 16;
  static constexpr size_t kHalves = 2;

  // Written by the sender.
  alignas(kCacheLinePair) std::atomic<uint64_t> announced;
  std::atomic<uint64_t> produced;
  // The last `granted` that the sender has seen. The receiver grants the next message after that.
  std::atomic<uint64_t> noticed;
  // Written by the receiver.
  alignas(kCacheLinePair) std::atomic<uint64_t> accepted;
  std::atomic<uint64_t> consumed;
  // 2 * (number of the message + 1), plus 1 when the receiver refused it for its size or dtype.
  std::atomic<uint64_t> granted;
  uint64_t wanted_bytes;
  uint64_t wanted_dtype;
  alignas(kCacheLinePair) Envelope envelopes[kEnvelopes];
};

constexpr int kStepBits = 24;
// Steps of every collective: the rank has entered it; it has nothing left to do for other ranks.
constexpr uint64_t kArrived = 1;
constexpr uint64_t kDone = (uint64_t{1} << kStepBits) - 1;

constexpr uint64_t stage_of(uint64_t seq, uint64_t step) {
  return seq << kStepBits | step;
}

// Offsets, the same on every rank: all follow from the size of the group and of the arena.
class Layout {
 public:
  static constexpr int kMaxSize = 256;
  static constexpr size_t kMinArena = size_t{256} << 10;
  // Its text, cut to fit.
  static constexpr size_t kCallSiteBytes = kCacheLinePair;

  Layout(int size, size_t arena) : size_(static_cast<size_t>(size)), arena_(arena) {
    tables_ = round_up(sizeof(Control), kCacheLinePair);
    eager_ = round_up(tables_ + 2 * 2 * size_ * sizeof(uint64_t), kCacheLinePair);
    eager_bytes_ = arena / 8 < kMaxEager ? arena / 8 / kCacheLinePair * kCacheLinePair : kMaxEager;
    eager_stride_ = round_up(sizeof(CollectiveHeader) + eager_bytes_, kPage) + kCacheLinePair;
    mail_ = round_up(eager_ + 2 * eager_stride_, kPage);
    half_bytes_ = arena / 8 / size_ / Mailbox::kHalves / kCacheLinePair * kCacheLinePair;
    half_bytes_ = half_bytes_ < kMinHalf   ? kMinHalf
                  : half_bytes_ > kMaxHalf ? kMaxHalf
                                           : half_bytes_;
    mail_stride_ = sizeof(Mailbox) + Mailbox::kHalves * half_bytes_;
    bulk_ = round_up(mail_ + size_ * mail_stride_, kPage);
    bulk_bytes_ = arena > bulk_ + kMinBulk ? (arena - bulk_) / kPage * kPage : kMinBulk;
    rank_stride_ = bulk_ + bulk_bytes_;
  }

  size_t total() const {
    return round_up(sizeof(Header), kPage) + size_ * rank_stride_;
  }
  size_t control(int rank) const {
    return round_up(sizeof(Header), kPage) + static_cast<size_t>(rank) * rank_stride_;
  }
  // Sizes of the parts this rank sends to (direction 0) or expects from (1) each rank.
  size_t table(int rank, uint64_t seq, int direction) const {
    return control(rank) + tables_ +
           ((seq & 1) * 2 + static_cast<size_t>(direction)) * size_ * sizeof(uint64_t);
  }
  // The header of a collective, directly followed by room for eager_bytes() of data. There is one
  // for even and one for odd collectives: see GroupMemory::eager. Two ranks swap places each time,
  // so that a rank writes to the cache lines that it read last, which its cache still holds.
  size_t header(int rank, uint64_t seq) const {
    const int place = size_ == 2 ? rank ^ static_cast<int>(seq >> 1 & 1) : rank;
    return control(place) + eager_ + (seq & 1) * eager_stride_;
  }
  size_t eager_bytes() const {
    return eager_bytes_;
  }
  // Where a rank says from which line it has called a collective: in the gap behind its data.
  size_t call_site(int rank, uint64_t seq) const {
    return header(rank, seq) + eager_stride_ - kCallSiteBytes;
  }
  size_t mailbox(int from, int to) const {
    return control(from) + mail_ + static_cast<size_t>(to) * mail_stride_;
  }
  size_t half_bytes() const {
    return half_bytes_;
  }
  size_t bulk(int rank) const {
    return control(rank) + bulk_;
  }
  size_t bulk_bytes() const {
    return bulk_bytes_;
  }

 private:
  // 256 KiB are no faster, and leave less memory for large data.
  static constexpr size_t kMaxEager = size_t{128} << 10;
  static constexpr size_t kMinHalf = 1024;
  static constexpr size_t kMaxHalf = size_t{64} << 10;
  static constexpr size_t kMinBulk = size_t{64} << 10;

  size_t size_, arena_;
  size_t tables_, eager_, eager_bytes_, eager_stride_, mail_, half_bytes_, mail_stride_, bulk_,
      bulk_bytes_, rank_stride_;
};

}  // namespace c10d_ext::shm
