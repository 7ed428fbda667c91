#include "backends/checked/works.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backends/checked/protocol.h"
#include "backends/checked/questions.h"
#include "base/caller_state.h"
#include "base/dtype.h"
#include "base/exceptions.h"
#include "base/gil.h"
#include "base/profiler_span.h"
#include "base/timeouts.h"
#include "base/wait_timer.h"
#include "work/blocking_work.h"
#include "work/pending.h"
#include "work/request_work.h"

namespace c10d_ext {

namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

c10d::OpType type_of(OpType op_type) {
  using Type = c10d::OpType;
  switch (op_type) {
    case OpType::Barrier:
      return Type::BARRIER;
    case OpType::AllReduce:
    case OpType::SparseAllReduce:
      return Type::ALLREDUCE;
    case OpType::Reduce:
      return Type::REDUCE;
    case OpType::Broadcast:
      return Type::BROADCAST;
    case OpType::AllGather:
      return Type::ALLGATHER;
    case OpType::ReduceScatter:
      return Type::REDUCE_SCATTER;
    case OpType::AllToAll:
      return Type::ALLTOALL_BASE;
    case OpType::Gather:
      return Type::GATHER;
    case OpType::Scatter:
      return Type::SCATTER;
    case OpType::Send:
      return Type::SEND;
    case OpType::Recv:
      return Type::RECV;
  }
  return Type::UNKNOWN;
}

std::exception_ptr error_of(const Failure& failure, const std::string& group) {
  return std::make_exception_ptr(
      CollectiveError(failure.kind, failure.text, failure.ranks, failure.op, failure.seq, group));
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an error of no known kind";
  }
}

CollectiveError wait_timed_out(std::string_view op, const Group& place, uint64_t seq,
                               std::chrono::milliseconds timeout,
                               const std::pair<std::vector<int>, std::string>& awaited) {
  const auto& [ranks, who] = awaited;
  return CollectiveError(ErrorKind::Timeout,
                         c10::str(op, ": ", text_of_wait_timeout(timeout, who), ' ', where(place)),
                         ranks, std::string(op), seq, place.name());
}

// A collective that the inner backend begins once the ranks have agreed.
class AgreedWork final : public SignalledWork {
 public:
  using Milliseconds = std::chrono::milliseconds;

  AgreedWork(std::string_view op, c10d::OpType type, const Group& group, const Inner& inner,
             std::weak_ptr<Agreement> agreement)
      : SignalledWork(static_cast<int>(group.rank()), type, op),
        place_({}, group.name(), group.rank(), group.size()),
        inner_(inner),
        agreement_(std::move(agreement)) {
    state_.queue();
  }

  // All ranks have called it, and what they called before is done.
  void begin(const Begin& begin, uint64_t seq) {
    state_.start();
    Started started;
    try {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      started = begin();
    } catch (...) {
      broke(seq, std::current_exception());
      return;
    }
    if (!started.work) {
      finish(started.finish, seq);
      return;
    }
    const auto self = c10::intrusive_ptr<AgreedWork>::reclaim_copy(this);
    if (!inner_.has_futures) {
      started.work = adapt_blocking_work(std::move(started.work));
    }
    subscribe_to_future(*started.work,
                        [self, seq, last = std::move(started.finish)](std::exception_ptr error) {
                          error ? self->broke(seq, std::move(error)) : self->finish(last, seq);
                        });
  }

  // All ranks have called it, and their data is here.
  void receive(const Piggyback& piggyback, const std::vector<SharedBytes>& data, uint64_t seq) {
    state_.start();
    auto span = ProfilerSpan::open(inner_.name, op());
    if (span) {
      span->begin();
    }
    finish(
        [&] {
          piggyback.receive(data);
          if (span) {
            span->end();
          }
        },
        seq);
  }

  void end(std::exception_ptr error) {
    if (!Agreement::is_here()) {
      SignalledWork::end(std::move(error));
      return;
    }
    if (awaited_here == this) {
      // For who waits, and is about to return.
      SignalledWork::end(std::move(error), [](std::function<void()> callbacks) {
        left_to_do_here = std::move(callbacks);
      });
      return;
    }
    const auto self = c10::intrusive_ptr<AgreedWork>::reclaim_copy(this);
    SignalledWork::end(std::move(error), [self](std::function<void()> callbacks) {
      self->inner_.callbacks->run([self, callbacks = std::move(callbacks)] { callbacks(); });
    });
  }

  void take_part() {
    const WaitTimer timer(timed_backend());
    help(std::chrono::steady_clock::time_point::max());
  }

 protected:
  void help(std::chrono::steady_clock::time_point until) override {
    const auto group = agreement_.lock();
    if (!group) {
      return;
    }
    constexpr Milliseconds kLook{50};  // for Ctrl-C, while it goes on
    without_gil([&] {
      bool waits = state_.number() > 0 && status() == WorkStatus::Queued;
      const auto begun = Clock::now();
      for (auto now = begun; waits && now < until; now = Clock::now()) {
        awaited_here = this;
        waits = group->help(number_or_zero(), std::min(until, now + kLook), begun);
        awaited_here = nullptr;
        if (const auto callbacks = std::exchange(left_to_do_here, nullptr)) {
          callbacks();
        }
        if (waits) {
          check_signals();
        }
      }
    });
  }
  std::string_view timed_backend() const override {
    return inner_.name;
  }
  std::exception_ptr late(Milliseconds timeout) override {
    std::pair<std::vector<int>, std::string> awaited;
    const uint64_t seq = number_or_zero();
    if (const auto group = agreement_.lock()) {
      without_gil([&] { awaited = group->awaited(seq, kVerdict, check_signals); });
    }
    return std::make_exception_ptr(wait_timed_out(op(), place_, seq, timeout, awaited));
  }
  std::exception_ptr foreign() const override {
    return std::make_exception_ptr(CollectiveError(
        ErrorKind::Closed,
        c10::str(op(), ": the work must be waited for in the process that started it, got a ",
                 "forked child ", where(place_)),
        {}, std::string(op()), number_or_zero(), place_.name()));
  }

 private:
  // The inner backend has not done it.
  void broke(uint64_t seq, std::exception_ptr error) {
    if (const auto group = agreement_.lock()) {
      group->broke(seq, text_of(error));
    } else {
      end(std::move(error));
    }
  }

  // The inner backend has done it.
  void finish(const Finish& last, uint64_t seq) {
    std::exception_ptr error = run_finish(last);
    // The next one may begin: a future's callback may wait for it.
    if (const auto group = agreement_.lock()) {
      without_gil([&] { group->done(seq); });  // whoever is at it may want the GIL
    }
    end(std::move(error));
  }

  // The work for whose beginning this thread does the agreement's part, and who wants to hear of
  // its end.
  static thread_local const AgreedWork* awaited_here;
  static thread_local std::function<void()> left_to_do_here;

  const Group place_;
  const Inner inner_;
  const std::weak_ptr<Agreement> agreement_;
};

thread_local const AgreedWork* AgreedWork::awaited_here = nullptr;
thread_local std::function<void()> AgreedWork::left_to_do_here;

// As shm calls it.
std::string name_of(const Message& message) {
  return std::string(name_of(message.sends ? OpType::Send : OpType::Recv));
}

c10d::OpType type_of(const Message& message) {
  return message.sends                ? c10d::OpType::SEND
         : message.peer == kAnySource ? c10d::OpType::RECVANYSOURCE
                                      : c10d::OpType::RECV;
}

// A message that the inner backend begins once its other end is there. Can only be waited for: it
// is settled by the thread that waits first, or before it was begun.
class GrantedWork final : public RequestWork {
 public:
  GrantedWork(const Message& message, int rank, std::shared_ptr<std::atomic<bool>> abandoned)
      : RequestWork(rank, type_of(message), own_),
        sends_(message.sends),
        abandoned_(std::move(abandoned)) {
    own_.queue();
  }

  void number(uint64_t number) {
    own_.set_number(static_cast<int64_t>(number));
  }

  void follow(const c10::intrusive_ptr<c10d::Work>& inner, int peer) {
    bool is_aborted = false;
    {
      std::lock_guard lock(mutex_);
      inner_ = inner;
      own_.set_source(peer);
      own_.start();
      is_aborted = is_aborted_;
    }
    changed_.notify_all();
    if (is_aborted) {
      abandon(inner);
    }
  }

  // Its data came, or went, with the word that its other end is there.
  void carried(int peer) {
    {
      std::lock_guard lock(mutex_);
      own_.set_source(peer);
      own_.start();
      own_.settle(nullptr, op());
    }
    changed_.notify_all();
  }

  void end(std::exception_ptr error) {
    {
      std::lock_guard lock(mutex_);
      own_.settle(std::move(error), op());
    }
    changed_.notify_all();
  }

  // Whether the inner backend knows of it, or it has failed.
  bool is_begun() const {
    return own_.status() != WorkStatus::Queued;
  }
  bool is_over() const {
    return own_.settled();
  }

  // Ends what the inner backend does of it, as soon as that has begun.
  void abort() override {
    c10::intrusive_ptr<c10d::Work> inner;
    {
      std::lock_guard lock(mutex_);
      is_aborted_ = true;
      inner = inner_;
    }
    if (inner && !own_.settled()) {
      abandon(inner);
    }
  }

 protected:
  bool poll() override {
    const auto inner = begun();
    return own_.settled() || (inner && inner->isCompleted());
  }

  void await(std::chrono::milliseconds /*timeout*/) override {
    {
      // The agreement ends it in time, and the inner backend.
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return is_begun(); });
      if (std::exchange(is_awaited_, true)) {
        changed_.wait(lock, [this] { return own_.settled(); });
      }
    }
    if (own_.settled()) {
      return;
    }
    std::exception_ptr error;
    try {
      const bool arrived = begun()->wait(kNoTimeout);
      TORCH_CHECK_WITH(DistBackendError, arrived, "an abort");
    } catch (...) {
      error = std::current_exception();
    }
    c10::intrusive_ptr<c10d::Work> over;  // with its memory, whoever knows of this one
    {
      std::lock_guard lock(mutex_);
      over.swap(inner_);
    }
    over.reset();
    end(std::move(error));
  }

  std::string_view op() const override {
    return name_of(sends_ ? OpType::Send : OpType::Recv);
  }

 private:
  // Of one that is over it would end the group. What another library's engine, as gloo, has begun
  // it goes on with, and would wait for ever for memory that is gone.
  void abandon(c10::intrusive_ptr<c10d::Work> inner) {
    try {
      if (inner->isCompleted()) {
        return;
      }
    } catch (...) {  // it has failed, or belongs to another process
      return;
    }
    inner->abort();
    if (dynamic_cast<const RequestWork*>(inner.get()) == nullptr) {
      *abandoned_ = true;
      (void)inner.release();
    }
  }

  c10::intrusive_ptr<c10d::Work> begun() const {
    std::lock_guard lock(mutex_);
    return inner_;
  }

  const bool sends_;
  const std::shared_ptr<std::atomic<bool>> abandoned_;
  WorkState own_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  c10::intrusive_ptr<c10d::Work> inner_;  // until it is over
  bool is_awaited_ = false, is_aborted_ = false;
};

bool says_it_all(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const CollectiveError&) {
    return true;
  } catch (...) {
    return false;
  }
}

// What has come of a message.
void write(const at::Tensor& tensor, std::string_view data) {
  TORCH_CHECK_WITH(DistBackendError, data.size() == tensor.nbytes(), "the message must have ",
                   tensor.nbytes(), " bytes, got ", data.size());
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor dense =
      tensor.is_contiguous() ? tensor : at::empty(tensor.sizes(), tensor.options());
  if (!data.empty() && data.data() != dense.const_data_ptr()) {
    std::memcpy(dense.mutable_data_ptr(), data.data(), data.size());
  }
  if (!dense.is_same(tensor)) {
    tensor.copy_(dense);
  }
}

// What the inner backend has to notice that a rank is gone before this asks who.
constexpr std::chrono::milliseconds kExplained{500};

}  // namespace

c10::intrusive_ptr<c10d::Work> start_agreed(const std::shared_ptr<Agreement>& agreement,
                                            const Group& group, const Inner& inner,
                                            AgreedCall&& call) {
  auto work = c10::make_intrusive<AgreedWork>(call.op, type_of(call.called.op_type), group, inner,
                                              agreement);
  Agreement::Operation operation;
  operation.op = call.op;
  operation.called = std::move(call.called);
  operation.timeout = call.timeout;
  operation.is_long = !call.quick;
  const auto caller = std::make_shared<const CallerState>();
  if (call.piggyback) {
    operation.data = std::move(call.piggyback->data);
    operation.receive = [work, caller, piggyback = std::move(*call.piggyback)](uint64_t seq,
                                                                               const auto& data) {
      caller->run([&] { work->receive(piggyback, data, seq); });
    };
  }
  operation.begin = [work, caller, beginnings = call.quick ? nullptr : inner.beginnings,
                     begin = std::move(call.begin)](uint64_t seq) {
    const auto run = [=] { work->begin(begin, seq); };
    if (beginnings) {
      beginnings->run([=] { caller->run_elsewhere(run); });
    } else {
      caller->run(run);
    }
  };
  operation.fail = [work, name = group.name()](const Failure& failure) {
    work->end(error_of(failure, name));
  };
  work->number(agreement->call(std::move(operation)));
  return work;
}

void take_part(c10d::Work& work) {
  static_cast<AgreedWork&>(work).take_part();
}

StartedMessage start_granted(const std::shared_ptr<Agreement>& agreement, const Group& group,
                             const Inner& inner, GrantedCall call) {
  const Message& message = call.message;
  auto work =
      c10::make_intrusive<GrantedWork>(message, static_cast<int>(group.rank()), inner.abandoned);
  Agreement::Message end;
  end.sends = message.sends;
  end.peer = static_cast<int>(message.peer);
  end.tag = message.tag;
  end.bytes = message.tensor.nbytes();
  // torch sends complex values as pairs of reals.
  end.dtype = dtype_of(c10::toRealValueType(message.tensor.scalar_type()));
  end.timeout = call.timeout;
  end.begin = [work, begin = std::move(call.begin), caller = CallerState()](int peer) {
    caller.run([&] {
      try {
        work->follow(begin(peer), peer);
      } catch (...) {
        work->end(std::current_exception());
      }
    });
  };
  end.fail = [work, name = group.name()](const Failure& failure) {
    work->end(error_of(failure, name));
  };
  if (end.bytes <= kLittleMessage) {
    end.receive = [work, inner, op = name_of(message), sends = message.sends, wire = call.wire](
                      int peer, std::string_view data) {
      auto span = ProfilerSpan::open(inner.name, op);
      if (span) {
        span->begin();
      }
      try {
        if (!sends) {
          write(wire, data);
        }
        if (span) {
          span->end();
        }
        work->carried(peer);
      } catch (...) {
        work->end(std::current_exception());
      }
    };
    if (!message.sends && call.wire.is_contiguous() && end.bytes >= Payload::kMuch) {
      const auto wire = std::make_shared<const at::Tensor>(call.wire);
      end.landing = {wire, static_cast<char*>(wire->mutable_data_ptr())};
    }
    const size_t most = std::min(call.most, agreement->most_with_words(end.peer));
    if (message.sends && end.bytes <= most && call.wire.is_contiguous()) {
      const auto wire = std::make_shared<const at::Tensor>(call.wire);
      const auto* first = static_cast<const char*>(wire->const_data_ptr());
      end.data = SharedBytes::lent({wire, first}, end.bytes);
    }
  }
  work->number(agreement->post(std::move(end)));

  const auto op = name_of(message);
  const Group place({}, group.name(), group.rank(), group.size());
  const auto failed = [op, place, agreement](std::exception_ptr error) {
    if (says_it_all(error)) {
      return error;
    }
    const auto failure = agreement->failure(op, 0, kExplained);
    return failure ? error_of(*failure, place.name()) : error;
  };
  const auto late = [op, place, agreement,
                     number = work->getSequencenumber()](Milliseconds timeout) {
    std::pair<std::vector<int>, std::string> awaited;
    without_gil([&] { awaited = agreement->awaited_by_message(number, kVerdict, check_signals); });
    return std::make_exception_ptr(wait_timed_out(op, place, 0, timeout, awaited));
  };
  // While a message waits for its other end, who waits for it takes in what comes.
  const auto help = [agreement, work, number = work->getSequencenumber()] {
    constexpr Milliseconds kLook{50};  // for Ctrl-C
    without_gil([&, begun = Clock::now()] {
      while (!work->is_begun() && agreement->help_message(number, Clock::now() + kLook, begun)) {
        check_signals();
      }
    });
    return work->is_over();
  };
  return {adapt_blocking_work(work, OnWait{inner.name, failed, help, late}), work};
}

}  // namespace c10d_ext
