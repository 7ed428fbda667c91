#include "base/fingerprint.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <sstream>

namespace c10d_ext {

namespace {

constexpr uint64_t kExact = uint64_t{1} << 63;
constexpr int kSizeBits = 60;
// For each size, by how many dimensions there are.
constexpr int kBits[] = {60, 60, 30, 20, 15, 12, 10};

uint64_t hashed(uint64_t hash, uint64_t value) {
  return (hash ^ (value + 0x9e3779b97f4a7c15ULL + (hash << 6) + (hash >> 2))) & ~kExact;
}

// Dimensions in bits 60 to 62, and equal parts of the rest for their sizes; 0 where they do not
// fit.
uint64_t exact(const int64_t* sizes, size_t dimensions) {
  if (dimensions >= std::size(kBits)) {
    return 0;
  }
  uint64_t code = kExact | static_cast<uint64_t>(dimensions) << kSizeBits;
  int at = 0;
  for (size_t i = 0; i < dimensions; ++i) {
    const auto size = static_cast<uint64_t>(sizes[i]);
    if (size >> kBits[dimensions] != 0) {
      return 0;
    }
    code |= size << at;
    at += kBits[dimensions];
  }
  return code;
}

std::string list_of(const std::vector<int>& ranks) {
  std::ostringstream out;
  out << (ranks.size() == 1 ? "rank " : "ranks ");
  for (size_t i = 0; i < ranks.size(); ++i) {
    out << (i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ") << ranks[i];
  }
  return out.str();
}

using Sizes = Fingerprint::Sizes;

bool are_all(const Sizes& sizes, int64_t size) {
  return std::all_of(sizes.begin(), sizes.end(), [size](int64_t s) { return s == size; });
}

}  // namespace

void Fingerprint::count_parts(bool is_even, int64_t each) {
  count = is_even ? each : -1;
  is_uneven = !is_even;
}

Fingerprint&& Fingerprint::of_members(const Sizes& sizes) && {
  count = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  tensors = std::max(static_cast<int64_t>(sizes.size()), tensors);
  std::ostringstream text;
  for (size_t i = 0; i < sizes.size(); ++i) {
    text << (i == 0 ? "[" : ", ") << sizes[i];
  }
  text << ']';
  details += text_of_members(sizes.size(), text.str());
  return std::move(*this);
}

std::string text_of_members(size_t tensors, const std::string& sizes) {
  return tensors > 1 ? " in " + std::to_string(tensors) + " tensors of sizes " + sizes : "";
}

Fingerprint&& Fingerprint::reduced_by(ReduceOp op) && {
  reduce_op = op;
  return std::move(*this);
}

Fingerprint&& Fingerprint::rooted_at(int64_t rank) && {
  root = static_cast<int>(rank);
  return std::move(*this);
}

Fingerprint&& Fingerprint::gathered(int64_t own, Sizes of_ranks) && {
  count_parts(are_all(of_ranks, own), own);
  sends.assign(of_ranks.size(), own);
  expects = std::move(of_ranks);
  return std::move(*this);
}

Fingerprint&& Fingerprint::scattered(Sizes of_ranks, int64_t own) && {
  count_parts(are_all(of_ranks, own), own);
  expects.assign(of_ranks.size(), own);
  sends = std::move(of_ranks);
  return std::move(*this);
}

Fingerprint&& Fingerprint::exchanged(Sizes to_ranks, Sizes from_ranks) && {
  const int64_t first = to_ranks.empty() ? 0 : to_ranks.front();
  count_parts(are_all(to_ranks, first) && are_all(from_ranks, first), first);
  sends = std::move(to_ranks);
  expects = std::move(from_ranks);
  shapes = 0;  // rows, of which the ranks may have other numbers
  return std::move(*this);
}

Fingerprint&& Fingerprint::gathered_at(int64_t rank, int64_t own, const Sizes& parts,
                                       int64_t ranks) && {
  count_parts(are_all(parts, own), own);
  sends.assign(static_cast<size_t>(ranks), 0);
  sends[static_cast<size_t>(rank)] = own;
  expects = parts.empty() ? Sizes(static_cast<size_t>(ranks), 0) : parts;
  return std::move(*this).rooted_at(rank);
}

Fingerprint&& Fingerprint::scattered_from(int64_t rank, int64_t own, const Sizes& parts,
                                          int64_t ranks) && {
  count_parts(are_all(parts, own), own);
  expects.assign(static_cast<size_t>(ranks), 0);
  expects[static_cast<size_t>(rank)] = own;
  sends = parts.empty() ? Sizes(static_cast<size_t>(ranks), 0) : parts;
  return std::move(*this).rooted_at(rank);
}

std::string text_of(const Fingerprint& fingerprint) {
  std::ostringstream text;
  text << name_of(fingerprint.op_type) << '(';
  if (fingerprint.count >= 0) {
    text << fingerprint.count << " x ";
  }
  text << (fingerprint.op_type == OpType::Barrier ? "" : fingerprint.unit) << fingerprint.details;
  if (fingerprint.reduce_op != ReduceOp::None) {
    text << ", " << name_of(fingerprint.reduce_op);
  }
  if (fingerprint.root >= 0) {
    text << ", root " << fingerprint.root;
  }
  if (fingerprint.is_uneven) {
    text << ", uneven sizes";
  }
  text << ')';
  if (fingerprint.shapes != 0) {
    text << " of shape " << text_of_shapes(fingerprint.shapes);
  }
  text << fingerprint.manner;
  if (!fingerprint.call_site.empty()) {
    text << " at " << fingerprint.call_site;
  }
  return text.str();
}

namespace {

// Where some of the ranks do not agree. `even`: counts and shapes are compared.
std::optional<Difference> difference_of_calls(const std::vector<Fingerprint>& calls, bool even,
                                              uint64_t seq) {
  const auto agree = [&](const Fingerprint& a, const Fingerprint& b) {
    return a.op_type == b.op_type && a.unit == b.unit && a.details == b.details &&
           a.tensors == b.tensors && a.reduce_op == b.reduce_op && a.root == b.root &&
           a.call_site == b.call_site && a.manner == b.manner &&
           (!even || (a.count == b.count && shapes_agree(a.shapes, b.shapes))) &&
           a.sends.size() == b.sends.size() && a.expects.size() == b.expects.size();
  };
  Difference found;
  for (size_t rank = 1; rank < calls.size(); ++rank) {
    if (!agree(calls[0], calls[rank])) {
      found.ranks.push_back(static_cast<int>(rank));
    }
    found.ends_group |= calls[rank].tensors != calls[0].tensors;
  }
  if (found.ranks.empty()) {
    return std::nullopt;
  }
  std::ostringstream text;
  text << "every rank must enter the same collective with matching arguments, got ";
  // Ranks that say the same share a line.
  std::vector<bool> told(calls.size());
  const char* separator = "";
  for (size_t rank = 0; rank < calls.size(); ++rank) {
    if (told[rank]) {
      continue;
    }
    std::vector<int> same;
    for (size_t other = rank; other < calls.size(); ++other) {
      if (!told[other] && agree(calls[rank], calls[other])) {
        told[other] = true;
        same.push_back(static_cast<int>(other));
      }
    }
    text << separator << text_of(calls[rank]) << " on " << list_of(same);
    separator = ", ";
  }
  text << " in collective " << seq;
  if (found.ends_group) {
    text << ", and the group ends, for ranks that send different numbers of tensors may have "
            "coalesced their calls differently";
  }
  found.text = text.str();
  return found;
}

}  // namespace

std::optional<Difference> difference(const std::vector<Fingerprint>& calls, uint64_t seq) {
  const bool even = std::all_of(calls.begin(), calls.end(), [](auto& c) { return c.count >= 0; });
  const size_t ranks = calls.size();
  auto found = difference_of_calls(calls, even, seq);
  if (found || even || calls[0].sends.size() != ranks || calls[0].expects.size() != ranks) {
    return found;
  }
  return difference_of_parts(
      calls[0].op_type, ranks, seq, [&](size_t from) { return calls[from].root; },
      [&](size_t from, size_t to) { return calls[from].sends[to]; },
      [&](size_t from, size_t to) { return calls[to].expects[from]; }, 1,
      [&](size_t from) { return calls[from].unit; });
}

std::optional<Difference> difference_of_parts(
    OpType op_type, size_t ranks, uint64_t seq, const std::function<int(size_t)>& root,
    const std::function<int64_t(size_t, size_t)>& sent,
    const std::function<int64_t(size_t, size_t)>& expected, int64_t element,
    const std::function<std::string(size_t)>& unit) {
  for (size_t from = 0; from < ranks; ++from) {
    for (size_t to = 0; to < ranks; ++to) {
      const bool is_concerned = op_type == OpType::Gather    ? static_cast<int>(to) == root(from)
                                : op_type == OpType::Scatter ? static_cast<int>(from) == root(from)
                                                             : true;
      if (is_concerned && sent(from, to) != expected(from, to)) {
        std::ostringstream text;
        text << "what a rank sends must be what the other expects, got " << sent(from, to) / element
             << " x " << unit(from) << " from rank " << from << " for rank " << to
             << ", which expects " << expected(from, to) / element << ", in collective " << seq;
        return Difference{text.str(), {static_cast<int>(from), static_cast<int>(to)}};
      }
    }
  }
  return std::nullopt;
}

std::string text_of_misfit(int from, uint64_t sent, DType sent_dtype, int to, uint64_t expected,
                           DType expected_dtype, int64_t tag) {
  const auto elements = [](uint64_t bytes, DType dtype) {
    return std::to_string(bytes / std::max<size_t>(size_of(dtype), 1)) + " x " +
           std::string(name_of(dtype));
  };
  std::ostringstream text;
  text << "what is sent must be what is received, got " << elements(sent, sent_dtype)
       << " from rank " << from << ", " << elements(expected, expected_dtype)
       << " expected by rank " << to << ", tag " << tag;
  return text.str();
}

std::string text_of_wait_timeout(std::chrono::milliseconds timeout, const std::string& who) {
  return "the wait must end within " + std::to_string(timeout.count()) + " ms, got " +
         (who.empty() ? "none of the result by then" : "no answer from " + who) +
         "; what it waits for goes on";
}

uint64_t add_shape(uint64_t shapes, const int64_t* sizes, size_t dimensions) {
  const uint64_t code = exact(sizes, dimensions);
  if (code != 0 && (shapes == 0 || shapes == code)) {
    return code;
  }
  uint64_t hash = hashed(shapes, dimensions);
  for (size_t i = 0; i < dimensions; ++i) {
    hash = hashed(hash, static_cast<uint64_t>(sizes[i]));
  }
  return hash;
}

uint64_t join_shapes(uint64_t first, uint64_t second) {
  return first == second ? first : hashed(first, second);
}

bool shapes_agree(uint64_t first, uint64_t second) {
  return first == 0 || second == 0 || first == second;
}

std::string text_of_shapes(uint64_t shapes) {
  std::ostringstream text;
  const size_t dimensions = shapes >> kSizeBits & 7;
  // Nobody has seven of them; another process may say so.
  if ((shapes & kExact) == 0 || dimensions >= std::size(kBits)) {
    if (shapes != 0) {
      text << "hash " << std::hex << shapes;
    }
    return text.str();
  }
  text << '[';
  for (size_t i = 0; i < dimensions; ++i) {
    const int bits = kBits[dimensions];
    text << (i == 0 ? "" : ", ")
         << (shapes >> static_cast<int>(i) * bits & ((uint64_t{1} << bits) - 1));
  }
  text << ']';
  return text.str();
}

}  // namespace c10d_ext
