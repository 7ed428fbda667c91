#include "backends/checked/membership.h"

#include <algorithm>
#include <thread>
#include <vector>

#include "work/blocking_work.h"

namespace c10d_ext {

namespace {

using Messages = std::vector<MessagesInFlight::WorkPtr>;

// What rank 0 has matched while it was asked to give it up has so long to travel.
constexpr std::chrono::milliseconds kLastMessages{1000};

// Whether all of them are over by then. Nobody else may be waiting for them.
bool finish(const Messages& messages, std::chrono::steady_clock::time_point until) {
  const auto is_over = [](const auto& message) { return message->isCompleted(); };
  for (const auto& message : messages) {
    if (!is_over(message)) {
      wait_aside(message);
    }
  }
  while (!std::all_of(messages.begin(), messages.end(), is_over)) {
    if (std::chrono::steady_clock::now() >= until) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace

void Membership::leave(Milliseconds grace) {
  if (Agreement::is_here() || agreement_->is_foreign()) {
    leave_now(grace, /*waits=*/false);
    return;
  }
  const std::lock_guard lock(leaving_);
  // A group that has ended may have messages that never come to their end.
  const bool has_ended = agreement_->failure("", 0, Milliseconds(0)).has_value();
  leave_now(grace, grace > Milliseconds(0) && !has_ended);
}

void Membership::abort() {
  agreement_->abort();
  messages_->abort();
}

void Membership::leave_now(Milliseconds grace, bool waits) {
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + grace;
  agreement_->leave(grace);
  // Each of them has begun by now, or has failed.
  const Messages messages = messages_->take();
  if (!waits || !finish(messages, std::max(until, Clock::now() + kLastMessages))) {
    abort_all(messages);
  }
}

}  // namespace c10d_ext
