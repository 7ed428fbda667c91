#include "backends/checked/coordinator.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace c10d_ext {

namespace {

using Clock = Coordinator::Clock;
using Kind = ErrorKind;

}  // namespace

Coordinator::Coordinator(const Roster& roster, Tell tell)
    : roster_(roster), tell_(std::move(tell)), progress_(roster) {}

void Coordinator::hear(int rank, uint32_t kind, Payload& words) {
  switch (kind) {
    case kCalling:
      progress_.hear_call(rank, words);
      compare();
      break;
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
      ask({seq, kLate, within}, progress_.suspects(seq));
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
      ask({seq, kBroken, why}, progress_.suspects(seq));
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
      questions_.hear(rank);
      break;
    case kLeaving:
      progress_.leave(rank);
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
  return questions_.next();
}

void Coordinator::look(Clock::time_point now) {
  for (const auto& question : questions_.take_ripe(now)) {
    answer(question);
  }
}

void Coordinator::lose(const std::vector<int>& ranks, const std::string& how) {
  if (progress_.lose(ranks, how)) {
    end_for_all(progress_.lost());
  }
}

bool Coordinator::is_alone() const {
  return progress_.is_alone();
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
  if (progress_.has_someone_called() && progress_.has_lost_some()) {
    end_for_all(progress_.lost());  // what a rank called before it left it will not do
  }
  while (!has_ended_ && progress_.have_all_called()) {
    const auto calls = progress_.take_calls();
    const uint64_t agreed = progress_.agreed();
    Payload words;
    words.put(static_cast<int64_t>(agreed));
    if (const auto found = difference(calls.called, agreed)) {
      words.put(found->text).put(found->ranks);
      tell_all(kDiffer, words);
      if (found->ends_group) {
        end_for_all({Kind::Mismatch, found->ranks, "the group is broken since " + found->text,
                     std::chrono::milliseconds(0)});
      }
    } else {
      put_all_data(words, calls.data);
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
  if (!progress_.has_lost_some()) {
    return;
  }
  const auto orphans = matching_.take_out([this](const Posted& posted) {
    const auto peers = peers_of(posted);
    return std::none_of(peers.begin(), peers.end(),
                        [this](int r) { return progress_.is_there(r); });
  });
  for (const auto& orphan : orphans) {
    const auto peers = peers_of(orphan);
    const auto who = roster_.describe(peers, [this](int rank) { return progress_.how_left(rank); });
    deny(orphan, Kind::RankLost, {text_of_loss(text_of_message(orphan.tag), who), peers});
  }
}

void Coordinator::end_for_all(const End& end) {
  if (!has_ended_) {
    has_ended_ = true;
    tell_all(kOver, encoded(end));
  }
}

std::vector<int> Coordinator::awaited_by(int rank, Says question, uint64_t number) const {
  if (question == kAsking) {
    return number > progress_.agreed() ? progress_.suspects(number) : std::vector<int>();
  }
  const auto* posted = matching_.find(rank, number);
  return posted == nullptr || posted->peer < 0 ? std::vector<int>() : peers_of(*posted);
}

void Coordinator::ask(Question question, const std::vector<int>& ranks) {
  // Of one that ends the group one is enough.
  if (has_ended_ || (question.kind == kLate && question.seq <= progress_.agreed()) ||
      (question.ends_group() && questions_.has_end())) {
    return;
  }
  for (const int rank : ranks) {
    if (rank != 0 && !roster_.is_near(rank)) {
      question.silent.insert(rank);
      tell_(rank, kPing, {});
    }
  }
  questions_.add(std::move(question));
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
  auto ranks = progress_.suspects(seq);
  const auto is_stuck = [&](int rank) {
    const auto state = state_of(rank);
    return state == "stopped" || state == "silent";
  };
  if (question.kind == kLate) {
    if (seq > progress_.agreed()) {
      const auto behind = ranks;
      // Those that are well may wait for what the others owe them.
      if (std::any_of(ranks.begin(), ranks.end(), is_stuck)) {
        std::erase_if(ranks, [&](int rank) { return !is_stuck(rank); });
      }
      std::ostringstream text;
      text << "the collective " << seq << " must be done within " << question.why
           << ", got no answer from " << roster_.describe(ranks, state_of);
      for (const int rank : behind) {
        const uint64_t at = progress_.at(rank);
        text << "; rank " << rank << " is "
             << (at == 0 ? "before its first collective" : "at collective " + std::to_string(at));
      }
      end_for_all({Kind::Timeout, ranks, text.str(), kDataGrace});
    }
  } else if (progress_.has_lost_some()) {
    end_for_all(progress_.lost());
  } else {
    std::erase_if(ranks, [&](int rank) { return !is_stuck(rank); });
    std::ostringstream text;
    text << "the data of collective " << seq << " must arrive, got " << question.why;
    if (!ranks.empty()) {
      text << "; no answer from " << roster_.describe(ranks, state_of);
    }
    end_for_all({Kind::Timeout, ranks, text.str(), kDataGrace});
  }
}

}  // namespace c10d_ext
