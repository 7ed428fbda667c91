#include "backends/checked/works.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/exceptions.h"
#include "base/gil.h"
#include "base/signal_masked_thread.h"
#include "base/timeouts.h"
#include "base/wait_timer.h"
#include "control/process.h"
#include "work/blocking_work.h"
#include "work/pending.h"

namespace c10d_ext {

namespace {

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

// What rank 0 has for telling who is awaited, once a wait has run out.
constexpr std::chrono::milliseconds kAnswered{1000};

CollectiveError impatience(std::string_view op, const Group& place, uint64_t seq,
                           std::chrono::milliseconds timeout,
                           const std::pair<std::vector<int>, std::string>& awaited) {
  const auto& [ranks, who] = awaited;
  return CollectiveError(ErrorKind::Timeout,
                         c10::str(op, ": ", text_of_wait_timeout(timeout, who), ' ', where(place)),
                         ranks, std::string(op), seq, place.name());
}

// A collective that the inner backend begins once the ranks have agreed.
class AgreedWork final : public c10d::Work {
 public:
  using Milliseconds = std::chrono::milliseconds;

  AgreedWork(std::string_view op, c10d::OpType type, const Group& group, const Inner& inner,
             std::weak_ptr<Agreement> agreement)
      : c10d::Work(static_cast<int>(group.rank()), type),
        op_(op),
        place_({}, group.name(), group.rank(), group.size()),
        inner_(inner),
        agreement_(std::move(agreement)) {}

  void number(uint64_t seq) {
    seq_ = seq;
  }

  // Throws in a fork of the process that called it.
  void check_at_home() const {
    if (fork_generation() != generation_) {
      throw CollectiveError(
          ErrorKind::Closed,
          c10::str(op_, ": the work must be waited for in the process that started it, got a ",
                   "forked child ", where(place_)),
          {}, std::string(op_), seq_, place_.name());
    }
  }

  // All ranks have called it, and what they called before is done.
  void begin(const Begin& begin, uint64_t seq) {
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

  // The first end is the one that counts.
  void end(std::exception_ptr error) {
    if (Agreement::is_here()) {
      // A future's callback may wait for what the agreement has yet to begin.
      const auto self = c10::intrusive_ptr<AgreedWork>::reclaim_copy(this);
      try {
        std::thread([self, error] { self->end(error); }).detach();
        return;
      } catch (const std::system_error&) {
        // No thread to be had.
      }
    }
    {
      std::lock_guard lock(mutex_);
      if (over_) {
        return;
      }
      over_ = true;
      error_ = error;
    }
    changed_.notify_all();
    if (error) {
      future_->setErrorIfNeeded(std::move(error));
    } else {
      future_->markCompleted(c10::IValue());
    }
  }

  bool isCompleted() override {
    check_at_home();
    std::lock_guard lock(mutex_);
    return over_;
  }
  bool isSuccess() const override {
    std::lock_guard lock(mutex_);
    return over_ && !error_;
  }
  std::exception_ptr exception() const override {
    std::lock_guard lock(mutex_);
    return error_;
  }

  bool wait(Milliseconds timeout) override {
    using Clock = std::chrono::steady_clock;
    check_at_home();
    const WaitTimer timer(inner_.name);
    const bool limited = timeout > Milliseconds(0);
    const auto until = limited ? Clock::now() + bounded(timeout) : Clock::time_point::max();
    std::unique_lock lock(mutex_);
    if (!wait_interruptibly(changed_, lock, until, [this] { return over_; })) {
      lock.unlock();
      std::pair<std::vector<int>, std::string> awaited;
      if (const auto group = agreement_.lock()) {
        awaited = group->awaited(seq_, kAnswered);
      }
      throw impatience(op_, place_, seq_, timeout, awaited);
    }
    if (error_) {
      std::rethrow_exception(error_);
    }
    return true;
  }
  void synchronize() override {
    wait(kNoTimeout);
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }
  uint64_t getSequencenumber() const override {
    return seq_;
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

  // the inner backend has done it.
  void finish(const Finish& last, uint64_t seq) {
    std::exception_ptr error;
    if (last) {
      try {
        at::AutoDispatchBelowADInplaceOrView below_autograd;
        last();
      } catch (...) {
        error = std::current_exception();
      }
    }
    // The next one may begin: a future's callback may wait for it.
    if (const auto group = agreement_.lock()) {
      group->done(seq);
    }
    end(std::move(error));
  }

  const std::string_view op_;  // the names of ops are literals
  const Group place_;
  const Inner inner_;
  const std::weak_ptr<Agreement> agreement_;
  const uint64_t generation_ = fork_generation();
  std::atomic<uint64_t> seq_{0};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  std::exception_ptr error_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_ =
      c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get());
};

// As shm calls it.
std::string name_of(const Message& message) {
  return std::string(name_of(message.sends ? OpType::Send : OpType::Recv));
}

c10d::OpType type_of(const Message& message) {
  return message.sends                ? c10d::OpType::SEND
         : message.peer == kAnySource ? c10d::OpType::RECVANYSOURCE
                                      : c10d::OpType::RECV;
}

// A message that the inner backend begins once its other end is there. Can only be waited for.
class GrantedWork final : public c10d::Work {
 public:
  GrantedWork(const Message& message, int rank) : c10d::Work(rank, type_of(message)) {}

  void number(uint64_t number) {
    number_ = number;
  }

  void follow(c10::intrusive_ptr<c10d::Work> inner, int peer) {
    {
      std::lock_guard lock(mutex_);
      inner_ = std::move(inner);
      peer_ = peer;
    }
    changed_.notify_all();
  }

  void fail(std::exception_ptr error) {
    {
      std::lock_guard lock(mutex_);
      error_ = std::move(error);
    }
    changed_.notify_all();
  }

  bool isCompleted() override {
    std::lock_guard lock(mutex_);
    return error_ || (inner_ && inner_->isCompleted());
  }

  bool wait(std::chrono::milliseconds /*timeout*/) override {
    c10::intrusive_ptr<c10d::Work> inner;
    {
      // The agreement ends it in time.
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return inner_ || error_; });
      if (error_) {
        std::rethrow_exception(error_);
      }
      inner = inner_;
    }
    return inner->wait(kNoTimeout);
  }

  void abort() override {
    c10::intrusive_ptr<c10d::Work> inner;
    {
      std::lock_guard lock(mutex_);
      inner = inner_;
    }
    if (inner) {
      inner->abort();
    }
  }

  int sourceRank() const override {
    std::lock_guard lock(mutex_);
    return peer_;
  }

  uint64_t getSequencenumber() const override {
    return number_;
  }

 private:
  std::atomic<uint64_t> number_{0};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  c10::intrusive_ptr<c10d::Work> inner_;
  int peer_ = kAnySource;
  std::exception_ptr error_;
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

// What the inner backend has to notice that a rank is gone before this asks who.
constexpr std::chrono::milliseconds kExplained{500};

}  // namespace

c10::intrusive_ptr<c10d::Work> start_agreed(const std::shared_ptr<Agreement>& agreement,
                                            const Group& group, const Inner& inner,
                                            std::string_view op, Fingerprint called,
                                            Milliseconds timeout, bool quick, Begin begin) {
  auto work = c10::make_intrusive<AgreedWork>(op, type_of(called.op_type), group, inner, agreement);
  Agreement::Operation operation;
  operation.op = op;
  operation.called = std::move(called);
  operation.timeout = timeout;
  operation.begin = [work, quick, begin = std::move(begin),
                     state = at::ThreadLocalState()](uint64_t seq) {
    const auto run = [work, begin, state, seq] {
      const at::ThreadLocalStateGuard as_the_caller(state);
      work->begin(begin, seq);
    };
    if (!quick) {
      // The agreement's thread hears of lost ranks meanwhile.
      try {
        signal_masked_thread("c10d_ext_begin", run).detach();
        return;
      } catch (const std::system_error&) {
        // No thread to be had.
      }
    }
    run();
  };
  operation.fail = [work, name = group.name()](const Failure& failure) {
    work->end(error_of(failure, name));
  };
  work->number(agreement->call(std::move(operation)));
  return work;
}

StartedMessage start_granted(const std::shared_ptr<Agreement>& agreement, const Group& group,
                             const Inner& inner, const Message& message, Milliseconds timeout,
                             std::function<WorkPtr(int peer)> begin) {
  auto work = c10::make_intrusive<GrantedWork>(message, static_cast<int>(group.rank()));
  Agreement::Message end;
  end.sends = message.sends;
  end.peer = static_cast<int>(message.peer);
  end.tag = message.tag;
  end.bytes = message.tensor.nbytes();
  // torch sends complex values as pairs of reals.
  end.dtype = dtype_of(c10::toRealValueType(message.tensor.scalar_type()));
  end.timeout = timeout;
  end.begin = [work, begin = std::move(begin), state = at::ThreadLocalState()](int peer) {
    const at::ThreadLocalStateGuard as_the_caller(state);
    try {
      work->follow(begin(peer), peer);
    } catch (...) {
      work->fail(std::current_exception());
    }
  };
  end.fail = [work, name = group.name()](const Failure& failure) {
    work->fail(error_of(failure, name));
  };
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
    const auto awaited = agreement->awaited_by_message(number, kAnswered);
    return std::make_exception_ptr(impatience(op, place, 0, timeout, awaited));
  };
  return {adapt_blocking_work(work, Explanations{inner.name, failed, late}), work};
}

}  // namespace c10d_ext
