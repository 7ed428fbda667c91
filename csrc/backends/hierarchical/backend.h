#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backends/capabilities.h"
#include "backends/process_group/inner_backend.h"
#include "backends/request.h"
#include "base/python_module.h"
#include "base/reduction.h"
#include "base/task_queue.h"
#include "base/thread_pool.h"

namespace c10d_ext {

// One group of ranks on several hosts: shared memory inside each host, another engine between them.
// A collective is a schedule of requests to backends of some of the ranks:
//
//   local    the ranks of this host, over shared memory,
//   rail     one rank of each host: where all hosts have as many ranks, those of the same place in
//            their hosts, else the first ones alone (the leaders),
//   flat     all ranks, for what has another size between each two.
//
// CheckedBackend around it is what users have. Every element is reduced on one rank or in the same
// way on all, so that all ranks get the same bits.
class HierarchicalBackend final : public InnerBackend {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

  // `hosts`: the group's ranks of each host. `local`: null on a host with one rank; `rail`: null on
  // ranks that are in none. `title`: what it is in profilers and reports.
  HierarchicalBackend(int rank, int size, const std::string& group_name,
                      std::vector<std::vector<int>> hosts, BackendPtr local, BackendPtr rail,
                      BackendPtr flat, std::string title);
  ~HierarchicalBackend() override;

  const Capabilities& capabilities() const override;
  const std::string getBackendName() const override {
    return "hierarchical";
  }

  void setTimeout(Milliseconds timeout) override;
  void abort() override;
  void shutdown() override;

  const std::vector<std::vector<int>>& hosts() const {
    return hosts_;
  }
  const BackendPtr& engine() const {
    return flat_.backend;
  }

 private:
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

  // Runs `steps`, which wait for each other, behind the schedules before it.
  void schedule(const InnerWork& work, std::function<void()> steps);
  Step start(const Part& part, const CollectiveRequest& request) const;

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
  WorkPtr start_message(const Message& message) override;

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
  Sizes order_by_host() const;
  Sizes order_by_place() const;

  void all_reduce_over_rails(const at::Tensor& t, const Reduction& reduction);
  void all_reduce_by_leaders(const at::Tensor& t, const Reduction& reduction);

  const std::vector<std::vector<int>> hosts_;
  std::vector<int> host_of_, place_of_;
  int host_ = 0, place_in_host_ = 0;
  bool is_even_ = true;  // all hosts have as many ranks
  const Part local_, rail_, flat_;
  const std::shared_ptr<TaskQueue> schedules_;
  // On which works end, and with them callbacks of users run.
  const std::shared_ptr<ThreadPool> ends_ = ThreadPool::make("c10d_ext_hend");
};

void bind_hierarchical(pybind11::module_& m);

}  // namespace c10d_ext
