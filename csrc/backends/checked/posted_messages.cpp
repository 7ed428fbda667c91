#include "backends/checked/posted_messages.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

namespace c10d_ext {

namespace {

using Kind = ErrorKind;

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
    const auto grant = [this](const Posted& to, int peer, const std::optional<std::string>& data) {
      Payload words;
      words.put(static_cast<int64_t>(to.number)).put(peer);
      put_data(words, data);
      tell_(to.rank, kGranted, words);
    };
    grant(send, receive.rank, send.data ? std::optional(std::string()) : std::nullopt);
    grant(receive, send.rank, send.data);
    return;
  }
  const Difference how{text_of_misfit(send.rank, send.bytes, send.dtype, receive.rank,
                                      receive.bytes, receive.dtype, send.tag),
                       {send.rank, receive.rank}};
  deny(send, Kind::Mismatch, how);
  deny(receive, Kind::Mismatch, how);
}

void PostedMessages::deny(const Posted& posted, Kind kind, const Difference& why) {
  tell_(posted.rank, kDenied,
        Payload()
            .put(static_cast<int64_t>(posted.number))
            .put(static_cast<int64_t>(kind))
            .put(why.text)
            .put(why.ranks));
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

void PostedMessages::leave(int rank) {
  for (const auto& posted :
       matching_.take_out([&](const Posted& posted) { return posted.rank == rank; })) {
    unwant(posted);
  }
  deny_those_without_peers();
}

void PostedMessages::give_up(int rank, uint64_t number, const std::string& why,
                             const std::vector<int>& ranks) {
  for (const auto& posted :
       matching_.take_out([&](const Posted& p) { return p.rank == rank && p.number == number; })) {
    unwant(posted);
    deny(posted, Kind::Timeout, {"the " + text_of_message(posted.tag) + " " + why, ranks});
  }
}

std::vector<int> PostedMessages::awaited_by(int rank, uint64_t number) const {
  const auto* posted = matching_.find(rank, number);
  return posted == nullptr || posted->peer < 0 ? std::vector<int>() : peers_of(*posted);
}

}  // namespace c10d_ext
