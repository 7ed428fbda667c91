#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "backends/backend.h"
#include "backends/request.h"
#include "base/group.h"
#include "base/profiler_span.h"
#include "base/types.h"
#include "work/request_work.h"

// torch names _allgather_base and its kin deprecated while they are what a Backend overrides.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace c10d_ext {

// A collective that begins, of dense CPU tensors: what c10d's methods and their options say.
struct InnerCollective {
  OpType op = OpType::Barrier;
  // One tensor where the result takes the input's place; none of a barrier.
  at::Tensor source, out;
  ReduceOp reduce_op = ReduceOp::None;
  int root = -1;
  // Of AllToAll: so many elements to and from each rank, one after the other.
  std::vector<int64_t> sent, received;
};

// A function of a backend's own for each collective that InnerBackend begins. Of a reduce, `out` is
// scratch memory on ranks other than the root.
template <class Function>
struct InnerTable {
  Function *barrier, *all_reduce, *reduce, *broadcast, *all_gather, *reduce_scatter, *all_to_all;

  Function* of(OpType op) const {
    switch (op) {
      case OpType::Barrier:
        return barrier;
      case OpType::AllReduce:
        return all_reduce;
      case OpType::Reduce:
        return reduce;
      case OpType::Broadcast:
        return broadcast;
      case OpType::AllGather:
        return all_gather;
      case OpType::ReduceScatter:
        return reduce_scatter;
      case OpType::AllToAll:
        return all_to_all;
      default:
        TORCH_INTERNAL_ASSERT(false, "no collective of an inner backend: ", name_of(op));
    }
  }
};

// What moves the data of a backend of ours, behind CheckedBackend: c10d's methods as far as
// lowering needs them, written once. Each takes its options apart, makes the work, which profilers
// are told of, and has the derived class start it, by its InnerTable.
//
// Arguments are checked by who decorates it: dense CPU tensors of any shape, the same on all ranks
// where they must be, and sources apart from what is written, or the same.
class InnerBackend : public c10d::Backend, public DescribedBackend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Milliseconds = std::chrono::milliseconds;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) final;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) final;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) final;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) final;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) final;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& opts) final;
  WorkPtr send(Tensors& tensors, int dst, int tag) final;
  WorkPtr recv(Tensors& tensors, int src, int tag) final;
  WorkPtr barrier(const c10d::BarrierOptions& opts) final;

  // Those of the methods above, which end with a future.
  const Capabilities& capabilities() const override;

  // To be called with ranks that are gone, as soon as that is known, from any thread and for as
  // long as anybody likes; none where the backend finds it out itself.
  using TellLosses = std::function<void(const std::vector<int>& ranks)>;
  virtual TellLosses losses() const {
    return {};
  }

  // What profilers and reports call it.
  const std::string& title() const {
    return title_;
  }

 protected:
  // What is under way, which whoever does it ends.
  using InnerWork = c10::intrusive_ptr<SignalledWork>;

  InnerBackend(int rank, int size, const std::string& group_name, std::string title);

  // Starts it and returns; `work` is ended once it is over on this rank, or has failed.
  virtual void start(const InnerWork& work, InnerCollective collective) = 0;
  // Of a sparse tensor, which becomes the sum. `timeout`: of the call.
  virtual WorkPtr all_reduce_sparse(const at::Tensor& tensor, Milliseconds timeout) = 0;
  virtual WorkPtr start_message(const Message& message) = 0;

  // The work of a call that begins; `input`: what profilers are told it reads.
  InnerWork begin_work(c10d::OpType type, OpType op, const at::Tensor& input) const;
  virtual InnerWork make_work(c10d::OpType type, std::string_view op,
                              std::unique_ptr<ProfilerSpan> span) const;

  const Group group_;  // for texts

 private:
  WorkPtr begin(c10d::OpType type, InnerCollective collective);

  const std::string title_;
};

}  // namespace c10d_ext
