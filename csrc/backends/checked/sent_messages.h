#pragma once

// The messages that this rank sends, and the receives of other ranks that wait for them. A little
// one for which a receive waits is over once it is said: its data is on the way to who takes it,
// and nobody's word has to be awaited. Not for several threads at once. No torch in here.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <utility>

#include "backends/checked/matching.h"

namespace c10d_ext {

class SentMessages {
 public:
  // This rank sends it; it has its number. Whether it is wanted, and over.
  bool add(const Posted& send);
  // A receive of another rank waits, and nobody had sent to it. The number of the message that is
  // over by that, where there is one.
  std::optional<uint64_t> want(const Posted& receive);
  // Rank 0 is asked to give the send up. A receive that comes meanwhile may be for this one, or for
  // the next: neither is over by that.
  void doubt(uint64_t number);
  // That of `rank` with this tag and number waits no longer.
  void unwant(int rank, int64_t tag, uint64_t number);
  // Whether it is to that rank, and rank 0 has not said what became of it.
  bool is_to(int rank, uint64_t number) const;
  // Rank 0 has said what became of it.
  void settle(uint64_t number);
  // Of data that is on its way, or at rank 0.
  size_t bytes() const {
    return bytes_;
  }

 private:
  // The other rank, and the tag.
  using Key = std::pair<int, int64_t>;
  // What one end of a message is said to be.
  struct End {
    uint64_t number;
    uint64_t bytes;
    DType dtype;
    bool has_data;
    bool is_in_doubt = false;
  };
  // The first send and the first receive belong together, so that one of the two is empty. Not
  // known any more once a receive has come for a send in doubt.
  struct Channel {
    std::deque<End> sends, receives;
    bool is_known = true;
  };
  struct Open {
    Key key;
    size_t data;  // bytes
  };

  static End end_of(const Posted& posted);
  // `channel`: of both.
  static bool is_over(const Channel& channel, const End& send, const End& receive);
  void tidy(const Key& key);

  std::map<Key, Channel> channels_;
  std::map<uint64_t, Open> open_;  // of which rank 0 has not said what became of them
  size_t bytes_ = 0;
};

}  // namespace c10d_ext
