#include "backends/checked/roster.h"

#include <algorithm>
#include <numeric>

namespace c10d_ext {

Roster::Roster(Place place, std::vector<Member> members)
    : place_(std::move(place)), members_(std::move(members)), hosts_(ranks_by_leader(members_)) {
  for (const auto& one : members_) {
    has_hosts_ = has_hosts_ || one.host != members_[0].host;
  }
  for (const auto& ranks : hosts_) {
    if (!is_linked(ranks.front())) {
      own_host_ = ranks;
    }
  }
}

std::vector<int> Roster::all_ranks() const {
  std::vector<int> ranks(members_.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

bool Roster::is_near(int rank) const {
  return member(rank).machine == member(place_.rank).machine;
}

bool Roster::is_linked(int rank) const {
  return member(rank).network != member(place_.rank).network;
}

int Roster::leader_of(int rank) const {
  for (const auto& ranks : hosts_) {
    if (std::find(ranks.begin(), ranks.end(), rank) != ranks.end()) {
      return ranks.front();
    }
  }
  return rank;
}

bool Roster::has_direct(int rank) const {
  bool has_some = false;
  for (int other = 0; other < place_.size && !has_some; ++other) {
    has_some = are_direct(rank, other);
  }
  return has_some;
}

bool Roster::is_leader(int rank) const {
  const auto all = leaders();
  return std::find(all.begin(), all.end(), rank) != all.end();
}

std::vector<int> Roster::leaders() const {
  std::vector<int> ranks;
  for (const auto& host : hosts_) {
    ranks.push_back(host.front());
  }
  return ranks;
}

std::string Roster::process_state(int rank) const {
  return c10d_ext::process_state(member(rank).peer);
}

bool Roster::has_ended(int rank) const {
  return c10d_ext::has_ended(member(rank).peer);
}

std::string Roster::describe(int rank, const std::string& state) const {
  const auto& host = member(rank).host;
  return "rank " + std::to_string(rank) + " (pid " + std::to_string(pid(rank)) +
         (has_hosts_ ? " on " + host : "") + ", " + state + ")";
}

std::string Roster::describe(const std::vector<int>& ranks,
                             const std::function<std::string(int)>& state) const {
  std::string text;
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0                  ? ""
             : i + 1 == ranks.size() ? " and "
                                     : ", ") +
            describe(ranks[i], state(ranks[i]));
  }
  return text;
}

std::string text_of_message(int64_t tag) {
  return "message with tag " + std::to_string(tag);
}

std::string text_of_loss(const std::string& what, const std::string& who) {
  return "every rank must live until the " + what + " is done, got " + who;
}

}  // namespace c10d_ext
