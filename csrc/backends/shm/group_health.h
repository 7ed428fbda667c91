#pragma once

// Whether a group can still complete collectives: which ranks are lost, which failure has ended the
// group on all ranks, and the texts of both.

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "backends/shm/bootstrap.h"
#include "backends/shm/engine.h"
#include "backends/shm/group_memory.h"

namespace c10d_ext::shm {

// Thread safe.
class GroupHealth {
 public:
  // `pulses`: as in Settings.
  GroupHealth(const GroupMemory& memory, const Place& place, std::vector<Peer> peers,
              std::vector<std::atomic<uint32_t>*> pulses);

  // The watcher reports a lost rank.
  void mark_lost(int rank);
  bool any_lost() const {
    return any_lost_.load(std::memory_order_seq_cst);
  }
  // Also true once the kernel has marked the rank's pulse; the other ranks are woken then.
  bool is_lost(int rank);
  // The lost ones of `ranks`.
  std::vector<int> lost_among(const std::vector<int>& ranks);
  // Whether the rank has destroyed the group in good order.
  bool has_left(int rank) const;

  // Ends the group on all ranks with this failure, unless another one has ended it.
  void poison(ErrorKind kind, OpType op, uint64_t seq, const std::vector<int>& ranks);
  // The failure that has ended the group on all ranks.
  std::optional<Failure> poisoned() const;

  // "rank 1 (pid 42, sleeping) and rank 3 (pid 44, gone)"
  std::string describe(const std::vector<int>& ranks) const;

  // The failures of an operation.
  Failure closed(const Operation& op, const std::string& what) const;
  Failure rank_lost(const Operation& op, const std::vector<int>& gone) const;
  Failure timed_out(const Operation& op, const std::vector<int>& missing) const;
  // The failure that broke the group, as the failure of this operation.
  static Failure restated(Failure why, const Operation& op);

  const Place& place() const {
    return place_;
  }

 private:
  bool has_died(int rank) const;
  std::string describe(int rank) const;
  Failure read_poison() const;

  const GroupMemory& memory_;
  const Place& place_;
  const std::vector<Peer> peers_;
  const std::vector<std::atomic<uint32_t>*> pulses_;
  std::vector<std::atomic<bool>> lost_;
  std::atomic<bool> any_lost_{false};
};

inline bool is_point_to_point(OpType op) {
  return op == OpType::Send || op == OpType::Recv;
}

}  // namespace c10d_ext::shm
