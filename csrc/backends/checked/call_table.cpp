#include "backends/checked/call_table.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "backends/checked/failures.h"
#include "base/timeouts.h"

namespace c10d_ext {

namespace {

CallTable::Clock::time_point after(CallTable::Milliseconds time) {
  return CallTable::Clock::now() + bounded(time);
}

std::string seconds(CallTable::Milliseconds time) {
  std::ostringstream out;
  out << std::chrono::duration<double>(time).count() << " s";
  return out.str();
}

std::string text_of_late(uint64_t seq, const OpenCall& call) {
  return (call.tag ? text_of_message(*call.tag) : "collective " + std::to_string(seq)) +
         " must be done within " + seconds(call.timeout);
}

}  // namespace

Failure CallTable::told(const std::string& op, uint64_t seq,
                        const std::optional<int64_t>& tag) const {
  return failure_of(roster_.place(), *end_, op, seq, tag);
}

void CallTable::add(Calls& calls, uint64_t seq, OpenCall&& call) {
  call.late = after(call.timeout);
  soonest_ = std::min(soonest_, call.late);
  calls.emplace(seq, std::move(call));
}

void CallTable::go(uint64_t seq, std::vector<SharedBytes> data) {
  if (!end_) {
    if (auto waited = waiting_.extract(seq)) {
      running_.insert(std::move(waited));
    }
  }
  const auto found = running_.find(seq);
  if (found == running_.end() || !found->second.begin) {
    return;
  }
  auto& call = found->second;
  auto receive = std::exchange(call.receive, nullptr);
  auto begin = std::exchange(call.begin, nullptr);
  if (!data.empty() && receive) {
    begin = [receive = std::move(receive), data = std::move(data)](uint64_t seq) {
      receive(seq, data);
    };
    call.is_long = false;  // its data is here, which rank 0 may not have heard of
  }
  begins_.emplace(seq, std::move(begin));
  call.late = kNever;
  call.asked = false;
  agreed_ = std::max(agreed_, seq);
}

void CallTable::grant(uint64_t number, uint64_t peer, std::optional<SharedBytes> data) {
  const auto found = messages_.find(number);
  if (found == messages_.end() || end_) {
    return;
  }
  auto& call = found->second;
  if (data && !call.receive) {
    throw std::runtime_error("data of a message that is not little");
  }
  call.give_back();
  if (data) {
    call.begin = [receive = std::move(call.receive),
                  all = std::vector{std::move(*data)}](uint64_t from) { receive(from, all); };
  }
  grants_.emplace_back(peer, std::move(call.begin));
  messages_.erase(found);
}

void CallTable::deny(Calls& calls, uint64_t seq, ErrorKind kind, const Difference& why) {
  if (auto denied = calls.extract(seq)) {
    const auto& op = denied.mapped().op;
    auto failure = gives_up_ && kind == ErrorKind::Timeout
                       ? failure_of_left(roster_.place(), op, seq)
                       : failure_of(roster_.place(), kind, op, seq, why.text, why.ranks);
    fails_.push_back({std::move(denied.mapped()), std::move(failure)});
  }
}

void CallTable::give_up_messages() {
  gives_up_ = true;
  for (const auto& [number, call] : messages_) {
    ask_again(number);
  }
}

std::optional<OpenCall> CallTable::take_running(uint64_t seq) {
  auto taken = running_.extract(seq);
  return taken ? std::optional(std::move(taken.mapped())) : std::nullopt;
}

bool CallTable::break_off(uint64_t seq) {
  const auto found = running_.find(seq);
  if (found == running_.end() || found->second.asked) {
    return false;
  }
  found->second.asked = true;
  found->second.late = end_ ? Clock::now() : after(verdict_);
  return true;
}

void CallTable::finish(End end) {
  if (end_) {
    return;
  }
  for (auto& [seq, call] : running_) {
    call.late = call.asked ? Clock::now() : end.grace == kUnlimited ? kNever : after(end.grace);
  }
  keep_agreed(end);
  end_ = std::move(end);
}

void CallTable::keep_agreed(const End& end) {
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    const auto waited = it++;
    if (!roster_.hosts().empty() && waited->first <= end.agreed && waited->second.receive) {
      waited->second.late = after(end.word_grace);
      running_.insert(waiting_.extract(waited));
    }
  }
}

void CallTable::doom(uint64_t seq) {
  for (auto it = running_.lower_bound(seq); end_ && it != running_.end(); ++it) {
    if (it->first == seq || it->second.is_long) {
      it->second.late = Clock::now();
    }
  }
}

std::pair<std::vector<CallTable::Begin>, std::vector<CallTable::Failed>> CallTable::close() {
  auto fails = std::exchange(fails_, {});
  const auto begun = std::count_if(running_.begin(), running_.end(),
                                   [](auto& running) { return !running.second.begin; });
  abandoned_ |= static_cast<size_t>(begun) > begins_.size();
  begins_.clear();
  for (auto* calls : {&waiting_, &running_, &messages_}) {
    for (auto& [seq, call] : *calls) {
      auto failure =
          end_ ? told(call.op, seq, call.tag) : failure_of_left(roster_.place(), call.op, seq);
      fails.push_back({std::move(call), std::move(failure)});
    }
    calls->clear();
  }
  return {std::exchange(grants_, {}), std::move(fails)};
}

CallTable::Clock::time_point CallTable::next_late() const {
  auto next = end_ ? kNever : soonest_;
  for (const auto& [seq, call] : running_) {
    next = std::min(next, call.late);
  }
  return next;
}

CallTable::Late CallTable::take_late(Clock::time_point now,
                                     const std::function<bool()>& is_root_stopped) {
  Late late;
  if (end_) {
    return late;
  }
  if (soonest_ <= now) {
    soonest_ = kNever;
    for (auto* calls : {&waiting_, &messages_}) {
      for (auto& [seq, call] : *calls) {
        const bool is_given_up = gives_up_ && calls == &messages_;
        if (call.late <= now && (call.asked || (!is_given_up && is_root_stopped()))) {
          late.unanswered = text_of_late(seq, call);
        } else if (call.late <= now) {
          call.asked = true;
          call.late = after(verdict_);
          late.questions.push_back({call.tag ? kOverdue : kLate, seq, text_of_late(seq, call)});
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

std::pair<std::vector<CallTable::Begin>, std::vector<CallTable::Failed>> CallTable::take_settled() {
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
    const bool begun = begins_.erase(it->first) == 0 && !it->second.begin;
    abandoned_ |= begun;
    it = fail(running_, it);
  }
  return {std::move(grants), std::move(fails)};
}

std::optional<CallTable::Begin> CallTable::next_to_begin() {
  const auto next = begins_.begin();
  if (next == begins_.end() || running_.begin()->first != next->first ||
      (!waiting_.empty() && waiting_.begin()->first < next->first)) {
    return std::nullopt;
  }
  auto taken = begins_.extract(next);
  return Begin(taken.key(), std::move(taken.mapped()));
}

}  // namespace c10d_ext
