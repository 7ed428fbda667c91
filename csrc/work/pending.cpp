#include "work/pending.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#ifdef C10D_EXT_WITH_CUDA
#include <c10/cuda/CUDAGraphsC10Utils.h>
#endif

#include <algorithm>
#include <chrono>
#include <exception>
#include <optional>
#include <thread>

#include "base/exceptions.h"
#include "base/gil.h"
#include "base/memory.h"
#include "base/sync_scope.h"
#include "work/coalesced.h"
#include "work/device_completion.h"
#include "work/future.h"
#include "work/left_alone.h"
#include "work/pending_work.h"
#include "work/snapshot.h"

namespace c10d_ext {

namespace {

using Clock = std::chrono::steady_clock;

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
    const auto over = [&](const PendingWorkPtr& work) { return release(work, ask_device); };
    works_.erase(std::remove_if(works_.begin(), works_.end(), over), works_.end());
    if (ask_device) {
      DeviceCompletions::get().sweep();
    }
    limit_ = std::max<size_t>(kSweepAt, 2 * works_.size());
    if (works_.size() < kMostInFlight) {
      limit_ = std::min(limit_, kMostInFlight);
    }
  }

  // After a wait on a device: what was started before that is over, too, where the backend's waits
  // block the host, and nobody may start enough any more for the next sweep. One question at most
  // that finds something in flight.
  void sweep_oldest() {
    if (works_.size() < kSweepAt || works_.front()->is_cpu() || !may_query_device()) {
      return;
    }
#ifdef C10D_EXT_WITH_CUDA
    std::optional<c10::cuda::CUDAStreamCaptureModeGuard> mode;
    mode.emplace(cudaStreamCaptureModeThreadLocal);  // as above
#endif
    // What is over with an error nobody has seen stays, and hides nothing behind it.
    auto kept = works_.begin();
    auto next = works_.begin();
    for (; next != works_.end(); ++next) {
      if (release(*next, true)) {
        continue;
      }
      if (!(*next)->is_done()) {
        break;
      }
      std::swap(*kept++, *next);
    }
    works_.erase(kept, next);
  }

 private:
  // True: it is over, and in no table any more. Completes what a device has completed.
  static bool release(const PendingWorkPtr& work, bool ask_device) {
    if (!work->is_done() && (work->is_cpu() || ask_device) && !work->is_lost_capture() &&
        work->isCompleted() && !work->is_cpu()) {
      work->complete_here(kNoTimeout);
    }
    if (!work->is_done() || work->has_unreported_error()) {
      return false;
    }
    if (work->is_listed()) {
      c10d::unregister_work(work);
    }
    return true;
  }

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

// The collective that this thread started last: its work, which releases the tensors when it is
// over, or what is known of one that was over at once.
struct Last {
  const c10::StorageImpl* storage = nullptr;
  PendingWorkPtr work;
  WorkInfo info;
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
  return true;
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

std::exception_ptr run_finish(const Finish& finish) noexcept {
  if (!finish) {
    return nullptr;
  }
  try {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    finish();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
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
    if (!cpu) {  // it runs on the current stream
      for (const auto& output : outputs) {
        used_here(output);
      }
      DeviceCompletions::get().add_written_here(outputs);
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

void note_over(const at::Tensor& output, const WorkInfo& info) {
  last_here() = {storage_of(output), {}, info};
}

void wait(const at::Tensor& t) {
  const auto* storage = storage_of(t);
  if (storage == nullptr) {
    return;
  }
  const auto works = WorkTable::get().find(storage);
  // Takes this thread's entries out of c10d's table and waits for works that torch put there.
  c10d::wait_tensor(t);
  for (const auto& work : works) {
    work->strike();
    work->wait(kNoTimeout);
  }
  if (!t.is_cpu() && !t.is_meta()) {
    DeviceCompletions::get().follow(t);
    started_here().sweep_oldest();
  }
  release_snapshots();
  check_left_alone(storage);
}

bool is_pending(const at::Tensor& t) {
  const auto* storage = storage_of(t);
  if (storage == nullptr) {
    return false;
  }
  if (WorkTable::get().contains(storage)) {
    return true;
  }
  if (!t.is_cpu() && DeviceCompletions::get().contains(storage)) {
    return true;  // queued on the stream of the call, which another one has to wait for
  }
  if (!started_here().empty()) {
    c10d::wait_tensor(t);  // does not block: the work, if there was one, is complete
  }
  return false;
}

bool is_being_written(const at::Tensor& t) {
  return WorkTable::get().is_writing(storage_of(t));
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
  const auto works = WorkTable::get().find(storage);
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
                   : c10::make_intrusive<PendingWork>(last.info, std::vector<at::Tensor>{t});
}

c10::intrusive_ptr<c10d::Work> work_behind(const at::Tensor& t) {
  if (auto work = work_of(t)) {
    return work;
  }
  // It is over, and its work has released the result.
  const auto& last = last_here();
  WorkInfo info;
  if (last.storage != nullptr && last.storage == storage_of(t)) {
    info = last.work ? last.work->info() : last.info;
  }
  return c10::make_intrusive<PendingWork>(info, std::vector<at::Tensor>{t});
}

void bind_works(pybind11::module_& m) {
  bind_work<PendingWork>(m, "Work");
  bind_work<SignalledWork>(m, "SignalledWork");
  bind_work<CoalescedWork>(m, "CoalescedWork");
}

size_t pending_count() {
  return WorkTable::get().size() + PendingWork::count_messages();
}

}  // namespace c10d_ext
