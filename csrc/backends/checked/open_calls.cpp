#include "backends/checked/open_calls.h"

#include "backends/checked/failures.h"
#include "base/timeouts.h"

namespace c10d_ext {

namespace {

// What rank 0 has to give up messages of a rank that leaves.
constexpr OpenCalls::Milliseconds kGivenUp{1000};

OpenCalls::Clock::time_point after(OpenCalls::Milliseconds time) {
  return OpenCalls::Clock::now() + bounded(time);
}

}  // namespace

// --- From any thread ---------------------------------------------------------------------------

std::optional<OpenCalls::Failed> OpenCalls::refuse(OpenCall& call, uint64_t seq) const {
  const bool leaves = leaving_ || table_.gives_up();
  if (!table_.end() && !leaves) {
    return std::nullopt;
  }
  auto failure =
      leaves ? failure_of_left(roster_.place(), call.op, seq) : table_.told(call.op, seq, call.tag);
  return Failed{std::move(call), std::move(failure)};
}

OpenCalls::Entered OpenCalls::enter(Fingerprint&& called, std::optional<Contribution>&& data,
                                    OpenCall&& call) {
  const std::lock_guard lock(mutex_);
  const uint64_t seq = ++count_;
  if (auto failed = refuse(call, seq)) {
    return {seq, std::move(failed)};
  }
  Calling said{last_called_.or_new(std::move(called)), std::move(data), seq};
  news_.push_back({seq, kCalling, {}, std::move(said)});
  table_.add_collective(seq, std::move(call));
  return {seq, std::nullopt};
}

OpenCalls::Entered OpenCalls::enter_message(Posted posted, OpenCall&& call) {
  const std::lock_guard lock(mutex_);
  posted.number = ++posted_;
  if (auto failed = refuse(call, posted.number)) {
    return {posted.number, std::move(failed)};
  }
  const uint64_t number = posted.number;
  table_.add_message(number, std::move(call));
  news_.push_back(messages_.post(std::move(posted)));
  settle_messages();
  return {number, std::nullopt};
}

void OpenCalls::add_news(News news) {
  const std::lock_guard lock(mutex_);
  news_.push_back(std::move(news));
}

bool OpenCalls::done(uint64_t seq) {
  std::optional<OpenCall> over;  // released without the lock
  const std::lock_guard lock(mutex_);
  over = table_.take_running(seq);
  if (!over) {
    return false;
  }
  changed_.notify_all();
  if (over->is_long) {
    news_.push_back({seq, kDone, Payload().put(static_cast<int64_t>(seq))});
  }
  return over->is_long || table_.has_begins();
}

std::optional<Failure> OpenCalls::failure(const std::string& op, uint64_t seq,
                                          Milliseconds within) const {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, after(within), [this] { return table_.end().has_value() || leaving_; });
  return leaving_       ? std::optional(failure_of_left(roster_.place(), op, seq))
         : table_.end() ? std::optional(table_.told(op, seq, std::nullopt))
                        : std::nullopt;
}

void OpenCalls::expect_answer(Asked asked) {
  const std::lock_guard lock(mutex_);
  asked_.try_emplace(asked);
  ask(asked);
}

void OpenCalls::ask(Asked asked) {
  const auto [kind, number] = asked;
  const int sender = kind == kAskingOfMessage ? messages_.sender_for(number) : -1;
  news_.push_back({number, kind, Payload().put(static_cast<int64_t>(number)).put(sender)});
}

std::optional<Difference> OpenCalls::answer(Asked asked, Milliseconds within, bool gives_up) {
  std::unique_lock lock(mutex_);
  const bool is_over = changed_.wait_until(lock, after(within), [&] {
    const auto found = asked_.find(asked);
    return found == asked_.end() || found->second || table_.end() || leaving_;
  });
  if (!is_over && !gives_up) {
    return std::nullopt;
  }
  const auto answer = asked_.extract(asked);
  return answer && answer.mapped() ? answer.mapped() : Difference();
}

void OpenCalls::leave(std::optional<Milliseconds> grace, const std::function<void()>& wake) {
  std::unique_lock lock(mutex_);
  const auto are_messages_over = [this] { return !table_.has_messages(); };
  if (grace) {
    changed_.wait_until(lock, after(*grace),
                        [&] { return !table_.has_collectives() && are_messages_over(); });
  }
  if (grace > Milliseconds(0) && !are_messages_over()) {
    table_.give_up_messages();
    wake();
    changed_.wait_until(lock, after(kGivenUp), are_messages_over);
  }
  leaving_ = true;
  std::erase_if(news_, [this](const News& one) {
    return one.kind == kCalling || (one.kind == kPosting && table_.is_message_waiting(one.seq));
  });
  changed_.notify_all();
  wake();
}

void OpenCalls::wait_until_left() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return has_left_; });
}

// --- From the agreement's thread ---------------------------------------------------------------

std::vector<News> OpenCalls::take_news() {
  const std::lock_guard lock(mutex_);
  for (const auto& one : news_) {
    if (one.wanted_by) {
      table_.grant(one.seq, static_cast<uint64_t>(*one.wanted_by), SharedBytes());
    }
  }
  return std::exchange(news_, {});
}

bool OpenCalls::break_off(uint64_t seq) {
  const std::lock_guard lock(mutex_);
  return table_.break_off(seq);
}

OpenCalls::Late OpenCalls::take_late(Clock::time_point now,
                                     const std::function<bool()>& is_root_stopped) {
  const std::lock_guard lock(mutex_);
  auto late = table_.take_late(now, is_root_stopped);
  for (auto& question : late.questions) {
    if (question.kind == kOverdue) {
      question.sender = messages_.doubt(question.seq);
    }
  }
  return late;
}

void OpenCalls::take_answer(Asked asked, Difference who) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = asked_.find(asked);
    if (found == asked_.end()) {
      return;  // nobody waits for it any more
    }
    if (asked.first == kAskingOfMessage && who.ranks.empty() &&
        messages_.sender_for(asked.second) >= 0) {
      ask(asked);  // matched on the way to rank 0, which did not know with whom
      return;
    }
    found->second = std::move(who);
  }
  changed_.notify_all();
}

void OpenCalls::hear_of_calls(const std::function<void(CallTable&)>& what) {
  const std::lock_guard lock(mutex_);
  what(table_);
}

void OpenCalls::hear_of_messages(const std::function<void(OwnMessages&)>& what) {
  const std::lock_guard lock(mutex_);
  what(messages_);
  settle_messages();
}

void OpenCalls::settle_messages() {
  for (auto& [number, peer, data] : messages_.take_granted()) {
    table_.grant(number, static_cast<uint64_t>(peer), std::move(data));
  }
  for (auto& news : messages_.take_news()) {
    news_.push_back(std::move(news));
  }
  for (const uint64_t number : messages_.take_known()) {
    table_.ask_again(number);
  }
}

void OpenCalls::deny_message(uint64_t number, ErrorKind kind, const Difference& why,
                             const OtherEnd& other) {
  const std::lock_guard lock(mutex_);
  messages_.deny(number, other);
  settle_messages();
  table_.deny_message(number, kind, why);
}

std::tuple<std::vector<OpenCalls::Begin>, std::vector<OpenCalls::Failed>,
           std::optional<OpenCalls::Begin>>
OpenCalls::take_settled() {
  const std::lock_guard lock(mutex_);
  if (table_.end()) {
    // A message that has failed is not said: its memory is its caller's again.
    std::erase_if(news_, [](const News& one) { return one.kind == kPosting; });
  }
  auto [grants, fails] = table_.take_settled();
  return {std::move(grants), std::move(fails), table_.next_to_begin()};
}

std::optional<OpenCalls::Begin> OpenCalls::next_to_begin() {
  const std::lock_guard lock(mutex_);
  return table_.next_to_begin();
}

void OpenCalls::notify() const {
  changed_.notify_all();
}

std::pair<std::vector<OpenCalls::Begin>, std::vector<OpenCalls::Failed>> OpenCalls::close() {
  const std::lock_guard lock(mutex_);
  return table_.close();
}

void OpenCalls::set_left() {
  const std::lock_guard lock(mutex_);
  has_left_ = true;
  changed_.notify_all();
}

}  // namespace c10d_ext
