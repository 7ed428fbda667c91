#pragma once

// The works of ops, and the table that finds them by the storages that they write. For work/*.cpp.

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <exception>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/exceptions.h"
#include "base/gil.h"
#include "base/memory.h"
#include "base/progress_handoff.h"
#include "work/device_completion.h"
#include "work/pending.h"
#include "work/snapshot.h"

namespace c10d_ext {

class PendingWork;
using PendingWorkPtr = c10::intrusive_ptr<PendingWork>;

// storage -> the works that write it. Entries are strong: a work holds its outputs, so the key
// cannot be reused while the entry stands.
class WorkTable {
 public:
  void add(const c10::StorageImpl* storage, const PendingWorkPtr& work);
  void remove(const c10::StorageImpl* storage, const PendingWork* work);
  std::vector<PendingWorkPtr> find(const c10::StorageImpl* storage) const;
  bool contains(const c10::StorageImpl* storage) const;
  bool is_writing(const c10::StorageImpl* storage) const;
  size_t size() const;

  // Never destroyed: backend threads may still complete works while the process exits.
  static WorkTable& get() {
    static WorkTable* instance = new WorkTable;
    return *instance;
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, std::vector<PendingWorkPtr>> works_;
};

inline const c10::StorageImpl* storage_of(const at::Tensor& t) {
  return t.defined() && t.has_storage() ? t.storage().unsafeGetStorageImpl() : nullptr;
}

// Those of groups written in Python may not.
inline bool tells_its_number(Subscribe subscribe) {
  return subscribe != nullptr && subscribe != &subscribe_if_possible;
}

// No backend but our own can tell how long it took.
inline bool is_timed(Subscribe subscribe) {
  return tells_its_number(subscribe) && subscribe != &subscribe_to_future;
}

inline float milliseconds_since(std::chrono::steady_clock::time_point begun) {
  return std::chrono::duration<float, std::milli>(std::chrono::steady_clock::now() - begun).count();
}

constexpr float kNotTimed = std::numeric_limits<float>::quiet_NaN();

// A backend's work, plus what this rank still has to do when it completes.
class PendingWork : public c10d::Work {
 public:
  PendingWork(std::string_view op, const Group& group, at::TensorList outputs,
              c10::intrusive_ptr<c10d::Work> inner, Finish finish, Subscribe subscribe)
      : c10d::Work(static_cast<int>(group.rank()), inner->retrieveOpType()),
        op_(op),
        group_name_(group.name()),
        rank_in_group_(group.rank()),
        group_size_(group.size()),
        outputs_(aliases_of(outputs)),
        inner_(std::move(inner)),
        finish_(std::move(finish)),
        cpu_(outputs.empty() || outputs.front().is_cpu()),
        device_(cpu_ ? c10::Device(c10::kCPU) : outputs.front().device()),
        capture_(cpu_ ? 0 : capture_on(outputs.front().device())),
        subscribe_(cpu_ ? subscribe : nullptr),
        timed_(is_timed(subscribe_)) {
    if (tells_its_number(subscribe_)) {
      note_sequence_number();
    }
  }

  // A message from `source`, a rank of the group, or -1: the backend will know.
  PendingWork(std::string_view op, const Group& group, at::TensorList outputs,
              c10::intrusive_ptr<c10d::Work> inner, Finish finish, int64_t source, bool timed)
      : PendingWork(op, group, outputs, std::move(inner), std::move(finish), nullptr) {
    what_ = "message";
    source_rank_ = source;
    timed_ = timed;
    note_sequence_number();
    ++messages_in_flight;
  }

  // A collective of `op` that was over when its start returned.
  PendingWork(const WorkInfo& facts, at::TensorList outputs)
      : c10d::Work(-1, facts.type),
        op_("work"),
        rank_in_group_(-1),
        group_size_(0),
        outputs_(aliases_of(outputs)),
        cpu_(true),
        subscribe_(nullptr),
        sequence_number_(facts.number),
        milliseconds_(facts.milliseconds) {}

  ~PendingWork() override {
    if (is_message() && inner_ != nullptr) {
      --messages_in_flight;
    }
  }

  // In no table: says itself what it writes. Called before anyone else knows of it.
  void write(const std::vector<at::Tensor>& tensors) {
    writes_ = WritesInFlight(tensors);
  }

  // Times it itself, for a backend that does not. Called before anyone else knows of it.
  void time_as(c10d::OpType type, std::chrono::steady_clock::time_point begun) {
    opType_ = type;
    begun_ = begun;
  }

  static size_t count_messages() {
    return messages_in_flight;
  }

  void enlist() {
    const auto self = PendingWorkPtr::reclaim_copy(this);
    for (const auto& output : outputs_) {
      WorkTable::get().add(storage_of(output), self);
      c10d::register_work(output, self);
    }
    complete_by_itself();
  }

  // Whoever waits or not.
  void complete_by_itself() {
    if (subscribe_ != nullptr) {
      // The backend's work holds the callback, the callback this work, and this work the
      // backend's: complete() breaks the circle.
      const auto self = PendingWorkPtr::reclaim_copy(this);
      const auto inner = inner_;
      subscribed_ = subscribe_(
          *inner, [self](std::exception_ptr error) { self->complete(std::move(error)); });
    }
  }

  // A message, which may be over, and then leaves nothing behind.
  void enlist_message() {
    if (isCompleted() && is_done()) {
      report();
      return;
    }
    const auto self = PendingWorkPtr::reclaim_copy(this);
    const at::Tensor tensor = result().at(0);
    WorkTable::get().add(storage_of(tensor), self);
    c10d::register_work(tensor, self);
    if (cpu_) {
      // What nobody waits for goes by itself. It may be over by now, and then calls at once.
      getFuture();
      subscribed_ = true;
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

  bool wait(std::chrono::milliseconds timeout) override {
    keep_to_capture();
    if (const auto inner = running()) {
      std::exception_ptr error;
      try {
        without_gil([&] { inner->wait(timeout); });
      } catch (const pybind11::error_already_set& e) {
        if (is_interrupt(e)) {
          throw;  // what it waits for goes on, or has just come to its end
        }
        complete(std::current_exception());
        throw;
      } catch (...) {
        error = std::current_exception();
        // A wait that timed out leaves the collective in flight.
        if (cpu_ && !inner->isCompleted()) {
          std::rethrow_exception(described(error));
        }
      }
      complete(error);
    }
    follow_completion();
    report();
    return true;
  }

  // One that was captured into a CUDA graph that this thread is no longer in. Nobody can wait for
  // it, nor ask for it, any more.
  bool is_lost_capture() {
    if (capture_ == 0 || capture_on(device_) == capture_) {
      return false;
    }
    complete(lost_capture());
    return true;
  }

  void synchronize() override {
    wait(kNoTimeout);
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
    TORCH_CHECK_NOT_IMPLEMENTED(
        inner_ == nullptr || subscribe_ == nullptr || subscribed_, op_,
        ": the work of the group's backend must have a future, got one without; use wait() ",
        where(rank_in_group_, group_size_, group_name_));
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
      if (is_message() && cpu_) {
        const auto self = PendingWorkPtr::reclaim_copy(this);
        const auto inner = inner_;
        const auto future = future_;
        lock.unlock();
        subscribe_to_future(*inner,
                            [self](std::exception_ptr error) { self->complete(std::move(error)); });
        return future;
      }
      if (!cpu_) {
        const auto future = future_;
        lock.unlock();
        complete_on_device();
        return future;
      }
    }
    return future_;
  }

  // The sender of a message, once it is there.
  int sourceRank() const override {
    const auto inner = running();
    return static_cast<int>(source_rank_ >= 0 || !inner ? source_rank_.load()
                                                        : inner->sourceRank());
  }

  uint64_t getSequencenumber() const override {
    TORCH_CHECK(sequence_number_ >= 0, op_, ": the backend must number what it does, got one that ",
                "does not", place());
    return sequence_number_;
  }

  float getDuration() const override {
    if (const auto inner = running()) {
      TORCH_CHECK(!begun_, op_, ": getDuration must be asked once the work is complete, got one ",
                  "in flight", place());
      return inner->getDuration();
    }
    TORCH_CHECK(!std::isnan(milliseconds_), op_, ": the backend must time what it does, got one ",
                "that does not", place());
    return milliseconds_;
  }

  // Somebody may ask for its result once it is over. False: it is, and has let go of it.
  bool hand_out() {
    std::lock_guard<std::mutex> lock(mutex_);
    handed_out_ = true;
    return inner_ != nullptr || !outputs_.empty();
  }

  // Once it is over.
  WorkInfo facts() const {
    return {opType_, sequence_number_, milliseconds_};
  }

  // In c10d's table of works, as far as is known here.
  bool is_listed() const {
    return listed_;
  }
  void strike() {
    listed_ = false;
  }
  bool is_cpu() const {
    return cpu_;
  }
  // Whoever waits or not.
  bool completes_itself() const {
    return subscribed_;
  }
  bool is_done() const {
    return running() == nullptr;
  }
  bool has_unreported_error() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return error_ != nullptr && !reported_;
  }

 private:
  // The end of a text; one that was over at once does not know.
  std::string place() const {
    return group_size_ > 0 ? " " + where(rank_in_group_, group_size_, group_name_) : "";
  }

  void note_sequence_number() {
    try {
      sequence_number_ = static_cast<int64_t>(inner_->getSequencenumber());
    } catch (const std::exception&) {
      // It counts nothing.
    }
  }

  bool is_message() const {
    return what_ == "message";
  }

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
      WorkTable::get().remove(storage_of(output), this);
    }
    if (error) {
      std::rethrow_exception(error);
    }
  }

  // For a future of which nobody may wait for the work: what is left to do is queued behind the
  // collective, on a stream of its own, so that the caller's goes on beside it.
  void complete_on_device() {
    const c10::impl::VirtualGuardImpl device(device_.type());
    std::optional<c10::StreamGuard> aside;
    if (capture_on(device_) == 0) {
      aside.emplace(device.getStreamFromGlobalPool(device_, /*isHighPriority=*/false));
    }
    try {
      wait(kNoTimeout);
    } catch (...) {
      // The future has it.
    }
  }

  std::exception_ptr lost_capture() const {
    return std::make_exception_ptr(c10::Error(
        {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
        "a wait outside the CUDA graph capture that it was started in: wait for it there"));
  }

  // A stream that is captured can wait for what the same capture holds alone, and a wait anywhere
  // else would end the capture or, later, the process.
  void keep_to_capture() {
    if (cpu_ || is_done()) {
      return;
    }
    const uint64_t here = capture_on(device_);
    if (here == capture_) {
      return;
    }
    if (capture_ != 0) {
      complete(lost_capture());
      return;
    }
    C10_THROW_ERROR(Error, text("a wait in a CUDA graph capture, and it was started before that: "
                                "wait for it before the capture"));
  }

  // On a device, whoever waits second waits for what the first has queued.
  void follow_completion() {
    if (cpu_) {
      return;
    }
    DeviceCompletionPtr completion;
    {
      std::lock_guard<std::mutex> lock(finish_mutex_);
      completion = completion_;
    }
    if (completion) {
      completion->follow();
    }
  }

  void note_completion() {
    std::vector<at::Tensor> outputs;
    {
      std::lock_guard<std::mutex> state(mutex_);
      outputs = outputs_;
    }
    completion_ = std::make_shared<const DeviceCompletion>(device_, capture_);
    for (const auto& output : outputs) {
      used_here(output);
      DeviceCompletions::get().add(storage_of(output), completion_);
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
    if (!error && (finish || !cpu_)) {
      try {
        at::AutoDispatchBelowADInplaceOrView below_autograd;
        if (finish) {
          finish();
        }
        if (!cpu_) {
          note_completion();
        }
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
      writes_.clear();
      error_ = error ? described(error) : nullptr;
      if (timed_ && !error_) {
        milliseconds_ = inner->getDuration();
      } else if (begun_ && !error_) {
        milliseconds_ = milliseconds_since(*begun_);
      }
      future = future_;
      if (is_message()) {
        --messages_in_flight;
        if (!error_ && source_rank_ < 0 && retrieveOpType() == c10d::OpType::RECVANYSOURCE) {
          source_rank_ = inner->sourceRank();
        }
      }
      if (!error_) {
        // Kept on failure, so that the storages stay known as the ones that never got their data.
        outputs = outputs_;
        // Of a caller's work result() and a later future have them.
        if (!future_ && !begun_ && !handed_out_) {
          outputs_.clear();
        }
      }
    }
    lock.unlock();
    for (const auto& output : outputs) {
      WorkTable::get().remove(storage_of(output), this);
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
    const ProgressHandoff handoff;
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
    } catch (const CollectiveError&) {
      return error;  // says it all
    } catch (const pybind11::error_already_set& e) {
      // Of a group written in Python. This may be thrown several times, which pybind11 takes for a
      // mistake in what it threw, and ends the process.
      return std::make_exception_ptr(c10::DistBackendError(
          {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text(e.what())));
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
    const std::string prefix = c10::str(op_, ": the ", what_, " must complete, got ");
    return std::string_view(cause).substr(0, prefix.size()) == prefix
               ? std::string(cause)
               : c10::str(prefix, cause, " ", where(rank_in_group_, group_size_, group_name_));
  }

  static inline std::atomic<size_t> messages_in_flight{0};

  const std::string_view op_;  // the ops' names are literals
  std::string_view what_ = "collective";
  // Formatted into a text only when something fails.
  const std::string group_name_;
  const int64_t rank_in_group_;
  const int64_t group_size_;
  // Guarded by mutex_: outputs_, inner_ (null once done), error_, reported_, handed_out_, future_.
  mutable std::mutex mutex_;
  std::vector<at::Tensor> outputs_;
  WritesInFlight writes_;
  c10::intrusive_ptr<c10d::Work> inner_;
  std::exception_ptr error_;
  bool reported_ = false;
  bool handed_out_ = false;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  // Held while finish_ runs: whoever comes second returns only after it has. Guards completion_.
  std::mutex finish_mutex_;
  Finish finish_;
  DeviceCompletionPtr completion_;  // of a collective on a device
  const bool cpu_;
  const c10::Device device_{c10::kCPU};
  const uint64_t capture_ = 0;  // the CUDA graph that it is captured into
  const Subscribe subscribe_;
  bool timed_ = false;
  std::optional<std::chrono::steady_clock::time_point> begun_;  // where it is timed here
  std::atomic<bool> subscribed_{false};
  std::atomic<bool> listed_{true};
  std::atomic<int64_t> sequence_number_{-1};  // -1: not known
  std::atomic<float> milliseconds_{kNotTimed};
  std::atomic<int64_t> source_rank_{-1};
};

}  // namespace c10d_ext
