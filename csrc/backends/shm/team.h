#pragma once

// One rank's view of the shared memory, and the coroutines that wait for what other ranks publish.

#include <atomic>
#include <coroutine>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "backends/shm/engine.h"
#include "backends/shm/futex.h"
#include "backends/shm/layout.h"

namespace c10d_ext::shm {

class Team {
 public:
  Team(std::shared_ptr<Mapping> mapping, int rank, int size, size_t arena)
      : rank_(rank),
        size_(size),
        layout_(size, arena),
        mapping_(std::move(mapping)),
        base_(mapping_->data()) {}

  int rank() const {
    return rank_;
  }
  int size() const {
    return size_;
  }
  const Layout& layout() const {
    return layout_;
  }

  Header& header() const {
    return *reinterpret_cast<Header*>(base_);
  }
  Control& control(int rank) const {
    return *reinterpret_cast<Control*>(base_ + layout_.control(rank));
  }
  uint64_t* table(int rank, uint64_t seq, int direction) const {
    return reinterpret_cast<uint64_t*>(base_ + layout_.table(rank, seq, direction));
  }
  CollectiveHeader& header(int rank, uint64_t seq) const {
    return *reinterpret_cast<CollectiveHeader*>(base_ + layout_.header(rank, seq));
  }
  // Room for small data that may be written before a collective is announced: what lies there was
  // last read in the collective before the last, which everyone has left by then, since this rank
  // has seen all of them enter the last.
  std::byte* eager(int rank, uint64_t seq) const {
    return base_ + layout_.header(rank, seq) + sizeof(CollectiveHeader);
  }
  char* call_site(int rank, uint64_t seq) const {
    return reinterpret_cast<char*>(base_ + layout_.call_site(rank, seq));
  }
  // Room for everything else: free from the moment that everyone has entered the collective.
  std::byte* bulk(int rank) const {
    return base_ + layout_.bulk(rank);
  }
  Mailbox& mailbox(int from, int to) const {
    return *reinterpret_cast<Mailbox*>(base_ + layout_.mailbox(from, to));
  }
  std::byte* half(int from, int to, uint64_t number) const {
    return base_ + layout_.mailbox(from, to) + sizeof(Mailbox) +
           (number % Mailbox::kHalves) * layout_.half_bytes();
  }

  // Everything this rank wrote so far becomes visible to whoever sees `stage` reached.
  //
  // Sequentially consistent, as are the waiter's `sleepers` and the loads in reached(): either the
  // publisher sees the sleeper, or the sleeper sees the stage when it looks again before it sleeps.
  void publish(uint64_t stage) const {
    control(rank_).stage.store(stage, std::memory_order_seq_cst);
    ring_sleepers();
  }
  bool reached(int rank, uint64_t stage) const {
    return control(rank).stage.load(std::memory_order_seq_cst) >= stage;
  }

  // After a seq_cst store that `rank` may be waiting for.
  void ring(int rank) const {
    Control& c = control(rank);
    if (c.sleepers.load(std::memory_order_seq_cst) != 0) {
      c.bell.fetch_add(1, std::memory_order_seq_cst);
      futex_wake_all(c.bell);
    }
  }
  void ring_sleepers() const {
    for (int p = 0; p < size_; ++p) {
      if (p != rank_) {
        ring(p);
      }
    }
  }

  // What a coroutine waits for: `rank` (every rank but this one if kAll) has reached `stage`.
  static constexpr int kAll = -1;
  static constexpr int kNobody = -2;
  struct Wait {
    const Team* team = nullptr;
    int rank = kNobody;
    uint64_t stage = 0;
    // Ranks below this one have been seen to be there.
    int seen = 0;

    bool over() {
      if (rank == kNobody) {
        return true;
      }
      if (rank != kAll) {
        return team->reached(rank, stage);
      }
      for (; seen < team->size(); ++seen) {
        if (seen != team->rank() && !team->reached(seen, stage)) {
          return false;
        }
      }
      return true;
    }
    // The ranks that are not there yet.
    std::vector<int> missing() const {
      std::vector<int> ranks;
      for (int p = 0; p < team->size(); ++p) {
        if (p != team->rank() && (rank == kAll || rank == p) && !team->reached(p, stage)) {
          ranks.push_back(p);
        }
      }
      return ranks;
    }
  };
  Wait until(int rank, uint64_t stage) const {
    return {this, rank, stage};
  }

 private:
  int rank_;
  int size_;
  Layout layout_;
  std::shared_ptr<Mapping> mapping_;
  std::byte* base_;
};

// A collective under way. It runs until it would have to wait and is resumed once the wait is over,
// by whichever thread drives the engine; between two waits it does a chunk's worth of work.
class Task {
 public:
  struct promise_type {
    Team::Wait wait;
    std::optional<Failure> failure;
    std::exception_ptr error;

    Task get_return_object() {
      return Task(std::coroutine_handle<promise_type>::from_promise(*this));
    }
    std::suspend_always initial_suspend() noexcept {
      return {};
    }
    std::suspend_always final_suspend() noexcept {
      return {};
    }
    void return_value(std::optional<Failure> f) {
      failure = std::move(f);
    }
    void unhandled_exception() {
      error = std::current_exception();
    }

    struct Awaiter {
      Team::Wait wait;
      bool await_ready() {
        return wait.over();
      }
      void await_suspend(std::coroutine_handle<promise_type> handle) {
        handle.promise().wait = wait;
      }
      void await_resume() {}
    };
    Awaiter await_transform(Team::Wait w) {
      return {w};
    }
    // Lets whoever drives the engine look at its watch.
    std::suspend_always await_transform(std::suspend_always pause) {
      wait.rank = Team::kNobody;
      return pause;
    }
  };

  Task() = default;
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, {})) {}
  Task& operator=(Task&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Task() {
    if (handle_) {
      handle_.destroy();
    }
  }

  explicit operator bool() const {
    return static_cast<bool>(handle_);
  }
  // False: still waiting, nothing was done.
  bool advance() {
    if (!handle_.promise().wait.over()) {
      return false;
    }
    handle_.resume();
    return true;
  }
  bool finished() const {
    return handle_.done();
  }
  const Team::Wait& wait() const {
    return handle_.promise().wait;
  }
  std::optional<Failure> failure() const {
    if (handle_.promise().error) {
      std::rethrow_exception(handle_.promise().error);
    }
    return handle_.promise().failure;
  }

 private:
  explicit Task(std::coroutine_handle<promise_type> handle) : handle_(handle) {}
  std::coroutine_handle<promise_type> handle_;
};

// The collective `request` as number `seq` of the group. `request` outlives the task.
Task run_collective(const Team& team, const Request& request, uint64_t seq, const Place& place,
                    bool strict);

}  // namespace c10d_ext::shm
