#include "work/blocking_work.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "base/gil.h"
#include "base/timeouts.h"
#include "base/wait_timer.h"
#include "control/process.h"

namespace c10d_ext {

namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class BlockingWorkAdapter final : public c10d::Work {
 public:
  BlockingWorkAdapter(WorkPtr inner, std::optional<Explanations> explanations)
      : c10d::Work(-1, inner->retrieveOpType()),
        inner_(std::move(inner)),
        explanations_(std::move(explanations)) {}

  ~BlockingWorkAdapter() override {
    if (inner_ == nullptr) {
      return;
    }
    // Nobody waits, and so nobody holds this: but the peer counts on the message.
    try {
      std::thread([inner = std::move(inner_)] {
        try {
          inner->wait(kNoTimeout);
        } catch (...) {
        }
      }).detach();
    } catch (...) {
    }
  }

  bool isCompleted() override {
    check_at_home();
    listen();
    std::lock_guard<std::mutex> lock(mutex_);
    return inner_ == nullptr;
  }

  bool isSuccess() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return inner_ == nullptr && !error_;
  }

  std::exception_ptr exception() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return error_;
  }

  bool wait(std::chrono::milliseconds timeout) override {
    using Clock = std::chrono::steady_clock;
    check_at_home();
    const WaitTimer timer(explanations_ ? explanations_->backend : std::string_view());
    const bool limited = timeout != kNoTimeout;
    const auto until = limited ? Clock::now() + bounded(timeout) : Clock::time_point::max();
    if (limited || explanations_) {
      // gloo would close the connection at the end of its own timeout, and knows no Ctrl-C.
      listen();
    } else if (take()) {
      run(/*throws=*/true);
    }
    std::unique_lock<std::mutex> lock(mutex_);
    // The taker's wait ends by the backend's own timeout.
    if (!wait_interruptibly(over_, lock, until, [this] { return inner_ == nullptr; })) {
      if (explanations_) {
        lock.unlock();
        std::rethrow_exception(explanations_->late(timeout));
      }
      C10_THROW_ERROR(DistBackendError, c10::str("no end after ", timeout.count(), " ms"));
    }
    if (error_) {
      std::rethrow_exception(error_);
    }
    return true;
  }

  void synchronize() override {
    wait(kNoTimeout);
  }

  void abort() override {
    WorkPtr inner;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      inner = inner_;
    }
    if (inner) {
      inner->abort();
    }
  }

  int sourceRank() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return source_rank_;
  }

  uint64_t getSequencenumber() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return inner_ ? inner_->getSequencenumber() : 0;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    bool is_over = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_over = inner_ == nullptr;
      if (!future_) {
        future_ = c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get());
      }
    }
    is_over ? settle() : listen();
    return future_;
  }

 private:
  // A fork has neither the thread that waits nor its connections.
  void check_at_home() const {
    if (fork_generation() != generation_) {
      const auto error = std::make_exception_ptr(
          c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                                "a message of the process this one was forked from"));
      std::rethrow_exception(explanations_ ? explanations_->failed(error) : error);
    }
  }

  // Whether the caller is the one to wait at the backend.
  bool take() {
    std::lock_guard<std::mutex> lock(mutex_);
    return !std::exchange(taken_, true);
  }

  void listen() {
    if (take()) {
      const auto self = c10::intrusive_ptr<BlockingWorkAdapter>::reclaim_copy(this);
      std::thread([self] { self->run(/*throws=*/false); }).detach();
    }
  }

  // `throws`: what a group written in Python has raised, as it is.
  void run(bool throws) {
    std::exception_ptr error, raised;
    int source = -1;
    try {
      const bool arrived = inner_->wait(kNoTimeout);
      TORCH_CHECK_WITH(DistBackendError, arrived, "an abort");
      if (inner_->retrieveOpType() == c10d::OpType::RECVANYSOURCE) {
        source = inner_->sourceRank();
      }
    } catch (const pybind11::error_already_set& e) {
      raised = std::current_exception();
      // Kept as what can be thrown several times: pybind11 ends the process at the second.
      error = std::make_exception_ptr(
          c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, e.what()));
    } catch (...) {
      error = std::current_exception();
      if (explanations_) {
        error = explanations_->failed(error);
      }
    }
    WorkPtr inner;  // released without the lock
    c10::intrusive_ptr<c10::ivalue::Future> future;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      inner.swap(inner_);
      error_ = error;
      source_rank_ = source;
      future = future_;
    }
    over_.notify_all();
    if (future) {
      settle();
    }
    if (raised && throws) {
      std::rethrow_exception(raised);
    }
  }

  // Once over. A callback may ask for the future again.
  void settle() {
    if (settled_.exchange(true)) {
      return;
    }
    if (error_) {
      future_->setErrorIfNeeded(error_);
    } else {
      future_->markCompleted(c10::IValue());
    }
  }

  mutable std::mutex mutex_;
  std::condition_variable over_;
  WorkPtr inner_;  // null once over
  const std::optional<Explanations> explanations_;
  const uint64_t generation_ = fork_generation();
  bool taken_ = false;
  std::exception_ptr error_;
  int source_rank_ = -1;
  std::atomic<bool> settled_{false};
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace

c10::intrusive_ptr<c10d::Work> adapt_blocking_work(c10::intrusive_ptr<c10d::Work> work) {
  return c10::make_intrusive<BlockingWorkAdapter>(std::move(work), std::nullopt);
}

c10::intrusive_ptr<c10d::Work> adapt_blocking_work(c10::intrusive_ptr<c10d::Work> work,
                                                   Explanations explanations) {
  return c10::make_intrusive<BlockingWorkAdapter>(std::move(work), std::move(explanations));
}

}  // namespace c10d_ext
