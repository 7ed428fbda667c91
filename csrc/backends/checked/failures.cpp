#include "backends/checked/failures.h"

#include <utility>

#include "backends/checked/roster.h"

namespace c10d_ext {

Failure failure_of(const Place& place, ErrorKind kind, const std::string& op, uint64_t seq,
                   const std::string& text, std::vector<int> ranks) {
  return {kind, op + ": " + text + " " + place.text(), std::move(ranks), op, seq};
}

Failure failure_of_left(const Place& place, const std::string& op, uint64_t seq) {
  return failure_of(place, ErrorKind::Closed, op, seq,
                    "the group must be alive, got a destroyed one");
}

Failure failure_of(const Place& place, const End& end, const std::string& op, uint64_t seq,
                   const std::optional<int64_t>& tag) {
  std::string text = end.why;
  if (end.kind == ErrorKind::RankLost) {
    text = text_of_loss(tag        ? text_of_message(*tag)
                        : seq == 0 ? "message"
                                   : "collective " + std::to_string(seq),
                        text);
  }
  return failure_of(place, end.kind, op, seq, text, end.ranks);
}

}  // namespace c10d_ext
