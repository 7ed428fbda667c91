// The engine: how the threads of a rank drive the scheduler, and when they sleep.

#include "backends/shm/engine.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>

#include "backends/shm/contention.h"
#include "backends/shm/cpu_placement.h"
#include "backends/shm/group_health.h"
#include "backends/shm/group_memory.h"
#include "backends/shm/progress_thread.h"
#include "backends/shm/scheduler.h"
#include "backends/shm/select.h"
#include "base/timeouts.h"
#include "base/wait_timer.h"

namespace c10d_ext::shm {

namespace {

using Clock = Operation::Clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

// A sleeping thread wakes at least this often: no rank rings for a timeout or a lost rank.
constexpr milliseconds kLongestSleep{5};
// A thread does not sleep if less than this is left until its deadline.
constexpr microseconds kShortestSleep{50};
// The first sleep of a wait. It waits on the doorbell alone, not on the pulses, which is cheaper.
constexpr milliseconds kFirstSleep{1};
constexpr milliseconds kInterruptEvery{50};
// Whose time it is that a caller waits.
constexpr std::string_view kTimedAs = "shm";
// The progress thread is woken at once for operations of this many bytes.
constexpr size_t kUrgentBytes = size_t{4} << 20;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

bool is_urgent(const Operation& op) {
  size_t bytes = 0;
  for (const auto* buffers : {&op.request.sources, &op.request.targets}) {
    for (const Buffer& buffer : *buffers) {
      bytes += bytes_of(buffer);
    }
  }
  return bytes >= kUrgentBytes;
}

using Ended = std::vector<Scheduler::Ended>;

// A list with the memory of the one that this thread had before: a small operation would spend more
// time on allocating it than on its data.
class EndedHere {
 public:
  EndedHere() {
    if (!is_thread_over) {
      list_.swap(spare());
    }
  }
  ~EndedHere() {
    list_.clear();
    if (!is_thread_over) {
      list_.swap(spare());
    }
  }
  EndedHere(const EndedHere&) = delete;
  EndedHere& operator=(const EndedHere&) = delete;

  Ended& list() {
    return list_;
  }

 private:
  struct Spare {
    Ended list;
    ~Spare() {
      is_thread_over = true;
    }
  };
  static Ended& spare() {
    static thread_local Spare instance;
    return instance.list;
  }
  // Groups may be closed by what is destroyed after a thread's own variables.
  static inline thread_local bool is_thread_over = false;

  Ended list_;
};

}  // namespace

size_t bytes_of(const Buffer& buffer) {
  size_t bytes = 0;
  for (const Piece& piece : buffer) {
    bytes += piece.bytes;
  }
  return bytes;
}

class Engine::Impl final : public Driven {
 public:
  Impl(std::shared_ptr<Mapping> mapping, size_t arena, int rank, int size, std::vector<Peer> peers,
       Settings settings)
      : settings_(std::move(settings)),
        place_{rank, size, settings_.group},
        memory_(std::move(mapping), rank, size, arena),
        selection_(size, settings_.algorithms),
        placement_(memory_),
        health_(memory_, place_, std::move(peers), settings_.pulses),
        scheduler_(memory_, selection_, settings_.strict, health_),
        progress_(*this, settings_.progress_thread),
        generation_(fork_generation()) {
    // More ranks than cores: a rank that spins may occupy the core of the rank for which it waits,
    // so it yields each time. Measured with 4 ranks on 2 cores, all_reduce of 8 B: 12 us when ranks
    // yield, 27 us when they sleep.
    if (static_cast<unsigned>(size) > std::max(1u, std::thread::hardware_concurrency())) {
      spins_ = 1;
      settings_.inline_time *= 3;
    }
    const std::string& overrides = selection_.overrides();
    const size_t shown = std::min(overrides.size(), Control::kMaxOverrides - 1);
    std::memcpy(memory_.control(rank).overrides, overrides.data(), shown);
    WaitTimer::expect(kTimedAs);
  }

  ~Impl() override {
    if (forked()) {
      progress_.abandon();
    }
  }

  void submit(const std::shared_ptr<Operation>& operation);
  bool wait(Operation& operation, std::optional<milliseconds> timeout,
            const std::function<void()>& interrupt);
  void abort(const std::string& why);
  void close(milliseconds grace);

  std::pair<std::vector<int>, std::string> awaited(const Operation& op) const {
    std::lock_guard lock(mutex_);
    const auto ranks = scheduler_.awaited(op);
    return {ranks, health_.describe(ranks)};
  }
  void peer_lost(int rank) {
    health_.mark_lost(rank);
    wake_self();
  }
  uint64_t seq() const {
    std::lock_guard lock(mutex_);
    return scheduler_.seq();
  }
  std::shared_ptr<const Failure> broken() const {
    std::lock_guard lock(mutex_);
    return scheduler_.broken();
  }
  const Place& place() const {
    return place_;
  }

  // --- Of the progress thread -------------------------------------------------------------------

  bool has_pending() const override {
    return pending_.load() != 0;
  }
  bool is_urgent() const override {
    return urgent_.load() != 0;
  }
  void drive_until(const std::function<bool()>& relieved,
                   const std::function<bool()>& stopping) override {
    drive(relieved, [&](Clock::time_point) { return !stopping(); }, Clock::time_point::max());
  }

 private:
  bool forked() const {
    return fork_generation() != generation_;
  }

  // Drives pending operations until `satisfied`; false when `go_on` says to stop before.
  template <class Satisfied, class GoOn>
  bool drive(const Satisfied& satisfied, const GoOn& go_on, Clock::time_point deadline);
  // One round of the scheduler. False: nothing moved.
  bool advance(Ended& ended, bool thorough);
  // The next three without locks.
  void fail_pending(Failure why);
  void finish(Ended& ended);
  void end(const std::shared_ptr<Operation>& operation, std::optional<Failure> failure);
  void wake_self();

  Settings settings_;
  const Place place_;
  const GroupMemory memory_;
  const Selection selection_;
  CpuPlacement placement_;
  GroupHealth health_;

  mutable std::mutex mutex_;
  Scheduler scheduler_;  // under mutex_

  std::atomic<size_t> pending_{0};
  std::atomic<size_t> urgent_{0};
  std::atomic<bool> closing_{false};
  ProgressThread progress_;
  const uint64_t generation_;
  // Rounds between two looks at the clock.
  int spins_ = 16;
};

void Engine::Impl::submit(const std::shared_ptr<Operation>& operation) {
  Operation& op = *operation;
  op.submitted_ = Clock::now();
  op.timeout = bounded(op.timeout);
  if (forked()) {
    end(operation,
        health_.closed(
            op, "the group must be used in the process that created it, got a forked child"));
    return;
  }
  placement_.publish_cpu();
  EndedHere ended;
  {
    std::unique_lock lock(mutex_);
    if (const auto why = scheduler_.number(op)) {
      lock.unlock();
      end(operation, *why);
      return;
    }
    pending_.fetch_add(1);
    op.urgent_ = shm::is_urgent(op);
    urgent_.fetch_add(op.urgent_);
    scheduler_.add(operation);
    // At once, so that the peers see the announcement.
    scheduler_.advance(ended.list());
  }
  finish(ended.list());
  // Large asynchronous operations are left to the thread that waits, or to the progress thread.
  const bool leave = op.request.async && is_urgent();
  if (!op.done() && !leave && settings_.inline_time.count() != 0) {
    const WaitTimer timer(kTimedAs);
    const auto deadline = op.submitted_ + settings_.inline_time;
    drive([&] { return op.done(); }, [&](Clock::time_point now) { return now < deadline; },
          deadline);
  }
  if (!op.done() && op.request.async) {
    progress_.wake();
  }
}

bool Engine::Impl::wait(Operation& operation, std::optional<milliseconds> timeout,
                        const std::function<void()>& interrupt) {
  if (operation.done()) {
    return true;
  }
  const WaitTimer timer(kTimedAs);
  const auto start = Clock::now();
  const auto deadline = timeout ? start + bounded(*timeout) : Clock::time_point::max();
  const ProgressThread::Waiter waiter(progress_);
  auto next_interrupt = start + kInterruptEvery;
  return drive([&] { return operation.done(); },
               [&](Clock::time_point now) {
                 if (interrupt && now >= next_interrupt) {
                   next_interrupt = now + kInterruptEvery;
                   interrupt();
                 }
                 return now < deadline;
               },
               deadline);
}

void Engine::Impl::abort(const std::string& why) {
  if (forked()) {
    return;
  }
  health_.poison(ErrorKind::Closed, OpType::Barrier, 0, {});
  fail_pending({ErrorKind::Closed, why + " " + place_.text(), {}, "abort", seq()});
}

void Engine::Impl::close(milliseconds grace) {
  if (forked() || closing_.exchange(true)) {
    return;
  }
  if (has_pending() && grace.count() > 0) {
    const ProgressThread::Waiter waiter(progress_);
    const auto deadline = Clock::now() + grace;
    drive([&] { return !has_pending(); }, [&](Clock::time_point now) { return now < deadline; },
          deadline);
  }
  fail_pending({ErrorKind::Closed,
                "the group must be alive, got a destroyed one " + place_.text(),
                {},
                "destroy",
                seq()});
  progress_.stop();
  wake_self();
  progress_.join();
  memory_.control(place_.rank).left.store(1, std::memory_order_seq_cst);
}

bool Engine::Impl::advance(Ended& ended, bool thorough) {
  bool moved;
  {
    std::lock_guard lock(mutex_);
    moved = scheduler_.advance(ended, thorough);
  }
  finish(ended);
  return moved;
}

void Engine::Impl::fail_pending(Failure why) {
  Ended ended;
  {
    std::lock_guard lock(mutex_);
    scheduler_.fail(std::move(why), ended);
  }
  finish(ended);
}

void Engine::Impl::end(const std::shared_ptr<Operation>& operation,
                       std::optional<Failure> failure) {
  operation->ended_ = Clock::now();
  if (operation->begun_ == Clock::time_point()) {
    operation->begun_ = operation->submitted_;
  }
  operation->failure_ = std::move(failure);
  operation->on_done(operation->failure());
  operation->done_.store(true, std::memory_order_release);
}

void Engine::Impl::finish(Ended& ended) {
  if (ended.empty()) {
    return;
  }
  for (auto& e : ended) {
    urgent_.fetch_sub(e.operation->urgent_);
    pending_.fetch_sub(1);
    end(e.operation, std::move(e.failure));
  }
  ended.clear();
  // Other threads of this rank may wait for one of them.
  if (memory_.control(place_.rank).sleepers.load(std::memory_order_seq_cst) != 0) {
    wake_self();
  }
}

void Engine::Impl::wake_self() {
  Control& c = memory_.control(place_.rank);
  c.bell.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(c.bell);
}

template <class Satisfied, class GoOn>
bool Engine::Impl::drive(const Satisfied& satisfied, const GoOn& go_on,
                         Clock::time_point deadline) {
  Control& self = memory_.control(place_.rank);
  EndedHere ended;
  auto idle_since = Clock::now();
  bool slept = false;
  for (int rounds = 0;; ++rounds) {
    if (satisfied()) {
      return true;
    }
    if (advance(ended.list(), /*thorough=*/false)) {
      idle_since = Clock::now();
      slept = false;
      if (!go_on(idle_since)) {
        return satisfied();
      }
      continue;
    }
    pause();
    if (rounds % spins_ != 0) {
      continue;
    }
    const auto now = Clock::now();
    if (!go_on(now)) {
      return satisfied();
    }
    thread_local ContentionDetector contention;
    const bool contended = contention.is_contended(now);
    if (!contended && now - idle_since < settings_.spin_time) {
      placement_.rebalance(now);
      // The awaited rank may need this core.
      sched_yield();
      contention.yielded(now, Clock::now());
      continue;
    }
    if (contended && deadline - now < kShortestSleep) {
      continue;
    }
    // From here on a rank that publishes rings; advance() sees what was published before.
    self.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = self.bell.load(std::memory_order_seq_cst);
    if (!advance(ended.list(), /*thorough=*/true) && !satisfied()) {
      if (std::exchange(slept, true)) {
        futex_sleep(self.bell, seen, settings_.pulses,
                    std::min<Clock::duration>(kLongestSleep, deadline - now));
      } else {
        futex_sleep(self.bell, seen, std::min<Clock::duration>(kFirstSleep, deadline - now));
      }
    }
    self.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    idle_since = Clock::now();
  }
}

size_t Engine::mapping_bytes(int size, size_t arena) {
  return Layout(size, arena).total();
}

Engine::Engine(std::shared_ptr<Mapping> mapping, size_t arena, int rank, int size,
               std::vector<Peer> peers, Settings settings)
    : impl_(std::make_shared<Impl>(std::move(mapping), arena, rank, size, std::move(peers),
                                   std::move(settings))) {}

Engine::~Engine() {
  impl_->close(std::chrono::milliseconds(0));
}

void Engine::submit(const std::shared_ptr<Operation>& operation) {
  impl_->submit(operation);
}
bool Engine::wait(Operation& operation, std::optional<std::chrono::milliseconds> timeout,
                  const std::function<void()>& interrupt) {
  return impl_->wait(operation, timeout, interrupt);
}
std::pair<std::vector<int>, std::string> Engine::awaited(const Operation& operation) const {
  return impl_->awaited(operation);
}
void Engine::peer_lost(int rank) {
  impl_->peer_lost(rank);
}
void Engine::abort(const std::string& why) {
  impl_->abort(why);
}
void Engine::close(std::chrono::milliseconds grace) {
  impl_->close(grace);
}
uint64_t Engine::seq() const {
  return impl_->seq();
}
std::shared_ptr<const Failure> Engine::broken() const {
  return impl_->broken();
}
int Engine::rank() const {
  return impl_->place().rank;
}
int Engine::size() const {
  return impl_->place().size;
}

}  // namespace c10d_ext::shm
