#include "backends/checked/coordinator.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace c10d_ext {

namespace {

using Clock = Coordinator::Clock;
using Kind = ErrorKind;

// What a rank on another machine has to say that it is there.
constexpr std::chrono::milliseconds kPatience{300};

}  // namespace

Coordinator::Coordinator(const Roster& roster, Tell tell)
    : roster_(roster),
      tell_(std::move(tell)),
      calls_(static_cast<size_t>(roster.place().size)),
      left_(calls_.size()) {}

void Coordinator::hear(int rank, uint32_t kind, Payload& words) {
  const auto r = static_cast<size_t>(rank);
  switch (kind) {
    case kCalling: {
      auto called = take_fingerprint(words);
      const auto is_of_all = [&](const auto& parts) {
        return parts.empty() || parts.size() == calls_.size();
      };
      if (!is_of_all(called.sends) || !is_of_all(called.expects) ||
          called.root >= roster_.place().size) {
        throw std::runtime_error("a call of another group");
      }
      if (static_cast<uint64_t>(words.number()) != agreed_ + calls_[r].size() + 1) {
        throw std::runtime_error("a call is missing");
      }
      calls_[r].push_back(std::move(called));
      compare();
      break;
    }
    case kPosting: {
      auto posted = take_posted(words);
      posted.rank = rank;
      posted.number = static_cast<uint64_t>(words.number());
      if (posted.peer == rank || posted.peer >= roster_.place().size ||
          posted.peer < (posted.sends ? 0 : -1)) {
        throw std::runtime_error("a message to or from nobody");
      }
      match(posted);
      break;
    }
    case kLate: {
      const auto seq = static_cast<uint64_t>(words.number());
      const auto within = words.text();
      ask({seq, kLate, within}, suspects(seq));
      break;
    }
    case kBroken: {
      const auto seq = static_cast<uint64_t>(words.number());
      const auto why = words.text();
      if (has_ended_) {
        // Somebody's part is missing: the others need not wait for it.
        tell_all(kDoomed, Payload().put(static_cast<int64_t>(seq)));
        break;
      }
      ask({seq, kBroken, why}, suspects(seq));
      break;
    }
    case kAsking:
    case kAskingOfMessage: {
      const auto number = static_cast<uint64_t>(words.number());
      const auto question = static_cast<Says>(kind);
      ask({number, question, "", rank}, awaited_by(rank, question, number));
      break;
    }
    case kOverdue: {
      const auto number = static_cast<uint64_t>(words.number());
      const auto within = words.text();
      if (matching_.find(rank, number) != nullptr) {
        ask({number, kOverdue, within, rank}, awaited_by(rank, kOverdue, number));
      }
      break;
    }
    case kPong:
      for (auto& question : questions_) {
        question.silent.erase(rank);
      }
      break;
    case kLeaving:
      left_[r] = kLeft;
      matching_.take_out([&](const Posted& posted) { return posted.rank == rank; });
      deny_those_without_peers();
      compare();
      break;
    case kAborting:
      end_for_all({Kind::Closed,
                   {rank},
                   "the group must be alive, got an abort by rank " + std::to_string(rank),
                   std::chrono::milliseconds(0)});
      break;
    default:
      throw std::runtime_error("a sentence of an unknown kind");
  }
}

Clock::time_point Coordinator::next_look() const {
  auto next = Clock::time_point::max();
  for (const auto& question : questions_) {
    next = std::min(next, question.until);
  }
  return next;
}

void Coordinator::look(Clock::time_point now) {
  std::vector<Question> ripe;
  std::erase_if(questions_, [&](const Question& question) {
    // That data does not come may be for a rank whose end is yet to be heard of.
    const bool answered = question.silent.empty() && question.kind != kBroken;
    if (answered || question.until <= now) {
      ripe.push_back(question);
      return true;
    }
    return false;
  });
  for (const auto& question : ripe) {
    answer(question);
  }
}

void Coordinator::lose(const std::vector<int>& ranks, const std::string& how) {
  bool any = false;
  for (const int rank : ranks) {
    auto& left = left_[static_cast<size_t>(rank)];
    if (left.empty()) {
      left = how;
      any = true;
    }
  }
  if (any) {
    end_for_all(lost());
  }
}

bool Coordinator::is_alone() const {
  return std::none_of(left_.begin() + 1, left_.end(), [](auto& how) { return how.empty(); });
}

bool Coordinator::has_messages() const {
  return !matching_.is_empty();
}

void Coordinator::tell_all(Says kind, const Payload& words) {
  for (int rank = 0; rank < roster_.place().size; ++rank) {
    tell_(rank, kind, words);
  }
}

void Coordinator::compare() {
  const bool wanted = std::any_of(calls_.begin(), calls_.end(), [](auto& c) { return !c.empty(); });
  if (wanted && has_lost_some()) {
    end_for_all(lost());  // what a rank called before it left it will not do
  }
  while (!has_ended_ &&
         std::none_of(calls_.begin(), calls_.end(), [](auto& c) { return c.empty(); })) {
    ++agreed_;
    std::vector<Fingerprint> calls;
    for (auto& own : calls_) {
      calls.push_back(std::move(own.front()));
      own.pop_front();
    }
    Payload words;
    words.put(static_cast<int64_t>(agreed_));
    if (const auto found = difference(calls, agreed_)) {
      words.put(found->text).put(found->ranks);
      tell_all(kDiffer, words);
      if (found->ends_group) {
        end_for_all({Kind::Mismatch, found->ranks, "the group is broken since " + found->text,
                     std::chrono::milliseconds(0)});
      }
    } else {
      tell_all(kGo, words);
    }
  }
}

void Coordinator::match(const Posted& posted) {
  if (has_ended_) {
    return;
  }
  const auto other = matching_.match(posted);
  if (!other) {
    deny_those_without_peers();
    return;
  }
  const Posted& send = posted.sends ? posted : *other;
  const Posted& receive = posted.sends ? *other : posted;
  if (send.bytes == receive.bytes && send.dtype == receive.dtype) {
    tell_(send.rank, kGranted, Payload().put(static_cast<int64_t>(send.number)).put(receive.rank));
    tell_(receive.rank, kGranted,
          Payload().put(static_cast<int64_t>(receive.number)).put(send.rank));
    return;
  }
  const Difference how{text_of_misfit(send.rank, send.bytes, send.dtype, receive.rank,
                                      receive.bytes, receive.dtype, send.tag),
                       {send.rank, receive.rank}};
  deny(send, Kind::Mismatch, how);
  deny(receive, Kind::Mismatch, how);
}

void Coordinator::deny(const Posted& posted, Kind kind, const Difference& why) {
  tell_(posted.rank, kDenied,
        Payload()
            .put(static_cast<int64_t>(posted.number))
            .put(static_cast<int64_t>(kind))
            .put(why.text)
            .put(why.ranks));
}

std::vector<int> Coordinator::peers_of(const Posted& posted) const {
  std::vector<int> peers;
  for (int rank = 0; rank < roster_.place().size; ++rank) {
    if (rank == posted.peer || (posted.peer < 0 && rank != posted.rank)) {
      peers.push_back(rank);
    }
  }
  return peers;
}

void Coordinator::deny_those_without_peers() {
  if (!has_lost_some()) {
    return;
  }
  const auto orphans = matching_.take_out([this](const Posted& posted) {
    const auto peers = peers_of(posted);
    return std::none_of(peers.begin(), peers.end(),
                        [this](int r) { return left_[static_cast<size_t>(r)].empty(); });
  });
  for (const auto& orphan : orphans) {
    const auto peers = peers_of(orphan);
    const auto who =
        roster_.describe(peers, [this](int rank) { return left_[static_cast<size_t>(rank)]; });
    deny(orphan, Kind::RankLost, {text_of_loss(text_of_message(orphan.tag), who), peers});
  }
}

void Coordinator::end_for_all(const End& end) {
  if (!has_ended_) {
    has_ended_ = true;
    tell_all(kOver, encoded(end));
  }
}

std::vector<int> Coordinator::suspects(uint64_t seq) const {
  std::vector<int> ranks;
  for (size_t rank = 0; seq > agreed_ && rank < calls_.size(); ++rank) {
    if (agreed_ + calls_[rank].size() < seq) {
      ranks.push_back(static_cast<int>(rank));
    }
  }
  for (size_t rank = 1; seq <= agreed_ && rank < calls_.size(); ++rank) {
    ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

std::vector<int> Coordinator::awaited_by(int rank, Says question, uint64_t number) const {
  if (question == kAsking) {
    return number > agreed_ ? suspects(number) : std::vector<int>();
  }
  const auto* posted = matching_.find(rank, number);
  return posted == nullptr || posted->peer < 0 ? std::vector<int>() : peers_of(*posted);
}

void Coordinator::ask(Question question, const std::vector<int>& ranks) {
  // Of one that ends the group one is enough.
  const auto ends = [](const Question& q) { return q.kind == kLate || q.kind == kBroken; };
  const bool asked = std::any_of(questions_.begin(), questions_.end(), ends);
  if (has_ended_ || (question.kind == kLate && question.seq <= agreed_) ||
      (ends(question) && asked)) {
    return;
  }
  for (const int rank : ranks) {
    if (rank != 0 && !roster_.is_near(rank)) {
      question.silent.insert(rank);
      tell_(rank, kPing, {});
    }
  }
  // A rank that is gone makes itself known meanwhile.
  question.until = question.kind == kBroken  ? Clock::now() + kPatience
                   : question.silent.empty() ? Clock::now()
                                             : Clock::now() + kPatience;
  questions_.push_back(std::move(question));
}

void Coordinator::answer(const Question& question) {
  const auto state_of = [&](int rank) -> std::string {
    return roster_.is_near(rank)              ? roster_.process_state(rank)
           : question.silent.count(rank) != 0 ? "silent"
                                              : "alive";
  };
  const uint64_t seq = question.seq;
  if (question.kind == kAsking || question.kind == kAskingOfMessage) {
    const auto ranks = awaited_by(question.of, question.kind, seq);
    tell_(question.of, kAwaited,
          Payload()
              .put(question.kind)
              .put(static_cast<int64_t>(seq))
              .put(roster_.describe(ranks, state_of))
              .put(ranks));
    return;
  }
  if (question.kind == kOverdue) {
    const auto ranks = awaited_by(question.of, question.kind, seq);
    for (const auto& posted : matching_.take_out(
             [&](const Posted& p) { return p.rank == question.of && p.number == seq; })) {
      const auto text = "the " + text_of_message(posted.tag) + " must be done within " +
                        question.why + ", got no answer from " +
                        (ranks.empty() ? "any rank" : roster_.describe(ranks, state_of));
      deny(posted, Kind::Timeout, {text, ranks});
    }
    return;
  }
  auto ranks = suspects(seq);
  if (question.kind == kLate) {
    if (seq > agreed_) {
      std::ostringstream text;
      text << "the collective " << seq << " must be done within " << question.why
           << ", got no answer from " << roster_.describe(ranks, state_of);
      for (const int rank : ranks) {
        const uint64_t at = agreed_ + calls_[static_cast<size_t>(rank)].size();
        text << "; rank " << rank << " is "
             << (at == 0 ? "before its first collective" : "at collective " + std::to_string(at));
      }
      end_for_all({Kind::Timeout, ranks, text.str(), kDataGrace});
    }
  } else if (has_lost_some()) {
    end_for_all(lost());
  } else {
    std::erase_if(ranks, [&](int rank) {
      const auto state = state_of(rank);
      return state != "stopped" && state != "silent";
    });
    std::ostringstream text;
    text << "the data of collective " << seq << " must arrive, got " << question.why;
    if (!ranks.empty()) {
      text << "; no answer from " << roster_.describe(ranks, state_of);
    }
    end_for_all({Kind::Timeout, ranks, text.str(), kDataGrace});
  }
}

bool Coordinator::has_lost_some() const {
  return std::any_of(left_.begin(), left_.end(), [](auto& how) { return !how.empty(); });
}

End Coordinator::lost() const {
  std::vector<int> gone;
  std::chrono::milliseconds grace = kUnlimited;
  for (size_t rank = 0; rank < left_.size(); ++rank) {
    if (!left_[rank].empty()) {
      gone.push_back(static_cast<int>(rank));
      // What would come over a link that is down the kernel has waited for.
      grace = left_[rank] == kUnreachable ? std::chrono::milliseconds(0)
              : left_[rank] == kGone      ? kDataGrace
                                          : grace;
    }
  }
  return {Kind::RankLost, gone,
          roster_.describe(gone, [this](int rank) { return left_[static_cast<size_t>(rank)]; }),
          grace};
}

}  // namespace c10d_ext
