#pragma once

// Ranks that have messages, and whose words are heard when a test says so.

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "agreement_ranks.h"
#include "backends/checked/coordinator.h"
#include "backends/checked/open_calls.h"
#include "backends/checked/participant.h"
#include "backends/checked/protocol.h"
#include "program.h"

namespace c10d_ext {

// Longer than any test takes.
constexpr std::chrono::milliseconds kNotYet = std::chrono::hours(1);

// Rank 0's host, and three others.
inline const std::vector<std::string> kHosts{"a", "b", "b", "c", "d", "a"};

// One end of a message, and what became of it.
struct Ending {
  bool sends;
  int rank;
  int peer;
  int64_t tag;
  uint64_t bytes;
  int ends = 0;
  bool has_begun = false;  // by the engine
  std::optional<std::string> data = std::nullopt;
  std::optional<Failure> failure = std::nullopt;
};

inline bool is_over(const Ending& ending) {
  return ending.ends == 1 && ending.data;
}
inline bool has_timed_out(const Ending& ending) {
  return ending.ends == 1 && ending.failure && ending.failure->kind == ErrorKind::Timeout;
}

// All ranks, whose words wait until a test has them heard: in any order, but for those of one
// route.
class Group {
 public:
  Group() {
    for (int rank = 0; rank < size(); ++rank) {
      ranks_.push_back(std::make_unique<Rank>(*this, rank));
    }
  }

  static int size() {
    return static_cast<int>(kHosts.size());
  }
  // With data of its own where it is little.
  Ending& send(int from, int to, int64_t tag, const std::string& data, bool is_little = true,
               std::chrono::milliseconds timeout = kNotYet) {
    Posted posted{.sends = true, .peer = to, .tag = tag, .bytes = data.size()};
    if (is_little) {
      posted.data = data;
    }
    return post(from, std::move(posted), timeout);
  }
  Ending& receive(int to, int from, int64_t tag, uint64_t bytes,
                  std::chrono::milliseconds timeout = kNotYet, DType dtype = DType::Bytes) {
    return post(to, {.peer = from, .tag = tag, .bytes = bytes, .dtype = dtype}, timeout);
  }
  // A busy rank answers rank 0, but tells of what it posts or hears only when it is busy no longer.
  void set_busy(int rank, bool is_busy) {
    auto& who = *ranks_[static_cast<size_t>(rank)];
    who.is_busy = is_busy;
    go_on(who);
  }
  void leave(int rank) {
    say({rank, 0}, kLeaving, Payload().put(0));
  }

  // From and to; what other ranks than rank 0 say to each other is on one of its own.
  using Route = std::pair<int, int>;
  static Route direct(int from, int to) {
    return {from, to + size()};
  }
  std::vector<Route> routes() const {
    std::vector<Route> all;
    for (const auto& [route, words] : routes_) {
      all.push_back(route);
    }
    return all;
  }
  // What is first on it. Whether there was something.
  bool hear(const Route& route) {
    const auto found = routes_.find(route);
    if (found == routes_.end()) {
      return false;
    }
    auto [kind, words] = std::move(found->second.front());
    found->second.pop_front();
    if (found->second.empty()) {
      routes_.erase(found);
    }
    if (route.second == 0) {
      coordinator_.hear(route.first, kind, words);
    } else if (kind != kSingly) {  // of collectives, for a leader
      auto& rank = *ranks_[static_cast<size_t>(route.second % size())];
      if (route.second < size()) {
        rank.participant.obey(kind, words);
      } else {
        rank.participant.hear_of_message(route.first, kind, words);
      }
      go_on(rank);
    }
    return true;
  }
  void hear_all(const Route& route) {
    while (hear(route)) {
    }
  }
  void hear_everything() {
    for (auto all = routes(); !all.empty(); all = routes()) {
      for (const auto& route : all) {
        hear_all(route);
      }
      answer_what_is_ripe();
    }
  }
  // Ends of messages that have had their time, and rank 0's answers.
  void look(int rank) {
    ranks_[static_cast<size_t>(rank)]->participant.look(std::chrono::steady_clock::now());
    go_on(*ranks_[static_cast<size_t>(rank)]);
  }
  // As if ranks that have not answered had had their time.
  void answer() {
    coordinator_.look(std::chrono::steady_clock::now() + kNotYet);
  }
  // What it need not wait for any longer.
  void answer_what_is_ripe() {
    coordinator_.look(std::chrono::steady_clock::now());
  }
  bool has_messages() const {
    return coordinator_.has_messages();
  }
  OpenCalls& calls(int rank) {
    return ranks_[static_cast<size_t>(rank)]->calls;
  }

 private:
  struct Rank {
    Rank(Group& group, int rank)
        : roster(roster_of(rank, kHosts)),
          participant(
              roster, calls,
              [&group, rank](Says kind, Payload words) {
                rank == 0 ? group.coordinator_.hear(0, kind, words)
                          : group.say({rank, 0}, kind, words);
              },
              [](const Calling&) { CHECK(false); },
              [&group, rank](int to, Says kind, const Payload& words) {
                CHECK(kind == kDelivering || kind == kTaken);
                group.say(direct(rank, to), kind, words);
              },
              [] {}, {}) {}

    const Roster roster;
    OpenCalls calls{roster, kNotYet};
    Participant participant;
    bool is_busy = false;
  };

  void say(const Route& route, Says kind, const Payload& words) {
    routes_[route].emplace_back(kind, words);
  }
  static void go_on(Rank& rank) {
    if (!rank.is_busy) {
      rank.participant.tell_news();
      rank.participant.settle();
    }
  }
  Ending& post(int rank, Posted posted, std::chrono::milliseconds timeout) {
    endings_.push_back({posted.sends, rank, posted.peer, posted.tag, posted.bytes});
    Ending& ending = endings_.back();
    OpenCall call{posted.sends ? "send" : "recv", posted.tag, timeout,
                  [&](uint64_t peer) {
                    ++ending.ends;
                    ending.has_begun = true;
                    ending.peer = static_cast<int>(peer);
                  },
                  [&](const Failure& failure) {
                    ++ending.ends;
                    ending.failure = failure;
                  }};
    call.receive = [&](uint64_t peer, const auto& data) {
      ++ending.ends;
      ending.data = std::string(data.front());
      ending.peer = static_cast<int>(peer);
    };
    auto& who = *ranks_[static_cast<size_t>(rank)];
    CHECK(!who.calls.enter_message(std::move(posted), std::move(call)).second);
    go_on(who);
    return ending;
  }

  const Roster roster_ = roster_of(0, kHosts);
  std::map<Route, std::deque<std::pair<Says, Payload>>> routes_;
  std::deque<Ending> endings_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  Coordinator coordinator_{roster_, [this](int rank, Says kind, const Payload& words) {
                             if (rank == 0) {
                               Payload own = words;
                               ranks_[0]->participant.obey(kind, own);
                               ranks_[0]->participant.settle();
                             } else {
                               say({0, rank}, kind, words);
                             }
                           }};
};

}  // namespace c10d_ext
