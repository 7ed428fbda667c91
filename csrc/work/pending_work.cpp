#include "work/pending_work.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <utility>

#include "base/gil.h"

namespace c10d_ext {

namespace {

// Whether it is Ctrl-C, or what the handler of another signal raises, and no error of what is
// waited for. Of a work of ours that is known: what a group written in Python raises ends it.
bool is_interrupt(const pybind11::error_already_set& error, const c10d::Work& inner) {
  pybind11::gil_scoped_acquire gil;
  const auto* own = dynamic_cast<const RequestWork*>(&inner);
  return !error.matches(PyExc_Exception) || (own != nullptr && !own->exception());
}

}  // namespace

void PendingWork::enlist() {
  const auto self = PendingWorkPtr::reclaim_copy(this);
  for (const auto& output : end_.outputs()) {
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
    const auto inner = end_.inner();
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
  const auto inner = end_.running();
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
  const auto inner = end_.running();
  return inner == nullptr ? own_.error() == nullptr : inner->isSuccess();
}

std::exception_ptr PendingWork::exception() const {
  const auto inner = end_.running();
  return inner == nullptr ? own_.error() : inner->exception();
}

void PendingWork::await(std::chrono::milliseconds timeout) {
  keep_to_capture();
  if (const auto inner = end_.running()) {
    std::exception_ptr error;
    try {
      without_gil([&] { inner->wait(timeout); });
    } catch (const pybind11::error_already_set& e) {
      if (is_interrupt(e, *inner)) {
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
  const auto [inner, is_first] =
      end_.expect_future([this] { return subscribe_ == nullptr || subscribed_; });
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
  const auto inner = end_.running();
  return own_.source() >= 0 || !inner ? own_.source() : inner->sourceRank();
}

float PendingWork::getDuration() const {
  const auto inner = end_.running();
  // The backend's work knows of its own.
  return inner && !end_.is_timed_here() ? inner->getDuration() : RequestWork::getDuration();
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
  if (order_.is_cpu() || order_.is_waited_for_at_once() || is_done()) {
    return;
  }
  if (order_.has_lost_capture()) {
    complete(DeviceOrder::lost_capture());
  } else {
    order_.check_capture(text_);
  }
}

}  // namespace c10d_ext
