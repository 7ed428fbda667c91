// A c10d backend as a plug-in would bring one: two collectives and messages, through the group's
// store, compiled against torch alone. Whoever waits does the work; there are no futures.

#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace {

using Store = c10::intrusive_ptr<c10d::Store>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Bytes = std::vector<uint8_t>;

Bytes bytes_of(const at::Tensor& t, int64_t offset, int64_t elements) {
  const auto item = static_cast<int64_t>(t.element_size());
  const auto* begin = static_cast<const uint8_t*>(t.const_data_ptr()) + offset * item;
  return Bytes(begin, begin + elements * item);
}

at::Tensor combined(const at::Tensor& a, const at::Tensor& b, c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
      return a + b;
    case c10d::ReduceOp::PRODUCT:
      return a * b;
    case c10d::ReduceOp::MIN:
      return at::minimum(a, b);
    case c10d::ReduceOp::MAX:
      return at::maximum(a, b);
    default:
      TORCH_CHECK(false, "store: no such reduce op");
  }
}

// Other backends' threads may need the GIL before they let a call in.
void check_gil_is_free() {
  TORCH_CHECK(!PyGILState_Check(), "store: must be called without the GIL, got it held");
}

class LazyWork : public c10d::Work {
 public:
  LazyWork(int rank, c10d::OpType type, std::function<void()> finish)
      : c10d::Work(rank, type), finish_(std::move(finish)) {}

  bool isCompleted() override {
    const std::lock_guard lock(mutex_);
    return finish_ == nullptr;
  }
  bool isSuccess() const override {
    return true;
  }
  bool wait(std::chrono::milliseconds) override {
    check_gil_is_free();
    const std::lock_guard lock(mutex_);
    if (finish_) {
      finish_();
      finish_ = nullptr;
    }
    return true;
  }
  void synchronize() override {
    wait(kNoTimeout);
  }

 private:
  std::mutex mutex_;
  std::function<void()> finish_;
};

class StoreBackend : public c10d::Backend {
 public:
  StoreBackend(Store store, int rank, int size, bool splits)
      : c10d::Backend(rank, size), store_(std::move(store)), splits_(splits) {}

  bool supportsSplitting() const override {
    return splits_;
  }
  bool supportsShrinking() const override {
    return splits_;
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>("store");
  }
  c10::intrusive_ptr<Backend> split(const Store&, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& opts) override {
    return part("split/" + opts->group_name + "/", ranks);
  }
  c10::intrusive_ptr<Backend> shrink(const std::vector<int64_t>& ranks_to_exclude, int,
                                     const c10::intrusive_ptr<Options>& opts) override {
    std::vector<int> ranks;
    for (int rank = 0; rank < size_; ++rank) {
      if (std::find(ranks_to_exclude.begin(), ranks_to_exclude.end(), rank) ==
          ranks_to_exclude.end()) {
        ranks.push_back(rank);
      }
    }
    return part("shrink/" + opts->group_name + "/", ranks);
  }
  c10::intrusive_ptr<Backend> merge(const Store& store, const c10::intrusive_ptr<Options>& opts,
                                    const int& rank, const int& size) override {
    const auto met = c10::make_intrusive<c10d::PrefixStore>("merge/" + opts->group_name, store);
    return c10::make_intrusive<StoreBackend>(met, rank, size, splits_);
  }

  const std::string getBackendName() const override {
    return "store";
  }

  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) override {
    check_gil_is_free();
    const at::Tensor t = tensors.at(0);
    const auto op = static_cast<c10d::ReduceOp::RedOpType>(opts.reduceOp);
    const std::string key = "reduce/" + std::to_string(reductions_++) + "/";
    store_->set(key + std::to_string(rank_), bytes_of(t, 0, t.numel()));
    return work(c10d::OpType::ALLREDUCE, [this, t, op, key] {
      at::Tensor total;
      for (int rank = 0; rank < size_; ++rank) {
        const Bytes bytes = store_->get(key + std::to_string(rank));
        at::Tensor part = at::empty(t.sizes(), t.options());
        std::memcpy(part.mutable_data_ptr(), bytes.data(), bytes.size());
        total = total.defined() ? combined(total, part, op) : part;
      }
      at::Tensor(t).copy_(total);
    });
  }

  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits,
                        std::vector<int64_t>& in_splits, const c10d::AllToAllOptions&) override {
    check_gil_is_free();
    const std::string key = "exchange/" + std::to_string(exchanges_++) + "/";
    int64_t offset = 0;
    for (int to = 0; to < size_; ++to) {
      const int64_t count = in_splits.empty() ? in.numel() / size_ : in_splits[to];
      store_->set(key + std::to_string(rank_) + ">" + std::to_string(to),
                  bytes_of(in, offset, count));
      offset += count;
    }
    return work(c10d::OpType::ALLTOALL_BASE, [this, out, key] {
      auto* to = static_cast<uint8_t*>(out.mutable_data_ptr());
      for (int from = 0; from < size_; ++from) {
        const Bytes bytes = store_->get(key + std::to_string(from) + ">" + std::to_string(rank_));
        std::memcpy(to, bytes.data(), bytes.size());
        to += bytes.size();
      }
    });
  }

  WorkPtr send(std::vector<at::Tensor>& tensors, int dst, int tag) override {
    check_gil_is_free();
    store_->set(message(rank_, dst, tag, sent_), bytes_of(tensors.at(0), 0, tensors[0].numel()));
    return work(c10d::OpType::SEND, [] {});
  }

  WorkPtr recv(std::vector<at::Tensor>& tensors, int src, int tag) override {
    check_gil_is_free();
    const std::string key = message(src, rank_, tag, received_);
    return work(c10d::OpType::RECV, [this, t = tensors.at(0), key] {
      const Bytes bytes = store_->get(key);
      std::memcpy(t.mutable_data_ptr(), bytes.data(), bytes.size());
    });
  }

 private:
  c10::intrusive_ptr<Backend> part(const std::string& prefix, const std::vector<int>& ranks) {
    const auto self = std::find(ranks.begin(), ranks.end(), rank_);
    if (self == ranks.end()) {
      return {};
    }
    return c10::make_intrusive<StoreBackend>(c10::make_intrusive<c10d::PrefixStore>(prefix, store_),
                                             static_cast<int>(self - ranks.begin()),
                                             static_cast<int>(ranks.size()), splits_);
  }
  WorkPtr work(c10d::OpType type, std::function<void()> finish) {
    return c10::make_intrusive<LazyWork>(rank_, type, std::move(finish));
  }
  std::string message(int from, int to, int tag, std::map<std::string, int>& counts) {
    const std::string key = "message/" + std::to_string(from) + ">" + std::to_string(to) + "/" +
                            std::to_string(tag) + "/";
    return key + std::to_string(counts[key]++);
  }

  const Store store_;
  const bool splits_;
  uint64_t reductions_ = 0;
  uint64_t exchanges_ = 0;
  std::map<std::string, int> sent_, received_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def(
      "create",
      [](const Store& store, int rank, int size, bool splits) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<StoreBackend>(store, rank, size, splits);
      });
}
