#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "backends/shm/backend.h"
#include "backends/shm/engine.h"
#include "backends/shm/operation_tensors.h"
#include "work/work_state.h"

namespace c10d_ext {

struct ShmBackend::Call {
  enum class Delivery : uint8_t {
    Async,  // a work, always
    Sync,   // complete on return, no work
    Op,     // a work unless complete already
  };

  std::string_view op;
  c10d::OpType type;
  Delivery delivery = Delivery::Op;
  Milliseconds timeout = c10d::kUnsetTimeout;
  // Of an Op that is complete on return: where to tell of it.
  WorkInfo* done = nullptr;

  static Call of(const MethodCall& call) {
    return {call.op, call.type, call.async ? Delivery::Async : Delivery::Sync, call.timeout};
  }
};

// An operation of the engine with the tensors it reads and writes, and what becomes of it. Built
// and submitted by one thread; settled by the one that drives the engine.
class ShmBackend::TensorOperation final : public OperationTensors {
 public:
  // Only for one that has ended well and whose single owner asks: what is allocated costs as much
  // as a small operation.
  void renew() {
    OperationTensors::renew();
    state_.renew();
  }
  bool is_renewable() const {
    return state_.is_renewable() && !carrier_;
  }

  // --- Several operations as one ----------------------------------------------------------------

  bool can_carry(const TensorOperation& other) const {
    const auto& a = request;
    const auto& b = other.request;
    return a.type == b.type && a.dtype == b.dtype && a.reduce_op == b.reduce_op &&
           a.factor.real == b.factor.real && a.factor.imaginary == b.factor.imaginary &&
           timeout == other.timeout &&
           (a.type == OpType::AllReduce || a.type == OpType::AllGather ||
            a.type == OpType::ReduceScatter);
  }
  void carry(const std::shared_ptr<TensorOperation>& other) {
    if (request.members.empty()) {
      request.members.push_back(member_bytes());
    }
    if (other->request.members.empty()) {
      request.members.push_back(other->member_bytes());
    } else {
      request.members.insert(request.members.end(), other->request.members.begin(),
                             other->request.members.end());
    }
    append(request.sources, other->request.sources);
    append(request.targets, other->request.targets);
    request.shapes = join_shapes(request.shapes, other->request.shapes);
    passengers_.push_back(other);
  }
  void hold() {
    state_.queue();
  }
  // `carrier`: the operation that this is a part of from now on, or null.
  void release(std::shared_ptr<TensorOperation> carrier) {
    carrier_ = std::move(carrier);
    state_.start();
  }
  // In an open coalescing block: not submitted yet.
  bool held() const {
    return state_.queued();
  }
  // What the engine knows.
  TensorOperation& carrier() {
    return carrier_ ? *carrier_ : *this;
  }

  // --- Outcome ----------------------------------------------------------------------------------

  WorkState& state() {
    return state_;
  }
  bool settled() const {
    return state_.settled();
  }
  // Once it is settled.
  bool disagrees() const {
    return disagrees_;
  }
  uint64_t number() const {
    return carrier_ && settled() ? static_cast<uint64_t>(state_.number()) : seq();
  }
  c10::intrusive_ptr<c10::ivalue::Future> future() {
    return state_.future(
        op(),
        [] {
          return c10::make_intrusive<c10::ivalue::Future>(
              c10::ListType::create(c10::TensorType::get()));
        },
        [this] { return c10::IValue(outputs()); });
  }

  void on_begin() override {
    fill();
    for (const auto& passenger : passengers_) {
      passenger->on_begin();
    }
  }

  void on_arrived() override {
    land();
    for (const auto& passenger : passengers_) {
      passenger->on_arrived();
    }
  }

  void on_done(const Failure* failure) override {
    settle(failure, *this);
    // They hold this one: the circle ends here.
    for (const auto& passenger : std::exchange(passengers_, {})) {
      passenger->settle(failure, *this);
    }
  }

 private:
  static void append(std::vector<shm::Buffer>& parts, const std::vector<shm::Buffer>& more) {
    for (size_t i = 0; i < parts.size(); ++i) {
      parts[i].insert(parts[i].end(), more[i].begin(), more[i].end());
    }
  }
  // `carrier` is the operation that the engine ran.
  void settle(const Failure* failure, const TensorOperation& carrier);

  std::vector<std::shared_ptr<TensorOperation>> passengers_;
  std::shared_ptr<TensorOperation> carrier_;

  bool disagrees_ = false;  // written before it is settled
  WorkState state_;
};

}  // namespace c10d_ext
