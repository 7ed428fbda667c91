#include "backends/checked/host_sums.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "kernels/in_groups.h"

namespace c10d_ext {

namespace {

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
  std::vector<std::unique_ptr<char[]>> copies_;
};

SharedBytes reduce(const ReducedBy& how, const kernels::GroupedRows& groups, size_t bytes) {
  std::string values(bytes, '\0');
  kernels::reduce_in_groups(how.dtype, how.op, values.data(), groups, bytes / size_of(how.dtype));
  return values;
}

}  // namespace

void reduce_on_host(std::vector<std::pair<int, Calling>>& calls) {
  const Calling& first = calls.front().second;
  if (calls.size() == 1 || !first.data || !first.data->reduced_by()) {
    return;
  }
  const ReducedBy how = *first.data->reduced_by();
  Aligned aligned;
  kernels::GroupedRows host;
  host.rows.reserve(calls.size());
  for (const auto& [rank, call] : calls) {
    if (!call.data || !call.data->fits(*first.data)) {
      return;
    }
    host.rows.push_back(aligned.of(call.data->bytes(), how.dtype));
  }
  host.ends = {host.rows.size()};
  Contribution sum = first.data->with(reduce(how, host, first.data->size()));
  for (auto& [rank, call] : calls) {
    call.data = Contribution::in_first();
  }
  calls.front().second.data = std::move(sum);
}

std::optional<SharedBytes> reduced(const std::vector<Contribution>& all,
                                   const std::vector<std::vector<int>>& hosts, int rank) {
  if (hosts.empty() || all.empty() || !all.front().reduced_by()) {
    return std::nullopt;
  }
  const ReducedBy how = *all.front().reduced_by();
  const size_t bytes = all.front().of(rank).size();
  Aligned aligned;
  kernels::GroupedRows groups;
  groups.rows.reserve(all.size());
  groups.ends.reserve(hosts.size());
  for (const auto& ranks : hosts) {
    const size_t begin = groups.rows.size();
    for (const int one : ranks) {
      const auto& given = all[static_cast<size_t>(one)];
      if (given.is_in_first() && one != ranks.front()) {
        continue;
      }
      const SharedBytes values = given.of(rank);
      if (given.reduced_by() != how || values.size() != bytes) {
        return std::nullopt;
      }
      groups.rows.push_back(aligned.of(values, how.dtype));
    }
    const size_t count = groups.rows.size() - begin;
    if (count != 1 && count != ranks.size()) {
      return std::nullopt;
    }
    groups.ends.push_back(groups.rows.size());
  }
  return reduce(how, groups, bytes);
}

}  // namespace c10d_ext
