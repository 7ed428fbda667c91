#pragma once

// The messages of a group that the inner backend may still be at.

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <utility>
#include <vector>

namespace c10d_ext {

// From any thread. Holds no work: one that its callers have dropped is not known any more.
class MessagesInFlight {
 public:
  void add(const c10::intrusive_ptr<c10d::Work>& end) {
    const std::lock_guard lock(mutex_);
    if (messages_.size() >= limit_) {
      std::erase_if(messages_, [](const auto& weak) {
        const auto known = weak.lock();
        return !known || known->isCompleted();
      });
      limit_ = std::max(kFew, 2 * messages_.size());
    }
    messages_.emplace_back(end);
  }

  void abort() {
    std::vector<c10::weak_intrusive_ptr<c10d::Work>> messages;
    {
      const std::lock_guard lock(mutex_);
      messages.swap(messages_);
    }
    for (const auto& weak : messages) {
      if (const auto work = weak.lock()) {
        work->abort();
      }
    }
  }

 private:
  static constexpr size_t kFew = 64;
  std::mutex mutex_;
  // Swept when there are as many as the limit.
  std::vector<c10::weak_intrusive_ptr<c10d::Work>> messages_;
  size_t limit_ = kFew;
};

}  // namespace c10d_ext
