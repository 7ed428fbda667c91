#pragma once

#include <chrono>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "backends/shm/live_group.h"
#include "backends/shm/operation.h"
#include "work/request_work.h"

namespace c10d_ext {

// An operation of a group's engine, which whoever waits for it may drive.
class ShmWork final : public RequestWork {
 public:
  using LiveGroup = ShmBackend::LiveGroup;
  using TensorOperation = ShmBackend::TensorOperation;

  ShmWork(std::shared_ptr<LiveGroup> live, std::shared_ptr<TensorOperation> operation, int rank,
          c10d::OpType type)
      : RequestWork(rank, type, operation->state()),
        live_(std::move(live)),
        operation_(std::move(operation)) {}

  void abort() override {
    live_->engine().abort(c10::str(op(), ": the group must be alive, got an abort of this work"));
  }
  std::vector<at::Tensor> result() override {
    return operation_->outputs();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return live_->future(*operation_);
  }
  uint64_t getSequencenumber() const override {
    return operation_->number();
  }
  TensorOperation& operation() const {
    return *operation_;
  }

 protected:
  bool poll() override {
    return live_->is_done(*operation_);
  }
  void await(std::chrono::milliseconds timeout) override {
    live_->wait(*operation_, timeout);
  }
  std::string_view op() const override {
    return operation_->op();
  }

 private:
  const std::shared_ptr<LiveGroup> live_;
  const std::shared_ptr<TensorOperation> operation_;
};

}  // namespace c10d_ext
