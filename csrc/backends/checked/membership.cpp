#include "backends/checked/membership.h"

#include <algorithm>
#include <thread>

namespace c10d_ext {

namespace {

// What rank 0 has matched while it was asked to give it up has so long to travel.
constexpr std::chrono::milliseconds kLastMessages{1000};

}  // namespace

void Membership::add(const StartedMessage& message) {
  const std::lock_guard lock(mutex_);
  if (messages_.size() >= limit_) {
    std::erase_if(messages_, [](const InFlight& known) {
      const auto end = known.second.lock();
      return !end || end->isCompleted();
    });
    limit_ = std::max(kFew, 2 * messages_.size());
  }
  messages_.emplace_back(message.work, message.end);
}

void Membership::leave(Milliseconds grace) {
  const bool waits = grace > Milliseconds(0) && !Agreement::is_here() && !agreement_->is_foreign();
  const auto until = Clock::now() + grace;
  agreement_->leave(grace);
  if (waits) {
    finish_messages(std::max(until, Clock::now() + kLastMessages));
  }
  abort_messages();
}

void Membership::finish_messages(Clock::time_point until) {
  constexpr Milliseconds kLook{1};
  while (!are_messages_over() && Clock::now() < until) {
    std::this_thread::sleep_for(kLook);
  }
}

bool Membership::are_messages_over() {
  std::vector<InFlight> messages;
  {
    const std::lock_guard lock(mutex_);
    messages = messages_;
  }
  bool are_over = true;
  for (const auto& [caller, known] : messages) {
    const auto end = known.lock();
    if (!end || end->isCompleted()) {
      continue;
    }
    are_over = false;
    const auto work = end->status() == WorkStatus::Queued ? nullptr : caller.lock();
    if (work) {
      try {
        work->isCompleted();  // a thread waits for it from here on
      } catch (...) {         // there is none to be had
      }
    }
  }
  return are_over;
}

void Membership::abort_messages() {
  std::vector<InFlight> messages;
  {
    const std::lock_guard lock(mutex_);
    messages.swap(messages_);
  }
  for (const auto& known : messages) {
    if (const auto end = known.second.lock()) {
      end->abort();
    }
  }
}

}  // namespace c10d_ext
