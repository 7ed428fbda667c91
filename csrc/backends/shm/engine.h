#pragma once

// Runs the collectives of one rank of one group over a shared mapping. No torch in here.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backends/shm/bootstrap.h"
#include "base/errors.h"
#include "base/fingerprint.h"
#include "base/types.h"
#include "kernels/kernels.h"

namespace c10d_ext::shm {

struct Piece {
  std::byte* data;
  size_t bytes;
};
// One part of a collective: its bytes are the pieces' bytes one after the other. Each piece holds
// whole elements.
using Buffer = std::vector<Piece>;

size_t bytes_of(const Buffer& buffer);

// One collective or message, as one rank requests it. Sources are read and targets written until
// the operation is done. A target may be exactly the memory of this rank's own source; apart from
// that nothing overlaps.
//
//   type           sources                        targets
//   Barrier        -                              -
//   AllReduce      1                              1, same sizes
//   Reduce         1                              1 on root, else 0
//   Broadcast      1 on root, else 0              1 (on root: none, or a copy)
//   AllGather      1                              N: what rank p sent
//   ReduceScatter  N: what goes to rank p         1
//   AllToAll       N: what goes to rank p         N: what rank p sent
//   Gather         1                              N on root, else 0
//   Scatter        N on root, else 0              1
//   Send           1, to `peer`                   -
//   Recv           -                              1, from `peer`, -1 for any
//
//   SparseAllReduce  1, known when it begins      N, from room(): what rank p sent
//
// AllGather, ReduceScatter, AllToAll, Gather and Scatter take parts of different sizes. So does
// SparseAllReduce, which gathers the parts without reducing them, and whose ranks need not know the
// sizes.
struct Request {
  OpType type = OpType::Barrier;
  // The elements; sizes are in bytes everywhere.
  DType dtype = DType::Bytes;
  ReduceOp reduce_op = ReduceOp::None;
  kernels::Factor factor;
  int root = -1;
  int peer = -1;
  int64_t tag = 0;
  std::vector<Buffer> sources;
  std::vector<Buffer> targets;
  // Compared across ranks under Settings::strict; see add_shape().
  uint64_t shapes = 0;
  // Compared, where the ranks give one: the line that called the collective. Its end counts where
  // it is too long.
  std::string call_site;
  // Always compared: the bytes of each tensor, where several are sent as one collective.
  std::vector<uint64_t> members;
  // Of a SparseAllReduce, which always compares it and `shapes`.
  int sparse_dims = 0;
  // Of a SparseAllReduce: allocates its targets, given the bytes of each rank's source. Called
  // under the conditions of Operation::on_begin().
  std::function<std::vector<Buffer>(const std::vector<uint64_t>& bytes)> room;
  // Whether the caller may do something else before it waits. If not, the thread that waits drives
  // the operation, and the progress thread is not woken.
  bool async = true;
};

class Engine;

class Operation {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Operation(Request r, std::chrono::milliseconds t) : request(std::move(r)), timeout(t) {}
  virtual ~Operation() = default;

  // The thread that drives the engine calls each of them once. They must not throw, except for
  // on_begin() of a collective, which ends the group by throwing.
  //
  // When the operation begins, before the request or any data is read. Called under the engine's
  // lock, and so in the order of collectives: must not take the GIL nor use the engine.
  virtual void on_begin() {}
  // When all data has been written, before the next collective begins. Under the engine's lock,
  // too. Not called for an operation that failed.
  virtual void on_arrived() {}
  // Before the operation counts as done, without locks. `failure` is null on success.
  virtual void on_done(const Failure* failure) {
    (void)failure;
  }

  bool done() const {
    return done_.load(std::memory_order_acquire);
  }
  // Only once it is done.
  const Failure* failure() const {
    return failure_ ? &*failure_ : nullptr;
  }
  uint64_t seq() const {
    return seq_;
  }
  // Of a Recv that is done.
  int source_rank() const {
    return source_rank_;
  }
  Clock::duration duration() const {
    return ended_ - begun_;
  }
  // Resets the operation for another use, by its only owner.
  void renew() {
    done_.store(false, std::memory_order_relaxed);
    failure_.reset();
    seq_ = 0;
    source_rank_ = -1;
    submitted_ = begun_ = ended_ = {};
  }

  Request request;
  std::chrono::milliseconds timeout;

 private:
  friend class Engine;
  friend class Scheduler;
  std::atomic<bool> done_{false};
  std::optional<Failure> failure_;
  uint64_t seq_ = 0;
  int source_rank_ = -1;
  bool urgent_ = false;
  Clock::time_point submitted_, begun_, ended_;
};

struct Settings {
  std::string group = "default";              // for error texts
  std::chrono::microseconds inline_time{20};  // how long submit() itself works at an operation
  std::chrono::microseconds spin_time{100};   // busy waiting before sleeping
  bool progress_thread = true;
  bool strict = false;  // compare shapes too, not only element counts
  // How the choice of algorithms is overridden: see select.h. The same on all ranks, or collectives
  // end with a mismatch.
  std::string algorithms;
  // By rank, or empty: words of the shared memory that the kernel marks with FUTEX_OWNER_DIED when
  // the rank's process begins to end; it then wakes one sleeper (peer_lost() may come much later).
  std::vector<std::atomic<uint32_t>*> pulses;
};

// Thread safe. Collectives run in the order of submission; sends and receives run beside them.
class Engine {
 public:
  // The size of the mapping for a group; `arena` bytes per rank carry the data.
  static size_t mapping_bytes(int size, size_t arena);

  // `arena` as given to mapping_bytes(). Throws std::invalid_argument where `settings.algorithms`
  // is not what parse_rules() takes.
  Engine(std::shared_ptr<Mapping> mapping, size_t arena, int rank, int size,
         std::vector<Peer> peers, Settings settings);
  // close()s.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Starts an operation and drives it for a short bounded time. Never throws: an error ends the
  // operation with a failure.
  void submit(const std::shared_ptr<Operation>& operation);

  // Drives the operation until it is done. False: not done within `timeout` (none: the operation's
  // own timeout ends it). `interrupt` is called about every 50 ms and may throw; then the operation
  // continues in the background.
  bool wait(Operation& operation, std::optional<std::chrono::milliseconds> timeout,
            const std::function<void()>& interrupt);

  // The ranks for which a pending operation waits, as far as this rank knows, and a text that names
  // them with the states of their processes.
  std::pair<std::vector<int>, std::string> awaited(const Operation& operation) const;

  // The watcher reports a lost rank. Operations that need it fail, now and later.
  void peer_lost(int rank);

  // Fails all operations, pending and future ones, on this rank and on all others.
  void abort(const std::string& why);

  // Drives pending operations for at most `grace`, fails the rest, and leaves the group. The
  // threads are gone when it returns. Idempotent.
  void close(std::chrono::milliseconds grace = std::chrono::milliseconds(0));

  // Collectives submitted so far.
  uint64_t seq() const;
  // Why the group can run no more operations (a lost rank, a timeout, an abort), or null.
  std::shared_ptr<const Failure> broken() const;
  int rank() const;
  int size() const;

 private:
  class Impl;
  // Shared with the progress thread.
  std::shared_ptr<Impl> impl_;
};

}  // namespace c10d_ext::shm
