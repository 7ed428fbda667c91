#pragma once

// What a rank has to do, and in which order: collectives one after the other, messages beside them.

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backends/shm/group_health.h"
#include "backends/shm/postbox.h"
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

  Scheduler(const Team& team, const Selection& selection, bool strict, GroupHealth& health)
      : team_(team),
        selection_(selection),
        strict_(strict),
        health_(health),
        postbox_(team, health.place()) {}

  // Gives the operation its number. A failure: the group is broken, and the operation cannot run.
  std::optional<Failure> number(Operation& op);
  // Queues an operation that has a number.
  void add(const Item& operation);

  // One round over everything that is pending; appends what has ended. False: nothing moved.
  // Now and then, and when `thorough`, a round without movement looks for the reason.
  bool advance(std::vector<Ended>& ended, bool thorough = false);

  // Ends everything, unless the group is broken already for this reason.
  void fail(Failure why, std::vector<Ended>& ended);

  // The ranks that an operation which is not done waits for.
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

  // Nothing moves: is that for good?
  void look_for_trouble(std::vector<Ended>& ended);
  // Whether that broke the group.
  bool look_at_collective(Clock::time_point now);
  void look_at_messages(Clock::time_point now, std::vector<Ended>& ended);
  void notice_poison();
  void fail_all(std::vector<Ended>& ended);

  const Team& team_;
  const Selection& selection_;
  const bool strict_;
  GroupHealth& health_;
  std::deque<Item> queue_;
  Task task_;  // of queue_.front()
  Postbox postbox_;
  // No message is late before.
  Clock::time_point messages_late_ = Clock::time_point::max();
  std::vector<Postbox::Outcome> outcomes_;
  uint64_t seq_ = 0;
  uint64_t point_to_point_seq_ = 0;
  unsigned rounds_without_movement_ = 0;
  std::shared_ptr<const Failure> broken_;
};

}  // namespace c10d_ext::shm
