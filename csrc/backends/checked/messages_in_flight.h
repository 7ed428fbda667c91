#pragma once

// The messages of a group that the inner backend may still be at.

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstddef>
#include <mutex>
#include <vector>

namespace c10d_ext {

// From any thread. Holds no work: one that its callers have dropped, and that is over, is not known
// any more.
class MessagesInFlight {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // Aborts it where the others have been taken.
  void add(const WorkPtr& message);
  // The group ends: all of them, which are not known any more.
  std::vector<WorkPtr> take();
  // They end with an error.
  void abort();

 private:
  static constexpr size_t kFew = 64;
  std::mutex mutex_;
  // Swept when there are as many as the limit.
  std::vector<c10::weak_intrusive_ptr<c10d::Work>> messages_;
  size_t limit_ = kFew;
  bool are_taken_ = false;
};

void abort_all(const std::vector<MessagesInFlight::WorkPtr>& messages);

}  // namespace c10d_ext
