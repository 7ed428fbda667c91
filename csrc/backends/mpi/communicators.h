#pragma once

// What a group of mpi has of the library, and its calls.

#include <torch/csrc/distributed/c10d/Store.hpp>

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
using Start = std::function<void(Library&, std::vector<Request>&)>;
using Over = std::function<void()>;

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
  Comm collectives() const {
    return collectives_;
  }
  Comm messages() const {
    return messages_;
  }
  // Of messages.
  int tag_limit() const {
    return tag_limit_;
  }
  int largest() const {
    return largest_;
  }
  // Whose calls they are to the engine.
  uint64_t owner() const {
    return owner_;
  }

  // Starts it; `over` once it is, on a thread that may block. An error ends the work.
  void call(const WorkPtr& work, Start start, Over over, uint64_t number = 0) const;

 private:
  const Group place_;  // for texts
  const Comm collectives_, messages_;
  const int tag_limit_, largest_;
  const uint64_t owner_;
};

// Gives up a call of that owner, or with number 0 all of them.
void abandon(uint64_t owner, uint64_t number, std::string why);

// Adds the requests of so many bytes to or from one rank.
void start_parts(Library& library, std::vector<Request>& requests, bool sends, std::byte* data,
                 int64_t bytes, int peer, int tag, Comm comm, int largest);

}  // namespace c10d_ext::mpi
