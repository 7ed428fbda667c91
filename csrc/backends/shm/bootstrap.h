#pragma once

// How the ranks of a group that are on one machine come to share memory, and how they notice that
// one of them is gone. No torch in here.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/errors.h"
#include "control/process.h"
#include "control/store.h"

namespace c10d_ext::shm {

// A stretch of memory shared by the ranks: zeroed, of fixed size, without a name anywhere.
class Mapping {
 public:
  // A sealed memfd of `bytes`, every page reserved, so that no later access can fail.
  static std::shared_ptr<Mapping> create(size_t bytes);
  // Maps a memfd received from another rank after checking its size and its seals. Takes `fd` over,
  // also when it throws.
  static std::shared_ptr<Mapping> adopt(int fd, size_t bytes);
  // Memory of this process alone, for ranks that are threads of it.
  static std::shared_ptr<Mapping> anonymous(size_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* data() const {
    return data_;
  }
  size_t bytes() const {
    return bytes_;
  }
  // The memfd, or -1.
  int fd() const {
    return fd_;
  }

 private:
  Mapping(std::byte* data, size_t bytes, int fd) : data_(data), bytes_(bytes), fd_(fd) {}
  std::byte* data_;
  size_t bytes_;
  int fd_;
};

// This rank's end of a group: the memory, and what tells that a peer is gone. Destroying it (or the
// process ending, however it ends) is what the peers see as this rank leaving.
class Membership {
 public:
  virtual ~Membership() = default;
  // At least as large as was asked for; the end of it is the membership's own.
  virtual const std::shared_ptr<Mapping>& mapping() const = 0;
  virtual const std::vector<Peer>& peers() const = 0;
  // Calls `on_lost(rank)` once per peer that goes away, on the process' watcher thread, until
  // stop() returns. `on_lost` must be quick and must not block.
  virtual void watch(std::function<void(int rank)> on_lost) = 0;
  // Whether the process of a rank that called watch() has begun to end. True as soon as the kernel
  // has stopped its threads; `on_lost` waits until it has freed its memory, too, about 0.1 s per
  // GB, but also tells of ranks that leave. Costs a load of shared memory; any thread may ask.
  virtual bool died(int rank) const = 0;
  // What tells died(): a word for each rank in the shared memory, marked FUTEX_OWNER_DIED. The
  // kernel wakes one of those who sleep on it then.
  virtual std::vector<std::atomic<uint32_t>*> pulses() const = 0;
  // Ends the watching; after it returns no `on_lost` runs or will run. Idempotent. Not to be called
  // with a lock held that `on_lost` takes.
  virtual void stop() = 0;
};

struct Joined {
  // Set when every rank shares the memory; otherwise every rank has none, and `why_not` is the
  // same text on all of them ("rank 1: cannot reach rank 0's socket: Connection refused"). Where a
  // rank has no descriptors left, joining fails instead on all of them.
  std::unique_ptr<Membership> membership;
  std::string why_not;
  // The same text on all of them, and on nobody else: what they leave in the store under it was not
  // left by a group of the same name before.
  std::string session;
};

// What a rank knows of itself.
struct Self {
  std::string build;   // what it runs: ranks of different ones cannot share memory
  std::string cannot;  // why it cannot share memory, where that is known
};

// Collective over the group's ranks: all join, or none does. Throws only when the store fails or a
// rank does not turn up before `timeout` (the text names the ranks that are missing).
Joined join(const KeyValueStore& store, int rank, int size, size_t bytes,
            std::chrono::milliseconds timeout, const Self& self = {});

}  // namespace c10d_ext::shm
