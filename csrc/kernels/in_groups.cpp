#include "kernels/in_groups.h"

#include <memory>

#include "kernels/kernels.h"

namespace c10d_ext::kernels {

void reduce_in_groups(DType dtype, ReduceOp op, void* out, const GroupedRows& groups,
                      size_t count) {
  const auto reduce_some = [&](void* to, const void* const* rows, size_t many) {
    reduce(dtype, op, to, nullptr, rows, static_cast<int>(many), count, nullptr);
  };
  const auto& [rows, ends] = groups;
  if (ends.size() == 1 || ends.size() == rows.size()) {
    reduce_some(out, rows.data(), rows.size());
    return;
  }
  const size_t bytes = count * size_of(dtype);
  const auto memory = std::make_unique_for_overwrite<char[]>(bytes * ends.size());
  std::vector<const void*> results;
  results.reserve(ends.size());
  size_t begin = 0;
  for (const size_t end : ends) {
    if (end - begin == 1) {
      results.push_back(rows[begin]);
    } else {
      char* const to = memory.get() + results.size() * bytes;
      reduce_some(to, rows.data() + begin, end - begin);
      results.push_back(to);
    }
    begin = end;
  }
  reduce_some(out, results.data(), results.size());
}

}  // namespace c10d_ext::kernels
