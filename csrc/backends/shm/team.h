#pragma once

// One rank's view of the shared memory, and of how far the other ranks have come.

#include <atomic>
#include <memory>
#include <vector>

#include "backends/shm/engine.h"
#include "backends/shm/futex.h"
#include "backends/shm/layout.h"

namespace c10d_ext::shm {

class Team {
 public:
  Team(std::shared_ptr<Mapping> mapping, int rank, int size, size_t arena)
      : rank_(rank),
        size_(size),
        layout_(size, arena),
        mapping_(std::move(mapping)),
        base_(mapping_->data()) {}

  int rank() const {
    return rank_;
  }
  int size() const {
    return size_;
  }
  const Layout& layout() const {
    return layout_;
  }

  Header& header() const {
    return *reinterpret_cast<Header*>(base_);
  }
  Control& control(int rank) const {
    return *reinterpret_cast<Control*>(base_ + layout_.control(rank));
  }
  uint64_t* table(int rank, uint64_t seq, int direction) const {
    return reinterpret_cast<uint64_t*>(base_ + layout_.table(rank, seq, direction));
  }
  CollectiveHeader& header(int rank, uint64_t seq) const {
    return *reinterpret_cast<CollectiveHeader*>(base_ + layout_.header(rank, seq));
  }
  // Room for small data that may be written before a collective is announced: what lies there was
  // last read in the collective before the last, which everyone has left by then, since this rank
  // has seen all of them enter the last.
  std::byte* eager(int rank, uint64_t seq) const {
    return base_ + layout_.header(rank, seq) + sizeof(CollectiveHeader);
  }
  // Room for everything else: free from the moment that everyone has entered the collective.
  std::byte* bulk(int rank) const {
    return base_ + layout_.bulk(rank);
  }
  Mailbox& mailbox(int from, int to) const {
    return *reinterpret_cast<Mailbox*>(base_ + layout_.mailbox(from, to));
  }
  std::byte* half(int from, int to, uint64_t number) const {
    return base_ + layout_.mailbox(from, to) + sizeof(Mailbox) +
           (number % Mailbox::kHalves) * layout_.half_bytes();
  }

  // Everything this rank wrote so far becomes visible to whoever sees `stage` reached.
  //
  // Sequentially consistent, as are the waiter's `sleepers` and the loads in reached(): either the
  // publisher sees the sleeper, or the sleeper sees the stage when it looks again before it sleeps.
  void publish(uint64_t stage) const {
    control(rank_).stage.store(stage, std::memory_order_seq_cst);
    ring_sleepers();
  }
  bool reached(int rank, uint64_t stage) const {
    return control(rank).stage.load(std::memory_order_seq_cst) >= stage;
  }

  // After a seq_cst store that `rank` may be waiting for.
  void ring(int rank) const {
    Control& c = control(rank);
    if (c.sleepers.load(std::memory_order_seq_cst) != 0) {
      c.bell.fetch_add(1, std::memory_order_seq_cst);
      futex_wake_all(c.bell);
    }
  }
  void ring_sleepers() const {
    for (int p = 0; p < size_; ++p) {
      if (p != rank_) {
        ring(p);
      }
    }
  }

  // What a coroutine waits for: `rank` (every rank but this one if kAll) has reached `stage`.
  static constexpr int kAll = -1;
  static constexpr int kNobody = -2;
  struct Wait {
    const Team* team = nullptr;
    int rank = kNobody;
    uint64_t stage = 0;
    // Ranks below this one have been seen to be there.
    int seen = 0;

    bool over() {
      if (rank == kNobody) {
        return true;
      }
      if (rank != kAll) {
        return team->reached(rank, stage);
      }
      for (; seen < team->size(); ++seen) {
        if (seen != team->rank() && !team->reached(seen, stage)) {
          return false;
        }
      }
      return true;
    }
    // The ranks that are not there yet.
    std::vector<int> missing() const {
      std::vector<int> ranks;
      for (int p = 0; p < team->size(); ++p) {
        if (p != team->rank() && (rank == kAll || rank == p) && !team->reached(p, stage)) {
          ranks.push_back(p);
        }
      }
      return ranks;
    }
  };
  Wait until(int rank, uint64_t stage) const {
    return {this, rank, stage};
  }

 private:
  int rank_;
  int size_;
  Layout layout_;
  std::shared_ptr<Mapping> mapping_;
  std::byte* base_;
};

}  // namespace c10d_ext::shm
