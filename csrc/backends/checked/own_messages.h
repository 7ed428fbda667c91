#pragma once

// The messages that this rank sends and receives: what travels of them with what is said, by which
// way, and which are over by what others say. Not for several threads at once. No torch in here.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "backends/checked/deliveries.h"
#include "backends/checked/matching.h"
#include "backends/checked/news.h"
#include "backends/checked/protocol.h"
#include "backends/checked/roster.h"
#include "backends/checked/sent_messages.h"

namespace c10d_ext {

class OwnMessages {
 public:
  // Its other end is there: its data is here, or has gone where this rank sends; without, it
  // begins.
  struct Granted {
    uint64_t number;
    int peer;
    std::optional<SharedBytes> data;
  };

  // `roster` outlives this.
  explicit OwnMessages(const Roster& roster) : roster_(roster), deliveries_(roster) {}

  // So many bytes of a message to that rank may travel before rank 0's word.
  size_t most_with_words(int peer) const;
  // One end of one, which has its number; and what is to be said of it. Its data stays here where
  // there is much on its way.
  News post(Posted posted);
  // This rank asks rank 0 to give it up. Returns what sender_for() does.
  int doubt(uint64_t number) {
    deliveries_.doubt(number);
    sent_.doubt(number);
    return sender_for(number);
  }
  // Which receive takes what is being sent to this rank, as far as that is known.
  std::optional<uint64_t> receive_for(const Posted& send) {
    return deliveries_.receive_for(send);
  }
  // Whose message a receive waits for; -1: nobody knows, or it is a send.
  int sender_for(uint64_t number) const {
    return deliveries_.sender_for(number);
  }

  // --- What rank 0 says, or another rank --------------------------------------------------------

  void grant(uint64_t number, const OtherEnd& other, std::optional<SharedBytes> data);
  void deny(uint64_t number, const OtherEnd& other);
  // A receive of another rank waits for a message of this one, or does so no longer.
  void want(const Posted& receive);
  void unwant(int rank, int64_t tag, uint64_t number) {
    sent_.unwant(rank, tag, number);
  }
  // A message to this rank is to be withdrawn.
  void withdraw(const OtherEnd& send, int64_t tag) {
    deliveries_.withdraw(send, tag);
  }
  // Its sender says what a message to this rank is.
  void deliver(Posted send) {
    deliveries_.add(std::move(send));
  }
  // A receive of rank `from` has taken the message.
  void take(int from, uint64_t number);

  // --- What has come of all that ----------------------------------------------------------------

  std::vector<Granted> take_granted();
  std::vector<News> take_news();
  // As Deliveries has them: rank 0 was asked of them without a sender.
  std::vector<uint64_t> take_known() {
    return deliveries_.take_known();
  }

 private:
  bool is_direct(int peer) const {
    return peer >= 0 && roster_.are_direct(roster_.place().rank, peer);
  }

  const Roster& roster_;
  SentMessages sent_;
  Deliveries deliveries_;
  std::vector<Granted> granted_;
};

}  // namespace c10d_ext
