#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "backends/backend.h"
#include "backends/process_group/argument_checks.h"
#include "backends/process_group/splittable_backend.h"
#include "backends/request.h"
#include "backends/shm/engine.h"
#include "base/dtype.h"
#include "base/group.h"
#include "base/reduction.h"
#include "base/types.h"
#include "work/work_info.h"

// torch names _allgather_base and its kin deprecated while they are what a Backend overrides.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace c10d_ext {

struct KnownGroup;

// The "shm" backend: CPU tensors, ranks on one machine.
//
// c10d's methods (methods.cpp) and the requests of ops (requests.cpp) meet in one place: a
// TensorOperation, the engine's operation with the tensors it reads and writes. Every dtype,
// stride, size and reduce op with a meaning is native here.
class ShmBackend final : public SplittableBackend,
                         public CollectiveBackend,
                         private ArgumentChecks {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  struct Settings {
    size_t arena = 0;         // bytes of shared memory per rank
    bool call_sites = false;  // the ranks must call a collective from one line
    shm::Settings engine;
  };

  struct Connected {
    c10::intrusive_ptr<ShmBackend> backend;
    // The same text on all ranks when they cannot share memory, and so have no backend.
    std::string why_not;
    // See shm::Joined.
    std::string session;
  };

  // Collective over the group's ranks.
  static Connected connect(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                           const Options& options, const Settings& settings,
                           const GlobalRanks& global_ranks);

  // Completes what is in flight in every group of this process, for at most `grace`, and closes
  // them: for the end of the process.
  static void close_all(Milliseconds grace);

  ~ShmBackend() override;

  void post(const Group& group, const CollectiveRequest& request) override;
  const Capabilities& capabilities() const override;
  WorkPtr post_message(const Message& message,
                       std::function<WorkPtr(c10d::Backend& backend, int peer)> start) override;

  // --- c10d::Backend ----------------------------------------------------------------------------

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
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  void startCoalescing() override;
  // One work for everything since startCoalescing, null when that was nothing.
  WorkPtr endCoalescing() override;

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;
  void enableCollectivesTiming() override {}
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  class LiveGroup;
  class TensorOperation;
  // How a call is delivered and what it is called.
  struct Call;

  ShmBackend(int rank, int size, const Options& options, const Settings& settings,
             c10::intrusive_ptr<c10d::Store> store, GlobalRanks global_ranks,
             std::shared_ptr<LiveGroup> live);

 private:
  using OperationPtr = std::shared_ptr<TensorOperation>;

  static OperationPtr& spare();
  static void recycle(OperationPtr operation);
  OperationPtr make(const Call& call, OpType type) const;
  OperationPtr make(const Call& call, OpType type, const Reduction& reduction,
                    c10::ScalarType dtype) const;
  WorkPtr launch(const Call& call, OperationPtr operation);

  // Null: complete already, which `done` tells of. Otherwise the work is in flight and holds the
  // tensors. A failure that shows at once is thrown.
  WorkPtr start(const CollectiveRequest& request, at::TensorList sources, WorkInfo* done);
  WorkPtr all_reduce(const Call& call, at::TensorList sources, at::TensorList outs,
                     const Reduction& reduction);
  WorkPtr reduce_to(const Call& call, const at::Tensor& source, const at::Tensor& out,
                    const Reduction& reduction, int64_t root);
  WorkPtr broadcast_from(const Call& call, at::TensorList sources, at::TensorList outs,
                         int64_t root);
  WorkPtr all_gather(const Call& call, at::TensorList sources, at::TensorList outs);
  WorkPtr scatter_reduced(const Call& call, at::TensorList sources, at::TensorList outs,
                          const Reduction& reduction);
  WorkPtr exchange(const Call& call, const at::Tensor& source, const at::Tensor& out,
                   c10::IntArrayRef source_sizes, c10::IntArrayRef out_sizes);
  WorkPtr all_reduce_sparse(const Call& call, const at::Tensor& tensor, const Reduction& reduction);
  WorkPtr receive(std::string_view op, c10d::OpType type, Tensors& tensors, int src, int tag);

  c10::intrusive_ptr<Backend> make_backend(std::string_view op,
                                           const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                           int size, Milliseconds timeout, const std::string& name,
                                           const GlobalRanks& global_ranks) const override;

  const Settings settings_;
  const std::shared_ptr<LiveGroup> live_;
  const std::shared_ptr<const KnownGroup> known_group_;

  // Between startCoalescing and endCoalescing: what has been called, not yet submitted.
  std::mutex batch_mutex_;
  std::atomic<bool> batching_{false};
  std::vector<OperationPtr> batch_;
};

void bind_shm(pybind11::module_& m);

}  // namespace c10d_ext
