#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "backends/mpi/engine.h"
#include "base/group.h"
#include "base/types.h"
#include "control/global_ranks.h"

// torch names _allgather_base and its kin deprecated while they are what a Backend overrides.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace c10d_ext {

// What moves the data of the "mpi" backend: CPU tensors between ranks of one MPI_COMM_WORLD, by an
// MPI library that was opened at run time. It has the methods that lowering needs and checks
// nothing; CheckedBackend around it is what users have.
//
// MPI moves bytes. Values are reduced here, in the order of ranks, each element on one rank, so
// that all ranks get the same bits, whichever the library, and halves are accumulated in float32.
class MpiBackend final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Milliseconds = std::chrono::milliseconds;

  // Collective over the group's ranks, in whose processes the engine is started. Messages of more
  // than `largest` bytes travel in parts.
  static c10::intrusive_ptr<MpiBackend> connect(const c10::intrusive_ptr<c10d::Store>& store,
                                                int rank, int size, Milliseconds timeout,
                                                const std::string& group_name,
                                                const GlobalRanks& global_ranks, int largest);
  ~MpiBackend() override;

  // The row of the table of capabilities.
  const std::string getBackendName() const override {
    return "libmpi";
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& opts) override;
  WorkPtr send(Tensors& tensors, int dst, int tag) override;
  WorkPtr recv(Tensors& tensors, int src, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;

  void setTimeout(Milliseconds /*timeout*/) override {}  // who decorates it has one
  void abort() override;
  void shutdown() override {}

  class MpiWork;
  struct Exchange;

  MpiBackend(int rank, int size, Group place, mpi::Comm collectives, mpi::Comm messages,
             int tag_limit, int largest);

 private:
  using Over = std::function<void()>;

  // Starts it; `over` once it is, on a thread that may block. An error ends the work.
  void call(const c10::intrusive_ptr<MpiWork>& work,
            std::function<void(mpi::Library&, std::vector<mpi::Request>&)> start, Over over,
            uint64_t number = 0);
  c10::intrusive_ptr<MpiWork> make_work(c10d::OpType type, const at::Tensor& input) const;

  // Sends and receives at once: parts of tensors to and from every rank.
  void exchange(const c10::intrusive_ptr<MpiWork>& work, Exchange parts, Over over);
  // Each rank's `sizes` bytes of `all`, of which it has its own, to everyone.
  void share(const c10::intrusive_ptr<MpiWork>& work, const at::Tensor& all,
             const std::vector<int64_t>& sizes, Over over);
  // What `sizes` elements of rank r's `source` are to rank r: reduced into `out`.
  void reduce_parts(const c10::intrusive_ptr<MpiWork>& work, const at::Tensor& source,
                    const std::vector<int64_t>& sizes, const at::Tensor& out, ReduceOp op,
                    Over over);
  WorkPtr all_reduce_sparse(const at::Tensor& tensor);
  WorkPtr message(c10d::OpType type, Tensors& tensors, int peer, int tag);
  // Elements that each rank is the one to reduce.
  std::vector<int64_t> shares_of(int64_t count) const;

  const Group place_;  // for texts
  const mpi::Comm collectives_, messages_;
  const int tag_limit_, largest_;
  const uint64_t id_;
  std::atomic<uint64_t> message_count_{0};
};

void bind_mpi(pybind11::module_& m);

}  // namespace c10d_ext
