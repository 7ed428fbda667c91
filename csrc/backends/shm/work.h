#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "backends/shm/live_group.h"
#include "backends/shm/operation.h"

namespace c10d_ext {

class ShmWork final : public c10d::Work {
 public:
  using LiveGroup = ShmBackend::LiveGroup;
  using TensorOperation = ShmBackend::TensorOperation;

  ShmWork(std::shared_ptr<LiveGroup> live, std::shared_ptr<TensorOperation> operation, int rank,
          c10d::OpType type)
      : c10d::Work(rank, type), live_(std::move(live)), operation_(std::move(operation)) {}

  bool isCompleted() override {
    return live_->is_done(*operation_);
  }
  bool isSuccess() const override {
    return operation_->settled() && !operation_->error();
  }
  std::exception_ptr exception() const override {
    return operation_->settled() ? operation_->error() : nullptr;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    live_->wait(*operation_, timeout);
    operation_->report();
    return true;
  }
  void synchronize() override {
    wait(kNoTimeout);
  }
  void abort() override {
    live_->engine().abort(c10::str(operation_->op(),
                                   ": the group must be alive, got an abort of "
                                   "this work"));
  }
  int sourceRank() const override {
    const auto type = retrieveOpType();
    const bool receives = type == c10d::OpType::RECV || type == c10d::OpType::RECVANYSOURCE;
    return receives ? operation_->source() : c10d::Work::sourceRank();  // which refuses
  }
  std::vector<at::Tensor> result() override {
    return operation_->outputs();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return live_->future(*operation_);
  }
  TensorOperation& operation() const {
    return *operation_;
  }
  uint64_t getSequencenumber() const override {
    return operation_->number();
  }
  float getDuration() const override {
    TORCH_CHECK(operation_->settled(), operation_->op(),
                ": getDuration must be asked once the work is complete, got one in flight");
    return operation_->milliseconds();
  }

 private:
  const std::shared_ptr<LiveGroup> live_;
  const std::shared_ptr<TensorOperation> operation_;
};

}  // namespace c10d_ext
