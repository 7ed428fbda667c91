#include "backends/shm/operation_tensors.h"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace c10d_ext {

void ShmBackend::OperationTensors::separate() {
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

}  // namespace c10d_ext
