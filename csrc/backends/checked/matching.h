#pragma once

// Which sends and receives of a group's ranks belong together. No torch in here.

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "base/types.h"
#include "control/shared_bytes.h"

namespace c10d_ext {

// What the receiver of a message hears of it by its sender, before rank 0 says that it is granted.
enum class Delivered : uint8_t { Nothing, Words, Data };

// A message as one of its two ends tells of it.
struct Posted {
  int rank = -1;
  uint64_t number = 0;  // among this rank's messages
  bool sends = false;
  int peer = -1;  // -1: whoever sends first
  int64_t tag = 0;
  uint64_t bytes = 0;
  DType dtype = DType::Bytes;
  // Of a send, where it is little: it travels with what is said of it.
  std::optional<SharedBytes> data = std::nullopt;
  Delivered delivered = Delivered::Nothing;  // of a send
  // Of a receive that waits: who is to send to it knows of it.
  bool is_wanted = false;
  // Of a send that waits: nobody waits for it.
  bool is_given_up = false;
};

// Ends of messages that wait for the other one. The messages from one rank to another with one tag
// are received in the order in which they are sent.
class Matching {
 public:
  // The other end, which waits no longer; or none, and this one waits for it.
  std::optional<Posted> match(const Posted& posted);
  // Of the last receive with this tag that waits at a rank, from a rank that it names: whether each
  // one before it that could take the same messages is wanted. Then so is this one.
  bool want_last(int rank, int64_t tag);

  // The receive that waits for this send, if there is one.
  const Posted* receive_for(const Posted& send) const;

  // One of those that wait, if there is any.
  const Posted* find_any(const std::function<bool(const Posted&)>& which) const;
  const Posted* find(int rank, uint64_t number) const;
  // It may be matched, but nobody waits for that.
  void give_up(int rank, uint64_t number);
  // What waits no longer.
  std::optional<Posted> take_out(int rank, uint64_t number);
  std::vector<Posted> take_out(const std::function<bool(const Posted&)>& which);

 private:
  struct Box {
    std::list<Posted> sends, receives;
  };
  // By who receives, and the tag.
  std::map<std::pair<int, int64_t>, Box> boxes_;
};

}  // namespace c10d_ext
