#include "work/completion.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <utility>

#include "work/pending_work.h"
#include "work/work_table.h"

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

}  // namespace

void Completion::note_sequence_number() {
  try {
    state_.set_number(static_cast<int64_t>(inner_->getSequencenumber()));
  } catch (const std::exception&) {
    // It counts nothing.
  }
}

void Completion::complete(std::exception_ptr error, const PendingWork& work) {
  // Destroyed last, without the lock: freeing a tensor may need the GIL, whose holder may be
  // waiting for the lock.
  Finish finish;
  std::unique_lock<std::mutex> lock(finish_mutex_);
  if (state_.settled()) {
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
      state_.set_milliseconds(inner->getDuration());
    } else if (begun_) {
      state_.set_milliseconds(milliseconds_since(*begun_));
    }
    if (is_message_) {
      --messages_in_flight;
      if (!error && state_.source() < 0 && work.retrieveOpType() == c10d::OpType::RECVANYSOURCE) {
        state_.set_source(inner->sourceRank());
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
    is_awaited = state_.end(std::move(error));
  }
  lock.unlock();
  for (const auto& output : outputs) {
    WorkTable::get().remove(storage_of(output), &work);
  }
  if (is_awaited) {
    state_.tell(text_.op(), [this] { return c10::IValue(result()); });
  }
}

void Completion::report(const PendingWork& work) {
  std::exception_ptr error;
  std::vector<at::Tensor> outputs;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    error = state_.error();
    if (error && !reported_) {
      reported_ = true;
      outputs = outputs_;
    }
  }
  for (const auto& output : outputs) {
    WorkTable::get().remove(storage_of(output), &work);
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

bool Completion::hand_out() {
  std::lock_guard<std::mutex> lock(mutex_);
  handed_out_ = true;
  return inner_ != nullptr || !outputs_.empty();
}

bool Completion::has_unreported_error() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return inner_ == nullptr && state_.error() != nullptr && !reported_;
}

}  // namespace c10d_ext
