#pragma once

// The works of ops. For work/*.cpp.

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <exception>
#include <string_view>
#include <utility>
#include <vector>

#include "base/group.h"
#include "work/completion.h"
#include "work/device_order.h"
#include "work/pending.h"
#include "work/request_work.h"
#include "work/work_table.h"
#include "work/work_text.h"

namespace c10d_ext {

// Those of groups written in Python may not.
inline bool tells_its_number(Subscribe subscribe) {
  return subscribe != nullptr && subscribe != &subscribe_if_possible;
}

// No backend but our own can tell how long it took.
inline bool is_timed(Subscribe subscribe) {
  return tells_its_number(subscribe) && subscribe != &subscribe_to_future;
}

// A backend's work, plus what this rank still has to do when it completes.
class PendingWork final : public RequestWork {
 public:
  PendingWork(std::string_view op, const Group& group, at::TensorList outputs,
              c10::intrusive_ptr<c10d::Work> inner, Finish finish, Subscribe subscribe)
      : RequestWork(static_cast<int>(group.rank()), inner->retrieveOpType(), own_),
        text_(op, "collective", group),
        order_(outputs),
        subscribe_(order_.is_cpu() ? subscribe : nullptr),
        end_(own_, text_, order_, outputs, std::move(inner), std::move(finish),
             Completion::Kind::Collective, {tells_its_number(subscribe_), is_timed(subscribe_)}) {}

  // A message from `source`, a rank of the group, or -1: the backend will know.
  PendingWork(std::string_view op, const Group& group, at::TensorList outputs,
              c10::intrusive_ptr<c10d::Work> inner, Finish finish, int64_t source, bool timed)
      : RequestWork(static_cast<int>(group.rank()), inner->retrieveOpType(), own_),
        is_message_(true),
        text_(op, "message", group),
        order_(outputs),
        subscribe_(nullptr),
        end_(own_, text_, order_, outputs, std::move(inner), std::move(finish),
             Completion::Kind::Message, {/*number=*/true, timed}) {
    own_.set_source(static_cast<int>(source));
  }

  // A collective of `op` that was over when its start returned.
  PendingWork(const WorkInfo& info, at::TensorList outputs)
      : RequestWork(-1, info.type, own_),
        text_("work"),
        subscribe_(nullptr),
        end_(own_, text_, order_, outputs) {
    own_.set_number(info.number);
    own_.set_milliseconds(info.milliseconds);
    own_.end(nullptr);
  }

  // In no table: says itself what it writes. Called before anyone else knows of it.
  void write(const std::vector<at::Tensor>& tensors) {
    end_.write(tensors);
  }

  // Times it itself, for a backend that does not. Called before anyone else knows of it.
  void time_as(c10d::OpType type, std::chrono::steady_clock::time_point begun) {
    opType_ = type;
    end_.time_from(begun);
  }

  static size_t count_messages() {
    return Completion::count_messages();
  }

  void enlist();

  // Whoever waits or not.
  void complete_by_itself();

  // A message, which may be over, and then leaves nothing behind.
  void enlist_message();

  // Before it is settled the backend's work is asked.
  bool isSuccess() const override;
  std::exception_ptr exception() const override;

  // A wait that leaves the collective's error to who waits for it.
  void complete_here(std::chrono::milliseconds timeout) {
    await(timeout);
  }

  // One that was captured into a CUDA graph that this thread is no longer in. Nobody can wait for
  // it, nor ask for it, any more.
  bool is_lost_capture();

  void abort() override {
    if (const auto inner = end_.running()) {
      inner->abort();
    }
  }

  std::vector<at::Tensor> result() override {
    return end_.result();
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  // The sender of a message, once it is there.
  int sourceRank() const override;

  float getDuration() const override;

  // Somebody may ask for its result once it is over. False: it is over and has released it.
  bool hand_out() {
    return end_.hand_out();
  }

  // Once it is over.
  WorkInfo info() const {
    return {opType_, own_.number(), own_.milliseconds()};
  }

  // In c10d's table of works, as far as is known here.
  bool is_listed() const {
    return listed_;
  }
  void strike() {
    listed_ = false;
  }
  bool is_cpu() const {
    return order_.is_cpu();
  }
  // Whoever waits or not.
  bool completes_itself() const {
    return subscribed_;
  }
  bool is_done() const {
    return own_.settled();
  }
  bool has_unreported_error() const {
    return end_.has_unreported_error();
  }

 protected:
  bool poll() override;
  void await(std::chrono::milliseconds timeout) override;
  // Raises the error of a failed collective; whoever waits next finds nothing to wait for.
  void report() override {
    end_.report(*this);
  }
  std::string_view op() const override {
    return text_.op();
  }
  std::string place() const override {
    return text_.place();
  }

 private:
  // For a future, as nobody may wait for the work: what is left to do is queued behind the
  // collective.
  void complete_on_device();

  // A wait in another CUDA graph capture than that of the collective is refused, or ends the work.
  void keep_to_capture();

  // Called when the backend's work is over, from whichever thread notices first.
  void complete(std::exception_ptr error) {
    end_.complete(std::move(error), *this);
  }

  const bool is_message_ = false;
  const WorkText text_;
  WorkState own_;
  DeviceOrder order_;
  const Subscribe subscribe_;
  Completion end_;
  std::atomic<bool> subscribed_{false};
  std::atomic<bool> listed_{true};
};

}  // namespace c10d_ext
