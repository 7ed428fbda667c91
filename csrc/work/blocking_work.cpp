#include "work/blocking_work.h"

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>

#include "base/thread_pool.h"
#include "base/wait_timer.h"
#include "control/process.h"
#include "work/request_work.h"

namespace c10d_ext {

namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

using Waiters = std::shared_ptr<ThreadPool>;

Waiters* make_waiters() {
  return new Waiters(ThreadPool::make("c10d_ext_waits"));
}

// The threads that wait where no caller does. Never destroyed: they outlive static objects.
Waiters*& waiters() {
  static auto* now = [] {
    const ForkGuard guard;
    at_fork_in_child([] { waiters() = make_waiters(); });  // its threads are not there
    return make_waiters();
  }();
  return now;
}

class BlockingWorkAdapter final : public SignalledWork {
 public:
  BlockingWorkAdapter(WorkPtr inner, std::optional<OnWait> on_wait)
      : SignalledWork(-1, inner->retrieveOpType(), "message"),
        inner_(std::move(inner)),
        on_wait_(std::move(on_wait)) {}

  ~BlockingWorkAdapter() override {
    if (inner_ != nullptr) {
      wait_aside(inner_);  // nobody holds this, and so nobody waits
    }
  }

  void abort() override {
    if (const auto inner = running()) {
      inner->abort();
    }
  }

  uint64_t getSequencenumber() const override {
    const auto inner = running();
    return inner ? inner->getSequencenumber() : 0;
  }

 protected:
  void await(std::chrono::milliseconds timeout) override {
    // gloo would close the connection at the end of its own timeout, and knows no Ctrl-C; the
    // taker's wait ends by the backend's own timeout.
    const WaitTimer timer(timed_backend());
    if (timeout <= kNoTimeout && !state_.settled()) {
      check_at_home();
      if ((!on_wait_ || on_wait_->help()) && take()) {
        run(/*throws=*/!on_wait_);
      }
    }
    SignalledWork::await(timeout);
  }

  void listen() override {
    if (take()) {
      const auto self = c10::intrusive_ptr<BlockingWorkAdapter>::reclaim_copy(this);
      if (!(*waiters())->try_run([self] { self->run(/*throws=*/false); })) {
        taken_ = false;  // who waits can
        TORCH_CHECK_WITH(DistBackendError, false, op(),
                         ": a work that is asked whether it is over needs a thread that waits for ",
                         "it, got none (as many as the system allows are running)");
      }
    }
  }

  std::string_view timed_backend() const override {
    return on_wait_ ? on_wait_->backend : std::string_view();
  }
  std::exception_ptr late(std::chrono::milliseconds timeout) override {
    return on_wait_ ? on_wait_->late(timeout) : SignalledWork::late(timeout);
  }
  std::exception_ptr foreign() const override {
    const auto error = SignalledWork::foreign();
    return on_wait_ ? on_wait_->failed(error) : error;
  }

 private:
  WorkPtr running() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return inner_;
  }

  // Whether the caller is the one to wait at the backend.
  bool take() {
    return !taken_.exchange(true);
  }

  // `throws`: what a group written in Python has raised, as it is.
  void run(bool throws) {
    std::exception_ptr error, raised;
    try {
      const bool arrived = inner_->wait(kNoTimeout);
      TORCH_CHECK_WITH(DistBackendError, arrived, "an abort");
      if (retrieveOpType() == c10d::OpType::RECVANYSOURCE) {
        state_.set_source(inner_->sourceRank());
      }
    } catch (const pybind11::error_already_set& e) {
      raised = std::current_exception();
      // Kept as what can be thrown several times: pybind11 ends the process at the second.
      error = std::make_exception_ptr(
          c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, e.what()));
    } catch (...) {
      error = std::current_exception();
      if (on_wait_) {
        error = on_wait_->failed(error);
      }
    }
    WorkPtr inner;  // released without the lock
    {
      std::lock_guard<std::mutex> lock(mutex_);
      inner.swap(inner_);
    }
    inner.reset();
    end(std::move(error));
    if (raised && throws) {
      std::rethrow_exception(raised);
    }
  }

  mutable std::mutex mutex_;
  WorkPtr inner_;  // guarded by mutex_, null once over
  const std::optional<OnWait> on_wait_;
  std::atomic<bool> taken_{false};
};

}  // namespace

void wait_aside(const WorkPtr& work) noexcept {
  try {
    (*waiters())->try_run([work] {
      try {
        work->wait(kNoTimeout);
      } catch (...) {
      }
    });
  } catch (...) {
  }
}

c10::intrusive_ptr<c10d::Work> adapt_blocking_work(c10::intrusive_ptr<c10d::Work> work) {
  return c10::make_intrusive<BlockingWorkAdapter>(std::move(work), std::nullopt);
}

c10::intrusive_ptr<c10d::Work> adapt_blocking_work(c10::intrusive_ptr<c10d::Work> work,
                                                   OnWait on_wait) {
  return c10::make_intrusive<BlockingWorkAdapter>(std::move(work), std::move(on_wait));
}

}  // namespace c10d_ext
