#pragma once

// A rank's part in a group of checked calls, and how it ends.

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "backends/checked/agreement.h"
#include "backends/checked/works.h"
#include "work/request_work.h"

namespace c10d_ext {

// From any thread.
class Membership {
 public:
  using Milliseconds = std::chrono::milliseconds;

  explicit Membership(std::shared_ptr<Agreement> agreement) : agreement_(std::move(agreement)) {}

  // Holds no work: a message that its callers have dropped comes to its end without this.
  void add(const StartedMessage& message);

  // Collectives and messages that have been started have `grace` to come to their end, whether or
  // not somebody waits for them; what has not by then, and what is called later, fails. The other
  // ranks hear of it. No time where this thread may not wait.
  void leave(Milliseconds grace);

 private:
  using Clock = std::chrono::steady_clock;
  // What its caller has, and its end.
  using InFlight =
      std::pair<c10::weak_intrusive_ptr<c10d::Work>, c10::weak_intrusive_ptr<RequestWork>>;

  // Until all messages are over, until then at most.
  void finish_messages(Clock::time_point until);
  bool are_messages_over();
  void abort_messages();

  static constexpr size_t kFew = 64;
  const std::shared_ptr<Agreement> agreement_;
  std::mutex mutex_;
  // Swept when there are as many as the limit.
  std::vector<InFlight> messages_;
  size_t limit_ = kFew;
};

}  // namespace c10d_ext
