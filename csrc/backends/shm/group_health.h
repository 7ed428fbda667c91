#pragma once

// Whether the ranks of a group can still reach the end of a collective: who is lost, which failure
// a rank has made everybody's, and how either is told.

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "backends/shm/bootstrap.h"
#include "backends/shm/engine.h"
#include "backends/shm/team.h"

namespace c10d_ext::shm {

// Thread safe.
class GroupHealth {
 public:
  // `pulses`: as in Settings.
  GroupHealth(const Team& team, const Place& place, std::vector<Peer> peers,
              std::vector<std::atomic<uint32_t>*> pulses);

  // Said by the watcher.
  void mark_lost(int rank);
  bool any_lost() const {
    return any_lost_.load(std::memory_order_seq_cst);
  }
  // Also where the kernel has marked the rank's pulse; tells the other ranks then.
  bool is_lost(int rank);
  // Of those, the ranks that are lost.
  std::vector<int> lost_among(const std::vector<int>& ranks);
  // In good order: it has destroyed the group.
  bool has_left(int rank) const;

  // Makes a failure everybody's. The first one stays.
  void poison(Failure::Kind kind, Verb op, uint64_t seq, const std::vector<int>& ranks);
  // The one that a rank has made everybody's.
  std::optional<Failure> poisoned() const;

  // "rank 1 (pid 42, sleeping) and rank 3 (pid 44, gone)"
  std::string describe(const std::vector<int>& ranks) const;

  // How an operation fails.
  Failure closed(const Operation& op, const std::string& what) const;
  Failure rank_lost(const Operation& op, const std::vector<int>& gone) const;
  Failure timed_out(const Operation& op, const std::vector<int>& missing) const;
  // Why the group is broken, as this operation's failure.
  static Failure restated(Failure why, const Operation& op);

  const Place& place() const {
    return place_;
  }

 private:
  bool has_died(int rank) const;
  std::string describe(int rank) const;
  Failure read_poison() const;

  const Team& team_;
  const Place& place_;
  const std::vector<Peer> peers_;
  const std::vector<std::atomic<uint32_t>*> pulses_;
  std::vector<std::atomic<bool>> lost_;
  std::atomic<bool> any_lost_{false};
};

inline bool is_point_to_point(Verb op) {
  return op == Verb::Send || op == Verb::Recv;
}

}  // namespace c10d_ext::shm
