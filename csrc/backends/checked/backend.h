#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "backends/adapter/adapter.h"
#include "backends/backend.h"
#include "backends/checked/agreement.h"
#include "backends/process_group/argument_checks.h"
#include "backends/process_group/splittable_backend.h"
#include "backends/request.h"
#include "base/fingerprint.h"
#include "base/group.h"
#include "base/reduction.h"
#include "work/pending.h"

// torch names _allgather_base and its kin deprecated while they are what a Backend overrides.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace c10d_ext {

struct KnownGroup;

// Any c10d::Backend, checked: it begins a collective once all ranks have called it and agree, and a
// message once both its ends are there and agree, whoever called it; a rank that is lost or does
// not come is named on all others. The "shm" backend is that around gloo where ranks cannot share
// memory.
//
// c10d's methods are checked as ShmBackend checks them; they and the requests of ops are lowered to
// what the inner backend can do, so that they have every dtype, stride, size and reduce op.
class CheckedBackend final : public SplittableBackend,
                             public CollectiveBackend,
                             private ArgumentChecks {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  // Who makes the backend of some ranks of a group of this name ("shm"); collective over them.
  using Connect = std::function<c10::intrusive_ptr<c10d::Backend>(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Milliseconds timeout,
      const std::string& group_name, const GlobalRanks& global_ranks)>;
  static void set_connect(Connect connect, const std::string& backend);

  // What has been started ends within `grace` or fails, and the groups of this process are left:
  // the other ranks know at once.
  static void close_all(Milliseconds grace);

  // Collective: meets the other ranks.
  // `strict`: 1: shapes must agree, and not only sizes; 2: and the lines that call.
  CheckedBackend(c10::intrusive_ptr<c10d::Backend> inner, c10::intrusive_ptr<c10d::Store> store,
                 const Options& options, GlobalRanks global_ranks, int strict);
  ~CheckedBackend() override;

  void post(const Group& group, const CollectiveRequest& request) override;
  const Capabilities& capabilities() const override {
    return can_;
  }
  // The work is that of both ends; any number of threads can ask and wait for it.
  WorkPtr post_message(const Message& message,
                       std::function<WorkPtr(c10d::Backend& backend, int peer)> start) override;

  const c10::intrusive_ptr<c10d::Backend>& inner_backend() const {
    return inner_;
  }

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

  // Calls start at once, in a block as outside of it; the block's end has one work for all of them.
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  void setTimeout(Milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;
  void enableCollectivesTiming() override {}
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

 private:
  // How a call is delivered and what it is called.
  struct Call {
    std::string_view op;
    c10d::OpType type;
    bool async;
    Milliseconds timeout;
    // What a collective says to the other ranks, in place of what the exchange that carries it out
    // says.
    std::optional<Fingerprint> called;

    template <class Options>
    static Call of(std::string_view op, c10d::OpType type, const Options& opts,
                   Fingerprint called) {
      const bool own = opts.timeout > Milliseconds(0);
      return {op, type, opts.asyncOp, own ? opts.timeout : c10d::kUnsetTimeout, std::move(called)};
    }
  };

  // What a collective reads, and what puts it there when its turn has come.
  struct Source {
    at::Tensor values;
    Finish fill;
  };
  static Source packed(const Tensors& tensors);
  static Source bytes_in(const at::Tensor& tensor);
  static Source apart(const at::Tensor& source, const at::Tensor& out);

  // What is done on this rank before the collective reads anything, and after all that it leaves to
  // do itself.
  struct Around {
    Finish before;
    Finish after;
  };
  // Starts the request as what the call says to the other ranks; null of one that is over on
  // return. `outputs` are the caller's, which `around.after` fills where the collective does not
  // write them itself.
  WorkPtr run(const Call& call, Tensors outputs, Around around, const CollectiveRequest& request);
  WorkPtr run(const Call& call, Tensors outputs, Around around, Begin begin, bool quick);
  WorkPtr deliver(const Call& call, const WorkPtr& work);
  // `begin` begins the collective at the inner backend, on another thread, once all ranks have
  // called the same and what they called before is done. The work is that of both, and has a
  // future. `quick`: `begin` takes less than a millisecond. `timeout`: of the call, or unset.
  WorkPtr agree(std::string_view op, Fingerprint called, Milliseconds timeout, bool quick,
                Begin begin);
  // For a call with this timeout, or unset.
  Adapter inner(std::string_view op, Milliseconds timeout) const;

  // Gathers everyone's `own` bytes, of which rank r has sizes[r], and hands them out.
  WorkPtr all_gather_bytes(const Call& call, const Source& own, std::vector<int64_t> sizes,
                           const Tensors& outputs);
  // Sends `source` and receives into `outputs`, with as many bytes to and from each rank.
  WorkPtr exchange_bytes(const Call& call, const Source& source, const Tensors& outputs,
                         const std::vector<int64_t>& in, const std::vector<int64_t>& out);
  // What is in flight ends.
  void leave();
  WorkPtr message(std::string_view op, c10d::OpType type, const at::Tensor& tensor, int peer,
                  int tag);
  c10::intrusive_ptr<Backend> make_backend(std::string_view op,
                                           const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                           int size, Milliseconds timeout, const std::string& name,
                                           const GlobalRanks& global_ranks) const override;

  const int strict_;
  c10::intrusive_ptr<c10d::Backend> inner_;
  const Capabilities inner_can_, can_;
  const Group group_;  // for texts
  // Works may outlive the backend; they hold this while they use it.
  std::shared_ptr<Agreement> agreement_;
  const std::shared_ptr<const KnownGroup> known_group_;
  // In flight, as far as anybody knows; swept when there are as many as the limit.
  static constexpr size_t kFewMessages = 64;
  std::mutex messages_mutex_;
  std::vector<c10::weak_intrusive_ptr<c10d::Work>> messages_;
  size_t messages_limit_ = kFewMessages;

  // Between startCoalescing and endCoalescing: what has been started.
  std::mutex batch_mutex_;
  std::atomic<bool> batching_{false};
  std::vector<WorkPtr> batch_;
};

void bind_fallback(pybind11::module_& m);

}  // namespace c10d_ext
