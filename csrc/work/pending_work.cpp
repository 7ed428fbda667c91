#include "work/pending_work.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <utility>

#include "base/gil.h"

namespace c10d_ext {

namespace {

float milliseconds_since(std::chrono::steady_clock::time_point begun) {
  return std::chrono::duration<float, std::milli>(std::chrono::steady_clock::now() - begun).count();
}

// 0 for works that count nothing.
uint64_t number_of(c10d::Work& work) {
  try {
    return work.getSequencenumber();
  } catch (const std::exception&) {
    return 0;
  }
}

// Whether it is Ctrl-C, or what else is no error of the call that it ends.
bool is_interrupt(const pybind11::error_already_set& error) {
  pybind11::gil_scoped_acquire gil;
  return !error.matches(PyExc_Exception);
}

}  // namespace

void PendingWork::enlist() {
  const auto self = PendingWorkPtr::reclaim_copy(this);
  for (const auto& output : outputs_) {
    WorkTable::get().add(storage_of(output), self);
    c10d::register_work(output, self);
  }
  complete_by_itself();
}

void PendingWork::complete_by_itself() {
  if (subscribe_ != nullptr) {
    // The backend's work holds the callback, the callback this work, and this work the
    // backend's: complete() breaks the circle.
    const auto self = PendingWorkPtr::reclaim_copy(this);
    const auto inner = inner_;
    subscribed_ =
        subscribe_(*inner, [self](std::exception_ptr error) { self->complete(std::move(error)); });
  }
}

void PendingWork::enlist_message() {
  if (isCompleted() && is_done()) {
    report();
    return;
  }
  const auto self = PendingWorkPtr::reclaim_copy(this);
  const at::Tensor tensor = result().at(0);
  WorkTable::get().add(storage_of(tensor), self);
  c10d::register_work(tensor, self);
  if (order_.is_cpu()) {
    // What nobody waits for goes by itself. It may be over by now, and then calls at once.
    getFuture();
    subscribed_ = true;
  }
}

bool PendingWork::poll() {
  const auto inner = running();
  if (inner == nullptr) {
    return true;
  }
  if (!inner->isCompleted()) {
    return false;
  }
  if (order_.is_cpu()) {
    complete(inner->exception());
  }
  return true;
}

bool PendingWork::isSuccess() const {
  const auto inner = running();
  return inner == nullptr ? own_.error() == nullptr : inner->isSuccess();
}

std::exception_ptr PendingWork::exception() const {
  const auto inner = running();
  return inner == nullptr ? own_.error() : inner->exception();
}

void PendingWork::await(std::chrono::milliseconds timeout) {
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
      if (order_.is_cpu() && !inner->isCompleted()) {
        std::rethrow_exception(text_.described(error));
      }
    }
    complete(error);
  }
  order_.follow_completion();
}

bool PendingWork::is_lost_capture() {
  if (!order_.has_lost_capture()) {
    return false;
  }
  complete(DeviceOrder::lost_capture());
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> PendingWork::getFuture() {
  c10::intrusive_ptr<c10d::Work> inner;
  bool is_first = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    inner = inner_;
    TORCH_CHECK_NOT_IMPLEMENTED(
        inner == nullptr || subscribe_ == nullptr || subscribed_, text_.op(),
        ": the work of the group's backend must have a future, got one without; use wait()",
        text_.place());
    is_first = !std::exchange(has_future_, true);
  }
  const auto future = own_.future(
      text_.op(),
      [this] {
        std::vector<c10::Device> devices;
        if (!order_.is_cpu()) {
          devices.push_back(order_.device());
        }
        return c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()), devices);
      },
      [this] { return c10::IValue(result()); });
  if (is_first && inner != nullptr && !order_.is_cpu()) {
    complete_on_device();
  } else if (is_first && inner != nullptr && is_message_) {
    const auto self = PendingWorkPtr::reclaim_copy(this);
    subscribe_to_future(*inner,
                        [self](std::exception_ptr error) { self->complete(std::move(error)); });
  }
  return future;
}

int PendingWork::sourceRank() const {
  const auto inner = running();
  return own_.source() >= 0 || !inner ? own_.source() : inner->sourceRank();
}

float PendingWork::getDuration() const {
  const auto inner = running();
  // The backend's work knows of its own.
  return inner && !begun_ ? inner->getDuration() : RequestWork::getDuration();
}

bool PendingWork::hand_out() {
  std::lock_guard<std::mutex> lock(mutex_);
  handed_out_ = true;
  return inner_ != nullptr || !outputs_.empty();
}

bool PendingWork::has_unreported_error() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return inner_ == nullptr && own_.error() != nullptr && !reported_;
}

void PendingWork::note_sequence_number() {
  try {
    own_.set_number(static_cast<int64_t>(inner_->getSequencenumber()));
  } catch (const std::exception&) {
    // It counts nothing.
  }
}

void PendingWork::report() {
  std::exception_ptr error;
  std::vector<at::Tensor> outputs;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    error = own_.error();
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

void PendingWork::complete_on_device() {
  order_.on_own_stream([this] {
    try {
      wait(kNoTimeout);
    } catch (...) {
      // The future has it.
    }
  });
}

void PendingWork::keep_to_capture() {
  if (order_.is_cpu() || is_done()) {
    return;
  }
  if (order_.has_lost_capture()) {
    complete(DeviceOrder::lost_capture());
  } else {
    order_.check_capture(text_);
  }
}

void PendingWork::complete(std::exception_ptr error) {
  // Destroyed last, without the lock: freeing a tensor may need the GIL, whose holder may be
  // waiting for the lock.
  Finish finish;
  std::unique_lock<std::mutex> lock(finish_mutex_);
  if (is_done()) {
    return;
  }
  finish.swap(finish_);
  if (!error) {
    error = run_finish(finish);
  }
  if (!error && !order_.is_cpu()) {
    try {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      order_.note_completion(result());
    } catch (...) {
      error = std::current_exception();
    }
  }
  c10::intrusive_ptr<c10d::Work> inner;
  std::vector<at::Tensor> outputs;
  bool is_awaited = false;
  {
    std::lock_guard<std::mutex> state(mutex_);
    inner.swap(inner_);
    writes_.clear();
    if (error) {
      error = text_.described(error, number_of(*inner));
    } else if (timed_) {
      own_.set_milliseconds(inner->getDuration());
    } else if (begun_) {
      own_.set_milliseconds(milliseconds_since(*begun_));
    }
    if (is_message_) {
      --messages_in_flight;
      if (!error && own_.source() < 0 && retrieveOpType() == c10d::OpType::RECVANYSOURCE) {
        own_.set_source(inner->sourceRank());
      }
    }
    if (!error) {
      // Kept on failure, so that the storages stay known as the ones that never got their data.
      outputs = outputs_;
      // Of a caller's work result() and a later future have them.
      if (!has_future_ && !begun_ && !handed_out_) {
        outputs_.clear();
      }
    }
    is_awaited = own_.end(std::move(error));
  }
  lock.unlock();
  for (const auto& output : outputs) {
    WorkTable::get().remove(storage_of(output), this);
  }
  if (is_awaited) {
    own_.tell(text_.op(), [this] { return c10::IValue(result()); });
  }
}

}  // namespace c10d_ext
