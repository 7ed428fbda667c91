#include "core/pending.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#ifdef C10D_EXT_WITH_CUDA
#include <c10/cuda/CUDAGraphsC10Utils.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <exception>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>

#include "backends/shm/aside.h"
#include "core/at_once.h"
#include "core/failure.h"
#include "core/future.h"
#include "core/gil.h"
#include "core/left_alone.h"
#include "core/memory.h"
#include "core/snapshot.h"

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

c10::Stream current_stream(const c10::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// The CUDA graph that the device's current stream is captured into, 0 where it is not.
uint64_t capture_on(const c10::Device& device) {
#ifdef C10D_EXT_WITH_CUDA
  if (device.is_cuda()) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    C10_CUDA_CHECK(
        cudaStreamGetCaptureInfo(c10::cuda::getCurrentCUDAStream(device.index()), &status, &id));
    return status == cudaStreamCaptureStatusActive ? id : 0;
  }
#endif
  return 0;
}

// Where on a device the end of a collective was queued: by whoever waited for it first, or found it
// over. Whoever waits later, on another stream, waits for that.
class Completion {
 public:
  Completion(const c10::Device& device, uint64_t capture)
      : device_(device), capture_(capture), on_(current_stream(device)), event_(device.type()) {
    event_.record(on_);
  }

  // The current stream goes on after it.
  void follow() const {
    const auto here = current_stream(device_);
    // An event of a CUDA graph's capture means something there alone.
    if (here != on_ && capture_on(device_) == capture_) {
      event_.block(here);
    }
  }

  // Nobody has to wait for it any more. Asks the device.
  bool is_over() const {
    return capture_ == 0 ? event_.query() : capture_on(device_) != capture_;
  }

 private:
  const c10::Device device_;
  const uint64_t capture_;
  const c10::Stream on_;
  c10::Event event_;
};
using CompletionPtr = std::shared_ptr<const Completion>;

// Of the storages written last. One that was freed meanwhile, and its address given to another, has
// the other wait for what is over.
class Completions {
 public:
  void add(const c10::StorageImpl* storage, const CompletionPtr& completion) {
    std::lock_guard<std::mutex> lock(mutex_);
    last_[storage] = completion;
  }

  void follow(const c10::StorageImpl* storage) const {
    CompletionPtr found;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto entry = last_.find(storage);
      found = entry == last_.end() ? nullptr : entry->second;
    }
    if (found) {
      found->follow();
    }
  }

  void sweep() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto entry = last_.begin(); entry != last_.end();) {
      entry = entry->second->is_over() ? last_.erase(entry) : std::next(entry);
    }
  }

  // Never destroyed, as the registry.
  static Completions& get() {
    static Completions* instance = new Completions;
    return *instance;
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, CompletionPtr> last_;
};

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
  PendingWork(const Facts& facts, at::TensorList outputs)
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
        // A wait that ran out of patience leaves the collective in flight.
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
  Facts facts() const {
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
    CompletionPtr completion;
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
    completion_ = std::make_shared<const Completion>(device_, capture_);
    for (const auto& output : outputs) {
      used_here(output);
      Completions::get().add(storage_of(output), completion_);
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
        // Of a claimed work result() and a later future have them.
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
    const shm::Aside aside;
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
  CompletionPtr completion_;  // of a collective on a device
  const bool cpu_;
  const c10::Device device_{c10::kCPU};
  const uint64_t capture_ = 0;  // the CUDA graph that it is captured into
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
#ifdef C10D_EXT_WITH_CUDA
    // Another thread may be capturing, which no question from here is to spoil.
    std::optional<c10::cuda::CUDAStreamCaptureModeGuard> mode;
    if (has_device_work()) {
      mode.emplace(cudaStreamCaptureModeThreadLocal);
    }
#endif
    const bool ask_device = has_device_work() && may_query_device();
    const auto over = [&](const PendingWorkPtr& work) {
      if (!work->is_done() && (work->is_cpu() || ask_device) && !work->is_lost_capture() &&
          work->isCompleted() && !work->is_cpu()) {
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
    if (ask_device) {
      Completions::get().sweep();
    }
    limit_ = std::max<size_t>(kSweepAt, 2 * works_.size());
    if (works_.size() < kMostInFlight) {
      limit_ = std::min(limit_, kMostInFlight);
    }
  }

 private:
  bool has_device_work() const {
    return std::any_of(works_.begin(), works_.end(), [](const auto& w) { return !w->is_cpu(); });
  }

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
  Facts facts;
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
  if (auto* claim = Claim::here()) {
    claim->attach(op, group, work, subscribe);
    return;
  }
  const bool cpu = outputs.empty() || outputs.front().is_cpu();
  if (!work || (cpu && work->isCompleted() && work->isSuccess())) {
    note_over(at::Tensor(), Facts());
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
  if (AtOnce::is_on()) {
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
                                      int64_t source, bool timed) {
  const auto begun = Clock::now();
  auto message =
      c10::make_intrusive<PendingWork>(op, group, std::vector<at::Tensor>{std::move(tensor)},
                                       std::move(work), std::move(finish), source, timed);
  if (const auto* claim = Claim::here()) {
    message->time_as(claim->type(), begun);
  }
  return message;
}

namespace {
thread_local Claim* claim_here = nullptr;
}  // namespace

Claim::Claim(OverGloo& backend, const Called* called, c10d::OpType type,
             std::vector<at::Tensor> outputs, Around around, std::chrono::milliseconds timeout)
    : backend_(backend),
      called_(called),
      type_(type),
      timeout_(timeout),
      begun_(Clock::now()),
      outputs_(std::move(outputs)),
      around_(std::move(around)),
      outer_(claim_here) {
  claim_here = this;
}

Claim::~Claim() {
  claim_here = outer_;
}

Claim* Claim::here() {
  return claim_here;
}

Begin Claim::around(Begin begin) {
  return [around = std::exchange(around_, {}), begin = std::move(begin)] {
    if (around.before) {
      around.before();
    }
    Started started = begin();
    started.finish = then(std::move(started.finish), around.after);
    return started;
  };
}

void Claim::attach(std::string_view op, const Group& group,
                   const c10::intrusive_ptr<c10d::Work>& work, Subscribe subscribe) {
  auto pending = c10::make_intrusive<PendingWork>(op, group, outputs_, work, Finish(), subscribe);
  pending->time_as(type_, begun_);
  pending->write(outputs_);
  pending->complete_by_itself();
  work_ = std::move(pending);
}

c10::intrusive_ptr<c10d::Work> Claim::take() {
  return std::move(work_);
}

void attach_message(const c10::intrusive_ptr<c10d::Work>& message) {
  auto* work = dynamic_cast<PendingWork*>(message.get());
  TORCH_CHECK(work != nullptr, "attach_message: must be given the work of a message, got another");
  work->enlist_message();
  started_here().add(PendingWorkPtr::reclaim_copy(work));
}

void note_over(const at::Tensor& output, const Facts& facts) {
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
  if (!t.is_cpu() && !t.is_meta()) {
    Completions::get().follow(storage);
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
  Facts facts;
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
