#pragma once

// A rank's part in a group of checked calls, and how it ends.

#include <chrono>
#include <memory>
#include <mutex>
#include <utility>

#include "backends/checked/agreement.h"
#include "backends/checked/messages_in_flight.h"

namespace c10d_ext {

// From any thread.
class Membership {
 public:
  using Milliseconds = std::chrono::milliseconds;

  Membership(std::shared_ptr<Agreement> agreement, std::shared_ptr<MessagesInFlight> messages)
      : agreement_(std::move(agreement)), messages_(std::move(messages)) {}

  // Collectives and messages that have been started have `grace` to come to their end, whether or
  // not somebody waits for them; what has not by then, and what is called later, fails. The other
  // ranks hear of it. No time where this thread may not wait.
  void leave(Milliseconds grace);
  // Ends the group on all ranks; where it had ended, its messages here.
  void abort();

 private:
  void leave_now(Milliseconds grace, bool waits);

  std::mutex leaving_;  // who comes second waits for the first
  const std::shared_ptr<Agreement> agreement_;
  const std::shared_ptr<MessagesInFlight> messages_;
};

}  // namespace c10d_ext
