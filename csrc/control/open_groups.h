#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace c10d_ext {

// The groups of one kind that this process has, for whoever ends them with the process.
template <class Group>
class OpenGroups {
 public:
  void add(const std::shared_ptr<Group>& group) {
    std::lock_guard lock(mutex_);
    std::erase_if(groups_, [](const auto& known) { return known.expired(); });
    groups_.push_back(group);
  }

  std::vector<std::shared_ptr<Group>> all() const {
    std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Group>> groups;
    for (const auto& known : groups_) {
      if (auto group = known.lock()) {
        groups.push_back(std::move(group));
      }
    }
    return groups;
  }

  // `close(group, time)` for each of them that still is; they have `grace` together, but each some,
  // unless there is none. None is known afterwards.
  template <class Close>
  void close_all(std::chrono::milliseconds grace, const Close& close) {
    using Clock = std::chrono::steady_clock;
    std::vector<std::weak_ptr<Group>> groups;
    {
      std::lock_guard lock(mutex_);
      groups.swap(groups_);
    }
    const auto deadline = Clock::now() + grace;
    for (const auto& known : groups) {
      if (const auto group = known.lock()) {
        const auto left =
            std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
        close(*group, std::max(left, std::min(grace, std::chrono::milliseconds(1))));
      }
    }
  }

  // Never destroyed: groups may end while the process does.
  static OpenGroups& of_this_process() {
    static auto* instance = new OpenGroups;
    return *instance;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::weak_ptr<Group>> groups_;
};

}  // namespace c10d_ext
