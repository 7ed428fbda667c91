#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "work/request_work.h"

namespace c10d_ext {

// All the works of a coalescing block, at least one. It is settled once somebody has found that all
// of them are over.
class CoalescedWork final : public RequestWork {
 public:
  CoalescedWork(std::vector<c10::intrusive_ptr<c10d::Work>> works, int rank)
      : RequestWork(rank, c10d::OpType::COALESCED, own_), works_(std::move(works)) {}

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
    const auto future = own_.future(
        op(),
        [] {
          return c10::make_intrusive<c10::ivalue::Future>(
              c10::ListType::create(c10::TensorType::get()));
        },
        [this] { return c10::IValue(result()); });
    if (!is_subscribed_.exchange(true)) {
      const auto self = c10::intrusive_ptr<CoalescedWork>::reclaim_copy(this);
      const auto remaining = std::make_shared<std::atomic<size_t>>(works_.size());
      for (const auto& work : works_) {
        work->getFuture()->addCallback([self, remaining](c10::ivalue::Future& /*one*/) {
          if (remaining->fetch_sub(1) == 1) {
            self->settle();
          }
        });
      }
    }
    return future;
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

 protected:
  bool poll() override {
    const bool over =
        std::all_of(works_.begin(), works_.end(), [](auto& w) { return w->isCompleted(); });
    if (over) {
      settle();
    }
    return over;
  }
  void await(std::chrono::milliseconds timeout) override {
    for (const auto& work : works_) {
      work->wait(timeout);
    }
    settle();
  }
  std::string_view op() const override {
    return "coalescing";
  }

 private:
  void settle() {
    if (own_.claim()) {
      own_.settle(exception(), op(), [this] { return c10::IValue(result()); });
    }
  }

  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  std::atomic<bool> is_subscribed_{false};
  WorkState own_;
};

}  // namespace c10d_ext
