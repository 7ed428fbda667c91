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
#include "backends/shm/kernels.h"

namespace c10d_ext::shm {

enum class Verb : uint8_t {
  Barrier,
  AllReduce,
  Reduce,
  Broadcast,
  AllGather,
  ReduceScatter,
  AllToAll,
  Gather,
  Scatter,
  Send,
  Recv,
  SparseAllReduce,
};

std::string_view name_of(Verb verb);

// "every rank must ..., got a on ranks 0 and 2, b on rank 1 in collective 7": what ranks 0, 1, ...
// have said that do not agree.
std::string text_of_difference(size_t ranks, uint64_t seq,
                               const std::function<bool(size_t, size_t)>& agree,
                               const std::function<std::string(size_t)>& said);

// "what is sent must be what is received, got ...": of a message that does not fit its receiver's
// tensor.
std::string text_of_misfit(int from, uint64_t sent, DType sent_dtype, int to, uint64_t expected,
                           DType expected_dtype, int64_t tag);

// "the wait must end within ...": of one whose own timeout has passed. `who` names the ranks that
// are awaited, as far as is known.
std::string text_of_impatience(std::chrono::milliseconds timeout, const std::string& who);

// What is compared of several shapes (0: none yet), and one more. Shapes that are all the same,
// with up to 6 dimensions that are not too large for 60 bits, stand for themselves, others are
// hashed.
uint64_t add_shape(uint64_t shapes, const int64_t* sizes, size_t dimensions);
// Whether they do, where both are told.
bool shapes_agree(uint64_t first, uint64_t second);
// "[2, 4]", or "hash 1f2e"; empty where there is none.
std::string text_of_shapes(uint64_t shapes);
// Of calls that travel together.
uint64_t join_shapes(uint64_t first, uint64_t second);

struct Piece {
  std::byte* data;
  size_t bytes;
};
// One part of a collective: its bytes are the pieces' bytes one after the other. Each piece holds
// whole elements.
using Buffer = std::vector<Piece>;

size_t bytes_of(const Buffer& buffer);

// What a rank asks for. Sources are read and targets written until the operation is done; a target
// may be the very same memory as this rank's own source, apart from that nothing overlaps.
//
//   verb           sources                        targets
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
// AllGather, ReduceScatter, AllToAll, Gather and Scatter take parts of different sizes, and so does
// SparseAllReduce, whose ranks need not know them: it adds nothing up.
struct Request {
  Verb verb = Verb::Barrier;
  // The elements; sizes are in bytes everywhere.
  DType dtype = DType::Bytes;
  ReduceOp reduce_op = ReduceOp::None;
  Factor factor;
  int root = -1;
  int peer = -1;
  int64_t tag = 0;
  std::vector<Buffer> sources;
  std::vector<Buffer> targets;
  // Compared across ranks under Settings::strict; see add_shape().
  uint64_t shapes = 0;
  // Compared, where the ranks give one: from which line the collective was called. Its end counts
  // where it is too long.
  std::string call_site;
  // Compared always: the bytes of each tensor, where several travel together.
  std::vector<uint64_t> members;
  // Of a SparseAllReduce, which compares it, and `shapes`, always.
  int sparse_dims = 0;
  // Of a SparseAllReduce: makes its targets, given the bytes of each rank's source. Called as
  // Operation::on_begin() is.
  std::function<std::vector<Buffer>(const std::vector<uint64_t>& bytes)> room;
  // Whether the caller may go on to something else. If not, the thread that waits does the work and
  // the progress thread is left asleep.
  bool async = true;
};

struct Failure {
  enum class Kind : uint8_t { RankLost, Timeout, Mismatch, Closed };
  Kind kind;
  // The whole text, "(rank 1/4, group 'tp')" included.
  std::string text;
  // The ranks at fault: lost, missing, or those that disagree with rank 0.
  std::vector<int> ranks;
  std::string op;
  uint64_t seq = 0;
};

class Engine;

class Operation {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Operation(Request r, std::chrono::milliseconds t) : request(std::move(r)), timeout(t) {}
  virtual ~Operation() = default;

  // All are called once, by the thread that drives the engine, and may not throw, but for
  // on_begin() of a collective, which ends the group then.
  // Under the engine's lock, and so in the order of collectives; must not take the GIL nor use the
  // engine. When the work begins: nothing has been read, of the request neither.
  virtual void on_begin() {}
  // When all has been written, and the next one has not begun. Not of what has failed.
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
  // As good as new, for a caller who alone still has it.
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
  std::atomic<bool> done_{false};
  std::optional<Failure> failure_;
  uint64_t seq_ = 0;
  int source_rank_ = -1;
  bool urgent_ = false;
  Clock::time_point submitted_, begun_, ended_;
};

struct Settings {
  std::string group = "default";              // for texts
  std::chrono::microseconds inline_time{20};  // how long submit() itself works at an operation
  std::chrono::microseconds spin_time{100};   // busy waiting before sleeping
  bool progress_thread = true;
  bool strict = false;  // compare shapes too, not only element counts
  // When given, by rank: words of the shared memory that the kernel marks with FUTEX_OWNER_DIED
  // when a rank's process begins to end, and then wakes who sleeps on them (peer_lost() may come
  // much later).
  std::vector<std::atomic<uint32_t>*> pulses;
};

// Thread safe. Collectives run in the order of submission; sends and receives beside them.
class Engine {
 public:
  // The size of the mapping for a group; `arena` bytes per rank carry the data.
  static size_t mapping_bytes(int size, size_t arena);

  // `arena` as given to mapping_bytes().
  Engine(std::shared_ptr<Mapping> mapping, size_t arena, int rank, int size,
         std::vector<Peer> peers, Settings settings);
  // close()s.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Starts an operation and works at it for a short bounded time. Never throws: whatever goes wrong
  // ends the operation with a failure.
  void submit(const std::shared_ptr<Operation>& operation);

  // Blocks until the operation is done, working at it. False: not done within `timeout` (none: the
  // operation's own timeout ends it). `interrupt` is called about every 50 ms and may throw; the
  // operation goes on in the background then.
  bool wait(Operation& operation, std::optional<std::chrono::milliseconds> timeout,
            const std::function<void()>& interrupt);

  // The ranks that an operation which is not done waits for, as far as is known here, and a text
  // that names them with their states.
  std::pair<std::vector<int>, std::string> awaited(const Operation& operation) const;

  // Said by the watcher. Operations that need the rank fail, now and later.
  void peer_lost(int rank);

  // Fails everything that is pending, here and on all other ranks, now and later.
  void abort(const std::string& why);

  // Ends what is pending, for at most `grace`, then leaves: the threads are gone when it returns.
  // Idempotent.
  void close(std::chrono::milliseconds grace = std::chrono::milliseconds(0));

  // Collectives submitted so far.
  uint64_t seq() const;
  // Why nothing can run here any more (a lost rank, a timeout, an abort), or null.
  std::shared_ptr<const Failure> broken() const;
  int rank() const;
  int size() const;

 private:
  class Impl;
  // Shared with the progress thread.
  std::shared_ptr<Impl> impl_;
};

}  // namespace c10d_ext::shm
