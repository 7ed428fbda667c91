#include "backends/checked/contribution.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace c10d_ext {

namespace {

// How a contribution begins.
enum Form : int64_t { kNone, kWhole, kParts };

}  // namespace

Contribution::Contribution(SharedBytes bytes, const std::vector<int64_t>& parts)
    : bytes_(std::move(bytes)) {
  size_t end = 0;
  for (const int64_t part : parts) {
    if (static_cast<uint64_t>(part) > bytes_.size() - end) {  // negative ones, too
      throw std::runtime_error("parts of more than there is");
    }
    end += static_cast<size_t>(part);
    ends_.push_back(end);
  }
  if (end != bytes_.size()) {
    throw std::runtime_error("parts of less than there is");
  }
}

SharedBytes Contribution::of(int rank) const {
  if (!has_parts()) {
    return bytes_;
  }
  const auto r = static_cast<size_t>(rank);
  const size_t begin = r == 0 ? 0 : ends_[r - 1];
  return bytes_.part(begin, ends_[r] - begin);
}

Contribution Contribution::of(const std::vector<int>& ranks) const {
  if (!has_parts()) {
    return *this;
  }
  Contribution some;
  some.ends_.resize(ends_.size());
  for (const int rank : ranks) {
    some.ends_[static_cast<size_t>(rank)] = of(rank).size();
  }
  std::string bytes;
  for (size_t rank = 0; rank < ends_.size(); ++rank) {
    if (some.ends_[rank] != 0) {
      bytes += of(static_cast<int>(rank));
    }
    some.ends_[rank] = bytes.size();
  }
  some.bytes_ = std::move(bytes);
  return some;
}

// Parts of one size are often next to each other: so many ranks, and what each has.
Payload& put(Payload& words, const Contribution& contribution) {
  if (!contribution.has_parts()) {
    return words.put(kWhole).put_data(contribution.bytes_);
  }
  std::vector<int64_t> runs;
  size_t begin = 0;
  for (const size_t end : contribution.ends_) {
    const auto part = static_cast<int64_t>(end - begin);
    if (runs.empty() || runs.back() != part) {
      runs.insert(runs.end(), {0, part});
    }
    ++*(runs.end() - 2);
    begin = end;
  }
  return words.put(kParts).put(runs).put_data(contribution.bytes_);
}

Payload& put(Payload& words, const std::optional<Contribution>& contribution) {
  return contribution ? put(words, *contribution) : words.put(kNone);
}

std::optional<Contribution> take_contribution(Payload& words, int ranks) {
  switch (words.number()) {
    case kNone:
      return std::nullopt;
    case kWhole:
      return Contribution(words.data());
    case kParts: {
      const auto runs = words.numbers();
      std::vector<int64_t> parts;
      for (size_t i = 0; i + 1 < runs.size(); i += 2) {
        const auto left = ranks - static_cast<int64_t>(parts.size());
        if (runs[i] <= 0 || runs[i] > left) {
          throw std::runtime_error("parts of other ranks");
        }
        parts.insert(parts.end(), static_cast<size_t>(runs[i]), runs[i + 1]);
      }
      if (parts.size() != static_cast<size_t>(ranks) || runs.size() % 2 != 0) {
        throw std::runtime_error("parts of another group");
      }
      return Contribution(words.data(), parts);
    }
    default:
      throw std::runtime_error("a contribution of an unknown form");
  }
}

Payload& put_all_of(Payload& words, const std::vector<Contribution>& all, int rank) {
  words.put(static_cast<int64_t>(all.size()));
  for (const auto& one : all) {
    words.put_data(one.of(rank));
  }
  return words;
}

std::vector<SharedBytes> take_all(Payload& words, int ranks) {
  const auto count = words.number();
  if (count != 0 && count != ranks) {
    throw std::runtime_error("data of another group");
  }
  std::vector<SharedBytes> data;
  for (int64_t i = 0; i < count; ++i) {
    data.push_back(words.data());
  }
  words.expect_end();
  return data;
}

}  // namespace c10d_ext
