#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "backends/mpi/engine.h"
#include "backends/process_group/inner_backend.h"
#include "backends/request.h"
#include "base/python_module.h"
#include "base/types.h"
#include "control/global_ranks.h"

namespace c10d_ext {

// What moves the data of the "mpi" backend: CPU tensors between ranks of one MPI_COMM_WORLD, by an
// MPI library that was opened at run time. CheckedBackend around it is what users have.
//
// MPI moves bytes. Values are reduced here, in the order of ranks, each element on one rank, so
// that all ranks get the same bits, whichever the library, and halves are accumulated in float32.
class MpiBackend final : public InnerBackend {
 public:
  // Collective over the group's ranks, in whose processes the engine is started. Messages of more
  // than `largest` bytes travel in parts.
  static c10::intrusive_ptr<MpiBackend> connect(const c10::intrusive_ptr<c10d::Store>& store,
                                                int rank, int size, Milliseconds timeout,
                                                const std::string& group_name,
                                                const GlobalRanks& global_ranks, int largest);
  MpiBackend(int rank, int size, const std::string& group_name, mpi::Comm collectives,
             mpi::Comm messages, int tag_limit, int largest);
  ~MpiBackend() override;

  // What users call it; getBackendName() tells what moves its data.
  static constexpr char kPublicName[] = "mpi";

  const Capabilities& capabilities() const override;
  const std::string getBackendName() const override {
    return "libmpi";
  }

  void setTimeout(Milliseconds /*timeout*/) override {}  // who decorates it has one
  void abort() override;
  void shutdown() override {}

  class MpiWork;

 private:
  using Over = std::function<void()>;
  // Parts of tensors to and from every rank.
  struct Exchange;

  // --- backend.cpp: one call of the library

  InnerWork make_work(c10d::OpType type, std::string_view op,
                      std::unique_ptr<ProfilerSpan> span) const override;
  WorkPtr start_message(const Message& message) override;

  // Starts it; `over` once it is, on a thread that may block. An error ends the work.
  void call(const InnerWork& work,
            std::function<void(mpi::Library&, std::vector<mpi::Request>&)> start, Over over,
            uint64_t number = 0);
  static void start_parts(mpi::Library& library, std::vector<mpi::Request>& requests, bool sends,
                          std::byte* data, int64_t bytes, int peer, int tag, mpi::Comm comm,
                          int largest);
  static std::exception_ptr error_of(std::string text);

  // --- collectives.cpp

  void start_broadcast(const InnerWork& work, const at::Tensor& t, int root) override;
  void start_all_reduce(const InnerWork& work, const at::Tensor& t, ReduceOp op) override;
  void start_reduce(const InnerWork& work, const at::Tensor& t, ReduceOp op, int root) override;
  void start_all_gather(const InnerWork& work, const at::Tensor& source,
                        const at::Tensor& out) override;
  void start_reduce_scatter(const InnerWork& work, const at::Tensor& source, const at::Tensor& out,
                            ReduceOp op) override;
  void start_all_to_all(const InnerWork& work, const at::Tensor& source, const at::Tensor& out,
                        Sizes sent, Sizes received) override;
  void start_barrier(const InnerWork& work) override;
  WorkPtr all_reduce_sparse(const at::Tensor& tensor, Milliseconds timeout) override;

  // Sends and receives at once.
  void exchange(const InnerWork& work, Exchange parts, Over over);
  // Each rank's `sizes` bytes of `all`, of which it has its own, to everyone.
  void share(const InnerWork& work, const at::Tensor& all, const Sizes& sizes, Over over);
  // What `sizes` elements of rank r's `source` are to rank r: reduced into `out`.
  void reduce_parts(const InnerWork& work, const at::Tensor& source, const Sizes& sizes,
                    const at::Tensor& out, ReduceOp op, Over over);
  // Elements that each rank is the one to reduce.
  Sizes shares_of(int64_t count) const;

  const mpi::Comm collectives_, messages_;
  const int tag_limit_, largest_;
  const uint64_t id_;
  std::atomic<uint64_t> message_count_{0};
};

void bind_mpi(pybind11::module_& m);

}  // namespace c10d_ext
