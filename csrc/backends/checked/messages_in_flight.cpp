#include "backends/checked/messages_in_flight.h"

#include <algorithm>
#include <utility>

namespace c10d_ext {

void abort_all(const std::vector<MessagesInFlight::WorkPtr>& messages) {
  for (const auto& message : messages) {
    message->abort();
  }
}

void MessagesInFlight::add(const WorkPtr& message) {
  std::unique_lock lock(mutex_);
  if (are_taken_) {
    lock.unlock();
    message->abort();
    return;
  }
  if (messages_.size() >= limit_) {
    std::erase_if(messages_, [](const auto& known) {
      const auto message = known.lock();
      return !message || message->isCompleted();
    });
    limit_ = std::max(kFew, 2 * messages_.size());
  }
  messages_.emplace_back(message);
}

std::vector<MessagesInFlight::WorkPtr> MessagesInFlight::take() {
  std::vector<WorkPtr> taken;
  const std::lock_guard lock(mutex_);
  for (const auto& known : messages_) {
    if (auto message = known.lock()) {
      taken.push_back(std::move(message));
    }
  }
  messages_.clear();
  are_taken_ = true;
  return taken;
}

void MessagesInFlight::abort() {
  abort_all(take());
}

}  // namespace c10d_ext
