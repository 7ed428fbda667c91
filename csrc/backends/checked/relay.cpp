#include "backends/checked/relay.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <utility>

#include "backends/checked/host_sums.h"

namespace c10d_ext {

namespace {

// Ranks give data where nothing of theirs is in flight, and so are a call or two with data apart.
constexpr size_t kMostOpen = 64;

}  // namespace

Relay::Relay(const Roster& roster, Tell tell)
    : roster_(roster), tell_(std::move(tell)), reader_(roster.place().size, roster.hosts().size()) {
  for (const int rank : roster_.own_host()) {
    callers_[rank];
  }
}

Calling Relay::take_call(int rank, Payload& words) {
  if (callers_.count(rank) == 0) {
    throw std::runtime_error("a call of another host's");
  }
  Calling call = reader_.take(words);
  words.expect_end();
  return call;
}

void Relay::add_call(int rank, Calling call) {
  auto& [count, calls] = callers_.at(rank);
  if (call.seq != count + 1) {
    throw std::runtime_error("a call is missing");
  }
  const auto has_data = [](const Calling& one) { return one.data.has_value(); };
  if (has_data(call) &&
      static_cast<size_t>(std::count_if(calls.begin(), calls.end(), has_data)) >= kMostOpen) {
    throw std::runtime_error("calls that are too far apart");
  }
  ++count;
  if (is_single_ && call.data) {
    tell_(0, kRelaying, encoded(Relayed{{rank, &call}}, roster_.hosts().front()));
  }
  calls.push_back(std::move(call));
  if (have_all_called()) {
    pass_on();
  }
}

bool Relay::have_all_called() const {
  return std::none_of(callers_.begin(), callers_.end(),
                      [](const auto& caller) { return caller.second.calls.empty(); });
}

void Relay::pass_on() {
  Calls own;
  own.reserve(callers_.size());
  for (auto& [rank, caller] : callers_) {
    own.emplace_back(rank, std::move(caller.calls.front()));
    caller.calls.pop_front();
  }
  reduce_on_host(own);
  // Those without data rank 0 hears of by the ranks themselves.
  Relayed passed;
  passed.reserve(own.size());
  bool has_parts = false;
  for (const auto& [rank, call] : own) {
    if (call.data) {
      passed.emplace_back(rank, &call);
      has_parts = has_parts || call.data->has_parts();
    }
  }
  const uint64_t seq = own.front().second.seq;
  const bool has_all_data = passed.size() == own.size();
  std::optional<Payload> words;
  for (const auto& ranks : roster_.hosts()) {
    const int leader = ranks.front();
    const bool is_told = leader == 0
                             ? is_for_root() && !is_single_ && !passed.empty()
                             : leader != roster_.place().rank && has_all_data && !is_settled(seq);
    if (is_told) {
      if (!words || has_parts) {
        words = encoded(passed, ranks);
      }
      tell_(leader, kRelaying, *words);
    }
  }
  if (has_all_data) {
    add(seq, std::move(own));
  }
}

void Relay::pass_on_singly() {
  if (!is_for_root() || std::exchange(is_single_, true)) {
    return;
  }
  for (const auto& [rank, caller] : callers_) {
    for (const auto& call : caller.calls) {
      if (call.data) {
        tell_(0, kRelaying, encoded(Relayed{{rank, &call}}, roster_.hosts().front()));
      }
    }
  }
}

std::vector<int64_t> Relay::counts() const {
  std::vector<int64_t> all;
  for (const auto& [rank, caller] : callers_) {
    all.push_back(static_cast<int64_t>(caller.count));
  }
  return all;
}

void Relay::hear_calls(int leader, Payload& words) {
  const auto& hosts = roster_.hosts();
  const auto host = std::find_if(hosts.begin(), hosts.end(),
                                 [&](const auto& ranks) { return ranks.front() == leader; });
  if (host == hosts.end()) {
    throw std::runtime_error("calls that no leader passes on");
  }
  Calls calls = reader_.take_relayed(
      words, [&](int rank) { return std::find(host->begin(), host->end(), rank) != host->end(); });
  const uint64_t seq = calls.front().second.seq;
  for (size_t i = 0; i < calls.size(); ++i) {
    const auto& [rank, call] = calls[i];
    if (!call.data || call.seq != seq) {
      throw std::runtime_error("calls that do not belong together");
    }
    if (calls.size() != host->size() || rank != (*host)[i]) {
      throw std::runtime_error("calls of some of a host");
    }
  }
  add(seq, std::move(calls));
}

void Relay::settle(uint64_t seq) {
  open_.erase(seq);
  if (is_settled(seq)) {
    return;
  }
  if (seq > settled_up_to_ + 1) {
    settled_.insert(seq);
    return;
  }
  settled_up_to_ = seq;
  while (settled_.erase(settled_up_to_ + 1) != 0) {
    ++settled_up_to_;
  }
}

void Relay::add(uint64_t seq, Calls of_host) {
  if (is_settled(seq)) {
    return;
  }
  if (open_.size() >= kMostOpen && open_.count(seq) == 0) {
    throw std::runtime_error("calls that are too far apart");
  }
  auto& calls = open_[seq];
  const auto is_there = [&](const auto& one) { return one.first == of_host.front().first; };
  if (std::any_of(calls.begin(), calls.end(), is_there)) {
    return;  // its leader has said so before
  }
  const auto size = static_cast<size_t>(roster_.place().size);
  calls.reserve(size);
  std::move(of_host.begin(), of_host.end(), std::back_inserter(calls));
  if (calls.size() < size || roster_.place().rank == 0) {
    return;
  }
  std::sort(calls.begin(), calls.end(),
            [](const auto& one, const auto& other) { return one.first < other.first; });
  std::vector<Called> called;
  std::vector<Contribution> data;
  called.reserve(size);
  data.reserve(size);
  for (auto& [rank, call] : calls) {
    called.push_back(std::move(call.called));
    data.push_back(std::move(*call.data));
  }
  settle(seq);
  if (difference(called, seq)) {
    return;  // rank 0 tells
  }
  tell_go(seq, data, roster_.own_host(), roster_.hosts(), tell_);
}

}  // namespace c10d_ext
