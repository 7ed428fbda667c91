#include "backends/checked/service.h"

#include "control/process.h"

namespace c10d_ext {

// Never destroyed: threads outlive static objects.
Service*& Service::instance() {
  static auto* now = [] {
    const ForkGuard guard;
    at_fork_in_child([] { instance() = new Service; });  // its threads are not there
    return new Service;
  }();
  return now;
}

Service& Service::of_this_process() {
  return *instance();
}

void Service::add(const Star* star) {
  const std::lock_guard lock(mutex_);
  stars_.push_back(star);
}

void Service::remove(const Star* star) {
  {
    const std::lock_guard lock(mutex_);
    std::erase(stars_, star);
  }
  ended_.notify_all();
}

void Service::end(Milliseconds grace) {
  at_once_ = grace.count() == 0;
  until_ = Clock::now() + grace;
  const std::lock_guard lock(mutex_);
  for (const auto* star : stars_) {
    star->wake(Star::Waiter::Thread);
  }
}

bool Service::goes_on(Milliseconds within) {
  std::unique_lock lock(mutex_);
  return !ended_.wait_for(lock, within, [this] { return stars_.empty(); });
}

}  // namespace c10d_ext
