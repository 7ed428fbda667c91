#include "work/request_work.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <cmath>
#include <utility>

#include "base/gil.h"
#include "base/timeouts.h"
#include "base/wait_timer.h"

namespace c10d_ext {

int RequestWork::sourceRank() const {
  const auto type = retrieveOpType();
  const bool receives = type == c10d::OpType::RECV || type == c10d::OpType::RECVANYSOURCE;
  return receives ? state_.source() : c10d::Work::sourceRank();  // which refuses
}

uint64_t RequestWork::getSequencenumber() const {
  const int64_t number = state_.number();
  TORCH_CHECK(number >= 0, op(), ": the backend must number what it does, got one that does not",
              place());
  return static_cast<uint64_t>(number);
}

float RequestWork::getDuration() const {
  TORCH_CHECK(state_.settled(), op(),
              ": getDuration must be asked once the work is complete, got one in flight", place());
  const float milliseconds = state_.milliseconds();
  TORCH_CHECK(!std::isnan(milliseconds), op(),
              ": the backend must time what it does, got one that does not", place());
  return milliseconds;
}

SignalledWork::SignalledWork(int rank, c10d::OpType type, std::string_view op,
                             std::unique_ptr<ProfilerSpan> span)
    : RequestWork(rank, type, own_), op_(op), span_(std::move(span)) {
  if (span_) {
    span_->begin();
  }
}

void SignalledWork::end(std::exception_ptr error, const Elsewhere& elsewhere) {
  if (!own_.claim()) {
    return;
  }
  if (span_) {
    span_->end();
  }
  if (!own_.end(std::move(error))) {
    return;
  }
  const auto nothing = [] { return c10::IValue(); };
  if (elsewhere) {
    own_.tell(op_, nothing, elsewhere);
  } else {
    own_.tell(op_, nothing);
  }
}

c10::intrusive_ptr<c10::ivalue::Future> SignalledWork::getFuture() {
  if (!own_.settled()) {
    check_at_home();
    listen();
  }
  return RequestWork::getFuture();
}

bool SignalledWork::poll() {
  check_at_home();
  listen();
  return own_.settled();
}

void SignalledWork::await(std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  if (own_.settled()) {
    return;
  }
  check_at_home();
  const WaitTimer timer(timed_backend());
  listen();
  const auto until =
      timeout > kNoTimeout ? Clock::now() + bounded(timeout) : Clock::time_point::max();
  help(until);
  const bool ended = own_.wait([&](auto& changed, auto& lock, const auto& is_over) {
    return wait_interruptibly(changed, lock, until, is_over);
  });
  if (!ended) {
    const auto error = late(timeout);
    if (!own_.settled()) {  // as it may be by now: to find out whom it waits for takes a while
      std::rethrow_exception(error);
    }
  }
}

std::exception_ptr SignalledWork::late(std::chrono::milliseconds timeout) {
  return std::make_exception_ptr(
      c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                            c10::str("no end after ", timeout.count(), " ms")));
}

std::exception_ptr SignalledWork::foreign() const {
  return std::make_exception_ptr(c10::DistBackendError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
      c10::str(op_, ": the work must be waited for in the process that started it, got a forked ",
               "child")));
}

void SignalledWork::check_at_home() const {
  if (fork_generation() != generation_) {
    std::rethrow_exception(foreign());
  }
}

}  // namespace c10d_ext
