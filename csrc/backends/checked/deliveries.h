#pragma once

// What this rank hears of messages to it by who sends them, before rank 0 says that they are
// granted. Messages from one rank with one tag are received in the order in which they are sent, so
// that this rank knows itself which of its receives rank 0 will match with one, and needs not wait
// for the word: unless it may be given up, does not fit, or a receive from any source comes before.
// Not for several threads at once. No torch in here.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "backends/checked/matching.h"
#include "backends/checked/protocol.h"
#include "backends/checked/roster.h"

namespace c10d_ext {

class Deliveries {
 public:
  // A receive whose data is here.
  struct Received {
    uint64_t number;
    int from;
    SharedBytes data;
  };
  // Which message of which rank.
  using Send = std::pair<int, uint64_t>;

  // `roster` outlives this.
  explicit Deliveries(const Roster& roster) : roster_(roster) {}

  // This rank receives; it has its number.
  void post(const Posted& receive);
  // What a sender says. Throws std::runtime_error where that makes no sense.
  void add(Posted send);
  // This rank asks rank 0 to give the receive up.
  void doubt(uint64_t number);
  // Which receive will take what a sender is about to say; none where rank 0 is to say so.
  std::optional<uint64_t> receive_for(const Posted& send);
  // Whose message the receive waits for; -1: nobody knows.
  int sender_for(uint64_t number) const;
  // Rank 0 has granted it a message. Whether to begin it by that: its data comes another way.
  // Throws std::runtime_error where that is none that it can be.
  bool grant(uint64_t number, const OtherEnd& send);
  // Rank 0 has denied it; the other end, where there is one, too.
  void deny(uint64_t number, const OtherEnd& send);
  // Its sender gives it up. So does this rank, once rank 0 is not about to match a receive with it.
  void withdraw(const OtherEnd& send, int64_t tag);

  // What has come of all that.
  std::vector<Received> take_received();
  std::vector<Send> take_taken();
  std::vector<Send> take_withdrawn();
  // Receives from any source that came in doubt before rank 0 said whose messages they take.
  std::vector<uint64_t> take_known();

 private:
  struct Receive {
    uint64_t number;
    int peer;  // -1: any
    uint64_t bytes;
    DType dtype;
    bool is_in_doubt = false;
    std::optional<Send> over_by = std::nullopt;  // its data is here, and rank 0 has yet to say so
  };
  // Of one tag, in the order of their posts.
  struct Channel {
    std::list<Receive> receives;
    std::map<int, std::deque<Posted>> sends;  // by who sends
  };

  struct ToWithdraw {
    int64_t tag;
    Delivered delivered;
  };

  // Gives receives the messages that are theirs, lets go of what is to be withdrawn, and tidies up.
  void settle(int64_t tag);
  // The one that takes it if it is the first of its sender's; null where that is not known here, or
  // its data does not come with it.
  static Receive* receive_of(const Posted& send, std::list<Receive>& receives);
  void pair(std::deque<Posted>& sends, std::list<Receive>& receives);
  void let_go(int64_t tag, Channel& channel);
  void drop(const Send& send, Channel& channel);
  // None where it has not come yet.
  std::optional<Posted> take(int64_t tag, const Send& send);
  Posted take_first(std::deque<Posted>& sends);
  std::optional<std::pair<int64_t, Receive>> take_receive(uint64_t number);

  const Roster& roster_;
  std::map<int64_t, Channel> channels_;  // by tag
  std::map<uint64_t, int64_t> tags_;     // of receives of which rank 0 has said nothing, by number
  // Settled, and not here: the receive that waits for the data of it, where one does.
  std::map<Send, std::optional<uint64_t>> awaited_;
  std::map<Send, ToWithdraw> to_withdraw_;
  std::map<int, uint64_t> last_;  // by who sends
  std::map<int, size_t> held_;    // bytes, by who sends
  size_t expected_ = 0;           // bytes, by receives of which rank 0 has said nothing
  std::vector<Received> received_;
  std::vector<Send> taken_;  // before rank 0's word
  std::vector<Send> withdrawn_;
  std::vector<uint64_t> known_;
};

}  // namespace c10d_ext
