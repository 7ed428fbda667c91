#include "backends/checked/coordinator.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace c10d_ext {

namespace {

using Clock = Coordinator::Clock;
using Kind = ErrorKind;

// A rank has lost its line to another one. Both ends of a link say so, and other ranks of theirs:
// the two that stand for it are the same whoever is first, their leaders. None where that is of no
// concern: who has left has no lines any more.
std::vector<int> ends_of_link(const Roster& roster, const RankProgress& progress, int one,
                              int64_t said) {
  const auto other = static_cast<int>(said);
  if (said < 1 || said >= roster.place().size || other == one) {
    throw std::runtime_error("a line to nobody");
  }
  const auto are_there = [&](int a, int b) { return progress.is_there(a) && progress.is_there(b); };
  if (!are_there(one, other)) {
    return {};
  }
  const int a = roster.leader_of(one), b = roster.leader_of(other);
  return a != b && are_there(a, b) ? std::vector<int>{a, b} : std::vector<int>{one, other};
}

// Whether that rank knows what others do not: whether it is well, what its leader has yet to tell
// of it, whether it has sent or received what is to be given up. Not one that is seen to be
// stopped.
bool must_answer(const Roster& roster, const Question& question, int rank) {
  return !roster.is_near(rank) || roster.calls_by_leader(rank) ||
         (question.kind == kOverdue && !is_stuck(roster.process_state(rank)));
}

// One end of a message, as a rank tells of it.
Posted take_posting(const Roster& roster, int rank, Payload& words) {
  auto posted = take_posted(words);
  posted.rank = rank;
  posted.number = static_cast<uint64_t>(words.number());
  words.expect_end();
  if (posted.peer == rank || posted.peer >= roster.place().size ||
      posted.peer < (posted.sends ? 0 : -1)) {
    throw std::runtime_error("a message to or from nobody");
  }
  if (posted.delivered != Delivered::Nothing && !roster.are_direct(rank, posted.peer)) {
    throw std::runtime_error("a message that nobody can deliver");
  }
  return posted;
}

}  // namespace

Coordinator::Coordinator(const Roster& roster, Tell tell)
    : roster_(roster),
      tell_(std::move(tell)),
      progress_(roster),
      messages_(roster, progress_, tell_) {}

void Coordinator::hear(int rank, uint32_t kind, Payload& words) {
  switch (kind) {
    case kCalling:
    case kRelaying:
      kind == kCalling ? progress_.hear_call(rank, words) : progress_.hear_calls(rank, words);
      compare();
      break;
    case kPosting: {
      const auto posted = take_posting(roster_, rank, words);
      if (!has_ended_) {
        messages_.add(posted);
      }
      break;
    }
    case kLate: {
      const auto seq = static_cast<uint64_t>(words.number());
      const auto within = words.text();
      ask({seq, kLate, within}, roster_.all_ranks());
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
    case kDone: {
      const auto seq = static_cast<uint64_t>(words.number());
      progress_.hear_done(rank, seq);
      if (rank == 0) {
        tell_done(seq);
      }
      break;
    }
    case kAsking:
    case kAskingOfMessage: {
      const auto number = static_cast<uint64_t>(words.number());
      const auto sender = take_rank_or_none(words, roster_.place().size);
      const Question question{number, static_cast<Says>(kind), "", rank, sender};
      ask(question, awaited_by(question));
      break;
    }
    case kOverdue: {
      const auto number = static_cast<uint64_t>(words.number());
      const auto what = words.text();
      const auto sender = take_rank_or_none(words, roster_.place().size);
      const Question question{number, kOverdue, what, rank, sender};
      messages_.withdraw(rank, number);
      ask(question, awaited_by(question));
      break;
    }
    case kWithdrawn: {
      const auto send = take_other_end(words, roster_.place().size);
      messages_.hear_withdrawn(rank, send.rank, send.number);
      break;
    }
    case kSevered: {
      const auto ends = ends_of_link(roster_, progress_, rank, words.number());
      if (!ends.empty()) {
        ask({0, kSevered, "", std::max(ends[0], ends[1])}, ends);
      }
      break;
    }
    case kPong:
      progress_.hear_counts(rank, words);
      questions_.hear(rank);
      compare();
      break;
    case kLeaving:
      if (!progress_.has_lost_some()) {
        tell_others(roster_.leaders(), kSingly, {});  // who calls more is to hear of it at once
      }
      progress_.leave(rank, static_cast<uint64_t>(words.number()));
      questions_.hear(rank);
      messages_.leave(rank);
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

void Coordinator::add_call(int rank, const Calling& call) {
  progress_.add_call(rank, call);
  compare();
}

Clock::time_point Coordinator::next_look() const {
  return questions_.next();
}

void Coordinator::look(Clock::time_point now) {
  for (const auto& question : questions_.take_ripe(now)) {
    answer(question);
  }
}

std::optional<uint64_t> Coordinator::receive_for(int rank, Payload& words) const {
  return messages_.receive_for(take_posting(roster_, rank, words));
}

void Coordinator::lose(const std::vector<int>& ranks, const std::string& how) {
  if (!progress_.lose(ranks, how)) {
    return;
  }
  end_for_all(progress_.lost());
  for (const int rank : ranks) {
    questions_.hear(rank);
    // What it had done it may have sent.
    tell_all(kDoomed, Payload().put(static_cast<int64_t>(progress_.done(rank) + 1)));
  }
}

bool Coordinator::is_alone() const {
  return progress_.is_alone();
}

bool Coordinator::has_messages() const {
  return !messages_.is_empty();
}

void Coordinator::tell_done(uint64_t seq) {
  // Others hear of it, where this one is gone, by the leaders.
  auto ranks = roster_.leaders();
  ranks.insert(ranks.end(), roster_.own_host().begin(), roster_.own_host().end());
  tell_others(ranks, kDone, Payload().put(static_cast<int64_t>(seq)));
}

void Coordinator::tell_all(Says kind, const Payload& words) {
  for (const int rank : roster_.all_ranks()) {
    tell_(rank, kind, words);
  }
}

void Coordinator::tell_others(const std::vector<int>& ranks, Says kind, const Payload& words) {
  for (const int rank : ranks) {
    if (rank != 0) {
      tell_(rank, kind, words);
    }
  }
}

void Coordinator::compare() {
  for (;;) {
    if (progress_.is_next_lost()) {
      end_for_all(progress_.lost());  // what a rank called before it left it will not do
    }
    if (has_ended_ || !progress_.have_all_called()) {
      return;
    }
    const auto calls = progress_.take_calls();
    const uint64_t agreed = progress_.agreed();
    if (const auto found = difference(calls.called, agreed)) {
      Payload words;
      words.put(static_cast<int64_t>(agreed)).put(found->text).put(found->ranks);
      tell_all(kDiffer, words);
      if (found->ends_group) {
        end_for_all({Kind::Mismatch, found->ranks, "the group is broken since " + found->text,
                     std::chrono::milliseconds(0)});
      }
    } else {
      const bool leaders_tell = !calls.data.empty() && !roster_.hosts().empty();
      tell_go(agreed, calls.data, leaders_tell ? roster_.own_host() : roster_.all_ranks(),
              roster_.hosts(), tell_);
    }
  }
}

void Coordinator::end_for_all(End end) {
  if (!has_ended_) {
    has_ended_ = true;
    end.agreed = progress_.agreed();
    tell_all(kOver, encoded(end));
    messages_.drop_all();
  }
}

std::vector<int> Coordinator::suspects_of(uint64_t seq) const {
  auto ranks = progress_.behind(seq);
  return ranks.empty() ? progress_.holding_up(seq) : ranks;
}

std::vector<int> Coordinator::awaited_by(const Question& question) const {
  return question.kind == kAsking ? suspects_of(question.seq) : messages_.awaited_by(question);
}

void Coordinator::ask(Question question, const std::vector<int>& ranks) {
  // What ends the group ends it for all who ask.
  if (has_ended_ || (question.ends_group() && questions_.has(question))) {
    return;
  }
  for (const int rank : ranks) {
    if (rank != 0 && progress_.is_there(rank) && must_answer(roster_, question, rank)) {
      question.silent.insert(rank);
      tell_(rank, kPing, {});
    }
  }
  questions_.add(std::move(question));
}

void Coordinator::answer(const Question& question) {
  if (has_ended_ && question.ends_group()) {
    return;
  }
  const auto state_of = [&](int rank) -> std::string {
    return !progress_.is_there(rank)          ? progress_.how_left(rank)
           : roster_.is_near(rank)            ? roster_.process_state(rank)
           : question.silent.count(rank) != 0 ? "silent"
                                              : "alive";
  };
  const auto is_stuck = [&](int rank) { return c10d_ext::is_stuck(state_of(rank)); };
  const uint64_t seq = question.seq;
  if (question.kind == kAsking || question.kind == kAskingOfMessage) {
    auto ranks = awaited_by(question);
    if (question.kind == kAsking && progress_.behind(seq).empty()) {
      std::erase_if(ranks, [&](int rank) { return !is_stuck(rank); });
    }
    tell_(question.of, kAwaited,
          Payload()
              .put(question.kind)
              .put(static_cast<int64_t>(seq))
              .put(roster_.describe(ranks, state_of))
              .put(ranks));
    return;
  }
  if (question.kind == kOverdue) {
    messages_.answer(question, state_of);
    return;
  }
  if (question.kind == kSevered) {
    // A host that is off does not answer, and this one may not have noticed yet.
    const auto& silent = question.silent;
    lose({silent.size() == 1 ? *silent.begin() : question.of}, kUnreachable);
    return;
  }
  if (question.kind == kLate) {
    auto ranks = suspects_of(seq);
    const auto behind = progress_.behind(seq);
    const bool are_some_stuck = std::any_of(ranks.begin(), ranks.end(), is_stuck);
    // Those that are well may wait for what the others owe them; and a host that stands still does
    // so with all of its ranks, whatever they had called.
    if (are_some_stuck) {
      ranks = roster_.all_ranks();
      std::erase_if(ranks, [&](int rank) { return !is_stuck(rank); });
    }
    // What all have called is about to begin, where their leaders are well.
    if (!behind.empty() || are_some_stuck) {
      std::ostringstream text;
      text << "the " << question.why << ", got no answer from "
           << roster_.describe(ranks, state_of);
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
    auto ranks = progress_.suspects(seq);
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
