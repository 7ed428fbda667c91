#include "backends/checked/little_reductions.h"

#include <ATen/ops/empty.h>
#include <c10/util/SmallVector.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/memory.h"
#include "kernels/in_groups.h"
#include "kernels/kernels.h"

namespace c10d_ext {

namespace {

using Sizes = std::vector<int64_t>;

// How tensors on the CPU are to be reduced; none where factors are to be applied.
std::optional<ReducedBy> reduction_of(const HeldRequest& request) {
  if (!request.reduction || request.reduction->factor) {
    return std::nullopt;
  }
  const auto dtype = request.outs.front().scalar_type();
  const auto is_alike = [&](const at::Tensor& t) { return t.is_cpu() && t.scalar_type() == dtype; };
  const ReducedBy how{dtype_of(dtype), request.reduction->op};
  return has_meaning(how.op, how.dtype) &&
                 std::all_of(request.outs.begin(), request.outs.end(), is_alike)
             ? std::optional(how)
             : std::nullopt;
}

void append(const at::Tensor& t, std::string& bytes) {
  const at::Tensor values = dense(t);
  bytes.append(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
}

std::string bytes_in(const HeldRequest::Tensors& tensors) {
  std::string bytes;
  bytes.reserve(bytes_of_all(tensors));
  for (const auto& t : tensors) {
    append(t, bytes);
  }
  return bytes;
}

// What each rank is to have of a reduce_scatter, one rank's after the other's.
struct Rows {
  std::string bytes;
  Sizes sizes;  // in bytes, by rank
};

Rows rows_of(const HeldRequest& request, int64_t ranks) {
  const auto& sources = request.sources;
  Rows rows{{}, Sizes(static_cast<size_t>(ranks))};
  rows.bytes.reserve(bytes_of_all(sources));
  const auto add = [&](size_t rank, const at::Tensor& t) {
    append(t, rows.bytes);
    rows.sizes[rank] += static_cast<int64_t>(t.nbytes());
  };
  if (request.source_parts) {
    for (size_t i = 0; i < sources.size(); ++i) {
      add(i * rows.sizes.size() / sources.size(), sources[i]);
    }
  } else if (request.is_list) {
    for (int64_t rank = 0; rank < ranks; ++rank) {
      for (const auto& source : sources) {
        const int64_t each = source.numel() / ranks;
        add(static_cast<size_t>(rank), dense(source).view(-1).narrow(0, rank * each, each));
      }
    }
  } else {
    const auto& source = sources.front();
    append(source, rows.bytes);
    const auto width = static_cast<int64_t>(source.element_size());
    for (size_t rank = 0; rank < rows.sizes.size(); ++rank) {
      rows.sizes[rank] = width * (request.source_sizes.empty() ? source.numel() / ranks
                                                               : request.source_sizes[rank]);
    }
  }
  return rows;
}

// Writes the values there, which are in `from` one after the other.
void write(const HeldRequest::Tensors& outs, const char* from) {
  for (const auto& out : outs) {
    const at::Tensor values = is_dense(out) ? out : at::empty(out.sizes(), out.options());
    std::memcpy(values.mutable_data_ptr(), from, values.nbytes());
    if (!values.is_same(out)) {
      copy_values(out, values);
    }
    from += values.nbytes();
  }
}

void write_divided(const HeldRequest::Tensors& outs, const char* from, int64_t divisor) {
  const auto bytes = bytes_of_all(outs);
  const auto& options = outs.front().options();
  const auto count = static_cast<int64_t>(bytes / options.dtype().itemsize());
  const at::Tensor values = at::empty({count}, options);
  std::memcpy(values.mutable_data_ptr(), from, bytes);
  values.div_(divisor);
  write(outs, static_cast<const char*>(values.const_data_ptr()));
}

// What leaders make of all.
Piggyback piggyback_by_leaders(const HeldRequest& request, const Group& group,
                               const ReducedBy& how) {
  const auto ranks = group.size();
  const int64_t divisor = request.reduction->op == ReduceOp::Avg ? ranks : 1;
  Piggyback piggyback;
  size_t begin = 0, whole = bytes_of_all(request.outs);
  if (request.type == OpType::AllReduce) {
    piggyback.data = Contribution(bytes_in(request.sources));
  } else {
    auto [rows, sizes] = rows_of(request, ranks);
    if (rows.size() * static_cast<size_t>(ranks) <= kMostUncut) {
      begin = static_cast<size_t>(c10::sum_integers(sizes.begin(), sizes.begin() + group.rank()));
      whole = rows.size();
      piggyback.data = Contribution(std::move(rows));
    } else {
      piggyback.data = Contribution(std::move(rows), sizes);
    }
  }
  piggyback.data = std::move(piggyback.data).to_be_reduced(how);
  piggyback.receive = [outs = request.outs, divisor, begin, whole](const auto& data) {
    check_size(data.size() == 1 && data.front().size() == whole);
    const char* const from = data.front().data() + begin;
    divisor == 1 ? write(outs, from) : write_divided(outs, from, divisor);
  };
  return piggyback;
}

void reduce_all(const HeldRequest::Tensors& outs, const ReducedBy& how, int64_t ranks,
                const std::vector<SharedBytes>& data) {
  check_size(static_cast<int64_t>(data.size()) == ranks);
  const size_t row = bytes_of_all(outs);
  // Aligned, as what comes need not be; and for the result.
  const auto all = std::make_unique_for_overwrite<char[]>(row * (data.size() + 1));
  c10::SmallVector<const void*, 16> rows;
  for (const auto& one : data) {
    check_size(one.size() == row);
    char* const to = all.get() + rows.size() * row;
    std::memcpy(to, one.data(), row);
    rows.push_back(to);
  }
  char* const to = all.get() + rows.size() * row;
  kernels::reduce(how.dtype, how.op, to, nullptr, rows.data(), static_cast<int>(rows.size()),
                  row / size_of(how.dtype), nullptr);
  write(outs, to);
}

}  // namespace

void check_size(bool fits) {
  TORCH_CHECK(fits, "data of the size that this rank expects must come with the calls, got other");
}

size_t bytes_of_all(at::TensorList tensors) {
  size_t bytes = 0;
  for (const auto& t : tensors) {
    bytes += t.nbytes();
  }
  return bytes;
}

std::optional<ReducedBy> reduced_by_leaders(const HeldRequest& request, const Little& little) {
  if (little.hosts == 0 ||
      (request.type != OpType::AllReduce && request.type != OpType::ReduceScatter)) {
    return std::nullopt;
  }
  auto how = reduction_of(request);
  if (how && how->op == ReduceOp::Avg) {
    how->op = ReduceOp::Sum;
  }
  return how && kernels::reduces_in_groups(how->dtype, how->op) ? how : std::nullopt;
}

std::optional<Piggyback> piggyback_of_reduction(const HeldRequest& request, const Group& group,
                                                const Little& little) {
  if (const auto how = reduced_by_leaders(request, little)) {
    return piggyback_by_leaders(request, group, *how);
  }
  const auto how = request.type == OpType::AllReduce ? reduction_of(request) : std::nullopt;
  if (!how) {
    return std::nullopt;
  }
  return Piggyback{Contribution(bytes_in(request.sources)),
                   [outs = request.outs, how = *how, ranks = group.size()](const auto& data) {
                     reduce_all(outs, how, ranks, data);
                   }};
}

}  // namespace c10d_ext
