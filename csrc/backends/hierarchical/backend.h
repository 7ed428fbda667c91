#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <string>
#include <vector>

#include "backends/capabilities.h"
#include "backends/hierarchical/hosts.h"
#include "backends/process_group/inner_backend.h"
#include "backends/request.h"
#include "base/python_module.h"
#include "base/task_queue.h"
#include "base/thread_pool.h"

namespace c10d_ext {

// One group of ranks on several hosts: shared memory inside each host, another engine between them.
// A collective is a schedule of requests to backends of some of the ranks (hosts.h), behind the
// schedules before it. CheckedBackend around it is what users have.
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
  TellLosses losses() const override;

  const std::vector<std::vector<int>>& hosts() const {
    return parts_->hosts.ranks();
  }
  const BackendPtr& engine() const {
    return parts_->flat.backend();
  }

 private:
  void start(const InnerWork& work, InnerCollective collective) override;
  WorkPtr all_reduce_sparse(const at::Tensor& tensor, Milliseconds timeout) override;
  WorkPtr start_message(const Message& message) override;

  const std::shared_ptr<const hierarchical::Parts> parts_;
  const std::shared_ptr<TaskQueue> schedules_;
  Capabilities can_;
  // On which works end, and with them callbacks of users run.
  const std::shared_ptr<ThreadPool> ends_ = ThreadPool::make("c10d_ext_hend");
};

void bind_hierarchical(pybind11::module_& m);

}  // namespace c10d_ext
