#include "backends/agreement/called.h"

#include <algorithm>
#include <numeric>
#include <sstream>

namespace c10d_ext {

namespace {

using Sizes = Called::Sizes;

bool are_all(const Sizes& sizes, int64_t size) {
  return std::all_of(sizes.begin(), sizes.end(), [size](int64_t s) { return s == size; });
}

}  // namespace

Called&& Called::of_members(const Sizes& sizes) && {
  count = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  if (sizes.size() > 1) {
    std::ostringstream text;
    text << " in " << sizes.size() << " tensors of sizes [";
    for (size_t i = 0; i < sizes.size(); ++i) {
      text << (i == 0 ? "" : ", ") << sizes[i];
    }
    text << ']';
    rest += text.str();
  }
  return std::move(*this);
}

Called&& Called::reduced_by(std::string_view reduce_op) && {
  rest += ", ";
  rest += reduce_op;
  return std::move(*this);
}

Called&& Called::rooted_at(int64_t rank) && {
  root = static_cast<int>(rank);
  rest += ", root " + std::to_string(rank);
  return std::move(*this);
}

Called&& Called::gathered(int64_t own, Sizes of_ranks) && {
  count = are_all(of_ranks, own) ? own : -1;
  sends.assign(of_ranks.size(), own);
  expects = std::move(of_ranks);
  return std::move(*this);
}

Called&& Called::scattered(Sizes of_ranks, int64_t own) && {
  count = are_all(of_ranks, own) ? own : -1;
  expects.assign(of_ranks.size(), own);
  sends = std::move(of_ranks);
  return std::move(*this);
}

Called&& Called::exchanged(Sizes to_ranks, Sizes from_ranks) && {
  const int64_t first = to_ranks.empty() ? 0 : to_ranks.front();
  count = are_all(to_ranks, first) && are_all(from_ranks, first) ? first : -1;
  sends = std::move(to_ranks);
  expects = std::move(from_ranks);
  shapes = 0;  // rows, of which the ranks may have other numbers
  return std::move(*this);
}

Called&& Called::gathered_at(int64_t rank, int64_t own, const Sizes& parts, int64_t ranks) && {
  count = are_all(parts, own) ? own : -1;
  sends.assign(static_cast<size_t>(ranks), 0);
  sends[static_cast<size_t>(rank)] = own;
  expects = parts.empty() ? Sizes(static_cast<size_t>(ranks), 0) : parts;
  return std::move(*this).rooted_at(rank);
}

Called&& Called::scattered_from(int64_t rank, int64_t own, const Sizes& parts, int64_t ranks) && {
  count = are_all(parts, own) ? own : -1;
  expects.assign(static_cast<size_t>(ranks), 0);
  expects[static_cast<size_t>(rank)] = own;
  sends = parts.empty() ? Sizes(static_cast<size_t>(ranks), 0) : parts;
  return std::move(*this).rooted_at(rank);
}

std::string text_of(const Called& called) {
  std::ostringstream text;
  text << shm::name_of(called.verb) << '(';
  if (called.count >= 0) {
    text << called.count << " x ";
  }
  text << (called.verb == shm::Verb::Barrier ? "" : called.unit) << called.rest;
  if (called.count < 0 && !called.sends.empty()) {
    text << ", uneven sizes";
  }
  text << ')';
  if (called.shapes != 0) {
    text << " of shape " << shm::text_of_shapes(called.shapes);
  }
  return text.str();
}

std::optional<Difference> difference(const std::vector<Called>& calls, uint64_t seq) {
  const bool even = std::all_of(calls.begin(), calls.end(), [](auto& c) { return c.count >= 0; });
  const auto agree = [&](const Called& a, const Called& b) {
    return a.verb == b.verb && a.unit == b.unit && a.rest == b.rest &&
           (!even || (a.count == b.count && shm::shapes_agree(a.shapes, b.shapes))) &&
           a.sends.size() == b.sends.size() && a.expects.size() == b.expects.size();
  };
  Difference found;
  for (size_t rank = 1; rank < calls.size(); ++rank) {
    if (!agree(calls[0], calls[rank])) {
      found.ranks.push_back(static_cast<int>(rank));
    }
  }
  if (!found.ranks.empty()) {
    found.text = shm::text_of_difference(
        calls.size(), seq, [&](size_t a, size_t b) { return agree(calls[a], calls[b]); },
        [&](size_t rank) { return text_of(calls[rank]); });
    return found;
  }
  const size_t ranks = calls.size();
  if (even || calls[0].sends.size() != ranks || calls[0].expects.size() != ranks) {
    return std::nullopt;
  }
  for (size_t from = 0; from < ranks; ++from) {
    for (size_t to = 0; to < ranks; ++to) {
      const int root = calls[from].root;
      const bool concerned = calls[0].verb == shm::Verb::Gather    ? static_cast<int>(to) == root
                             : calls[0].verb == shm::Verb::Scatter ? static_cast<int>(from) == root
                                                                   : true;
      const int64_t sent = calls[from].sends[to];
      const int64_t expected = calls[to].expects[from];
      if (concerned && sent != expected) {
        std::ostringstream text;
        text << "what a rank sends must be what the other expects, got " << sent << " x "
             << calls[from].unit << " from rank " << from << " for rank " << to
             << ", which expects " << expected << ", in collective " << seq;
        return Difference{text.str(), {static_cast<int>(from), static_cast<int>(to)}};
      }
    }
  }
  return std::nullopt;
}

}  // namespace c10d_ext
