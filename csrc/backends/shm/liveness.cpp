#include "backends/shm/liveness.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <stdexcept>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "base/signal_masked_thread.h"

namespace c10d_ext::shm {

namespace {

[[noreturn]] void fail(int error, const char* what) {
  throw std::system_error(error, std::generic_category(), what);
}

class Watcher;

// That of this process. Guarded by a ForkGuard.
std::shared_ptr<Watcher>& watcher_of_this_process() {
  // Never destroyed: the watcher's thread runs until the very end of the process.
  static auto* const instance = [] {
    // In a child its thread is not there; its memory stays with the memberships it served.
    at_fork_in_child([] { watcher_of_this_process().reset(); });
    return new std::shared_ptr<Watcher>();
  }();
  return *instance;
}

// The thread that polls the pipes of all memberships of this process. Lives from the first watch()
// to the last stop(). It has no destructor that would need its thread, as a forked child has none.
class Watcher : public std::enable_shared_from_this<Watcher> {
 public:
  using OnLost = std::function<void(int rank)>;

  explicit Watcher(const ForkGuard& guard)
      : epoll_(epoll_create1(EPOLL_CLOEXEC), guard), wake_(eventfd(0, EFD_CLOEXEC), guard) {
    if (!epoll_ || !wake_) {
      fail(errno, "cannot watch the peers' processes");
    }
  }

  void start(const ForkGuard&) {
    epoll_event event{.events = EPOLLIN, .data = {.u64 = kWake}};
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) < 0) {
      fail(errno, "cannot watch the peers' processes");
    }
    auto self = std::make_unique<std::shared_ptr<Watcher>>(shared_from_this());
    const int error = [&] {
      const SignalMask quiet;
      return pthread_create(&thread_, nullptr, &Watcher::main, self.get());
    }();
    if (error != 0) {
      fail(error, "cannot start the thread that watches the peers' processes");
    }
    self.release();
    pthread_setname_np(thread_, "c10d_ext_watch");
    thread_id_.wait(0, std::memory_order_acquire);
    for (auto* link = locks_.list.next; link != &locks_.list; link = link->next) {
      reinterpret_cast<Pulse*>(link)->owner.store(word(), std::memory_order_release);
    }
  }

  void add(const void* owner, const OnLost* on_lost, const std::vector<FdOwner>& ends, Pulse& pulse,
           const ForkGuard& guard) {
    ++owners_;
    for (size_t rank = 0; rank < ends.size(); ++rank) {
      if (!ends[rank]) {
        continue;
      }
      const uint64_t key = ++last_key_;
      // Hang-ups are reported without being asked for.
      epoll_event event{.events = 0, .data = {.u64 = key}};
      if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, ends[rank].get(), &event) < 0) {
        const int error = errno;
        remove(owner, pulse, guard);
        fail(error, "cannot watch the peers' processes");
      }
      watched_.emplace(key, Watched{owner, on_lost, static_cast<int>(rank), ends[rank].get()});
    }
    // The kernel reads the list when the thread is dead, so others may write it.
    pulse.next = locks_.list.next;
    locks_.list.next = link_of(pulse);
    pulse.owner.store(word(), std::memory_order_release);
  }

  // True when the last owner is gone: call finish() then.
  bool remove(const void* owner, Pulse& pulse, const ForkGuard&) {
    std::erase_if(watched_, [&](const auto& entry) {
      if (entry.second.owner != owner) {
        return false;
      }
      epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, entry.second.fd, nullptr);
      return true;
    });
    for (auto* link = &locks_.list; link->next != &locks_.list; link = link->next) {
      if (link->next == link_of(pulse)) {
        link->next = link->next->next;
        break;
      }
    }
    pulse.owner.store(0, std::memory_order_release);
    return --owners_ == 0;
  }

  // Waits for a call of an on_lost in progress, unless it is what calls this.
  void settle() {
    if (running_here != this) {
      std::lock_guard lock(calling_);
    }
  }

  void finish() {
    eventfd_write(wake_.get(), 1);
    if (running_here == this) {
      pthread_detach(thread_);
    } else {
      pthread_join(thread_, nullptr);
    }
  }

 private:
  struct Watched {
    const void* owner;
    const OnLost* on_lost;
    int rank;
    int fd;
  };

  // Nobody's as long as the thread is not running yet.
  uint32_t word() const {
    const uint32_t id = thread_id_;
    return id == 0 ? 0 : id | FUTEX_WAITERS;
  }

  static robust_list* link_of(Pulse& pulse) {
    return reinterpret_cast<robust_list*>(&pulse.next);
  }

  static constexpr uint64_t kWake = 0;
  static thread_local const Watcher* running_here;

  static void* main(void* argument) {
    std::unique_ptr<std::shared_ptr<Watcher>> self(
        static_cast<std::shared_ptr<Watcher>*>(argument));
    running_here = self->get();
    (*self)->run();
    return nullptr;
  }

  void run() {
    syscall(SYS_set_robust_list, &locks_, sizeof(locks_));
    thread_id_.store(static_cast<uint32_t>(syscall(SYS_gettid)), std::memory_order_release);
    thread_id_.notify_one();
    std::array<epoll_event, 64> events;
    while (true) {
      const int count = epoll_wait(epoll_.get(), events.data(), events.size(), -1);
      for (int i = 0; i < count; ++i) {
        const uint64_t key = events[i].data.u64;
        if (key == kWake) {
          // This object may be gone before the kernel has ended the thread.
          syscall(SYS_set_robust_list, nullptr, sizeof(locks_));
          return;
        }
        // settle() waits for this lock, and stop() erases before it settles: what is found here
        // stays valid until the call has returned.
        std::lock_guard calling(calling_);
        if (const auto lost = take(key)) {
          (*lost->on_lost)(lost->rank);
        }
      }
    }
  }

  std::optional<Watched> take(uint64_t key) {
    const ForkGuard guard;
    const auto found = watched_.find(key);
    if (found == watched_.end()) {
      return std::nullopt;
    }
    const auto watched = found->second;
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, watched.fd, nullptr);
    watched_.erase(found);
    return watched;
  }

  FdOwner epoll_, wake_;
  pthread_t thread_{};
  std::mutex calling_;  // taken before the process' mutex
  std::unordered_map<uint64_t, Watched> watched_;
  robust_list_head locks_{{&locks_.list}, offsetof(Pulse, owner) - offsetof(Pulse, next), nullptr};
  std::atomic<uint32_t> thread_id_{0};  // 0: not running yet
  uint64_t last_key_ = kWake;
  int owners_ = 0;
};

thread_local const Watcher* Watcher::running_here = nullptr;

class Member : public Membership {
 public:
  Member(std::shared_ptr<Mapping> mapping, int rank, std::vector<Peer> peers, FdOwner own,
         std::vector<FdOwner> ends)
      : mapping_(std::move(mapping)),
        rank_(rank),
        peers_(std::move(peers)),
        own_(std::move(own)),
        ends_(std::move(ends)),
        generation_(fork_generation()) {}

  ~Member() override {
    stop();
  }

  const std::shared_ptr<Mapping>& mapping() const override {
    return mapping_;
  }

  const std::vector<Peer>& peers() const override {
    return peers_;
  }

  void watch(std::function<void(int rank)> on_lost) override {
    if (generation_ != fork_generation()) {
      throw std::logic_error("this group belongs to the process that this one was forked from");
    }
    on_lost_ = std::move(on_lost);
    std::shared_ptr<Watcher> watcher;  // outlives the guard: its destructor takes one itself
    const ForkGuard guard;
    watcher = watcher_of_this_process();
    const bool first = !watcher;
    if (first) {
      watcher = std::make_shared<Watcher>(guard);
    }
    watcher->add(this, &on_lost_, ends_, pulse(rank_), guard);
    if (first) {
      watcher->start(guard);
    }
    watcher_of_this_process() = watcher_ = watcher;
  }

  std::vector<std::atomic<uint32_t>*> pulses() const override {
    std::vector<std::atomic<uint32_t>*> words;
    for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
      words.push_back(&pulse(rank).owner);
    }
    return words;
  }

  bool died(int rank) const override {
    return (pulse(rank).owner.load(std::memory_order_acquire) & FUTEX_OWNER_DIED) != 0;
  }

  void stop() override {
    // In a forked child there is neither a thread to wait for nor a descriptor to forget.
    if (!watcher_ || generation_ != fork_generation()) {
      return;
    }
    bool last = false;
    {
      const ForkGuard guard;
      if (!std::exchange(stopped_, true)) {
        last = watcher_->remove(this, pulse(rank_), guard);
      }
      if (last) {
        watcher_of_this_process().reset();
      }
    }
    watcher_->settle();
    if (last) {
      watcher_->finish();
    }
  }

 private:
  Pulse& pulse(int rank) const {
    auto* end = reinterpret_cast<Pulse*>(mapping_->data() + mapping_->bytes());
    return *(end - peers_.size() + rank);
  }

  std::shared_ptr<Mapping> mapping_;
  int rank_;
  std::vector<Peer> peers_;
  FdOwner own_;
  std::vector<FdOwner> ends_;
  uint64_t generation_;
  std::function<void(int rank)> on_lost_;
  std::shared_ptr<Watcher> watcher_;
  bool stopped_ = false;
};

}  // namespace

size_t with_pulses(size_t bytes, int size) {
  const size_t aligned = (bytes + alignof(Pulse) - 1) / alignof(Pulse) * alignof(Pulse);
  return aligned + static_cast<size_t>(size) * sizeof(Pulse);
}

std::unique_ptr<Membership> make_membership(std::shared_ptr<Mapping> mapping, int rank,
                                            std::vector<Peer> peers, FdOwner own,
                                            std::vector<FdOwner> ends) {
  return std::make_unique<Member>(std::move(mapping), rank, std::move(peers), std::move(own),
                                  std::move(ends));
}

}  // namespace c10d_ext::shm
