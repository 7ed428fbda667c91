#include "backends/checked/participant.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

namespace c10d_ext {

namespace {

using Clock = Participant::Clock;
using Milliseconds = std::chrono::milliseconds;
using Kind = ErrorKind;

// What rank 0 has agreed on before it was lost nobody knows, but leaders may.
constexpr uint64_t kAnyAgreed = std::numeric_limits<uint64_t>::max();
constexpr Milliseconds kLastWord{50};

}  // namespace

Participant::Participant(const Roster& roster, OpenCalls& calls, Say say, SayCall say_call,
                         Tell tell, Wake wake, Lose lose)
    : roster_(roster),
      calls_(calls),
      say_(std::move(say)),
      say_call_(std::move(say_call)),
      tell_(std::move(tell)),
      wake_(std::move(wake)),
      lose_(std::move(lose)) {}

void Participant::obey(uint32_t kind, Payload& words) {
  switch (kind) {
    case kGo: {
      const auto seq = static_cast<uint64_t>(words.number());
      auto data = take_all(words, roster_.place().size);
      calls_.hear_of_calls([&](CallTable& calls) { calls.go(seq, std::move(data)); });
      break;
    }
    case kDiffer: {
      const auto seq = static_cast<uint64_t>(words.number());
      const auto text = words.text();
      const Difference how{text, words.numbers<int>()};
      calls_.hear_of_calls(
          [&](CallTable& calls) { calls.deny_collective(seq, Kind::Mismatch, how); });
      break;
    }
    case kGranted: {
      const auto number = static_cast<uint64_t>(words.number());
      const auto other = take_other_end(words, roster_.place().size);
      if (other.rank < 0) {
        throw std::runtime_error("a message to or from nobody");
      }
      auto data = take_data(words);
      words.expect_end();
      calls_.hear_of_messages(
          [&](OwnMessages& messages) { messages.grant(number, other, std::move(data)); });
      break;
    }
    case kWithdraw: {
      const auto send = take_other_end(words, roster_.place().size);
      calls_.hear_of_messages(
          [&](OwnMessages& messages) { messages.withdraw(send, words.number()); });
      break;
    }
    case kDenied: {
      const auto number = static_cast<uint64_t>(words.number());
      const auto said = words.number();
      if (said < 0 || said > static_cast<int64_t>(Kind::Closed)) {
        throw std::runtime_error("an error of an unknown kind");
      }
      const auto kind = static_cast<Kind>(said);
      const auto text = words.text();
      const auto ranks = words.numbers<int>();
      calls_.deny_message(number, kind, {text, ranks}, take_other_end(words, roster_.place().size));
      break;
    }
    case kWanted:
      calls_.hear_of_messages([&](OwnMessages& messages) {
        messages.want(take_wanted(words, roster_.place().rank, roster_.place().size));
      });
      break;
    case kUnwanted: {
      const auto rank = static_cast<int>(words.number());
      const auto tag = words.number();
      calls_.hear_of_messages([&](OwnMessages& messages) {
        messages.unwant(rank, tag, static_cast<uint64_t>(words.number()));
      });
      break;
    }
    case kAwaited: {
      const auto question = static_cast<Says>(words.number());
      const auto number = static_cast<uint64_t>(words.number());
      const auto text = words.text();
      calls_.take_answer({question, number}, {text, words.numbers<int>()});
      break;
    }
    case kPing:
      tell_news();  // what has been received is not given up
      say_count();
      break;
    case kOver: {
      auto end = take_end(words);
      if (std::any_of(end.ranks.begin(), end.ranks.end(),
                      [this](int rank) { return rank < 0 || rank >= roster_.place().size; })) {
        throw std::runtime_error("an end by nobody");
      }
      finish(std::move(end));
      break;
    }
    case kDone:
      root_done_ = static_cast<uint64_t>(words.number());
      break;
    case kDoomed:
      doom(static_cast<uint64_t>(words.number()));
      break;
    case kLeaving:
      // Nothing else will be agreed.
      root_left_ = true;
      finish({Kind::RankLost, {0}, roster_.describe(0, kLeft), kUnlimited});
      break;
    default:
      throw std::runtime_error("a sentence of an unknown kind");
  }
}

void Participant::hear_of_message(int rank, uint32_t kind, Payload& words) {
  calls_.hear_of_messages([&](OwnMessages& messages) {
    if (kind == kDelivering) {
      messages.deliver(take_delivery(words, rank, roster_.place().rank));
    } else if (kind == kTaken) {
      messages.take(rank, static_cast<uint64_t>(words.number()));
    } else {
      throw std::runtime_error("a sentence of an unknown kind");
    }
  });
}

void Participant::finish(End end) {
  if (lose_ && end.kind == Kind::RankLost && end.grace != kUnlimited) {
    lose_(end.ranks);
  }
  const bool is_aborted = end.kind == Kind::Closed;
  calls_.hear_of_calls([&](CallTable& calls) { calls.finish(std::move(end)); });
  if (lose_ && is_aborted) {
    lose_({});
  }
}

void Participant::doom(uint64_t seq) {
  calls_.hear_of_calls([seq](CallTable& calls) { calls.doom(seq); });
}

void Participant::lose_everybody() {
  if (lose_) {
    auto others = roster_.all_ranks();
    std::erase(others, roster_.place().rank);
    lose_(others);
  }
}

void Participant::lose_root(const std::string& how) {
  if (!root_left_) {
    const bool is_unreachable = how == kUnreachable;
    // Who fails, and ends because of that, would have told rank 0.
    lose_everybody();
    finish({Kind::RankLost,
            {0},
            roster_.describe(0, how),
            is_unreachable ? Milliseconds(0) : kDataGrace,
            kAnyAgreed,
            is_unreachable ? Milliseconds(0) : kLastWord});
  }
}

std::optional<uint64_t> Participant::undone_by_root() const {
  const auto& here = roster_.own_host();
  const bool is_told = !here.empty() && (here.front() == 0 || here.front() == roster_.place().rank);
  return is_told && !root_left_ ? std::optional(root_done_ + 1) : std::nullopt;
}

void Participant::say_count(const std::vector<int64_t>& of_host) const {
  say_(kPong, Payload().put(static_cast<int64_t>(called_)).put(of_host));
}

void Participant::tell_news() {
  for (auto& one : calls_.take_news()) {
    if (one.call) {
      called_ = one.call->seq;
      say_call_(*one.call);
    } else if (one.kind != kBroken || calls_.break_off(one.seq)) {
      if (one.delivery) {
        tell_(*one.peer, kDelivering, *one.delivery);
      }
      one.kind == kTaken ? tell_(*one.peer, kTaken, one.words)
                         : say_(one.kind, std::move(one.words));
    }
  }
}

void Participant::look(Clock::time_point now) {
  auto late = calls_.take_late(now, [this] { return roster_.is_root_stopped(); });
  for (const auto& [kind, seq, what, sender] : late.questions) {
    Payload words = Payload().put(static_cast<int64_t>(seq)).put(what);
    if (kind == kOverdue) {
      words.put(sender);
    }
    say_(kind, std::move(words));
  }
  if (!late.unanswered.empty()) {
    const std::string state = roster_.is_near(0) ? roster_.process_state(0) : "silent";
    finish({Kind::Timeout,
            {0},
            "the " + late.unanswered + ", got no answer from " + roster_.describe(0, state),
            kDataGrace});
  }
}

void Participant::settle() {
  auto [grants, fails, next] = calls_.take_settled();
  for (; next; next = calls_.next_to_begin()) {
    try {
      next->second(next->first);
    } catch (const std::exception& error) {
      calls_.add_news(broken(next->first, error.what()));
      wake_();
    }
  }
  for (const auto& [peer, begin] : grants) {
    begin(peer);
  }
  for (const auto& failed : fails) {
    failed.call.fail(failed.failure);
  }
  calls_.notify();
}

News Participant::broken(uint64_t seq, const std::string& why) {
  return {seq, kBroken, Payload().put(static_cast<int64_t>(seq)).put(why)};
}

}  // namespace c10d_ext
