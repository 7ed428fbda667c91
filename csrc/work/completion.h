#pragma once

// How a work of an op comes to its end: what runs then, what is kept, and what is told of it. For
// work/*.cpp.

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/memory.h"
#include "work/device_order.h"
#include "work/pending.h"
#include "work/snapshot.h"
#include "work/work_state.h"
#include "work/work_text.h"

namespace c10d_ext {

class PendingWork;

// Holds the backend's work, what this rank does once that is complete, and the tensors that are
// written, for as long as somebody needs them. From any thread. Parts of one work, as those that it
// refers to are: they outlive it.
class Completion {
 public:
  enum class Kind : uint8_t { Collective, Message };
  // What the backend's work tells of itself.
  struct Told {
    bool number = false;
    bool time = false;
  };

  Completion(WorkState& state, const WorkText& text, DeviceOrder& order, at::TensorList outputs,
             c10::intrusive_ptr<c10d::Work> inner, Finish finish, Kind kind, Told told)
      : state_(state),
        text_(text),
        order_(order),
        is_message_(kind == Kind::Message),
        outputs_(aliases_of(outputs)),
        inner_(std::move(inner)),
        finish_(std::move(finish)),
        timed_(told.time) {
    if (told.number) {
      note_sequence_number();
    }
    if (is_message_) {
      ++messages_in_flight;
    }
  }
  // Of a work that was over at once.
  Completion(WorkState& state, const WorkText& text, DeviceOrder& order, at::TensorList outputs)
      : state_(state), text_(text), order_(order), outputs_(aliases_of(outputs)) {}

  ~Completion() {
    if (is_message_ && inner_ != nullptr) {
      --messages_in_flight;
    }
  }
  Completion(const Completion&) = delete;
  Completion& operator=(const Completion&) = delete;

  static size_t count_messages() {
    return messages_in_flight;
  }

  // These two before anyone else knows of the work. It is in no table, and says itself what it
  // writes.
  void write(const std::vector<at::Tensor>& tensors) {
    writes_ = WritesInFlight(tensors);
  }
  // Timed here, for a backend that does not.
  void time_from(std::chrono::steady_clock::time_point begun) {
    begun_ = begun;
  }
  bool is_timed_here() const {
    return begun_.has_value();
  }

  // The backend's work, null once it is over.
  c10::intrusive_ptr<c10d::Work> running() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return inner_;
  }
  std::vector<at::Tensor> result() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return outputs_;
  }
  // These two only for who has started the work, while it makes it known to others.
  const std::vector<at::Tensor>& outputs() const {
    return outputs_;
  }
  const c10::intrusive_ptr<c10d::Work>& inner() const {
    return inner_;
  }

  // The backend's work is over: whoever notices first runs what is left to do and settles the
  // state; whoever comes second returns only after that. `work`: the entry in the table.
  void complete(std::exception_ptr error, const PendingWork& work);
  // Raises the error of a failed work; whoever waits next finds nothing to wait for.
  void report(const PendingWork& work);
  bool has_unreported_error() const;

  // Somebody may ask for the result once it is over. False: it is over and has released it.
  bool hand_out();
  // Somebody asks for a future, which holds the result. The backend's work, null once it is over,
  // and whether this is the first time. Refused where `can_tell()` is false while it runs.
  template <class CanTell>
  std::pair<c10::intrusive_ptr<c10d::Work>, bool> expect_future(const CanTell& can_tell) {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK_NOT_IMPLEMENTED(
        inner_ == nullptr || can_tell(), text_.op(),
        ": the work of the group's backend must have a future, got one without; use wait()",
        text_.place());
    return {inner_, !std::exchange(has_future_, true)};
  }

 private:
  void note_sequence_number();

  static inline std::atomic<size_t> messages_in_flight{0};

  WorkState& state_;
  const WorkText& text_;
  DeviceOrder& order_;
  const bool is_message_ = false;
  // Guarded by mutex_: outputs_, inner_ (null once settled), reported_, handed_out_,
  // has_future_.
  mutable std::mutex mutex_;
  std::vector<at::Tensor> outputs_;
  WritesInFlight writes_;
  c10::intrusive_ptr<c10d::Work> inner_;
  bool reported_ = false;
  bool handed_out_ = false;
  bool has_future_ = false;
  // Held while finish_ runs: whoever comes second returns only after it has.
  std::mutex finish_mutex_;
  Finish finish_;
  const bool timed_ = false;
  std::optional<std::chrono::steady_clock::time_point> begun_;  // where it is timed here
};

}  // namespace c10d_ext
