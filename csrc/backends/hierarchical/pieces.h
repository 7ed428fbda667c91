#pragma once

// Parts of a rank's tensors.

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>

#include "base/memory.h"

namespace c10d_ext::hierarchical {

inline at::Tensor flat(const at::Tensor& t) {
  return span_of(t, 0, t.numel());
}

inline at::Tensor rows_of(const at::Tensor& t, int64_t rows) {
  return flat(t).view({rows, t.numel() / std::max<int64_t>(rows, 1)});
}

// Calls `piece(offset, count)` for each of `pieces` parts of `count` elements; the last is smaller.
template <class Piece>
void each_piece(int64_t count, int64_t pieces, Piece&& piece) {
  const int64_t each = std::max<int64_t>((count + pieces - 1) / pieces, 1);
  for (int64_t offset = 0; offset < count; offset += each) {
    piece(offset, std::min(each, count - offset));
  }
}

}  // namespace c10d_ext::hierarchical
