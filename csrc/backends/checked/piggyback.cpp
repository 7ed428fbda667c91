#include "backends/checked/piggyback.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>

#include "backends/adapter/adapter.h"
#include "backends/adapter/lowering.h"
#include "backends/checked/little_reductions.h"
#include "backends/process_group/inner_backend.h"

namespace c10d_ext {

namespace {

using Sizes = std::vector<int64_t>;

std::string bytes_in(const at::Tensor& t) {
  return {static_cast<const char*>(t.const_data_ptr()), t.nbytes()};
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

// Of an exchange each rank is told what is for it, or everything.
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
