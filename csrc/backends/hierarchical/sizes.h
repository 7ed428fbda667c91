#pragma once

// From which sizes on a collective of several hosts takes another way, and in how many parts it
// travels: so that memory and links work at once; but in each part ranks wait for each other.
// Reports know it from here. No torch in here.

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace c10d_ext::hierarchical {

// Where nothing goes by messages, so little goes as a whole by every rail.
constexpr size_t kSmall = size_t{16} << 10;
// An all_reduce of less goes by messages, where all go; of so little by those of leaders alone,
// which are fewer.
constexpr size_t kByMessages = size_t{2} << 20;
constexpr size_t kByLeaders = size_t{128} << 10;
// Of so little each host sends all to each other one, in one step: else each reduces a part of it,
// and sends that back.
constexpr bool goes_at_once(size_t bytes, int64_t hosts) {
  return bytes * static_cast<size_t>(hosts - 1) <= size_t{192} << 10;
}

constexpr int64_t parts_of(size_t bytes, int64_t part, int64_t most = 8) {
  return std::clamp<int64_t>(static_cast<int64_t>(bytes) / part, int64_t{1}, most);
}

// Its steps over the rails are the more, and each the smaller, the more hosts there are.
constexpr int64_t all_reduce_parts(size_t bytes, int64_t hosts) {
  return parts_of(bytes, int64_t{hosts > 2 ? 2 : 1} << 20);
}
constexpr int64_t all_gather_parts(size_t bytes) {
  return parts_of(bytes, int64_t{1} << 20);
}
constexpr int64_t reduce_scatter_parts(size_t bytes) {
  return parts_of(bytes, int64_t{4} << 20);
}
// Where data goes by messages: whether what is for each host is reduced inside in a step of its
// own, of each part, so that the first goes while the others are reduced.
constexpr bool reduces_rows_apart(size_t bytes, int64_t hosts) {
  return static_cast<int64_t>(bytes) / reduce_scatter_parts(bytes) / hosts >= int64_t{256} << 10;
}
// Whether an all_gather or a reduce_scatter goes round all hosts, given what a rank contributes or
// gets: what is less goes to all hosts at once, and takes fewer steps. Steps cost no time where the
// parts of one are still being sent in the next.
constexpr bool pays_round(size_t part_bytes, int64_t hosts) {
  return hosts > 2 && part_bytes >= std::max(hosts, int64_t{4}) * (size_t{128} << 10);
}
constexpr int64_t round_parts(size_t part_bytes) {
  return parts_of(part_bytes, int64_t{256} << 10, 4);
}
// Of a broadcast, which goes from host to host, and on from there. With smaller parts those of a
// few MiB take longer.
constexpr int64_t chain_parts(size_t bytes) {
  return parts_of(bytes, int64_t{128} << 10, 64);
}

}  // namespace c10d_ext::hierarchical
