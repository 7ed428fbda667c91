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

#include "backends/agreement/agreement.h"
#include "backends/agreement/called.h"
#include "backends/parts.h"
#include "core/group.h"
#include "core/pending.h"
#include "core/reduction.h"
#include "core/verb_checks.h"

// torch names _allgather_base and its kin deprecated while they are what a Backend overrides.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace c10d_ext {

struct Acquaintance;
struct Message;

// The "shm" backend where ranks cannot share memory: its verbs over gloo.
//
// Each verb is checked as ShmBackend checks it and carried out by core/exchange.h, which makes
// every dtype, stride, size and reduce op from what gloo has. The ops use that past the verbs.
//
// gloo begins a collective once all ranks have called it and agree, and a message once both its
// ends are there and agree, whoever called it.
class OverGloo final : public DivisibleBackend, private VerbChecks {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  // Who makes the backend of some ranks of a group; collective over them.
  using Connect = std::function<c10::intrusive_ptr<c10d::Backend>(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Milliseconds timeout,
      const std::string& group_name, const Seats& seats)>;
  static void set_connect(Connect connect);

  // What has been started ends within `grace` or fails, and the groups of this process are left:
  // the other ranks know at once.
  static void close_all(Milliseconds grace);

  // Collective: meets the other ranks.
  // `strict`: 1: shapes must agree, and not only sizes; 2: and the lines that call.
  OverGloo(c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<c10d::Store> store,
           const Options& options, Seats seats, int strict);
  ~OverGloo() override;

  // `begin` begins the collective at gloo, on another thread, once all ranks have called the same
  // and what they called before is done. The work is that of both, and has a future.
  // `quick`: `begin` takes less than a millisecond.
  WorkPtr agree(std::string_view op, Called called, bool quick, Begin begin);
  // `begin` begins the message at gloo, on another thread, once its other end at `peer` is there
  // and fits. The work is that of both; any number of threads can ask and wait for it.
  WorkPtr agree(const Message& message, std::function<WorkPtr(int peer)> begin);

  const c10::intrusive_ptr<c10d::Backend>& gloo() const {
    return gloo_;
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
    std::optional<Called> called;

    template <class Options>
    static Call of(std::string_view op, c10d::OpType type, const Options& opts, Called called) {
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

  // What `start` starts, as the call's work, null of one that is over on return. `start` returns
  // nothing, or a message's work. `outputs` are the caller's, which `around.after` fills where the
  // collective does not write them itself.
  template <class Start>
  WorkPtr run(const Call& call, Tensors outputs, Claim::Around around, Start&& start);

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
                                           const Seats& seats) const override;

  const int strict_;
  c10::intrusive_ptr<c10d::Backend> gloo_;
  // Of this backend's name, with gloo as its only backend.
  Group group_;
  // Works may outlive the backend; they hold this while they use it.
  std::shared_ptr<Agreement> agreement_;
  const std::shared_ptr<const Acquaintance> acquaintance_;
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

// What a rank says of a collective of tensors like these, at least one.
Called called(shm::Verb verb, at::TensorList like, int64_t count = -1);

void bind_fallback(pybind11::module_& m);

}  // namespace c10d_ext
