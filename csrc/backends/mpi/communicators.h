#pragma once

// What a group of mpi has of the library, and its calls.

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backends/mpi/engine.h"
#include "base/group.h"
#include "control/global_ranks.h"
#include "work/request_work.h"

namespace c10d_ext::mpi {

// What users call the backend.
inline constexpr char kPublicName[] = "mpi";

using WorkPtr = c10::intrusive_ptr<SignalledWork>;
using Requests = std::vector<Request>;
using Over = std::function<void()>;

// One of a group's communicators, as steps use it, which may outlive the group.
struct Channel {
  // One end of a message: a request for each of its parts. Throws an MpiError where it goes to a
  // rank that is gone.
  void add(Library& library, Requests& requests, bool sends, std::byte* data, int64_t bytes,
           int peer, int tag) const;

  Comm comm;
  int largest = 0;
  std::shared_ptr<const Losses> losses;
};

// The communicators of a group, freed with it: a message is never taken for a part of a collective.
// A collective of several calls holds them until its last one.
class Communicators {
 public:
  // Collective over the group's ranks, in whose processes the engine is started. Messages of more
  // than `largest` bytes travel in parts.
  static std::shared_ptr<const Communicators> connect(const c10::intrusive_ptr<c10d::Store>& store,
                                                      const Group& place,
                                                      std::chrono::milliseconds timeout,
                                                      const GlobalRanks& global_ranks, int largest);
  Communicators(Group place, Comm collectives, Comm messages, int tag_limit, int largest);
  ~Communicators();
  Communicators(const Communicators&) = delete;
  Communicators& operator=(const Communicators&) = delete;

  int rank() const {
    return static_cast<int>(place_.rank());
  }
  int size() const {
    return static_cast<int>(place_.size());
  }
  Channel collectives() const {
    return {collectives_, largest_, losses_};
  }
  Channel messages() const {
    return {messages_, largest_, losses_};
  }
  // Of messages.
  int tag_limit() const {
    return tag_limit_;
  }
  // Whose calls they are to the engine.
  uint64_t owner() const {
    return owner_;
  }

  // Of the ranks of this group, for who knows them.
  const std::shared_ptr<Losses>& losses() const {
    return losses_;
  }
  // For the messages of one collective, of those that all ranks begin in the same order.
  int next_tag() const {
    return static_cast<int>(collective_count_++ % (static_cast<uint64_t>(tag_limit_) + 1));
  }

  // Begins the steps, one after the other; `over` once they are, on a thread that may block. An
  // error ends the work.
  void call(const WorkPtr& work, std::vector<Step> steps, Over over, uint64_t number = 0) const;

 private:
  const Group place_;  // for texts
  const Comm collectives_, messages_;
  const int tag_limit_, largest_;
  const uint64_t owner_;
  const std::shared_ptr<Losses> losses_;
  mutable std::atomic<uint64_t> collective_count_{0};
};

// Gives up a call of that owner, or with number 0 all of them.
void abandon(uint64_t owner, uint64_t number, std::string why);

}  // namespace c10d_ext::mpi
