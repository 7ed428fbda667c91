#include "kernels/in_groups.h"

#include <memory>

#include "kernels/kernels.h"

namespace c10d_ext::kernels {

void reduce_in_groups(DType dtype, ReduceOp op, void* out,
                      const std::vector<std::vector<const void*>>& groups, size_t count) {
  const size_t bytes = count * size_of(dtype);
  const auto memory = std::make_unique_for_overwrite<char[]>(bytes * groups.size());
  std::vector<const void*> rows;
  for (const auto& group : groups) {
    if (group.size() == 1) {
      rows.push_back(group.front());
      continue;
    }
    char* const to = memory.get() + rows.size() * bytes;
    reduce(dtype, op, to, nullptr, group.data(), static_cast<int>(group.size()), count, nullptr);
    rows.push_back(to);
  }
  reduce(dtype, op, out, nullptr, rows.data(), static_cast<int>(rows.size()), count, nullptr);
}

}  // namespace c10d_ext::kernels
