#include "backends/checked/posted_messages.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

namespace c10d_ext {

namespace {

using Kind = ErrorKind;

OtherEnd end_of(const Posted& posted) {
  return {posted.rank, posted.number, posted.delivered};
}

}  // namespace

PostedMessages::PostedMessages(const Roster& roster, const RankProgress& progress, Tell tell)
    : roster_(roster), progress_(progress), tell_(std::move(tell)) {}

void PostedMessages::add(const Posted& posted) {
  const auto other = matching_.match(posted);
  if (!other) {
    // Rank 0 itself need not be told.
    if (!posted.sends && posted.peer > 0 && posted.bytes <= kLittleMessage &&
        matching_.want_last(posted.rank, posted.tag)) {
      tell_(posted.peer, kWanted, encoded_wanted(posted));
    }
    deny_those_without_peers();
    return;
  }
  const Posted& send = posted.sends ? posted : *other;
  const Posted& receive = posted.sends ? *other : posted;
  if (send.bytes == receive.bytes && send.dtype == receive.dtype) {
    const auto grant = [this](const Posted& to, const OtherEnd& other,
                              const std::optional<SharedBytes>& data) {
      Payload words;
      put(words.put(static_cast<int64_t>(to.number)), other);
      put_data(words, data);
      tell_(to.rank, kGranted, words);
    };
    const bool has_gone = send.data || send.delivered == Delivered::Data;
    grant(send, end_of(receive), has_gone ? std::optional(SharedBytes()) : std::nullopt);
    grant(receive, end_of(send), send.data);
    return;
  }
  const Difference how{text_of_misfit(send.rank, send.bytes, send.dtype, receive.rank,
                                      receive.bytes, receive.dtype, send.tag),
                       {send.rank, receive.rank}};
  deny(send, Kind::Mismatch, how, end_of(receive));
  deny(receive, Kind::Mismatch, how, end_of(send));
}

std::optional<uint64_t> PostedMessages::receive_for(const Posted& send) const {
  const auto* receive = send.peer == 0 ? matching_.receive_for(send) : nullptr;
  const bool fits = receive != nullptr && receive->peer == send.rank &&
                    receive->bytes == send.bytes && receive->dtype == send.dtype;
  return fits ? std::optional(receive->number) : std::nullopt;
}

bool PostedMessages::is_empty() const {
  return matching_.find_any([](const Posted& posted) { return !posted.is_given_up; }) == nullptr;
}

const Posted* PostedMessages::find(int rank, uint64_t number) const {
  const auto* posted = matching_.find(rank, number);
  if (posted != nullptr) {
    return posted->is_given_up ? nullptr : posted;
  }
  const auto withdrawn = withdrawn_.find({rank, number});
  return withdrawn == withdrawn_.end() ? nullptr : &withdrawn->second;
}

void PostedMessages::deny(const Posted& posted, Kind kind, const Difference& why,
                          const OtherEnd& other) {
  Payload words;
  words.put(static_cast<int64_t>(posted.number))
      .put(static_cast<int64_t>(kind))
      .put(why.text)
      .put(why.ranks);
  tell_(posted.rank, kDenied, put(words, other));
}

std::vector<int> PostedMessages::peers_of(const Posted& posted) const {
  std::vector<int> peers;
  for (int rank = 0; rank < roster_.place().size; ++rank) {
    if (rank == posted.peer || (posted.peer < 0 && rank != posted.rank)) {
      peers.push_back(rank);
    }
  }
  return peers;
}

void PostedMessages::deny_those_without_peers() {
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

void PostedMessages::unwant(const Posted& posted) {
  if (posted.is_wanted) {
    tell_(posted.peer, kUnwanted,
          Payload().put(posted.rank).put(posted.tag).put(static_cast<int64_t>(posted.number)));
  }
}

void PostedMessages::tell_to_withdraw(const Posted& posted) {
  if (posted.delivered != Delivered::Nothing) {
    Payload words;
    put(words, end_of(posted)).put(posted.tag);
    tell_(posted.peer, kWithdraw, words);
  }
}

void PostedMessages::leave(int rank) {
  for (const auto& posted :
       matching_.take_out([&](const Posted& posted) { return posted.rank == rank; })) {
    unwant(posted);
    tell_to_withdraw(posted);
  }
  std::erase_if(withdrawn_, [&](const auto& one) { return one.first.first == rank; });
  deny_those_without_peers();
}

void PostedMessages::answer(const Question& question,
                            const std::function<std::string(int rank)>& state_of) {
  const auto* waiting = find(question.of, question.seq);
  if (waiting == nullptr && (question.sender < 0 || !roster_.has_direct(question.of))) {
    return;  // matched: it has its data by the word on that, or asks again, of its sender
  }
  const auto ranks = awaited_by(question);
  const Difference why{"the " + question.why + ", got no answer from " +
                           (ranks.empty() ? "any rank" : roster_.describe(ranks, state_of)),
                       ranks};
  if (waiting != nullptr) {
    give_up(Posted(*waiting), why);
  } else {
    // Matched meanwhile: this rank has its data, or its sender does not bring that.
    deny({.rank = question.of, .number = question.seq}, Kind::Timeout, why);
  }
}

void PostedMessages::give_up(const Posted& posted, const Difference& why) {
  if (withdrawn_.erase({posted.rank, posted.number}) == 0) {
    if (posted.delivered == Delivered::Data) {
      matching_.give_up(posted.rank, posted.number);
    } else {
      matching_.take_out(posted.rank, posted.number);
      unwant(posted);
      tell_to_withdraw(posted);
    }
  }
  deny(posted, Kind::Timeout, why);
}

void PostedMessages::withdraw(int rank, uint64_t number) {
  const auto* posted = matching_.find(rank, number);
  if (posted == nullptr) {
    return;
  }
  if (posted->delivered == Delivered::Data) {
    tell_to_withdraw(*posted);
  }
  unwant(*posted);
}

void PostedMessages::hear_withdrawn(int receiver, int rank, uint64_t number) {
  const auto* posted = matching_.find(rank, number);
  if (posted == nullptr || posted->peer != receiver || posted->delivered != Delivered::Data) {
    return;
  }
  const Posted taken = *matching_.take_out(rank, number);
  if (!taken.is_given_up) {
    withdrawn_.emplace(std::pair(rank, number), taken);
  }
}

std::vector<int> PostedMessages::awaited_by(const Question& question) const {
  const auto* posted = find(question.of, question.seq);
  if (posted == nullptr) {
    return question.sender < 0 ? std::vector<int>() : std::vector{question.sender};
  }
  return posted->peer < 0 ? std::vector<int>() : peers_of(*posted);
}

}  // namespace c10d_ext
