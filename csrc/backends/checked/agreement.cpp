// A thread per rank and group talks over the lines. Rank 0's is also the coordinator's. Callers
// spare it: they say themselves what they call, and one who waits takes in what comes.

#include "backends/checked/agreement.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "backends/checked/duties.h"
#include "backends/checked/failures.h"
#include "backends/checked/open_calls.h"
#include "backends/checked/protocol.h"
#include "backends/checked/questions.h"
#include "backends/checked/roster.h"
#include "backends/checked/service.h"
#include "base/signal_masked_thread.h"
#include "control/process.h"

namespace c10d_ext {

namespace {

using Clock = OpenCalls::Clock;
using Milliseconds = Agreement::Milliseconds;
using Kind = ErrorKind;

// For so many times as long as a caller has waited another one is expected, within bounds: ranks
// that are at little data wait one time after the other, and a thread that is woken in between
// takes more than it does.
constexpr int kLulls = 4;
constexpr Milliseconds kShortestLull{1}, kLongestLull{2};

// For so long a caller stays awake, which is more than a little collective takes on a few hosts:
// who sleeps is woken late, and keeps the others waiting until they sleep, too.
constexpr Milliseconds kAwake{1};

thread_local bool agreeing_here = false;

// While it lives, this thread does an agreement's work.
class Here {
 public:
  Here() {
    agreeing_here = true;
  }
  ~Here() {
    agreeing_here = false;
  }
  Here(const Here&) = delete;
  Here& operator=(const Here&) = delete;
};

// Whether a rank is known not to be there any more.
bool is_gone(const Roster& roster, const OpenCalls& calls, int rank) {
  if (roster.is_near(rank)) {
    return roster.has_ended(rank);
  }
  const auto end = calls.end();
  const auto names = [&](const char* how) {
    return end->why.find(roster.describe(rank, how)) != std::string::npos;
  };
  return end && end->kind == Kind::RankLost && (names(kGone) || names(kUnreachable));
}

// What rank 0 answers; that it is stopped where this rank sees that.
Difference answer(const Roster& roster, OpenCalls& calls, OpenCalls::Asked asked,
                  Milliseconds within, const std::function<void()>& look) {
  constexpr Milliseconds kLook{50};
  try {
    for (const auto until = Clock::now() + within;;) {
      const bool is_stopped = roster.is_root_stopped();
      const bool gives_up = is_stopped || Clock::now() + kLook >= until;
      if (auto who = calls.answer(asked, kLook, gives_up)) {
        return who->ranks.empty() && is_stopped ? Difference{roster.describe(0, "stopped"), {0}}
                                                : std::move(*who);
      }
      look();
    }
  } catch (...) {
    calls.answer(asked, Milliseconds(0), /*gives_up=*/true);
    throw;
  }
}

// Of one caller at a time.
class HelpersSeat {
 public:
  explicit HelpersSeat(std::atomic<bool>& taken) : seat_(taken.exchange(true) ? nullptr : &taken) {}
  ~HelpersSeat() {
    if (seat_ != nullptr) {
      *seat_ = false;
    }
  }
  HelpersSeat(const HelpersSeat&) = delete;
  HelpersSeat& operator=(const HelpersSeat&) = delete;

  explicit operator bool() const {
    return seat_ != nullptr;
  }

 private:
  std::atomic<bool>* const seat_;
};

}  // namespace

// The thread of a rank, which listens and decides, and what other threads ask of it, or do for it.
class Agreement::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(Connections star, Place place, Lose lose)
      : roster_(std::move(place), std::move(star.members)),
        calls_(roster_, kVerdict),
        generation_(fork_generation()),
        duties_(roster_, calls_, std::move(star.lines), std::move(star.death_sockets),
                std::move(lose)) {}

  void start() {
    thread_ = signal_masked_thread("c10d_ext_agree", [self = shared_from_this()] { self->run(); });
  }

  // --- From any thread --------------------------------------------------------------------------

  uint64_t call(Operation&& operation) {
    OpenCall call{std::move(operation.op), std::nullopt, operation.timeout,
                  std::move(operation.begin), std::move(operation.fail)};
    call.receive = std::move(operation.receive);
    call.is_long = operation.is_long;
    return tell(std::move(call), [&](OpenCall&& entered) {
      return calls_.enter(std::move(operation.called), std::move(operation.data),
                          std::move(entered));
    });
  }

  uint64_t post(Message message) {
    Posted posted{.sends = message.sends,
                  .peer = message.peer,
                  .tag = message.tag,
                  .bytes = message.bytes,
                  .dtype = message.dtype,
                  .data = std::move(message.data)};
    OpenCall call{
        std::string(name_of(message.sends ? OpType::Send : OpType::Recv)), message.tag,
        message.timeout,
        [begin = std::move(message.begin)](uint64_t peer) { begin(static_cast<int>(peer)); },
        std::move(message.fail)};
    if (message.receive) {
      call.receive = [receive = std::move(message.receive)](uint64_t peer,
                                                            const std::vector<SharedBytes>& data) {
        receive(static_cast<int>(peer), data.front());
      };
    }
    if (message.landing) {
      call.landing = std::make_shared<Landing>(std::move(message.landing), message.bytes);
    }
    return tell(std::move(call), [&](OpenCall&& entered) {
      return calls_.enter_message(std::move(posted), std::move(entered));
    });
  }

  const std::vector<std::vector<int>>& led_hosts() const {
    return roster_.hosts();
  }
  size_t told_by_one() const {
    size_t most = led_hosts().empty() ? static_cast<size_t>(roster_.place().size) : 0;
    for (const auto& ranks : roster_.hosts()) {
      most = std::max(most, ranks.size());
    }
    return most;
  }

  size_t most_with_words(int peer) const {
    return calls_.most_with_words(peer);
  }

  uint64_t count() const {
    return calls_.count();
  }
  bool has_collectives() const {
    return calls_.has_collectives();
  }

  bool help(uint64_t seq, Clock::time_point until, Clock::time_point begun) {
    return help_while([&] { return calls_.is_waiting(seq); }, until, begun);
  }
  bool help_message(uint64_t number, Clock::time_point until, Clock::time_point begun) {
    return help_while([&] { return calls_.is_message_waiting(number); }, until, begun);
  }

  void done(uint64_t seq) {
    if (calls_.done(seq) && (is_foreign() || !tell_here(/*waits=*/true))) {
      duties_.star().wake();
    }
  }

  void broke(uint64_t seq, const std::string& why) {
    bring(Participant::broken(seq, why));
  }

  std::optional<Failure> failure(const std::string& op, uint64_t seq, Milliseconds within) const {
    if (is_foreign()) {
      return failure_of(roster_.place(), Kind::Closed, op, seq, kForked);
    }
    return calls_.failure(op, seq, within);
  }

  // Of collective or message `number`.
  std::pair<std::vector<int>, std::string> awaited(Says question, uint64_t number,
                                                   Milliseconds within,
                                                   const std::function<void()>& look) {
    if (is_foreign()) {
      return {};
    }
    calls_.expect_answer({question, number});
    duties_.star().wake();
    auto who = answer(roster_, calls_, {question, number}, within, look);
    return {std::move(who.ranks), std::move(who.text)};
  }

  std::optional<int> gone(int rank) const {
    const bool is_known = !is_foreign() && is_gone(roster_, calls_, rank);
    return is_known ? std::optional(roster_.pid(rank)) : std::nullopt;
  }

  bool has_abandoned() const {
    return calls_.has_abandoned();
  }

  // The locks of another process may be taken, and nobody here would ever give them back.
  bool is_foreign() const {
    return fork_generation() != generation_;
  }

  void abort() {
    bring({0, kAborting, {}});
    calls_.failure("", 0, kLinger);  // until it is known here, too
  }

  void leave(Milliseconds grace) {
    if (is_foreign()) {
      if (thread_.joinable()) {
        thread_.detach();  // there is none
      }
      return;
    }
    bool can_wait = false;
    {
      const std::lock_guard lock(thread_mutex_);
      if (!thread_.joinable()) {
        return;
      }
      can_wait = thread_.get_id() != std::this_thread::get_id();
      thread_.detach();
    }
    calls_.leave(can_wait ? std::optional(grace) : std::nullopt,
                 [this] { duties_.star().wake(Star::Waiter::Thread); });
    if (can_wait) {
      calls_.wait_until_left();
    }
  }

 private:
  static constexpr char kForked[] =
      "the group must be used in the process that created it, got a forked child";

  // Does the agreement's work while `is_waiting`. True: it still is, and the time is over.
  template <class IsWaiting>
  bool help_while(const IsWaiting& is_waiting, Clock::time_point until, Clock::time_point begun) {
    if (agreeing_here || is_foreign()) {
      return false;
    }
    const HelpersSeat seat(has_helper_);
    if (!seat) {
      return false;
    }
    for (auto next = begin_helping();;) {
      const bool waits = next && is_waiting();
      if (!waits || Clock::now() >= until) {
        stop_helping(begun);
        return waits;
      }
      // Whatever woke this one has woken nobody else.
      next = help_once(
          duties_.star().wait(Star::Waiter::Caller, std::min(until, *next), begun + kAwake));
    }
  }

  // Enters it by `enter`, and tells of it. Its number.
  template <class Enter>
  uint64_t tell(OpenCall&& call, const Enter& enter) {
    if (is_foreign()) {
      call.fail(failure_of(roster_.place(), Kind::Closed, call.op, 0, kForked));
      return 0;
    }
    const bool is_little = static_cast<bool>(call.receive);
    auto [seq, failed] = enter(std::move(call));
    if (failed) {
      failed->call.fail(failed->failure);
    } else if (!tell_here()) {
      duties_.star().wake();
    } else if (!is_little && is_aside_) {
      duties_.star().wake(Star::Waiter::Thread);  // who calls it may have other things to do
    }
    return seq;
  }

  // Says what there is to say on this thread. Where another one does the agreement's work, it waits
  // for that, or says nothing. False: one has to come round.
  bool tell_here(bool waits = false) {
    if (agreeing_here) {
      return false;
    }
    const auto lock =
        waits ? std::unique_lock(work_mutex_) : std::unique_lock(work_mutex_, std::try_to_lock);
    if (!lock || calls_.is_leaving()) {
      return false;
    }
    const Here here;
    wake_thread_by(duties_.tell_news());
    return true;
  }

  // When something is late; none where the group is being left.
  std::optional<Clock::time_point> begin_helping() {
    const std::lock_guard lock(work_mutex_);
    if (calls_.is_leaving()) {
      return std::nullopt;
    }
    duties_.set_helped(true);
    return duties_.next_look();
  }

  // One round of a caller's; the same.
  std::optional<Clock::time_point> help_once(const Star::Ready& ready) {
    const std::lock_guard lock(work_mutex_);
    duties_.set_helped(false);
    if (calls_.is_leaving()) {
      duties_.star().wake(Star::Waiter::Thread);  // for what has come and is not taken in here
      return std::nullopt;
    }
    const Here here;
    const auto next = duties_.work(ready);
    duties_.set_helped(true);
    return next;
  }

  void stop_helping(Clock::time_point begun) {
    const auto now = Clock::now();
    callers_until_ =
        now + std::clamp<Clock::duration>(kLulls * (now - begun), kShortestLull, kLongestLull);
    const std::lock_guard lock(work_mutex_);
    duties_.set_helped(false);
    if (!calls_.is_leaving()) {
      wake_thread_by(duties_.next_look());
    }
  }

  // Under work_mutex_. The thread may sleep for longer.
  void wake_thread_by(Clock::time_point next) {
    if (next < thread_wakes_at_) {
      duties_.star().wake(Star::Waiter::Thread);
    }
  }

  void bring(News news) {
    calls_.add_news(std::move(news));
    duties_.star().wake();
  }

  // --- The thread -------------------------------------------------------------------------------

  void run() {
    // What came in one piece with a welcome is heard already, and nothing more may come.
    auto until = work(duties_.star().everything());
    while (!calls_.is_leaving()) {
      until = work(wait(until));
    }
    say_goodbye();
  }

  Clock::time_point work(const Star::Ready& ready) {
    const std::lock_guard lock(work_mutex_);
    const Here here;
    return thread_wakes_at_ = duties_.work(ready);
  }

  // Callers who are at it take in themselves what comes.
  Star::Ready wait(Clock::time_point until) {
    for (;;) {
      const auto lull = callers_until_.load();
      is_aside_ = Clock::now() < lull;
      if (!is_aside_) {
        return duties_.star().wait(Star::Waiter::Thread, until);
      }
      auto ready = duties_.star().wait_aside(std::min(until, lull));
      if (!ready.empty() || Clock::now() >= until) {
        is_aside_ = false;
        return ready;
      }
    }
  }

  // The thread's alone, once the group is being left.
  void say_goodbye() {
    const Here here;
    {
      const std::lock_guard lock(work_mutex_);  // until callers, too, know of it
    }
    duties_.say_goodbye();
  }

  const Roster roster_;
  OpenCalls calls_;
  const uint64_t generation_;
  std::mutex thread_mutex_;
  std::thread thread_;  // detached by the first to leave

  // A caller waits in the thread's place.
  std::atomic<bool> has_helper_{false};
  // Until when another one is expected, and whether the thread leaves lines to it.
  std::atomic<Clock::time_point> callers_until_{Clock::time_point()};
  std::atomic<bool> is_aside_{false};

  // Guards all that follows, but for waits and wakes. Locked by who does the agreement's work.
  std::mutex work_mutex_;
  Duties duties_;
  Clock::time_point thread_wakes_at_{OpenCalls::kNever};
};

std::unique_ptr<Agreement> Agreement::join(const KeyValueStore& store, const Place& place,
                                           Milliseconds timeout, const std::string& machine,
                                           Lose lose) {
  auto impl = std::make_shared<Impl>(meet(store, place, timeout, machine), place, std::move(lose));
  return std::unique_ptr<Agreement>(new Agreement(std::move(impl)));
}

Agreement::Agreement(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {
  impl_->start();
}

Agreement::~Agreement() {
  leave(Milliseconds(0));
}

void Agreement::leave(Milliseconds grace) {
  impl_->leave(grace);
}

void Agreement::end_service(Milliseconds grace) {
  Service::of_this_process().end(grace);
}

bool Agreement::serves(Milliseconds within) {
  return Service::of_this_process().goes_on(within);
}

std::optional<int> Agreement::gone(int rank) const {
  return impl_->gone(rank);
}

bool Agreement::has_abandoned() const {
  return impl_->has_abandoned();
}

bool Agreement::is_foreign() const {
  return impl_->is_foreign();
}

uint64_t Agreement::call(Operation&& operation) {
  return impl_->call(std::move(operation));
}

uint64_t Agreement::count() const {
  return impl_->count();
}

bool Agreement::has_collectives() const {
  return impl_->has_collectives();
}

const std::vector<std::vector<int>>& Agreement::led_hosts() const {
  return impl_->led_hosts();
}

size_t Agreement::told_by_one() const {
  return impl_->told_by_one();
}

size_t Agreement::most_with_words(int peer) const {
  return impl_->most_with_words(peer);
}

uint64_t Agreement::post(Message message) {
  return impl_->post(std::move(message));
}

std::pair<std::vector<int>, std::string> Agreement::awaited(uint64_t seq, Milliseconds within,
                                                            const std::function<void()>& look) {
  return impl_->awaited(kAsking, seq, within, look);
}

std::pair<std::vector<int>, std::string> Agreement::awaited_by_message(
    uint64_t number, Milliseconds within, const std::function<void()>& look) {
  return impl_->awaited(kAskingOfMessage, number, within, look);
}

bool Agreement::help(uint64_t seq, Clock::time_point until, Clock::time_point begun) {
  return impl_->help(seq, until, begun);
}

bool Agreement::help_message(uint64_t number, Clock::time_point until, Clock::time_point begun) {
  return impl_->help_message(number, until, begun);
}

void Agreement::done(uint64_t seq) {
  impl_->done(seq);
}

void Agreement::broke(uint64_t seq, const std::string& why) {
  impl_->broke(seq, why);
}

std::optional<Failure> Agreement::failure(const std::string& op, uint64_t seq,
                                          Milliseconds within) const {
  return impl_->failure(op, seq, within);
}

bool Agreement::is_here() {
  return agreeing_here;
}

void Agreement::abort() {
  impl_->abort();
}

}  // namespace c10d_ext
