#include "work/pending.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#ifdef C10D_EXT_WITH_CUDA
#include <c10/cuda/CUDAGraphsC10Utils.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>

#include "base/exceptions.h"
#include "base/gil.h"
#include "base/memory.h"
#include "base/progress_handoff.h"
#include "base/sync_scope.h"
#include "work/future.h"
#include "work/left_alone.h"
#include "work/snapshot.h"

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
  bool is_writing(const c10::StorageImpl* storage) const;
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

// Those of groups written in Python may not.
bool tells_its_number(Subscribe subscribe) {
  return subscribe != nullptr && subscribe != &subscribe_if_possible;
}

// No backend but our own can tell how long it took.
bool is_timed(Subscribe subscribe) {
  return tells_its_number(subscribe) && subscribe != &subscribe_to_future;
}

using Clock = std::chrono::steady_clock;

float milliseconds_since(Clock::time_point begun) {
  return std::chrono::duration<float, std::milli>(Clock::now() - begun).count();
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

  // In no table: says itself what it writes. Fingerprint before anyone else knows of it.
  void write(const std::vector<at::Tensor>& tensors) {
    writes_ = WritesInFlight(tensors);
  }

  // Times it itself, for a backend that does not. Fingerprint before anyone else knows of it.
  void time_as(c10d::OpType type, Clock::time_point begun) {
    opType_ = type;
    begun_ = begun;
  }

  static size_t count_messages() {
    return messages_in_flight;
  }

  void enlist() {
    const auto self = PendingWorkPtr::reclaim_copy(this);
    for (const auto& output : outputs_) {
      Registry::get().add(storage_of(output), self);
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
    Registry::get().add(storage_of(tensor), self);
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
      Registry::get().remove(storage_of(output), this);
    }
    if (error) {
      std::rethrow_exception(error);
    }
  }

  // Fingerprint when the backend's work is over, from whichever thread notices first.
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
  // Held while finish_ runs: whoever comes second returns only after it has.
  std::mutex finish_mutex_;
  Finish finish_;
  const bool cpu_;
  const Subscribe subscribe_;
  bool timed_ = false;
  std::optional<Clock::time_point> begun_;  // where it is timed here
  std::atomic<bool> subscribed_{false};
  std::atomic<bool> listed_{true};
  std::atomic<int64_t> sequence_number_{-1};  // -1: not known
  std::atomic<float> milliseconds_{kNotTimed};
  std::atomic<int64_t> source_rank_{-1};
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

bool Registry::is_writing(const c10::StorageImpl* storage) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto entry = works_.find(storage);
  return entry != works_.end() && std::any_of(entry->second.begin(), entry->second.end(),
                                              [](const auto& work) { return !work->is_done(); });
}

size_t Registry::size() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return works_.size();
}

// The works this thread started: c10d's table is per thread, so only this thread can clear its own.
class StartedHere {
 public:
  void add(PendingWorkPtr work) {
    if (works_.size() >= limit_) {
      sweep();
      if (works_.size() >= kMostInFlight) {
        hold_back();
      }
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
        work->wait(kNoTimeout);
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
    if (works_.size() < kMostInFlight) {
      limit_ = std::min(limit_, kMostInFlight);
    }
  }

 private:
  static constexpr size_t kSweepAt = 64;
  static constexpr size_t kMostInFlight = 256;

  // Works that complete by themselves, so that waiting for them comes to an end.
  size_t in_flight() const {
    return std::count_if(works_.begin(), works_.end(),
                         [](const auto& w) { return w->completes_itself() && !w->is_done(); });
  }

  // Lets the backend catch up with a caller who never waits: the backend's queue holds the tensors
  // of every collective in it. Gives up where nothing completes, for the ranks that could make it
  // complete may be waiting for what this thread is about to start; the next time comes at twice
  // as many. Patience is counted in looks, at least 5 s of them, and not by the clock: while a
  // machine stands still nothing completes, and that says nothing of the ranks.
  void hold_back() {
    constexpr auto kPause = std::chrono::microseconds(100);
    constexpr int kPatience = 50'000;
    auto before = in_flight();
    for (int looks = 0; before > kMostInFlight / 2 && looks < kPatience; ++looks) {
      without_gil([&] { std::this_thread::sleep_for(kPause); });
      sweep();
      if (const auto now = in_flight(); now < before) {
        before = now;
        looks = 0;
      }
    }
    if (before <= kMostInFlight / 2) {
      sweep();  // of those that went after the last look, or the limit stays twice too high
    }
  }

  size_t limit_ = kSweepAt;
  std::vector<PendingWorkPtr> works_;
};

// The collective that this thread started last: its work, which lets go of the tensors when it is
// over, or what is known of one that was over at once.
struct Last {
  const c10::StorageImpl* storage = nullptr;
  PendingWorkPtr work;
  WorkInfo facts;
};

Last& last_here() {
  // Leaked on thread exit, as StartedHere.
  static thread_local Last* instance = new Last;
  return *instance;
}

StartedHere& started_here() {
  // Leaked on thread exit by design: destroying works there could run backend code too late.
  static thread_local StartedHere* instance = new StartedHere;
  return *instance;
}

void enlist(PendingWorkPtr work, at::TensorList outputs) {
  work->enlist();
  last_here() = {outputs.empty() ? nullptr : storage_of(outputs.front()), work, {}};
  started_here().add(std::move(work));
}

}  // namespace

bool may_query_device() {
#ifdef C10D_EXT_WITH_CUDA
  // Asking an event for its state would invalidate a CUDA graph under capture.
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None;
#else
  return false;
#endif
}

Finish then(Finish first, Finish second) {
  if (!first) {
    return second;
  }
  if (!second) {
    return first;
  }
  return [first = std::move(first), second = std::move(second)] {
    first();
    second();
  };
}

bool subscribe_to_future(c10d::Work& work, std::function<void(std::exception_ptr)> over) {
  work.getFuture()->addCallback([over = std::move(over)](c10::ivalue::Future& future) {
    over(future.hasError() ? future.exception_ptr() : nullptr);
  });
  return true;
}

bool subscribe_if_possible(c10d::Work& work, std::function<void(std::exception_ptr)> over) {
  try {
    return subscribe_to_future(work, std::move(over));
  } catch (const std::exception&) {
    return false;
  }
}

void attach(std::string_view op, const Group& group, at::TensorList outputs,
            const c10::intrusive_ptr<c10d::Work>& work, Finish finish, Subscribe subscribe) {
  const bool cpu = outputs.empty() || outputs.front().is_cpu();
  if (!work || (cpu && work->isCompleted() && work->isSuccess())) {
    note_over(at::Tensor(), WorkInfo());
    if (work && !outputs.empty() && tells_its_number(subscribe)) {
      note_over(outputs.front(),
                {work->retrieveOpType(), static_cast<int64_t>(work->getSequencenumber()),
                 is_timed(subscribe) ? work->getDuration() : kNotTimed});
    }
    if (finish) {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      finish();
    }
    return;
  }
  auto pending =
      c10::make_intrusive<PendingWork>(op, group, outputs, work, std::move(finish), subscribe);
  if (SyncScope::is_on()) {
    try {
      pending->wait(kNoTimeout);
    } catch (...) {
      if (!pending->isCompleted()) {
        enlist(std::move(pending), outputs);  // Ctrl-C: it goes on
      }
      throw;
    }
    return;
  }
  enlist(std::move(pending), outputs);
}

c10::intrusive_ptr<c10d::Work> follow(std::string_view op, const Group& group, at::Tensor tensor,
                                      c10::intrusive_ptr<c10d::Work> work, Finish finish,
                                      int64_t source, bool timed,
                                      std::optional<c10d::OpType> type) {
  const auto begun = Clock::now();
  auto message =
      c10::make_intrusive<PendingWork>(op, group, std::vector<at::Tensor>{std::move(tensor)},
                                       std::move(work), std::move(finish), source, timed);
  if (type) {
    message->time_as(*type, begun);
  }
  return message;
}

c10::intrusive_ptr<c10d::Work> work_for_caller(std::string_view op, const Group& group,
                                               at::TensorList outputs,
                                               c10::intrusive_ptr<c10d::Work> work,
                                               Subscribe subscribe, c10d::OpType type,
                                               Clock::time_point begun) {
  auto pending =
      c10::make_intrusive<PendingWork>(op, group, outputs, std::move(work), Finish(), subscribe);
  pending->time_as(type, begun);
  pending->write(outputs.vec());
  pending->complete_by_itself();
  return pending;
}

void attach_message(const c10::intrusive_ptr<c10d::Work>& message) {
  auto* work = dynamic_cast<PendingWork*>(message.get());
  TORCH_CHECK(work != nullptr, "attach_message: must be given the work of a message, got another");
  work->enlist_message();
  started_here().add(PendingWorkPtr::reclaim_copy(work));
}

void note_over(const at::Tensor& output, const WorkInfo& facts) {
  last_here() = {storage_of(output), {}, facts};
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
    work->strike();
    work->wait(kNoTimeout);
  }
  release_snapshots();
  check_left_alone(storage);
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

bool is_being_written(const at::Tensor& t) {
  return Registry::get().is_writing(storage_of(t));
}

void sweep() {
  started_here().sweep();
}

namespace {

PendingWorkPtr newest_work_of(const at::Tensor& t) {
  const auto* storage = storage_of(t);
  if (storage == nullptr) {
    return {};
  }
  const auto works = Registry::get().find(storage);
  return works.empty() ? PendingWorkPtr() : works.back();
}

}  // namespace

c10::intrusive_ptr<c10d::Work> work_of(const at::Tensor& t) {
  release_to_user(storage_of(t));
  auto work = newest_work_of(t);
  return work && work->hand_out() ? work : nullptr;
}

c10::intrusive_ptr<c10d::Work> started_work_of(const at::Tensor& t) {
  release_to_user(storage_of(t));
  if (auto work = newest_work_of(t)) {
    return work;
  }
  const auto& last = last_here();
  if (last.storage == nullptr || last.storage != storage_of(t)) {
    return {};
  }
  return last.work ? last.work
                   : c10::make_intrusive<PendingWork>(last.facts, std::vector<at::Tensor>{t});
}

c10::intrusive_ptr<c10d::Work> work_behind(const at::Tensor& t) {
  if (auto work = work_of(t)) {
    return work;
  }
  // It is over, and its work has let go of the result.
  const auto& last = last_here();
  WorkInfo facts;
  if (last.storage != nullptr && last.storage == storage_of(t)) {
    facts = last.work ? last.work->facts() : last.facts;
  }
  return c10::make_intrusive<PendingWork>(facts, std::vector<at::Tensor>{t});
}

void bind_works(pybind11::module_& m) {
  bind_work<PendingWork>(m, "Work").def(
      "_get_sequence_number", &PendingWork::getSequencenumber,
      "The number of the collective, or of the message, among those of its group.");
}

size_t pending_count() {
  return Registry::get().size() + PendingWork::count_messages();
}

}  // namespace c10d_ext
