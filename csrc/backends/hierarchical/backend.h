#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "backends/backend.h"
#include "backends/capabilities.h"
#include "backends/request.h"
#include "base/group.h"
#include "base/reduction.h"

// torch names _allgather_base and its kin deprecated while they are what a Backend overrides.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace c10d_ext {

// One group of ranks on several hosts: shared memory inside each host, another engine between them.
// A collective is a schedule of requests to backends of some of the ranks:
//
//   local    the ranks of this host, over shared memory,
//   rail     one rank of each host: where all hosts have as many ranks, those of the same place in
//            their hosts, else the first ones alone (the leaders),
//   flat     all ranks, for what has another size between each two.
//
// It has the methods that lowering needs and checks nothing; CheckedBackend around it is what users
// have. Every element is reduced on one rank or in the same way on all, so that all ranks get the
// same bits.
class HierarchicalBackend final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using Tensors = std::vector<at::Tensor>;

  // `hosts`: the group's ranks of each host. `local`: null on a host with one rank; `rail`: null on
  // ranks that are in none. `title`: what it is in profilers and reports.
  HierarchicalBackend(int rank, int size, const std::string& group_name,
                      std::vector<std::vector<int>> hosts, BackendPtr local, BackendPtr rail,
                      BackendPtr flat, std::string title);
  ~HierarchicalBackend() override;

  // The row of the table of capabilities.
  const std::string getBackendName() const override {
    return "hierarchical";
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

  void setTimeout(std::chrono::milliseconds timeout) override;
  void abort() override;
  void shutdown() override;

  const std::vector<std::vector<int>>& hosts() const {
    return hosts_;
  }
  const std::string& title() const {
    return title_;
  }
  const BackendPtr& engine() const {
    return flat_.backend;
  }

 private:
  class Thread;
  // A backend of some of the ranks, and this rank's place there.
  struct Part {
    BackendPtr backend;
    Capabilities can;

    explicit Part(BackendPtr of);
    bool is_there() const {
      return backend != nullptr;
    }
  };
  // Something that was begun, and waits.
  class Step {
   public:
    Step() = default;
    explicit Step(struct Started started);
    void wait();

   private:
    WorkPtr work_;
    std::function<void()> finish_;
  };

  WorkPtr schedule(c10d::OpType type, const at::Tensor& input, std::function<void()> steps);
  Step start(const Part& part, const CollectiveRequest& request) const;

  bool is_leader() const {
    return place_in_host_ == 0;
  }
  int host_of(int rank) const {
    return host_of_[static_cast<size_t>(rank)];
  }
  int ranks_here() const {
    return static_cast<int>(hosts_[static_cast<size_t>(host_)].size());
  }
  // Rows of `t`, one for each rank, in the order of hosts, or of places in hosts and then hosts.
  std::vector<int64_t> order_by_host() const;
  std::vector<int64_t> order_by_place() const;

  void all_reduce_over_rails(const at::Tensor& t, const Reduction& reduction);
  void all_reduce_by_leaders(const at::Tensor& t, const Reduction& reduction);

  const Group group_;
  const std::vector<std::vector<int>> hosts_;
  std::vector<int> host_of_, place_of_;
  int host_ = 0, place_in_host_ = 0;
  bool is_even_ = true;  // all hosts have as many ranks
  const Part local_, rail_, flat_;
  const std::string title_;
  const std::shared_ptr<Thread> thread_;
};

void bind_hierarchical(pybind11::module_& m);

}  // namespace c10d_ext
