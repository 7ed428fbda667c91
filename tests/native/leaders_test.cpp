// Leaders of hosts, which pass calls with little data on to each other. Run without arguments it
// runs every test; with arguments, those named.

#include <algorithm>
#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "agreement_ranks.h"
#include "backends/checked/coordinator.h"
#include "backends/checked/open_calls.h"
#include "backends/checked/relay.h"
#include "program.h"

using namespace c10d_ext;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Kind = ErrorKind;

namespace {

const std::vector<std::vector<std::string>> kGroups = {
    {"a", "b"},
    {"a", "a", "b", "b"},
    {"a", "b", "a", "b"},                 // not next to each other
    {"a", "b", "b", "c", "c", "c"},       // not equally many
    {"b", "a", "c", "a", "d", "d", "b"},  //
};

std::string data_of(uint64_t call, int rank) {
  return std::to_string(call) + " of rank " + std::to_string(rank);
}

std::vector<std::string> all_data(uint64_t call, int size) {
  std::vector<std::string> all;
  for (int rank = 0; rank < size; ++rank) {
    all.push_back(data_of(call, rank));
  }
  return all;
}

// For some ranks there is nothing.
std::string part_of(uint64_t call, int from, int to) {
  std::string part;
  for (auto times = (static_cast<int>(call) + from + 2 * to) % 3; times > 0; --times) {
    part += std::to_string(call) + " of " + std::to_string(from) + " for " + std::to_string(to);
  }
  return part;
}

Contribution parts_of(uint64_t call, int from, int size) {
  std::string bytes;
  std::vector<int64_t> parts;
  for (int to = 0; to < size; ++to) {
    const auto part = part_of(call, from, to);
    bytes += part;
    parts.push_back(static_cast<int64_t>(part.size()));
  }
  return {bytes, parts};
}

// Calls `body` with each rank, on a thread of its own.
void on_all(int size, const std::function<void(int rank)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] { body(rank); });
  }
  for (auto& thread : threads) {
    thread.join();
  }
}

void all_receive_the_data_of_all() {
  constexpr uint64_t kCalls = 300;
  for (const auto& machines : kGroups) {
    Ranks ranks(machines);
    const auto size = static_cast<int>(machines.size());
    on_all(size, [&](int rank) {
      for (uint64_t i = 1; i <= kCalls; ++i) {
        Call call;
        // In every fifth one rank gives nothing, which all then begin.
        const bool gives = i % 5 != 0 || rank != static_cast<int>(i / 5) % size;
        const auto seq = ranks[rank].call(gives ? call.operation(summed(6), data_of(i, rank))
                                                : call.operation(summed(6), kLong));
        if (i % 3 != 0) {
          ranks[rank].help(seq, Clock::now() + kLong);
        }
        CHECK(call.begun() == i);
        CHECK(call.received() == (i % 5 != 0 ? all_data(i, size) : std::vector<std::string>()));
        ranks[rank].done(i);
      }
    });
  }
}

void all_receive_their_parts() {
  constexpr uint64_t kCalls = 60;
  auto groups = kGroups;
  groups.push_back({"a", "a", "a"});  // rank 0 tells all
  for (const auto& machines : groups) {
    Ranks ranks(machines);
    const auto size = static_cast<int>(machines.size());
    on_all(size, [&](int rank) {
      for (uint64_t i = 1; i <= kCalls; ++i) {
        Call call;
        const auto seq = ranks[rank].call(call.operation(summed(6), parts_of(i, rank, size)));
        if (i % 3 != 0) {
          ranks[rank].help(seq, Clock::now() + kLong);
        }
        std::vector<std::string> expected;
        for (int from = 0; from < size; ++from) {
          expected.push_back(part_of(i, from, rank));
        }
        CHECK(call.begun() == i && call.received() == expected);
        ranks[rank].done(i);
      }
    });
  }
}

// Rank 0's word for a call without data may come before a leader's for an earlier one with data.
void calls_in_flight_begin_in_their_order() {
  constexpr uint64_t kCalls = 600;
  for (const auto& machines : kGroups) {
    Ranks ranks(machines);
    on_all(static_cast<int>(machines.size()), [&](int rank) {
      std::mutex mutex;
      std::vector<uint64_t> begun;
      std::vector<Call> calls(kCalls);
      uint64_t with_data = 0;
      for (auto& call : calls) {
        const bool gives = !ranks[rank].has_collectives();
        with_data += gives;
        auto operation =
            gives ? call.operation(summed(6), data_of(1, rank)) : call.operation(summed(6), kLong);
        const auto begins = [&](uint64_t seq) {
          {
            const std::lock_guard lock(mutex);
            begun.push_back(seq);
          }
          ranks[rank].done(seq);
        };
        operation.begin = [begins, begin = operation.begin](uint64_t seq) {
          begins(seq);
          begin(seq);
        };
        if (gives) {
          operation.receive = [begins, receive = operation.receive](uint64_t seq,
                                                                    const auto& data) {
            begins(seq);
            receive(seq, data);
          };
        }
        const auto seq = ranks[rank].call(std::move(operation));
        if (seq % 3 == 0) {
          ranks[rank].help(seq, Clock::now() + kLong);
          CHECK(call.begun() == seq);
        }
      }
      CHECK(calls.back().begun() == kCalls && with_data > kCalls / 10);
      CHECK(begun.size() == kCalls && std::is_sorted(begun.begin(), begun.end()));
    });
  }
}

void ranks_that_disagree_all_hear_of_it_once() {
  for (const auto& machines : kGroups) {
    const auto size = static_cast<int>(machines.size());
    for (int other = 0; other < size; ++other) {
      Ranks ranks(machines);
      on_all(size, [&](int rank) {
        Call call, next;
        ranks[rank].call(call.operation(summed(rank == other ? 7 : 6), data_of(1, rank)));
        const auto failure = call.failure();
        CHECK(failure.kind == Kind::Mismatch && call.received().empty());
        ranks[rank].call(next.operation(summed(6), data_of(2, rank)));
        CHECK(next.begun() == 2 && next.received() == all_data(2, size));
        ranks[rank].done(2);
      });
    }
  }
}

// A rank that has its result may go, though others are yet to hear of it.
void who_leaves_after_its_last_call_fails_nobody() {
  const int rounds = 30;
  for (const auto& machines : kGroups) {
    const auto size = static_cast<int>(machines.size());
    for (int round = 0; round < rounds; ++round) {
      Ranks ranks(machines);
      on_all(size, [&](int rank) {
        for (uint64_t i = 1; i <= 3; ++i) {
          Call call;
          ranks[rank].help(ranks[rank].call(call.operation(summed(6), data_of(i, rank))),
                           Clock::now() + kLong);
          CHECK(call.begun() == i && call.received() == all_data(i, size));
          ranks[rank].done(i);
        }
        ranks.drop(rank);
      });
    }
  }
}

void who_does_not_call_is_named() {
  for (const int missing : {0, 1, 2, 3}) {
    Ranks ranks({"a", "a", "b", "b"});
    on_all(4, [&](int rank) {
      if (rank != missing) {
        Call call;
        auto operation = call.operation(summed(6), data_of(1, rank));
        operation.timeout = 200ms;
        ranks[rank].call(std::move(operation));
        const auto failure = call.failure();
        CHECK(failure.kind == Kind::Timeout && failure.ranks == std::vector<int>{missing});
        CHECK_HAS(failure.text,
                  "the collective 1 must be done within 0.2 s, got no answer from "
                  "rank " +
                      std::to_string(missing));
      }
    });
  }
}

void who_leaves_without_a_call_is_named() {
  for (const int missing : {0, 1, 2, 3}) {
    Ranks ranks({"a", "a", "b", "b"});
    ranks.drop(missing);
    on_all(4, [&](int rank) {
      if (rank != missing) {
        Call call;
        ranks[rank].call(call.operation(summed(6), data_of(1, rank)));
        const auto failure = call.failure();
        CHECK(failure.kind == Kind::RankLost && failure.ranks == std::vector<int>{missing});
        CHECK_HAS(failure.text, "left the group");
      }
    });
  }
}

// --- A leader by itself ------------------------------------------------------------------------

Roster roster_of(int rank, const std::vector<std::string>& machines) {
  std::vector<Member> members;
  for (const auto& machine : machines) {
    members.push_back({this_process(), machine, machine, machine});
  }
  return {{rank, static_cast<int>(machines.size()), "test"}, std::move(members)};
}

Payload calling(uint64_t seq, const Fingerprint& called, const std::optional<std::string>& data) {
  return encoded(Calling{called, data ? std::optional(Contribution(*data)) : std::nullopt, seq});
}

struct Said {
  int rank;
  Says kind;
  std::string words;
  auto operator<=>(const Said&) const = default;
};

class Leader {
 public:
  Leader(int rank, const std::vector<std::string>& machines)
      : roster_(roster_of(rank, machines)),
        relay_(roster_, [this](int to, Says kind, const Payload& words) {
          said_.push_back({to, kind, words.words()});
        }) {}

  Relay& operator*() {
    return relay_;
  }
  std::vector<Said> said() {
    return std::exchange(said_, {});
  }

 private:
  const Roster roster_;
  std::vector<Said> said_;
  Relay relay_;
};

Payload together(const std::vector<Payload>& calls) {
  Payload all;
  for (const auto& call : calls) {
    all.put(call);
  }
  return all;
}

const std::vector<std::string> kThree = {"a", "a", "b", "b", "c", "c"};

void a_leader_passes_on_what_its_host_calls() {
  const auto call = [](int rank) { return calling(1, summed(6), data_of(1, rank)); };
  for (const int first : {2, 3}) {
    Leader leader(2, kThree);
    (*leader).hear_call(first, call(first));
    CHECK(leader.said().empty());
    (*leader).hear_call(5 - first, call(5 - first));
    // Not to rank 0, which has heard each of them.
    CHECK(
        (leader.said() == std::vector<Said>{{4, kRelaying, together({call(2), call(3)}).words()}}));
    auto of_c = together({call(4), call(5)}), of_a = together({call(0), call(1)});
    (*leader).hear_calls(4, of_c);
    CHECK(leader.said().empty());
    (*leader).hear_calls(0, of_a);
    Payload go;
    go.put(1);
    put_all(go, all_data(1, 6));
    CHECK((leader.said() == std::vector<Said>{{2, kGo, go.words()}, {3, kGo, go.words()}}));
    // What comes twice, or late, is nothing new.
    (*leader).hear_call(3, call(3));
    CHECK(leader.said().empty());
  }
}

void a_leader_passes_on_what_is_for_each_host() {
  const auto call = [](int rank) { return encoded(Calling{summed(6), parts_of(1, rank, 6), 1}); };
  Leader leader(2, kThree);
  (*leader).hear_call(2, call(2));
  (*leader).hear_call(3, call(3));
  const auto passed_on = leader.said();
  CHECK(passed_on.size() == 1 && passed_on[0].rank == 4 && passed_on[0].kind == kRelaying);
  Payload all(passed_on[0].words);
  for (const int from : {2, 3}) {
    const auto passed = take_call(all, 6, 3);
    for (int to = 0; to < 6; ++to) {
      CHECK(passed.data->of(to) == (to >= 4 ? part_of(1, from, to) : ""));
    }
  }
  auto of_c = together({call(4), call(5)}), of_a = together({call(0), call(1)});
  (*leader).hear_calls(4, of_c);
  (*leader).hear_calls(0, of_a);
  std::vector<Said> expected;
  for (const int to : {2, 3}) {
    std::vector<Contribution> parts;
    for (int from = 0; from < 6; ++from) {
      parts.emplace_back(part_of(1, from, to));
    }
    Payload go;
    expected.push_back({to, kGo, put_all_of(go.put(1), parts, to).words()});
  }
  CHECK(leader.said() == expected);
}

void rank_0_passes_on_and_lets_the_coordinator_say_the_rest() {
  const auto call = [](int rank) { return calling(1, summed(6), data_of(1, rank)); };
  Leader leader(0, kThree);
  (*leader).hear_call(0, call(0));
  (*leader).hear_call(1, call(1));
  const auto all = together({call(0), call(1)}).words();
  CHECK((leader.said() == std::vector<Said>{{2, kRelaying, all}, {4, kRelaying, all}}));
}

void a_leader_says_nothing_of_what_rank_0_decides() {
  const auto others = [](Leader& leader, const Fingerprint& last) {
    auto of_a = together({calling(1, summed(6), "0"), calling(1, summed(6), "1")});
    auto of_c = together({calling(1, summed(6), "4"), calling(1, last, "5")});
    (*leader).hear_calls(0, of_a);
    (*leader).hear_calls(4, of_c);
  };
  {  // ranks disagree
    Leader leader(2, kThree);
    (*leader).hear_call(2, calling(1, summed(6), "2"));
    (*leader).hear_call(3, calling(1, summed(6), "3"));
    leader.said();
    others(leader, summed(7));
    CHECK(leader.said().empty());
  }
  {  // a rank gives no data
    Leader leader(2, kThree);
    (*leader).hear_call(2, calling(1, summed(6), "2"));
    (*leader).hear_call(3, calling(1, summed(6), std::nullopt));
    others(leader, summed(6));
    CHECK(leader.said().empty());
    // ... of which rank 0 has told, after the next one's first call here: that one goes on.
    (*leader).hear_call(3, calling(2, summed(6), "3"));
    (*leader).settle(1);
    (*leader).settle(3);
    (*leader).hear_call(2, calling(2, summed(6), "2"));
    CHECK(leader.said().size() == 1);
    (*leader).hear_call(2, calling(3, summed(6), "2"));
    (*leader).hear_call(3, calling(3, summed(6), "3"));
    CHECK(leader.said().empty());
  }
}

// Ranks may have called many collectives without data behind one with data.
void rank_0_may_be_far_ahead() {
  Leader leader(1, {"a", "b"});
  for (uint64_t seq = 2; seq < 1000; ++seq) {
    (*leader).settle(seq);
  }
  (*leader).hear_call(1, calling(1, summed(6), "1"));
  auto of_a = together({calling(1, summed(6), "0")});
  (*leader).hear_calls(0, of_a);
  const auto said = leader.said();
  CHECK(said.size() == 1 && said[0].rank == 1 && said[0].kind == kGo);
}

void a_leader_refuses_nonsense() {
  Leader leader(2, kThree);
  const auto hear = [&](int from, std::vector<Payload> calls) {
    auto words = together(calls);
    (*leader).hear_calls(from, words);
  };
  refused([&] { hear(5, {calling(1, summed(6), "4"), calling(1, summed(6), "5")}); });
  refused([&] { hear(4, {calling(1, summed(6), "4")}); });
  refused([&] { (*leader).hear_call(4, calling(1, summed(6), "4")); });
  refused([&] { hear(4, {calling(1, summed(6), "4"), calling(2, summed(6), "5")}); });
  refused([&] { hear(4, {calling(1, summed(6), "4"), calling(1, summed(6), std::nullopt)}); });
  // Data that no word is about.
  refused([&] { (*leader).hear_call(3, Payload(calling(1, summed(6), "3").words(), "more")); });
  refused([&] {
    const auto calls = together({calling(1, summed(6), "4"), calling(1, summed(6), "5")});
    Payload words(calls.words(), "more");
    (*leader).hear_calls(4, words);
  });
  refused([&] {
    for (uint64_t seq = 1; seq < 1000; ++seq) {
      (*leader).hear_call(3, calling(seq, summed(6), "3"));
    }
  });
}

// --- What rank 0 makes of it -------------------------------------------------------------------

class Root {
 public:
  explicit Root(const std::vector<std::string>& machines)
      : roster_(roster_of(0, machines)),
        coordinator_(roster_, [this](int to, Says kind, const Payload& words) {
          said_.push_back({to, kind, words.words()});
        }) {}

  void hear(int rank, Says kind, Payload words) {
    coordinator_.hear(rank, kind, words);
  }
  void call(int rank, uint64_t seq) {
    hear(rank, kCalling, calling(seq, summed(6), data_of(seq, rank)));
  }
  void look() {
    coordinator_.look(Clock::now());
  }
  void look_later() {
    coordinator_.look(Clock::now() + 1h);
  }
  Coordinator& operator*() {
    return coordinator_;
  }
  // To whom it has said this, and what it said last.
  std::vector<int> told(Says kind) {
    std::vector<int> ranks;
    for (const auto& said : said_) {
      if (said.kind == kind) {
        ranks.push_back(said.rank);
        last_ = said.words;
      }
    }
    return ranks;
  }
  End end() {
    CHECK(!told(kOver).empty());
    Payload words(last_);
    return take_end(words);
  }

 private:
  const Roster roster_;
  std::vector<Said> said_;
  std::string last_;
  Coordinator coordinator_;
};

void rank_0_gives_its_own_host_the_word_to_go() {
  Root root(kThree);
  for (int rank = 0; rank < 6; ++rank) {
    root.call(rank, 1);
  }
  CHECK((root.told(kGo) == std::vector<int>{0, 1}));
  for (int rank = 0; rank < 6; ++rank) {
    root.hear(rank, kCalling,
              calling(2, summed(6), rank == 4 ? std::nullopt : std::optional<std::string>("x")));
  }
  CHECK((root.told(kGo) == std::vector<int>{0, 1, 0, 1, 2, 3, 4, 5}));
}

void a_call_that_a_leader_has_agreed_on_is_waited_for() {
  // Rank 5 has its result, and leaves before rank 0 hears of the last call.
  for (const uint64_t done : {1, 0}) {
    Root root(kThree);
    for (const int rank : {0, 1, 2, 4, 5}) {
      root.call(rank, 1);
    }
    root.hear(5, kLeaving, Payload().put(static_cast<int64_t>(done)));
    CHECK(root.told(kOver).empty() == (done == 1));
    root.call(3, 1);
    CHECK(root.told(kGo).empty() == (done == 0));
    if (done == 1) {
      root.call(3, 2);
      CHECK((root.end().ranks == std::vector<int>{5}) && root.end().agreed == 1);
    }
  }
}

void a_leader_that_does_not_pass_on_is_named() {
  for (const bool answers : {false, true}) {
    Root root(kThree);
    for (int rank = 0; rank < 6; ++rank) {
      root.call(rank, 1);
    }
    root.hear(3, kLate, Payload().put(1).put("collective 1 must be done within 1 s"));
    CHECK((root.told(kPing) == std::vector<int>{2, 3, 4, 5}));
    // Of its host nobody answers, or the leader, whose word it is, alone.
    for (const int rank : answers ? std::vector<int>{2, 4, 5} : std::vector<int>{4, 5}) {
      root.hear(rank, kPong, {});
    }
    root.look_later();
    CHECK(root.told(kOver).empty() == answers);
    if (!answers) {
      const End end = root.end();
      CHECK((end.kind == Kind::Timeout && end.ranks == std::vector<int>{2, 3}));
      CHECK_HAS(end.why,
                "the collective 1 must be done within 1 s, got no answer from rank 2 (pid ");
      CHECK_HAS(end.why, "on b, silent)");
    }
  }
}

void leaders_that_lose_each_other_end_the_group() {
  for (const bool ends : {false, true}) {
    for (const bool backwards : {false, true}) {  // whoever says so
      Root root(kThree);
      root.hear(backwards ? 4 : 2, kSevered, Payload().put(backwards ? 2 : 4));
      root.look();
      CHECK(root.told(kOver).empty());
      if (ends) {  // of which rank 0 hears a little later
        (*root).lose({4}, kGone);
      }
      root.look_later();
      const End end = root.end();
      CHECK(end.kind == Kind::RankLost && end.ranks == std::vector<int>{4});
      CHECK_HAS(end.why, ends ? "on c, gone)" : "on c, unreachable)");
    }
  }
  Root root(kThree);
  refused([&] { root.hear(2, kSevered, Payload().put(6)); });
}

const std::vector<Test> kTests = {
    TEST(all_receive_the_data_of_all),
    TEST(all_receive_their_parts),
    TEST(calls_in_flight_begin_in_their_order),
    TEST(ranks_that_disagree_all_hear_of_it_once),
    TEST(who_leaves_after_its_last_call_fails_nobody),
    TEST(who_does_not_call_is_named),
    TEST(who_leaves_without_a_call_is_named),
    TEST(a_leader_passes_on_what_its_host_calls),
    TEST(a_leader_passes_on_what_is_for_each_host),
    TEST(rank_0_passes_on_and_lets_the_coordinator_say_the_rest),
    TEST(a_leader_says_nothing_of_what_rank_0_decides),
    TEST(rank_0_may_be_far_ahead),
    TEST(a_leader_refuses_nonsense),
    TEST(rank_0_gives_its_own_host_the_word_to_go),
    TEST(a_call_that_a_leader_has_agreed_on_is_waited_for),
    TEST(a_leader_that_does_not_pass_on_is_named),
    TEST(leaders_that_lose_each_other_end_the_group),
};

}  // namespace

int main(int count, char** names) {
  return run_tests(kTests, count, names);
}
