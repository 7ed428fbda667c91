#include "backends/shm/operation.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/exceptions.h"

namespace c10d_ext {

void ShmBackend::TensorOperation::separate() {
  auto& sources = request.sources;
  auto& targets = request.targets;
  if (targets.empty() || sources.empty()) {
    return;
  }
  struct Span {
    const std::byte* begin;
    const std::byte* end;
    size_t part;
    size_t piece;
  };
  std::vector<Span> written;
  for (size_t part = 0; part < targets.size(); ++part) {
    for (size_t piece = 0; piece < targets[part].size(); ++piece) {
      const auto& [data, bytes] = targets[part][piece];
      if (bytes != 0) {
        written.push_back({data, data + bytes, part, piece});
      }
    }
  }
  std::sort(written.begin(), written.end(),
            [](const Span& a, const Span& b) { return a.begin < b.begin; });
  // Where the engine reads and writes the same part of the same rank.
  const auto own = static_cast<size_t>(place_->rank());
  const auto in_place = [&](size_t source_part, size_t target_part) {
    return (sources.size() == 1 ? source_part == 0 : source_part == own) &&
           (targets.size() == 1 ? target_part == 0 : target_part == own);
  };
  for (size_t part = 0; part < sources.size(); ++part) {
    for (size_t piece = 0; piece < sources[part].size(); ++piece) {
      auto& [data, bytes] = sources[part][piece];
      const std::byte* end = data + bytes;
      // Targets do not overlap each other, so their ends are in order too.
      auto hit =
          std::lower_bound(written.begin(), written.end(), data,
                           [](const Span& s, const std::byte* begin) { return s.end <= begin; });
      if (bytes == 0 || hit == written.end() || hit->begin >= end) {
        continue;
      }
      if (hit->begin == data && hit->end == end && hit->piece == piece &&
          in_place(part, hit->part)) {
        continue;
      }
      data = staging_.copy_of(data, bytes);
    }
  }
}

void ShmBackend::TensorOperation::settle(const Failure* failure, const TensorOperation& carrier) {
  std::exception_ptr error;
  if (C10_UNLIKELY(failure != nullptr)) {
    // The engine knows types of collectives: all_gather is all_gather_into_tensor's as well.
    disagrees_ = failure->kind == ErrorKind::Mismatch;
    std::string op = failure->op, text = failure->text;
    if (op == name_of(request.type) && text.starts_with(op + ":")) {
      text.replace(0, op.size(), op_);
      op = op_;
    }
    error = std::make_exception_ptr(
        CollectiveError(failure->kind, text, failure->ranks, op, failure->seq, place_->name()));
  } else {
    error = staging_.trouble();
  }
  if (C10_UNLIKELY(span_ != nullptr)) {
    span_->end();
    span_.reset();
  }
  state_.set_source(carrier.source_rank());
  state_.set_number(static_cast<int64_t>(carrier.seq()));
  state_.set_milliseconds(
      std::chrono::duration<float, std::milli>(carrier.shm::Operation::duration()).count());
  if (C10_UNLIKELY(finish_)) {
    prepare_ = finish_ = nullptr;
    request.room = nullptr;
  }
  staging_.release();
  writes_.clear();
  state_.settle(std::move(error), op_, [this] { return c10::IValue(outputs()); });
}

}  // namespace c10d_ext
