#include "backends/checked/relay.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <utility>

namespace c10d_ext {

namespace {

// Ranks give data where nothing of theirs is in flight, and so are a call or two apart.
constexpr size_t kMostOpen = 64;

}  // namespace

Relay::Relay(const Roster& roster, Tell tell) : roster_(roster), tell_(std::move(tell)) {}

Relay::Collective* Relay::open(uint64_t seq) {
  if (is_settled(seq)) {
    return nullptr;
  }
  if (open_.size() >= kMostOpen && open_.count(seq) == 0) {
    throw std::runtime_error("calls that are too far apart");
  }
  return &open_[seq];
}

void Relay::hear_call(int rank, Payload words) {
  const auto& own = roster_.own_host();
  if (std::find(own.begin(), own.end(), rank) == own.end()) {
    throw std::runtime_error("a call of another host's");
  }
  Calling call = take_call(words, roster_.place().size, roster_.hosts().size());
  words.expect_no_more_data();
  const uint64_t seq = call.seq;
  auto* collective = call.data ? open(seq) : nullptr;
  if (collective == nullptr) {
    return;
  }
  collective->own += collective->calls.insert_or_assign(rank, std::move(call)).second;
  if (collective->own == own.size()) {
    pass_on(*collective);
    compare(seq);
  }
}

void Relay::pass_on(const Collective& collective) const {
  const auto for_host = [&](const std::vector<int>& ranks) {
    Payload all;
    for (const int rank : roster_.own_host()) {
      const Calling& call = collective.calls.at(rank);
      all.put(encoded(Calling{call.called, call.data->of(ranks), call.seq}));
    }
    return all;
  };
  const bool has_parts =
      std::any_of(roster_.own_host().begin(), roster_.own_host().end(),
                  [&](int rank) { return collective.calls.at(rank).data->has_parts(); });
  std::optional<Payload> words;
  for (const auto& ranks : roster_.hosts()) {
    // Rank 0 has heard each of them.
    if (const int leader = ranks.front(); leader != 0 && leader != roster_.place().rank) {
      if (!words || has_parts) {
        words = for_host(ranks);
      }
      tell_(leader, kRelaying, *words);
    }
  }
}

void Relay::hear_calls(int leader, Payload& words) {
  const auto& hosts = roster_.hosts();
  const auto host = std::find_if(hosts.begin(), hosts.end(),
                                 [&](const auto& ranks) { return ranks.front() == leader; });
  if (host == hosts.end()) {
    throw std::runtime_error("calls that no leader passes on");
  }
  std::optional<uint64_t> seq;
  std::map<int, Calling> calls;
  for (const int rank : *host) {
    Calling call = take_call(words, roster_.place().size, roster_.hosts().size());
    if (!call.data || call.seq != seq.value_or(call.seq)) {
      throw std::runtime_error("calls that do not belong together");
    }
    seq = call.seq;
    calls.emplace(rank, std::move(call));
  }
  words.expect_no_more_data();
  if (auto* collective = open(*seq)) {
    collective->calls.merge(std::move(calls));
    compare(*seq);
  }
}

void Relay::hear_of_message(int rank, Says kind, const Payload& words) {
  Payload copy = words.first_numbers(2);
  const auto [from, to] = take_way(copy, roster_.place().size);
  const int own = roster_.place().rank, away = roster_.leader_of(from);
  const bool is_own = rank == from && away == own, is_for_own = roster_.leader_of(to) == own;
  if (!roster_.go_by_leaders(from, to) || is_own == is_for_own || (is_for_own && rank != away)) {
    throw std::runtime_error("a message that is not for this leader");
  }
  tell_(is_own ? roster_.leader_of(to) : to, kind, words);
}

void Relay::settle(uint64_t seq) {
  open_.erase(seq);
  if (is_settled(seq)) {
    return;
  }
  settled_.insert(seq);
  while (settled_.erase(settled_up_to_ + 1) != 0) {
    ++settled_up_to_;
  }
}

void Relay::compare(uint64_t seq) {
  auto& calls = open_.at(seq).calls;
  const auto size = static_cast<size_t>(roster_.place().size);
  if (calls.size() < size || roster_.place().rank == 0) {
    return;
  }
  std::vector<Fingerprint> called;
  std::vector<Contribution> data;
  for (auto& [rank, call] : calls) {
    called.push_back(std::move(call.called));
    data.push_back(std::move(*call.data));
  }
  settle(seq);
  if (difference(called, seq)) {
    return;  // rank 0 tells
  }
  tell_go(seq, data, roster_.own_host(), tell_);
}

}  // namespace c10d_ext
