#include "backends/checked/piggyback.h"

#include <ATen/ops/empty.h>
#include <c10/util/SmallVector.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>

#include "backends/adapter/adapter.h"
#include "backends/adapter/lowering.h"
#include "backends/process_group/inner_backend.h"
#include "base/dtype.h"
#include "base/memory.h"
#include "kernels/in_groups.h"
#include "kernels/kernels.h"

namespace c10d_ext {

namespace {

using Sizes = std::vector<int64_t>;

std::string bytes_in(const at::Tensor& t) {
  return {static_cast<const char*>(t.const_data_ptr()), t.nbytes()};
}

void check_size(bool fits) {
  TORCH_CHECK(fits, "data of the size that this rank expects must come with the calls, got other");
}

// Each rank's row of `out`.
void receive_rows(const at::Tensor& out, size_t ranks, const std::vector<SharedBytes>& data) {
  check_size(data.size() == ranks);
  const size_t row = out.nbytes() / data.size();
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  for (const auto& one : data) {
    check_size(one.size() == row);
    std::memcpy(to, one.data(), row);
    to += row;
  }
}

void receive_of_root(const InnerCollective& what, bool is_root, size_t ranks,
                     const std::vector<SharedBytes>& data) {
  check_size(data.size() == ranks);
  const auto& sent = data[static_cast<size_t>(what.root)];
  check_size(sent.size() == what.out.nbytes());
  if (!is_root) {
    std::memcpy(what.out.mutable_data_ptr(), sent.data(), sent.size());
  }
}

// Of an exchange each rank is told what is for it; of so many bytes of all ranks together
// everything, which takes less than to cut them for each.
constexpr size_t kMostUncut = 4096;

Contribution parts_of(const InnerCollective& what) {
  Sizes parts = what.sent;
  const bool is_even =
      std::adjacent_find(parts.begin(), parts.end(), std::not_equal_to<>()) == parts.end();
  if (is_even && what.source.nbytes() * parts.size() <= kMostUncut) {
    return Contribution(bytes_in(what.source));
  }
  for (auto& part : parts) {
    part *= static_cast<int64_t>(what.source.itemsize());
  }
  return {bytes_in(what.source), parts};
}

void receive_parts(const InnerCollective& what, size_t rank, const std::vector<SharedBytes>& data) {
  check_size(data.size() == what.received.size());
  auto* to = static_cast<char*>(what.out.mutable_data_ptr());
  for (size_t from = 0; from < data.size(); ++from) {
    const size_t size = static_cast<size_t>(what.received[from]) * what.out.itemsize();
    // Each rank's part is as long, or this one's is all that came.
    const bool is_uncut = data[from].size() == size * data.size();
    check_size(is_uncut || data[from].size() == size);
    std::memcpy(to, data[from].data() + (is_uncut ? rank * size : 0), size);
    to += size;
  }
}

// What the collective that a thread lowers is lowered to.
thread_local Piggyback noted_here;

// Whose tensors nobody holds any longer than this, also where that throws.
struct Noting {
  Noting() = default;
  ~Noting() {
    noted_here = {};
  }
  Noting(const Noting&) = delete;
  Noting& operator=(const Noting&) = delete;
};

// The backend to which such collectives are lowered. Notes what it is asked for.
class PiggybackBackend final : public InnerBackend {
 public:
  explicit PiggybackBackend(const Group& group)
      : InnerBackend(static_cast<int>(group.rank()), static_cast<int>(group.size()), group.name(),
                     "piggyback") {
    init();
  }

  static const Capabilities& can() {
    static const Capabilities can = [] {
      Capabilities few;
      few.methods = {Method::AllGatherIntoTensor, Method::AllToAllSingle, Method::Broadcast,
                     Method::Barrier};
      few.keeps_inputs = true;
      few.exchanges_rooted_parts = true;
      return capabilities_for_little(few, {});
    }();
    return can;
  }
  const Capabilities& capabilities() const override {
    return can();
  }

 private:
  void start(const InnerWork& /*work*/, InnerCollective what) override {
    switch (what.op) {
      case OpType::AllGather:
        noted_here.data = Contribution(bytes_in(what.source));
        noted_here.receive = [out = what.out, ranks = ranks()](const auto& data) {
          receive_rows(out, ranks, data);
        };
        return;
      case OpType::AllToAll:
        noted_here.data = parts_of(what);
        noted_here.receive = [what = std::move(what), rank = rank_](const auto& data) {
          receive_parts(what, static_cast<size_t>(rank), data);
        };
        return;
      case OpType::Broadcast:
        noted_here.data = rank_ == what.root ? Contribution(bytes_in(what.out)) : Contribution();
        noted_here.receive = [what = std::move(what), is_root = rank_ == what.root,
                              ranks = ranks()](const auto& data) {
          receive_of_root(what, is_root, ranks, data);
        };
        return;
      case OpType::Barrier:
        noted_here.receive = [](const auto&) {};
        return;
      default:
        TORCH_INTERNAL_ASSERT(false, "no collective that is piggybacked: ", name_of(what.op));
    }
  }
  size_t ranks() const {
    return static_cast<size_t>(size_);
  }
  // Profilers are told of the collective itself.
  InnerWork make_work(c10d::OpType type, std::string_view op,
                      std::unique_ptr<ProfilerSpan> /*span*/) const override {
    return c10::make_intrusive<SignalledWork>(rank_, type, op);
  }
  WorkPtr all_reduce_sparse(const at::Tensor& /*tensor*/, Milliseconds /*timeout*/) override {
    TORCH_INTERNAL_ASSERT(false, "sparse tensors are not piggybacked");
  }
  WorkPtr start_message(const Message& /*message*/) override {
    TORCH_INTERNAL_ASSERT(false, "messages are not piggybacked");
  }
};

size_t bytes_of_all(at::TensorList tensors) {
  size_t bytes = 0;
  for (const auto& t : tensors) {
    bytes += t.nbytes();
  }
  return bytes;
}

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

// How leaders reduce them, an average as a sum; none where there are no leaders, or they do not.
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
std::string rows_in(const HeldRequest& request, int64_t ranks) {
  if (!request.is_list) {
    return bytes_in(request.sources);
  }
  std::string bytes;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    for (const auto& source : request.sources) {
      const int64_t each = source.numel() / ranks;
      append(dense(source).view(-1).narrow(0, rank * each, each), bytes);
    }
  }
  return bytes;
}

// The bytes of those.
Sizes sizes_of_rows(const HeldRequest& request, int64_t ranks) {
  Sizes sizes(static_cast<size_t>(ranks));
  const auto width = static_cast<int64_t>(request.outs.front().element_size());
  for (size_t rank = 0; rank < sizes.size(); ++rank) {
    if (!request.source_sizes.empty()) {
      sizes[rank] = request.source_sizes[rank] * width;
      continue;
    }
    for (size_t i = 0; i < request.sources.size(); ++i) {
      const auto bytes = static_cast<int64_t>(request.sources[i].nbytes());
      if (!request.source_parts) {
        sizes[rank] += bytes / ranks;
      } else if (i * sizes.size() / request.sources.size() == rank) {
        sizes[rank] += bytes;
      }
    }
  }
  return sizes;
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
    const Sizes sizes = sizes_of_rows(request, ranks);
    std::string rows = rows_in(request, ranks);
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

// What lowering makes of reductions, as most little collectives are, but for the tensors that it
// makes on the way: they are a tenth of what one takes.
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

// Of one rank.
size_t most_of_this(const HeldRequest& request, const Group& group, const Little& little) {
  return most_of_a_rank(request.type, little.most, static_cast<size_t>(group.size()), little.hosts,
                        reduced_by_leaders(request, little).has_value());
}

}  // namespace

bool reduces_little(const HeldRequest& request, const Group& group, const Little& little) {
  return request.reduction && request.type != OpType::SparseAllReduce &&
         bytes_of_all(request.sources) <= most_of_this(request, group, little);
}

std::string manner_of(const HeldRequest& request, const Group& group, const Little& little) {
  if (little.most == little.usual ||
      !reduces_little(request, group,
                      {std::max(little.most, little.usual), little.usual, little.hosts})) {
    return {};
  }
  return " with TORCH_C10D_EXT_SHM_PIGGYBACK=" + std::to_string(little.most);
}

Capabilities capabilities_for_little(Capabilities inner,
                                     const std::vector<std::vector<int>>& hosts) {
  if (!hosts.empty()) {
    inner.reduces_on_hosts = std::make_shared<const std::vector<std::vector<int>>>(hosts);
  }
  inner.methods = inner.methods.without(
      {Method::AllReduce, Method::AllReduceCoalesced, Method::Reduce, Method::ReduceScatterTensor});
  inner.reduces_avg = inner.reduces_avg_to_one = inner.reduces_low_precision = false;
  inner.reduces_bitwise = true;
  inner.keeps_nan = false;
  return inner;
}

c10::intrusive_ptr<c10d::Backend> make_piggyback_backend(const Group& group) {
  return c10::make_intrusive<PiggybackBackend>(group);
}

std::optional<Piggyback> piggyback_of(const HeldRequest& request, const Group& group,
                                      const Little& little,
                                      const c10::intrusive_ptr<c10d::Backend>& backend) {
  if (little.most == 0 || request.type == OpType::SparseAllReduce) {
    return std::nullopt;
  }
  const size_t most = most_of_this(request, group, little);
  const bool is_little =
      request.type == OpType::Barrier ||
      (bytes_of_all(request.sources) <= most && bytes_of_all(request.outs) <= little.most);
  if (!is_little) {
    return std::nullopt;
  }
  if (auto own = piggyback_of_reduction(request, group, little)) {
    return own;
  }
  const Adapter adapter(request.op, group, backend, PiggybackBackend::can(), std::nullopt);
  const Noting noting;
  Started started = lowering::start(adapter, request);
  Piggyback noted = std::exchange(noted_here, {});
  if (!noted.receive || noted.data.size() > most) {
    return std::nullopt;
  }
  noted.receive = [receive = std::move(noted.receive),
                   finish = std::move(started.finish)](const auto& data) {
    receive(data);
    if (finish) {
      finish();
    }
  };
  return noted;
}

}  // namespace c10d_ext
