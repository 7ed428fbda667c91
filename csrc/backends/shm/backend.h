#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "backends/process_group/request_backend.h"
#include "backends/request.h"
#include "backends/shm/engine.h"
#include "base/dtype.h"
#include "base/group.h"
#include "base/python_module.h"
#include "base/reduction.h"
#include "base/types.h"
#include "work/work_info.h"

namespace c10d_ext {

struct KnownGroup;

// The "shm" backend: CPU tensors, ranks on one machine.
//
// A request, whether of an op or of one of c10d's methods, becomes a TensorOperation
// (operation_builder.cpp), the engine's operation with the tensors it reads and writes, which is
// submitted and delivered (requests.cpp). Every dtype, stride, size and reduce op with a meaning is
// native here.
class ShmBackend final : public RequestBackend {
 public:
  static constexpr char kPublicName[] = "shm";

  struct Settings {
    size_t arena = 0;         // bytes of shared memory per rank
    bool call_sites = false;  // the ranks must call a collective from one line
    std::string build;        // the same on all ranks
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
  WorkPtr post_message(const Message& message, const at::Tensor& wire, Start start) override;

  // --- c10d::Backend ----------------------------------------------------------------------------

  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  // One work for everything since startCoalescing, null when that was nothing.
  WorkPtr endCoalescing() override;

  uint64_t getSequenceNumberForGroup() override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  class LiveGroup;
  class OperationBuilder;
  class OperationTensors;
  class TensorOperation;
  using OperationPtr = std::shared_ptr<TensorOperation>;
  // How a call is delivered and what it is called.
  struct Call;

  ShmBackend(int rank, int size, const Options& options, const Settings& settings,
             c10::intrusive_ptr<c10d::Store> store, GlobalRanks global_ranks,
             std::shared_ptr<LiveGroup> live);

 private:
  // From a call to the operation that launch() starts and delivers.
  OperationBuilder builder() const;
  WorkPtr launch(const Call& call, OperationPtr operation);

  WorkPtr run(const MethodCall& call, const CollectiveRequest& request) override;
  WorkPtr run(const MethodCall& call, const Message& message) override;
  // Null: complete already, which `call.done` tells of. Otherwise the work is in flight and holds
  // the tensors. A failure that shows at once is thrown. `sources`: the request's, as they are
  // read.
  WorkPtr start(const Call& call, const CollectiveRequest& request, at::TensorList sources);

  c10::intrusive_ptr<Backend> make_backend(std::string_view op,
                                           const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                           int size, Milliseconds timeout, const std::string& name,
                                           const GlobalRanks& global_ranks) const override;

  const Settings settings_;
  const std::shared_ptr<LiveGroup> live_;
  const std::shared_ptr<const KnownGroup> known_group_;

  // Between startCoalescing and endCoalescing: what has been called, not yet submitted.
  std::vector<OperationPtr> batch_;
};

void bind_shm(pybind11::module_& m);

}  // namespace c10d_ext
