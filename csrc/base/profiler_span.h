#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/util/StringUtil.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace c10d_ext {

// A profiler's view of one call: opened when the work begins, closed when it ends, on whichever
// thread that is, for the observers of the thread that called.
class ProfilerSpan {
 public:
  // "shm:all_reduce". Null when nobody observes.
  static std::unique_ptr<ProfilerSpan> open(std::string_view backend, std::string_view op) {
    auto observers = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
    if (C10_LIKELY(!observers)) {
      return nullptr;
    }
    return std::unique_ptr<ProfilerSpan>(
        new ProfilerSpan(c10::str(backend, ':', op), std::move(*observers)));
  }

  void add_input(const at::Tensor& t) {
    inputs_.emplace_back(t);
  }
  void begin() {
    at::ThreadLocalStateGuard caller(state_);
    record_.emplace(std::move(observers_));
    record_->_setAsync();
    record_->before(title_.c_str(),
                    c10::ArrayRef<const c10::IValue>(inputs_.data(), inputs_.size()));
  }
  void end() {
    if (record_) {
      at::ThreadLocalStateGuard caller(state_);
      record_->end();
    }
  }

 private:
  ProfilerSpan(std::string title, at::StepCallbacks observers)
      : title_(std::move(title)), observers_(std::move(observers)) {}

  const at::ThreadLocalState state_;
  const std::string title_;
  at::StepCallbacks observers_;
  std::vector<c10::IValue> inputs_;
  std::optional<at::RecordFunction> record_;
};

}  // namespace c10d_ext
