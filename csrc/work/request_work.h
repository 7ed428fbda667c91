#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/profiler_span.h"
#include "control/process.h"
#include "work/work_state.h"

namespace c10d_ext {

// A work of ours: a handle on a state, and how its end is found. What is asked of a work is
// answered here, once; a derived class says how one looks and waits for the end.
class RequestWork : public c10d::Work {
 public:
  bool isCompleted() final {
    return state_.settled() || poll();
  }
  bool isSuccess() const override {
    return state_.settled() && !state_.error();
  }
  std::exception_ptr exception() const override {
    return state_.settled() ? state_.error() : nullptr;
  }
  bool wait(std::chrono::milliseconds timeout) final {
    await(timeout);
    report();
    return true;
  }
  void synchronize() final {
    wait(kNoTimeout);
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return state_.future(op());
  }
  // Of a receive, -1 until it is known; others have none.
  int sourceRank() const override;
  // Refused where the backend does not number what it does.
  uint64_t getSequencenumber() const override;
  float getDuration() const override;

  WorkStatus status() const {
    return state_.status();
  }

 protected:
  // `state` outlives this.
  RequestWork(int rank, c10d::OpType type, WorkState& state)
      : c10d::Work(rank, type), state_(state) {}

  // Whether it is complete, where it is not settled as far as is known.
  virtual bool poll() {
    return state_.settled();
  }
  // Returns once it is settled; throws where the wait ends before that.
  virtual void await(std::chrono::milliseconds timeout) = 0;
  // Throws what it failed with.
  virtual void report() {
    state_.report();
  }
  // For texts.
  virtual std::string_view op() const = 0;
  // The end of a text: where it happened.
  virtual std::string place() const {
    return {};
  }

  WorkState& state_;
};

// A work that a thread of its backend ends. Those who wait for it sleep, and hear of Ctrl-C.
class SignalledWork : public RequestWork {
 public:
  // `span`: what the profiler is told of it, from now to its end; none where nobody looks.
  SignalledWork(int rank, c10d::OpType type, std::string_view op,
                std::unique_ptr<ProfilerSpan> span = nullptr);

  // The first end is the one that counts. `elsewhere` has callbacks run where they may wait; none:
  // they run here.
  using Elsewhere = std::function<void(std::function<void()> callbacks)>;
  void end(std::exception_ptr error, const Elsewhere& elsewhere = nullptr);

  void number(uint64_t number) {
    own_.set_number(static_cast<int64_t>(number));
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 protected:
  bool poll() override;
  void await(std::chrono::milliseconds timeout) override;
  std::string_view op() const final {
    return op_;
  }

  // Somebody wants to hear of the end: for what ends only where somebody waits.
  virtual void listen() {}
  // Does here what brings the end nearer, until then at most: this thread waits for it.
  virtual void help(std::chrono::steady_clock::time_point /*until*/) {}
  // Whose time it is that a caller waits; empty: it is not counted.
  virtual std::string_view timed_backend() const {
    return {};
  }
  // What a wait raises that ends before the work.
  virtual std::exception_ptr late(std::chrono::milliseconds timeout);
  // What is raised in a fork of the process that started it, which has neither the thread that
  // ends it nor its connections.
  virtual std::exception_ptr foreign() const;
  // Throws it there.
  void check_at_home() const;
  // Before it has a number, 0.
  uint64_t number_or_zero() const {
    return static_cast<uint64_t>(std::max<int64_t>(own_.number(), 0));
  }

 private:
  const std::string_view op_;  // the names of ops are literals
  const std::unique_ptr<ProfilerSpan> span_;
  const uint64_t generation_ = fork_generation();
  WorkState own_;
};

}  // namespace c10d_ext
