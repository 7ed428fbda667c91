#pragma once

// One rank's view of the shared memory, and of how far the other ranks have come.

#include <atomic>
#include <memory>
#include <vector>

#include "backends/shm/engine.h"
#include "backends/shm/futex.h"
#include "backends/shm/layout.h"

namespace c10d_ext::shm {

class GroupMemory {
 public:
  GroupMemory(std::shared_ptr<Mapping> mapping, int rank, int size, size_t arena)
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
  // Memory for small data, which a rank may write before it announces the collective. The previous
  // contents were read two collectives ago; every rank has left that one, since this rank has seen
  // all of them enter the one after it.
  std::byte* eager(int rank, uint64_t seq) const {
    return base_ + layout_.header(rank, seq) + sizeof(CollectiveHeader);
  }
  // Where the rank says which line has called the collective.
  char* call_site(int rank, uint64_t seq) const {
    return reinterpret_cast<char*>(base_ + layout_.call_site(rank, seq));
  }
  // Memory for all other data. Free once every rank has entered the collective.
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

  // Everything that this rank has written is visible to a rank that sees `stage` reached.
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

  // Wakes the threads of `rank` that sleep. After a seq_cst store for which they may wait.
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

  // The condition on which a coroutine waits: `rank` (kAll: every other rank) has reached `stage`.
  static constexpr int kAll = -1;
  static constexpr int kNobody = -2;
  struct Wait {
    const GroupMemory* memory = nullptr;
    int rank = kNobody;
    uint64_t stage = 0;
    // All ranks below this one are known to have reached it.
    int seen = 0;

    bool over() {
      if (rank == kNobody) {
        return true;
      }
      if (rank != kAll) {
        return memory->reached(rank, stage);
      }
      for (; seen < memory->size(); ++seen) {
        if (seen != memory->rank() && !memory->reached(seen, stage)) {
          return false;
        }
      }
      return true;
    }
    // The ranks that have not reached it.
    std::vector<int> missing() const {
      std::vector<int> ranks;
      for (int p = 0; p < memory->size(); ++p) {
        if (p != memory->rank() && (rank == kAll || rank == p) && !memory->reached(p, stage)) {
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
