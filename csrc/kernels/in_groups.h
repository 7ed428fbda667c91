#pragma once

// Reductions of the values of some first, and then of what comes of that. No torch in here.

#include <cstddef>
#include <vector>

#include "base/types.h"

namespace c10d_ext::kernels {

// Whether that is as exact as to reduce all at once: halves and less are rounded in between, and an
// average or factors are not of groups.
constexpr bool reduces_in_groups(DType dtype, ReduceOp op) {
  const auto& [name, size, kind] = info_of(dtype);
  const bool is_rounded = (kind == DTypeKind::Floating && size < 4) || dtype == DType::ComplexHalf;
  return has_meaning(op, dtype) && op != ReduceOp::Avg && op != ReduceOp::PremulSum && !is_rounded;
}

// Rows of values, those of one group after the other's.
struct GroupedRows {
  std::vector<const void*> rows;
  std::vector<size_t> ends;  // of each group, none of which is empty
};

// As reduce() of what it makes of each group.
void reduce_in_groups(DType dtype, ReduceOp op, void* out, const GroupedRows& groups, size_t count);

}  // namespace c10d_ext::kernels
