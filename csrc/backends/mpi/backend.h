#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "backends/mpi/collectives.h"
#include "backends/process_group/inner_backend.h"
#include "backends/request.h"
#include "base/python_module.h"
#include "control/global_ranks.h"

namespace c10d_ext {

// What moves the data of the "mpi" backend: CPU tensors between ranks of one MPI_COMM_WORLD, by an
// MPI library that was opened at run time. CheckedBackend around it is what users have.
//
// MPI moves bytes. Values are reduced here, in the order of ranks, each element on one rank, so
// that all ranks get the same bits, whichever the library, and halves are accumulated in float32.
class MpiBackend final : public InnerBackend {
 public:
  // Collective over the group's ranks: see Communicators::connect().
  static c10::intrusive_ptr<MpiBackend> connect(const c10::intrusive_ptr<c10d::Store>& store,
                                                int rank, int size, Milliseconds timeout,
                                                const std::string& group_name,
                                                const GlobalRanks& global_ranks, int largest);
  MpiBackend(int rank, int size, const std::string& group_name, mpi::CommsPtr comms);
  ~MpiBackend() override;

  const Capabilities& capabilities() const override;
  // What moves the data of mpi::kPublicName.
  const std::string getBackendName() const override {
    return "libmpi";
  }

  void setTimeout(Milliseconds /*timeout*/) override {}  // who decorates it has one
  void abort() override;
  void shutdown() override {}
  TellLosses losses() const override;

  class MpiWork;

 private:
  InnerWork make_work(c10d::OpType type, std::string_view op,
                      std::unique_ptr<ProfilerSpan> span) const override;
  void start(const InnerWork& work, InnerCollective collective) override;
  WorkPtr all_reduce_sparse(const at::Tensor& tensor, Milliseconds timeout) override;
  WorkPtr start_message(const Message& message) override;

  const mpi::CommsPtr comms_;
  std::atomic<uint64_t> message_count_{0};
};

void bind_mpi(pybind11::module_& m);

}  // namespace c10d_ext
