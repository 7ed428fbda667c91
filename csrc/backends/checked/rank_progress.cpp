#include "backends/checked/rank_progress.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace c10d_ext {

void RankProgress::hear_call(int rank, Payload& words) {
  auto call = reader_.take(words);
  words.expect_end();
  if (call.data && roster_.calls_by_leader(rank)) {
    throw std::runtime_error("a call that its leader is to tell of");
  }
  add_call(rank, std::move(call));
}

void RankProgress::hear_calls(int leader, Payload& words) {
  const auto is_led = [&](int rank) {
    return roster_.calls_by_leader(rank) && roster_.leader_of(rank) == leader;
  };
  for (auto& [rank, call] : reader_.take_relayed(words, is_led)) {
    if (!call.data) {
      throw std::runtime_error("a call that the rank itself tells of");
    }
    add_call(rank, std::move(call));
  }
}

void RankProgress::add_call(int rank, Calling call) {
  auto& calls = calls_[static_cast<size_t>(rank)];
  const uint64_t seq = call.seq, last = calls.empty() ? agreed_ : calls.rbegin()->first;
  const bool is_next = roster_.calls_by_leader(rank) ? seq > agreed_ : seq == last + 1;
  if (!is_next || !calls.emplace(seq, std::move(call)).second) {
    throw std::runtime_error("a call is missing, or comes twice");
  }
  note(rank, seq);
}

void RankProgress::hear_counts(int rank, Payload& words) {
  const auto own = words.number();
  const auto of_host = words.numbers();
  const auto& hosts = roster_.hosts();
  const auto host = std::find_if(hosts.begin(), hosts.end(),
                                 [rank](const auto& ranks) { return ranks.front() == rank; });
  if (own < 0 ||
      std::any_of(
          of_host.begin(), of_host.end(), [](auto one) { return one < 0; }) ||
      (!of_host.empty() && (host == hosts.end() || of_host.size() != host->size()))) {
    throw std::runtime_error("a number of calls that nobody has made");
  }
  note(rank, static_cast<uint64_t>(own));
  for (size_t i = 0; i < of_host.size(); ++i) {
    note((*host)[i], static_cast<uint64_t>(of_host[i]));
  }
}

void RankProgress::note(int rank, uint64_t count) {
  auto& last = counts_[static_cast<size_t>(rank)];
  last = std::max(last, count);
}

bool RankProgress::is_next_lost() const {
  bool is_called = false, is_lost = false;
  for (size_t rank = 0; rank < calls_.size(); ++rank) {
    is_called = is_called || at(static_cast<int>(rank)) > agreed_;
    // Who has left after it knew that the others would call it, too.
    const bool has_done = left_[rank] == kLeft && left_after_[rank] > agreed_;
    is_lost = is_lost || (!left_[rank].empty() && !has_done);
  }
  return is_called && is_lost;
}

bool RankProgress::have_all_called() const {
  return std::all_of(calls_.begin(), calls_.end(), [this](const auto& calls) {
    return !calls.empty() && calls.begin()->first == agreed_ + 1;
  });
}

RankProgress::Calls RankProgress::take_calls() {
  ++agreed_;
  Calls calls;
  calls.called.reserve(calls_.size());
  calls.data.reserve(calls_.size());
  bool have_all_data = true;
  for (auto& own : calls_) {
    Calling call = std::move(own.extract(own.begin()).mapped());
    calls.called.push_back(std::move(call.called));
    if (call.data) {
      calls.data.push_back(std::move(*call.data));
    } else {
      have_all_data = false;
    }
  }
  if (!have_all_data) {
    calls.data.clear();
  }
  return calls;
}

void RankProgress::hear_done(int rank, uint64_t seq) {
  auto& last = done_[static_cast<size_t>(rank)];
  if (seq <= last || seq > agreed_) {
    throw std::runtime_error("what is done must have begun");
  }
  last = seq;
}

std::vector<int> RankProgress::behind(uint64_t seq) const {
  std::vector<int> ranks;
  for (int rank = 0; rank < roster_.place().size; ++rank) {
    if (at(rank) < seq) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

std::vector<int> RankProgress::holding_up(uint64_t seq) const {
  auto ranks = roster_.all_ranks();
  const auto leaders = roster_.leaders();
  std::erase_if(ranks, [&](int rank) {
    const bool has_told = seq <= agreed_ || calls_[static_cast<size_t>(rank)].count(seq) != 0;
    return has_told && std::find(leaders.begin(), leaders.end(), rank) == leaders.end();
  });
  return ranks;
}

std::vector<int> RankProgress::suspects(uint64_t seq) const {
  if (seq > agreed_) {
    return behind(seq);
  }
  std::vector<int> others(calls_.size() - 1);
  std::iota(others.begin(), others.end(), 1);
  return others;
}

void RankProgress::leave(int rank, uint64_t after) {
  left_[static_cast<size_t>(rank)] = kLeft;
  left_after_[static_cast<size_t>(rank)] = after;
}

bool RankProgress::lose(const std::vector<int>& ranks, const std::string& how) {
  bool any = false;
  for (const int rank : ranks) {
    auto& left = left_[static_cast<size_t>(rank)];
    if (left.empty()) {
      left = how;
      any = true;
    }
  }
  return any;
}

bool RankProgress::has_lost_some() const {
  return std::any_of(left_.begin(), left_.end(), [](auto& how) { return !how.empty(); });
}

bool RankProgress::is_alone() const {
  return std::none_of(left_.begin() + 1, left_.end(), [](auto& how) { return how.empty(); });
}

End RankProgress::lost() const {
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
  return {ErrorKind::RankLost, gone,
          roster_.describe(gone, [this](int rank) { return how_left(rank); }), grace};
}

}  // namespace c10d_ext
