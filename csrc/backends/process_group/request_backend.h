#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "backends/backend.h"
#include "backends/process_group/argument_checks.h"
#include "backends/process_group/splittable_backend.h"
#include "backends/request.h"

// torch names _allgather_base and its kin deprecated while they are what a Backend overrides.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace c10d_ext {

// A backend of ours for CPU tensors: c10d's methods, written once. Each checks its arguments and is
// one request, or one message, which the derived class runs.
class RequestBackend : public SplittableBackend,
                       public CollectiveBackend,
                       protected ArgumentChecks {
 public:
  using WorkPtr = CollectiveBackend::WorkPtr;
  using Tensors = std::vector<at::Tensor>;

  // A call of one of c10d's methods, as its work tells it.
  struct MethodCall {
    std::string_view op;
    c10d::OpType type;
    bool async;
    Milliseconds timeout;  // kUnsetTimeout: the group's

    template <class Options>
    static MethodCall of(std::string_view op, c10d::OpType type, const Options& opts) {
      const bool is_own = opts.timeout > Milliseconds(0);
      return {op, type, opts.asyncOp, is_own ? opts.timeout : c10d::kUnsetTimeout};
    }
  };

  // Its work; null where the call is not async, once it is complete. The tensors are the caller's,
  // and read when it begins: an earlier one may write them. Parts may differ in size and dtype.
  virtual WorkPtr run(const MethodCall& call, const CollectiveRequest& request) = 0;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr send(Tensors& tensors, int dst, int tag) override;
  WorkPtr recv(Tensors& tensors, int src, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;

  void startCoalescing() override;
  void setSequenceNumberForGroup() override {}
  void enableCollectivesTiming() override {}

 protected:
  // `place` outlives this.
  RequestBackend(int rank, int size, Options options, c10::intrusive_ptr<c10d::Store> store,
                 GlobalRanks global_ranks, const Group& place)
      : SplittableBackend(rank, size, std::move(options), std::move(store),
                          std::move(global_ranks)),
        ArgumentChecks(place, options_.backend) {}

  virtual WorkPtr run(const MethodCall& call, const Message& message) = 0;

  bool is_coalescing() const {
    return is_coalescing_.load(std::memory_order_relaxed);
  }
  // For endCoalescing(), with coalescing_mutex_ held.
  void end_block();

  // Guards what an open block holds.
  std::mutex coalescing_mutex_;

 private:
  std::atomic<bool> is_coalescing_{false};
};

}  // namespace c10d_ext
