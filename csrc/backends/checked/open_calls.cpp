#include "backends/checked/open_calls.h"

#include <algorithm>
#include <sstream>

#include "base/timeouts.h"

namespace c10d_ext {

namespace {

OpenCalls::Clock::time_point after(OpenCalls::Milliseconds time) {
  return OpenCalls::Clock::now() + bounded(time);
}

std::string seconds(OpenCalls::Milliseconds time) {
  std::ostringstream out;
  out << std::chrono::duration<double>(time).count() << " s";
  return out.str();
}

}  // namespace

// --- Texts -------------------------------------------------------------------------------------

Failure OpenCalls::failure_of(ErrorKind kind, const std::string& op, uint64_t seq,
                              const std::string& text, std::vector<int> ranks) const {
  return {kind, op + ": " + text + " " + roster_.place().text(), std::move(ranks), op, seq};
}

Failure OpenCalls::closed(const std::string& op, uint64_t seq, const std::string& text) const {
  return failure_of(ErrorKind::Closed, op, seq, text, {});
}

// Of what ends with the group.
Failure OpenCalls::told(const std::string& op, uint64_t seq,
                        const std::optional<int64_t>& tag) const {
  std::string text = end_->why;
  if (end_->kind == ErrorKind::RankLost) {
    text = text_of_loss(tag        ? text_of_message(*tag)
                        : seq == 0 ? "message"
                                   : "collective " + std::to_string(seq),
                        text);
  }
  return failure_of(end_->kind, op, seq, text, end_->ranks);
}

// --- From any thread ---------------------------------------------------------------------------

std::pair<uint64_t, std::optional<OpenCalls::Failed>> OpenCalls::enter(Says kind, Payload words,
                                                                       OpenCall call) {
  const bool collective = kind == kCalling;
  const std::lock_guard lock(mutex_);
  const uint64_t seq = collective ? ++count_ : ++posted_;
  if (end_ || leaving_) {
    auto failure = leaving_ ? closed(call.op, seq, kDestroyed) : told(call.op, seq, call.tag);
    return {seq, Failed{std::move(call), std::move(failure)}};
  }
  call.late = after(call.timeout);
  soonest_ = std::min(soonest_, call.late);
  (collective ? waiting_ : messages_).emplace(seq, std::move(call));
  news_.push_back({seq, kind, words.put(static_cast<int64_t>(seq))});
  return {seq, std::nullopt};
}

void OpenCalls::add_news(News news) {
  const std::lock_guard lock(mutex_);
  news_.push_back(std::move(news));
}

bool OpenCalls::done(uint64_t seq) {
  OpenCall over;  // released without the lock
  const std::lock_guard lock(mutex_);
  const auto found = running_.find(seq);
  if (found == running_.end()) {
    return false;
  }
  over = std::move(found->second);
  running_.erase(found);
  changed_.notify_all();
  return !begins_.empty();
}

uint64_t OpenCalls::count() const {
  const std::lock_guard lock(mutex_);
  return count_;
}

std::optional<Failure> OpenCalls::failure(const std::string& op, uint64_t seq,
                                          Milliseconds within) const {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, after(within), [this] { return end_.has_value() || leaving_; });
  return leaving_ ? std::optional(closed(op, seq, kDestroyed))
         : end_   ? std::optional(told(op, seq, std::nullopt))
                  : std::nullopt;
}

std::optional<End> OpenCalls::end() const {
  const std::lock_guard lock(mutex_);
  return end_;
}

bool OpenCalls::has_abandoned() const {
  const std::lock_guard lock(mutex_);
  return abandoned_;
}

void OpenCalls::expect_answer(Asked asked) {
  const std::lock_guard lock(mutex_);
  asked_.try_emplace(asked);
  news_.push_back({asked.second, asked.first, Payload().put(static_cast<int64_t>(asked.second))});
}

std::optional<Difference> OpenCalls::answer(Asked asked, Milliseconds within) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, after(within), [&] {
    const auto found = asked_.find(asked);
    return found == asked_.end() || found->second || end_ || leaving_;
  });
  const auto answer = asked_.extract(asked);
  return answer ? answer.mapped() : std::nullopt;
}

void OpenCalls::wait_for_end(Milliseconds within) const {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, after(within), [this] { return end_.has_value(); });
}

void OpenCalls::leave(std::optional<Milliseconds> grace) {
  std::unique_lock lock(mutex_);
  if (grace) {
    changed_.wait_until(lock, after(*grace),
                        [this] { return waiting_.empty() && running_.empty(); });
  }
  leaving_ = true;
  changed_.notify_all();
}

void OpenCalls::wait_until_left() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return has_left_; });
}

// --- From the agreement's thread ---------------------------------------------------------------

bool OpenCalls::is_leaving() const {
  const std::lock_guard lock(mutex_);
  return leaving_;
}

OpenCalls::Clock::time_point OpenCalls::next_late() const {
  const std::lock_guard lock(mutex_);
  auto next = end_ ? kNever : soonest_;
  for (const auto& [seq, call] : running_) {
    next = std::min(next, call.late);
  }
  return next;
}

std::vector<OpenCalls::News> OpenCalls::take_news() {
  const std::lock_guard lock(mutex_);
  return std::exchange(news_, {});
}

bool OpenCalls::break_off(uint64_t seq) {
  const std::lock_guard lock(mutex_);
  const auto found = running_.find(seq);
  if (found == running_.end() || found->second.asked) {
    return false;
  }
  found->second.asked = true;
  found->second.late = end_ ? Clock::now() : after(verdict_);
  return true;
}

OpenCalls::Late OpenCalls::take_late(Clock::time_point now,
                                     const std::function<bool()>& is_root_stopped) {
  Late late;
  const std::lock_guard lock(mutex_);
  if (end_) {
    return late;
  }
  if (soonest_ <= now) {
    soonest_ = kNever;
    for (auto* calls : {&waiting_, &messages_}) {
      for (auto& [seq, call] : *calls) {
        if (call.late <= now && (call.asked || is_root_stopped())) {
          late.unanswered =
              (call.tag ? text_of_message(*call.tag) : "collective " + std::to_string(seq)) +
              " must be done within " + seconds(call.timeout);
        } else if (call.late <= now) {
          call.asked = true;
          call.late = after(verdict_);
          late.questions.emplace_back(
              call.tag ? kOverdue : kLate,
              Payload().put(static_cast<int64_t>(seq)).put(seconds(call.timeout)));
        }
        soonest_ = std::min(soonest_, call.late);
      }
    }
  }
  for (const auto& [seq, call] : running_) {
    if (call.late <= now) {
      late.unanswered = "data of collective " + std::to_string(seq) + " must arrive";
    }
  }
  return late;
}

void OpenCalls::go(uint64_t seq) {
  const std::lock_guard lock(mutex_);
  const auto found = waiting_.find(seq);
  if (found == waiting_.end() || end_) {
    return;
  }
  begins_.emplace_back(seq, std::move(found->second.begin));
  found->second.late = kNever;
  found->second.asked = false;
  running_.insert(waiting_.extract(found));
}

void OpenCalls::take_answer(Asked asked, Difference who) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = asked_.find(asked);
    if (found == asked_.end()) {
      return;  // nobody waits for it any more
    }
    found->second = std::move(who);
  }
  changed_.notify_all();
}

void OpenCalls::grant(uint64_t number, uint64_t peer) {
  const std::lock_guard lock(mutex_);
  const auto found = messages_.find(number);
  if (found == messages_.end() || end_) {
    return;
  }
  grants_.emplace_back(peer, std::move(found->second.begin));
  messages_.erase(found);
}

void OpenCalls::deny_collective(uint64_t seq, ErrorKind kind, const Difference& why) {
  const std::lock_guard lock(mutex_);
  deny(waiting_, seq, kind, why);
}

void OpenCalls::deny_message(uint64_t number, ErrorKind kind, const Difference& why) {
  const std::lock_guard lock(mutex_);
  deny(messages_, number, kind, why);
}

void OpenCalls::deny(Calls& calls, uint64_t seq, ErrorKind kind, const Difference& why) {
  const auto found = calls.find(seq);
  if (found == calls.end()) {
    return;
  }
  auto failure = failure_of(kind, found->second.op, seq, why.text, why.ranks);
  fails_.push_back({std::move(found->second), std::move(failure)});
  calls.erase(found);
}

void OpenCalls::finish(End end) {
  const std::lock_guard lock(mutex_);
  if (end_) {
    return;
  }
  for (auto& [seq, call] : running_) {
    call.late = call.asked ? Clock::now() : end.grace == kUnlimited ? kNever : after(end.grace);
  }
  end_ = std::move(end);
}

void OpenCalls::doom(uint64_t seq) {
  const std::lock_guard lock(mutex_);
  const auto found = running_.find(seq);
  if (found != running_.end() && end_) {
    found->second.late = Clock::now();
  }
}

std::pair<std::vector<OpenCalls::Begin>, std::vector<OpenCalls::Failed>> OpenCalls::take_settled() {
  const std::lock_guard lock(mutex_);
  auto grants = std::exchange(grants_, {});
  auto fails = std::exchange(fails_, {});
  if (!end_) {
    return {std::move(grants), std::move(fails)};
  }
  const auto fail = [&](Calls& calls, Calls::iterator it) {
    auto failure = told(it->second.op, it->first, it->second.tag);
    fails.push_back({std::move(it->second), std::move(failure)});
    return calls.erase(it);
  };
  for (auto* calls : {&waiting_, &messages_}) {
    for (auto it = calls->begin(); it != calls->end();) {
      it = fail(*calls, it);
    }
  }
  const auto now = Clock::now();
  for (auto it = running_.begin(); it != running_.end();) {
    if (it->second.late > now) {
      ++it;
      continue;
    }
    const auto begun = std::erase_if(begins_, [&](auto& b) { return b.first == it->first; }) == 0;
    abandoned_ |= begun;
    it = fail(running_, it);
  }
  return {std::move(grants), std::move(fails)};
}

std::optional<OpenCalls::Begin> OpenCalls::next_to_begin() {
  const std::lock_guard lock(mutex_);
  if (begins_.empty() || running_.begin()->first != begins_.front().first) {
    return std::nullopt;
  }
  auto next = std::move(begins_.front());
  begins_.pop_front();
  return next;
}

void OpenCalls::notify() const {
  changed_.notify_all();
}

std::vector<OpenCalls::Failed> OpenCalls::close() {
  std::vector<Failed> fails;
  const std::lock_guard lock(mutex_);
  abandoned_ |= running_.size() > begins_.size();
  begins_.clear();
  for (auto* calls : {&waiting_, &running_, &messages_}) {
    for (auto& [seq, call] : *calls) {
      auto failure = end_ ? told(call.op, seq, call.tag) : closed(call.op, seq, kDestroyed);
      fails.push_back({std::move(call), std::move(failure)});
    }
    calls->clear();
  }
  return fails;
}

void OpenCalls::set_left() {
  {
    const std::lock_guard lock(mutex_);
    has_left_ = true;
  }
  changed_.notify_all();
}

}  // namespace c10d_ext
