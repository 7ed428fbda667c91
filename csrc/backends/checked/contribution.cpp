#include "backends/checked/contribution.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernels/in_groups.h"

namespace c10d_ext {

namespace {

// How a contribution begins.
enum Form : int64_t { kNone, kWhole, kParts, kToReduce, kInFirst };

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

Contribution Contribution::to_be_reduced(const ReducedBy& how) && {
  const auto is_whole = [&](size_t bytes) { return bytes % size_of(how.dtype) == 0; };
  if (!kernels::reduces_in_groups(how.dtype, how.op) || !is_whole(bytes_.size()) ||
      !std::all_of(ends_.begin(), ends_.end(), is_whole)) {
    throw std::runtime_error("values that cannot be reduced");
  }
  reduced_by_ = how;
  return std::move(*this);
}

Contribution Contribution::with(SharedBytes bytes) const {
  Contribution other = *this;
  other.bytes_ = std::move(bytes);
  return other;
}

Contribution Contribution::in_first() {
  Contribution none;
  none.is_in_first_ = true;
  return none;
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
  some.reduced_by_ = reduced_by_;
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
  if (contribution.is_in_first_) {
    return words.put(kInFirst);
  }
  if (const auto& how = contribution.reduced_by_) {
    words.put(kToReduce).put(static_cast<int64_t>(how->dtype)).put(static_cast<int64_t>(how->op));
  }
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

namespace {

Contribution take_parts(Payload& words, int ranks) {
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
  return {words.data(), parts};
}

}  // namespace

std::optional<Contribution> take_contribution(Payload& words, int ranks) {
  auto form = words.number();
  if (form == kNone) {
    return std::nullopt;
  }
  if (form == kInFirst) {
    return Contribution::in_first();
  }
  std::optional<ReducedBy> how;
  if (form == kToReduce) {
    const auto dtype = words.one_of(DType::Bytes);
    how = {dtype, words.one_of(ReduceOp::None)};
    form = words.number();
  }
  if (form != kWhole && form != kParts) {
    throw std::runtime_error("a contribution of an unknown form");
  }
  auto given = form == kParts ? take_parts(words, ranks) : Contribution(words.data());
  return how ? std::move(given).to_be_reduced(*how) : std::move(given);
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
  if (count != 0 && count != 1 && count != ranks) {
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
