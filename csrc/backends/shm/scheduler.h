#pragma once

// The pending operations of a rank: collectives in order, one at a time, and messages beside them.

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backends/shm/group_health.h"
#include "backends/shm/point_to_point.h"
#include "backends/shm/select.h"
#include "backends/shm/task.h"

namespace c10d_ext::shm {

// Not thread safe: the engine's lock is held.
class Scheduler {
 public:
  using Clock = Operation::Clock;
  using Item = std::shared_ptr<Operation>;
  struct Ended {
    Item operation;
    std::optional<Failure> failure;
  };

  Scheduler(const GroupMemory& memory, const Selection& selection, bool strict, GroupHealth& health)
      : memory_(memory),
        selection_(selection),
        strict_(strict),
        health_(health),
        messages_(memory, health.place()) {}

  // Gives the operation its sequence number. Returns a failure if the group is broken.
  std::optional<Failure> number(Operation& op);
  // Queues an operation that has a number.
  void add(const Item& operation);

  // One round over all pending operations; appends those that have ended. False: nothing moved.
  // Every 64th round without movement, and each one when `thorough`, looks for lost ranks, timeouts
  // and a failure of another rank.
  bool advance(std::vector<Ended>& ended, bool thorough = false);

  // Ends all operations with this failure, or with the earlier one that broke the group.
  void fail(Failure why, std::vector<Ended>& ended);

  // The ranks for which a pending operation waits.
  std::vector<int> awaited(const Operation& op) const;
  uint64_t seq() const {
    return seq_;
  }
  const std::shared_ptr<const Failure>& broken() const {
    return broken_;
  }

 private:
  static void begin(Operation& op);
  bool begin_front();
  void take_front(std::vector<Ended>& ended, std::optional<Failure> failure);
  std::optional<Failure> outcome();
  bool collect_messages(std::vector<Ended>& ended);
  void give_up(const Operation& op, const std::string& why);

  // Checks whether the wait can still end.
  void look_for_trouble(std::vector<Ended>& ended);
  // True: the group is broken now.
  bool look_at_collective(Clock::time_point now);
  void look_at_messages(Clock::time_point now, std::vector<Ended>& ended);
  void notice_poison();
  void fail_all(std::vector<Ended>& ended);

  const GroupMemory& memory_;
  const Selection& selection_;
  const bool strict_;
  GroupHealth& health_;
  std::deque<Item> queue_;
  Task task_;  // of queue_.front()
  PointToPoint messages_;
  // No message times out before this.
  Clock::time_point messages_late_ = Clock::time_point::max();
  std::vector<PointToPoint::Outcome> outcomes_;
  uint64_t seq_ = 0;
  uint64_t point_to_point_seq_ = 0;
  unsigned rounds_without_movement_ = 0;
  std::shared_ptr<const Failure> broken_;
};

}  // namespace c10d_ext::shm
