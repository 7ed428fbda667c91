#include "core/pending.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#ifdef C10D_EXT_WITH_CUDA
#include <c10/cuda/CUDAGraphsC10Utils.h>
#endif

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace c10d_ext {

namespace {

class PendingWork;
using PendingWorkPtr = c10::intrusive_ptr<PendingWork>;

// storage -> the works that write it. Entries are strong: a work holds its outputs, so the key
// cannot be reused while the entry stands.
class Registry {
 public:
  void add(const c10::StorageImpl* storage, const PendingWorkPtr& work);
  void remove(const c10::StorageImpl* storage, const PendingWork* work);
  std::vector<PendingWorkPtr> find(const c10::StorageImpl* storage) const;
  bool contains(const c10::StorageImpl* storage) const;
  size_t size() const;

  // Never destroyed: backend threads may still complete works while the process exits.
  static Registry& get() {
    static Registry* instance = new Registry;
    return *instance;
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, std::vector<PendingWorkPtr>> works_;
};

const c10::StorageImpl* storage_of(const at::Tensor& t) {
  return t.defined() && t.has_storage() ? t.storage().unsafeGetStorageImpl() : nullptr;
}

// A backend's work, plus what this rank still has to do when it completes.
class PendingWork : public c10d::Work {
 public:
  PendingWork(std::string_view op, const Group& group, at::TensorList outputs,
              c10::intrusive_ptr<c10d::Work> inner, Finish finish)
      : c10d::Work(static_cast<int>(group.rank()), inner->retrieveOpType()),
        op_(op),
        group_name_(group.name()),
        rank_in_group_(group.rank()),
        group_size_(group.size()),
        outputs_(outputs.vec()),
        inner_(std::move(inner)),
        finish_(std::move(finish)),
        cpu_(outputs.empty() || outputs.front().is_cpu()) {}

  void enlist(bool has_future) {
    const auto self = PendingWorkPtr::reclaim_copy(this);
    for (const auto& output : outputs_) {
      Registry::get().add(storage_of(output), self);
      c10d::register_work(output, self);
    }
    if (has_future) {
      // The future holds the callback, the callback this work, and this work the backend's:
      // complete() breaks the circle.
      inner_->getFuture()->addCallback([self](c10::ivalue::Future& future) {
        self->complete(future.hasError() ? future.exception_ptr() : nullptr);
      });
    }
  }

  bool isCompleted() override {
    const auto inner = running();
    if (inner == nullptr) {
      return true;
    }
    if (!inner->isCompleted()) {
      return false;
    }
    if (cpu_) {
      complete(inner->exception());
    }
    return true;
  }

  bool isSuccess() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return inner_ == nullptr ? error_ == nullptr : inner_->isSuccess();
  }

  std::exception_ptr exception() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return inner_ == nullptr ? error_ : inner_->exception();
  }

  // c10d calls this after it took the work out of its own table.
  bool wait(std::chrono::milliseconds timeout) override {
    listed_ = false;
    return wait_here(timeout);
  }

  bool wait_here(std::chrono::milliseconds timeout = kNoTimeout) {
    if (const auto inner = running()) {
      std::exception_ptr error;
      try {
        inner->wait(timeout);
      } catch (...) {
        error = std::current_exception();
        // A wait that ran out of patience leaves the collective in flight.
        if (cpu_ && !inner->isCompleted()) {
          std::rethrow_exception(described(error));
        }
      }
      complete(error);
    }
    report();
    return true;
  }

  void synchronize() override {
    wait_here();
  }

  void abort() override {
    if (const auto inner = running()) {
      inner->abort();
    }
  }

  std::vector<at::Tensor> result() override {
    std::lock_guard<std::mutex> lock(mutex_);
    return outputs_;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!future_) {
      std::vector<c10::Device> devices;
      if (!cpu_) {
        devices.push_back(outputs_.front().device());
      }
      future_ = c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()), devices);
      if (inner_ == nullptr) {
        const auto future = future_;
        lock.unlock();
        settle(future);
        return future;
      }
    }
    return future_;
  }

  uint64_t getSequencenumber() const override {
    const auto inner = running();
    return inner ? inner->getSequencenumber() : sequence_number_.load();
  }

  float getDuration() const override {
    const auto inner = running();
    TORCH_CHECK(inner, op_, ": getDuration must be asked before the work is waited for");
    return inner->getDuration();
  }

  void note_sequence_number() {
    sequence_number_ = inner_->getSequencenumber();
  }

  bool is_listed() const {
    return listed_;
  }
  bool is_cpu() const {
    return cpu_;
  }
  bool is_done() const {
    return running() == nullptr;
  }
  bool has_unreported_error() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return error_ != nullptr && !reported_;
  }

 private:
  c10::intrusive_ptr<c10d::Work> running() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return inner_;
  }

  // Raises the error of a failed collective; whoever waits next finds nothing to wait for.
  void report() {
    std::exception_ptr error;
    std::vector<at::Tensor> outputs;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      error = error_;
      if (error && !reported_) {
        reported_ = true;
        outputs = outputs_;
      }
    }
    for (const auto& output : outputs) {
      Registry::get().remove(storage_of(output), this);
    }
    if (error) {
      std::rethrow_exception(error);
    }
  }

  // Called when the backend's work is over, from whichever thread notices first.
  void complete(std::exception_ptr error) {
    // Destroyed last, without the lock: freeing a tensor may need the GIL, whose holder may be
    // waiting for the lock.
    Finish finish;
    std::unique_lock<std::mutex> lock(finish_mutex_);
    if (is_done()) {
      return;
    }
    finish.swap(finish_);
    if (!error && finish) {
      try {
        at::AutoDispatchBelowADInplaceOrView below_autograd;
        finish();
      } catch (...) {
        error = std::current_exception();
      }
    }
    c10::intrusive_ptr<c10d::Work> inner;
    c10::intrusive_ptr<c10::ivalue::Future> future;
    std::vector<at::Tensor> outputs;
    {
      std::lock_guard<std::mutex> state(mutex_);
      inner.swap(inner_);
      error_ = error ? described(error) : nullptr;
      future = future_;
      if (!error_) {
        // Kept on failure, so that the storages stay known as the ones that never got their data.
        outputs = outputs_;
        if (!future_) {
          outputs_.clear();
        }
      }
    }
    lock.unlock();
    for (const auto& output : outputs) {
      Registry::get().remove(storage_of(output), this);
    }
    if (future) {
      settle(future);
    }
  }

  void settle(const c10::intrusive_ptr<c10::ivalue::Future>& future) {
    std::exception_ptr error;
    std::vector<at::Tensor> outputs;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      error = error_;
      outputs = outputs_;
    }
    if (error) {
      future->setErrorIfNeeded(error);
    } else if (!future->completed()) {
      future->markCompleted(c10::IValue(outputs));
    }
  }

  // The backend's error with the op, rank and group it happened to.
  std::exception_ptr described(const std::exception_ptr& error) const {
    try {
      std::rethrow_exception(error);
    } catch (const c10::DistBackendError& e) {
      return std::make_exception_ptr(c10::DistBackendError(
          {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text(e.what_without_backtrace())));
    } catch (const c10::Error& e) {
      return std::make_exception_ptr(c10::Error(
          {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text(e.what_without_backtrace())));
    } catch (const std::exception& e) {
      return std::make_exception_ptr(c10::DistBackendError(
          {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text(e.what())));
    } catch (...) {
      return error;
    }
  }

  std::string text(const char* cause) const {
    const std::string prefix = std::string(op_) + ": the collective must complete, got ";
    return std::string_view(cause).substr(0, prefix.size()) == prefix
               ? std::string(cause)
               : c10::str(prefix, cause, " ", where(rank_in_group_, group_size_, group_name_));
  }

  const std::string_view op_;  // the ops' names are literals
  // Formatted into a text only when something fails.
  const std::string group_name_;
  const int64_t rank_in_group_;
  const int64_t group_size_;
  // Guarded by mutex_: outputs_, inner_ (null once done), error_, reported_, future_.
  mutable std::mutex mutex_;
  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10d::Work> inner_;
  std::exception_ptr error_;
  bool reported_ = false;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  // Held while finish_ runs: whoever comes second returns only after it has.
  std::mutex finish_mutex_;
  Finish finish_;
  const bool cpu_;
  std::atomic<bool> listed_{true};
  std::atomic<uint64_t> sequence_number_{0};
};

void Registry::add(const c10::StorageImpl* storage, const PendingWorkPtr& work) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& works = works_[storage];
  if (std::find(works.begin(), works.end(), work) == works.end()) {
    works.push_back(work);
  }
}

void Registry::remove(const c10::StorageImpl* storage, const PendingWork* work) {
  PendingWorkPtr last;  // released outside the lock: its destructor may free tensors
  std::lock_guard<std::mutex> lock(mutex_);
  const auto entry = works_.find(storage);
  if (entry == works_.end()) {
    return;
  }
  auto& works = entry->second;
  const auto found =
      std::find_if(works.begin(), works.end(), [&](const auto& w) { return w.get() == work; });
  if (found != works.end()) {
    last = std::move(*found);
    works.erase(found);
  }
  if (works.empty()) {
    works_.erase(entry);
  }
}

std::vector<PendingWorkPtr> Registry::find(const c10::StorageImpl* storage) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto entry = works_.find(storage);
  return entry == works_.end() ? std::vector<PendingWorkPtr>() : entry->second;
}

bool Registry::contains(const c10::StorageImpl* storage) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return works_.find(storage) != works_.end();
}

size_t Registry::size() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return works_.size();
}

bool may_query_device() {
#ifdef C10D_EXT_WITH_CUDA
  // Asking an event for its state would invalidate a CUDA graph under capture.
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None;
#else
  return false;
#endif
}

// The works this thread started: c10d's table is per thread, so only this thread can clear its own.
class StartedHere {
 public:
  void add(PendingWorkPtr work) {
    if (works_.size() >= limit_) {
      sweep();
    }
    works_.push_back(std::move(work));
  }

  bool empty() const {
    return works_.empty();
  }

  void sweep() {
    const bool ask_device =
        std::any_of(works_.begin(), works_.end(), [](const auto& w) { return !w->is_cpu(); }) &&
        may_query_device();
    const auto over = [&](const PendingWorkPtr& work) {
      if (!work->is_done() && (work->is_cpu() || ask_device) && work->isCompleted() &&
          !work->is_cpu()) {
        work->wait_here();
      }
      if (!work->is_done() || work->has_unreported_error()) {
        return false;
      }
      if (work->is_listed()) {
        c10d::unregister_work(work);
      }
      return true;
    };
    works_.erase(std::remove_if(works_.begin(), works_.end(), over), works_.end());
    limit_ = std::max<size_t>(kSweepAt, 2 * works_.size());
  }

 private:
  static constexpr size_t kSweepAt = 64;
  size_t limit_ = kSweepAt;
  std::vector<PendingWorkPtr> works_;
};

StartedHere& started_here() {
  // Leaked on thread exit by design: destroying works there could run backend code too late.
  static thread_local StartedHere* instance = new StartedHere;
  return *instance;
}

}  // namespace

void attach(std::string_view op, const Group& group, at::TensorList outputs,
            const c10::intrusive_ptr<c10d::Work>& work, Finish finish, bool has_future) {
  const bool cpu = outputs.empty() || outputs.front().is_cpu();
  if (!work || (cpu && work->isCompleted() && work->isSuccess())) {
    if (finish) {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      finish();
    }
    return;
  }
  auto pending = c10::make_intrusive<PendingWork>(op, group, outputs, work, std::move(finish));
  if (has_future) {
    pending->note_sequence_number();
  }
  pending->enlist(has_future && cpu);
  started_here().add(std::move(pending));
}

void wait(const at::Tensor& t) {
  const auto* storage = storage_of(t);
  if (storage == nullptr) {
    return;
  }
  const auto works = Registry::get().find(storage);
  // Takes this thread's entries out of c10d's table and waits for works that torch put there.
  c10d::wait_tensor(t);
  for (const auto& work : works) {
    work->wait_here();
  }
}

bool is_pending(const at::Tensor& t) {
  const auto* storage = storage_of(t);
  if (storage == nullptr) {
    return false;
  }
  if (Registry::get().contains(storage)) {
    return true;
  }
  if (!started_here().empty()) {
    c10d::wait_tensor(t);  // does not block: the work, if there was one, is complete
  }
  return false;
}

void sweep() {
  started_here().sweep();
}

c10::intrusive_ptr<c10d::Work> work_of(const at::Tensor& t) {
  const auto* storage = storage_of(t);
  if (storage == nullptr) {
    return {};
  }
  const auto works = Registry::get().find(storage);
  if (works.empty()) {
    return {};
  }
  return works.back();
}

size_t pending_count() {
  return Registry::get().size();
}

}  // namespace c10d_ext
