#pragma once

// Which sends and receives of a group's ranks belong together. No torch in here.

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/types.h"

namespace c10d_ext {

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
  std::optional<std::string> data = std::nullopt;
  // Of a receive that waits: who is to send to it knows of it.
  bool is_wanted = false;
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

  bool is_empty() const {
    return boxes_.empty();
  }
  const Posted* find(int rank, uint64_t number) const;
  // Those that wait no longer.
  std::vector<Posted> take_out(const std::function<bool(const Posted&)>& which);

 private:
  struct Box {
    std::list<Posted> sends, receives;
  };
  // By who receives, and the tag.
  std::map<std::pair<int, int64_t>, Box> boxes_;
};

}  // namespace c10d_ext
