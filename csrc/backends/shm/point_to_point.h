#pragma once

// The sends and receives of one rank. See Mailbox in layout.h for the protocol.

#include <deque>
#include <list>
#include <vector>

#include "backends/shm/group_memory.h"

namespace c10d_ext::shm {

// Not thread safe: the engine's lock is held.
class PointToPoint {
 public:
  using Item = std::shared_ptr<Operation>;
  struct Outcome {
    Item operation;
    int source_rank = -1;
    std::optional<Failure> failure;
  };

  PointToPoint(const GroupMemory& memory, const Place& place);

  void post(Item operation);
  bool idle() const {
    return sends_ == 0 && receives_.empty() && arriving_ == 0;
  }
  // Moves what can be moved without waiting; appends the operations that have ended. False: nothing
  // moved.
  bool advance(std::vector<Outcome>& ended);

  // Visits all posted operations, to check deadlines and lost ranks.
  template <class Visit>
  void each(Visit visit) const {
    for (const Outgoing& out : outgoing_) {
      for (const Sending& s : out.queue) {
        visit(s.operation, /*started=*/s.announced);
      }
    }
    for (const Item& r : receives_) {
      visit(r, /*started=*/false);
    }
    for (const Incoming& in : incoming_) {
      if (in.operation) {
        visit(in.operation, /*started=*/true);
      }
    }
  }
  // Removes an operation in any state. One that was started leaves this pair of ranks unusable.
  void remove(const Item& operation);

 private:
  struct Sending {
    Item operation;
    bool announced = false;
    uint64_t number = 0;
  };
  struct Outgoing {
    std::deque<Sending> queue;
    // How many operations at the end of the queue are not announced.
    size_t unannounced = 0;
    uint64_t announced = 0;
    uint64_t noticed = 0;
    // The granted message, if any, and how many of its bytes have been written.
    Item flowing;
    size_t sent = 0;
    uint64_t produced = 0;
  };
  struct Incoming {
    struct Note {
      uint64_t number;
      Envelope envelope;
    };
    std::list<Note> notes;
    // No posted receive matches any of the notes.
    bool unmatched = true;
    uint64_t accepted = 0;
    uint64_t granted = 0;
    Item operation;
    size_t received = 0;
    uint64_t consumed = 0;
  };

  bool advance_send(int to, std::vector<Outcome>& ended);
  bool advance_receive(int from, std::vector<Outcome>& ended);
  bool match(int from, std::vector<Outcome>& ended);
  Failure refusal(const Operation& operation, int from, int to, uint64_t sent, DType sent_dtype,
                  uint64_t expected, DType expected_dtype) const;

  const GroupMemory& memory_;
  const Place& place_;
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
  std::list<Item> receives_;
  size_t sends_ = 0;
  size_t arriving_ = 0;
};

}  // namespace c10d_ext::shm
