#include "backends/checked/host_sums.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <utility>

#include "kernels/in_groups.h"

namespace c10d_ext {

namespace {

using Groups = std::vector<std::vector<const void*>>;

// What comes over a line need not be aligned, as the kernels want it.
class Aligned {
 public:
  const void* of(const SharedBytes& values, DType dtype) {
    const size_t alignment = std::min(size_of(dtype), sizeof(double));
    if (reinterpret_cast<uintptr_t>(values.data()) % alignment == 0) {
      return values.data();
    }
    auto& copy = copies_.emplace_back(std::make_unique_for_overwrite<char[]>(values.size()));
    std::memcpy(copy.get(), values.data(), values.size());
    return copy.get();
  }

 private:
  std::deque<std::unique_ptr<char[]>> copies_;
};

SharedBytes reduce(const ReducedBy& how, const Groups& groups, size_t bytes) {
  std::string values(bytes, '\0');
  kernels::reduce_in_groups(how.dtype, how.op, values.data(), groups, bytes / size_of(how.dtype));
  return values;
}

}  // namespace

void reduce_on_host(std::map<int, Calling>& calls) {
  const Calling& first = calls.begin()->second;
  if (calls.size() == 1 || !first.data || !first.data->reduced_by()) {
    return;
  }
  const ReducedBy how = *first.data->reduced_by();
  Aligned aligned;
  std::vector<const void*> rows;
  for (const auto& [rank, call] : calls) {
    if (!call.data || !call.data->fits(*first.data)) {
      return;
    }
    rows.push_back(aligned.of(call.data->bytes(), how.dtype));
  }
  Contribution sum = first.data->with(reduce(how, {rows}, first.data->size()));
  for (auto& [rank, call] : calls) {
    call.data = Contribution::in_first();
  }
  calls.begin()->second.data = std::move(sum);
}

std::optional<SharedBytes> reduced(const std::vector<Contribution>& all,
                                   const std::vector<std::vector<int>>& hosts, int rank) {
  if (hosts.empty() || all.empty() || !all.front().reduced_by()) {
    return std::nullopt;
  }
  const ReducedBy how = *all.front().reduced_by();
  const size_t bytes = all.front().of(rank).size();
  Aligned aligned;
  Groups groups;
  for (const auto& ranks : hosts) {
    auto& group = groups.emplace_back();
    for (const int one : ranks) {
      const auto& given = all[static_cast<size_t>(one)];
      if (given.is_in_first() && one != ranks.front()) {
        continue;
      }
      const SharedBytes values = given.of(rank);
      if (given.reduced_by() != how || values.size() != bytes) {
        return std::nullopt;
      }
      group.push_back(aligned.of(values, how.dtype));
    }
    if (group.size() != 1 && group.size() != ranks.size()) {
      return std::nullopt;
    }
  }
  return reduce(how, groups, bytes);
}

}  // namespace c10d_ext
