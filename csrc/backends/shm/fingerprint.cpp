// What is compared of a collective besides its header's numbers, and the texts of what differs.

#include <algorithm>
#include <iterator>
#include <sstream>

#include "backends/shm/engine.h"

namespace c10d_ext::shm {

namespace {

constexpr std::string_view kVerbs[] = {"barrier",    "all_reduce",     "reduce",     "broadcast",
                                       "all_gather", "reduce_scatter", "all_to_all", "gather",
                                       "scatter",    "send",           "recv",       "all_reduce"};

}  // namespace

std::string_view name_of(Verb verb) {
  const size_t i = static_cast<size_t>(verb);
  return i < std::size(kVerbs) ? kVerbs[i] : "unknown";
}

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

}  // namespace

namespace {

std::string list_of(const std::vector<int>& ranks) {
  std::ostringstream out;
  out << (ranks.size() == 1 ? "rank " : "ranks ");
  for (size_t i = 0; i < ranks.size(); ++i) {
    out << (i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ") << ranks[i];
  }
  return out.str();
}

}  // namespace

std::string text_of_difference(size_t ranks, uint64_t seq,
                               const std::function<bool(size_t, size_t)>& agree,
                               const std::function<std::string(size_t)>& said) {
  std::ostringstream text;
  text << "every rank must enter the same collective with matching arguments, got ";
  // Ranks that say the same share a line.
  std::vector<bool> told(ranks);
  const char* separator = "";
  for (size_t rank = 0; rank < ranks; ++rank) {
    if (told[rank]) {
      continue;
    }
    std::vector<int> same;
    for (size_t other = rank; other < ranks; ++other) {
      if (!told[other] && agree(rank, other)) {
        told[other] = true;
        same.push_back(static_cast<int>(other));
      }
    }
    text << separator << said(rank) << " on " << list_of(same);
    separator = ", ";
  }
  text << " in collective " << seq;
  return text.str();
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

std::string text_of_impatience(std::chrono::milliseconds timeout, const std::string& who) {
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
  if ((shapes & kExact) == 0) {
    if (shapes != 0) {
      text << "hash " << std::hex << shapes;
    }
    return text.str();
  }
  const size_t dimensions = shapes >> kSizeBits & 7;
  text << '[';
  for (size_t i = 0; i < dimensions; ++i) {
    const int bits = kBits[dimensions];
    text << (i == 0 ? "" : ", ")
         << (shapes >> static_cast<int>(i) * bits & ((uint64_t{1} << bits) - 1));
  }
  text << ']';
  return text.str();
}

std::string Place::text() const {
  return "(rank " + std::to_string(rank) + "/" + std::to_string(size) + ", group '" + group + "')";
}

}  // namespace c10d_ext::shm
