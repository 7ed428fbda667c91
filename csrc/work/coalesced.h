#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace c10d_ext {

// All the works of a coalescing block, at least one.
class CoalescedWork final : public c10d::Work {
 public:
  CoalescedWork(std::vector<c10::intrusive_ptr<c10d::Work>> works, int rank)
      : c10d::Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](auto& w) { return w->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(), [](auto& w) { return w->isSuccess(); });
  }
  std::exception_ptr exception() const override {
    for (const auto& work : works_) {
      if (auto error = work->exception()) {
        return error;
      }
    }
    return nullptr;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    for (const auto& work : works_) {
      work->wait(timeout);
    }
    return true;
  }
  void synchronize() override {
    wait(kNoTimeout);
  }
  void abort() override {
    works_.front()->abort();
  }
  std::vector<at::Tensor> result() override {
    std::vector<at::Tensor> all;
    for (const auto& work : works_) {
      const std::vector<at::Tensor> some = work->result();
      all.insert(all.end(), some.begin(), some.end());
    }
    return all;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::lock_guard lock(mutex_);
    if (!future_) {
      future_ =
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
      const auto remaining = std::make_shared<std::atomic<size_t>>(works_.size());
      for (const auto& work : works_) {
        work->getFuture()->addCallback(
            [remaining, all = future_, tensors = result()](c10::ivalue::Future& one) {
              if (one.hasError()) {
                all->setErrorIfNeeded(one.exception_ptr());
              }
              if (remaining->fetch_sub(1) == 1 && !all->completed()) {
                all->markCompleted(c10::IValue(tensors));
              }
            });
      }
    }
    return future_;
  }
  uint64_t getSequencenumber() const override {
    return works_.front()->getSequencenumber();
  }
  float getDuration() const override {
    float sum = 0;
    for (const auto& work : works_) {
      sum += work->getDuration();
    }
    return sum;
  }

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // guarded by mutex_
};

}  // namespace c10d_ext
