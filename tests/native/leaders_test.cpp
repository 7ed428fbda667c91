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
#include "backends/checked/open_calls.h"
#include "backends/checked/relay.h"
#include "passed_on.h"
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

// What the others are told, of which the last one calls once rank 0 has heard of the rest.
std::vector<Failure> wait_for(int missing) {
  Ranks ranks({"a", "a", "b", "b"});
  const int last = missing == 3 ? 2 : 3;
  std::mutex mutex;
  std::vector<Failure> failures;
  on_all(4, [&](int rank) {
    if (rank == missing) {
      return;
    }
    Call call;
    auto operation = call.operation(summed(6), data_of(1, rank));
    if (rank == last) {
      CHECK(only_lacks(ranks[rank], 1, {std::min(missing, last), std::max(missing, last)}));
      operation.timeout = 200ms;
    }
    ranks[rank].call(std::move(operation));
    const auto failure = call.failure();
    const std::lock_guard lock(mutex);
    failures.push_back(failure);
  });
  return failures;
}

void who_does_not_call_is_named() {
  for (const int missing : {0, 1, 2, 3}) {
    const auto failures = wait_for(missing);
    CHECK(failures.size() == 3);
    for (const auto& failure : failures) {
      CHECK(failure.kind == Kind::Timeout && failure.ranks == std::vector<int>{missing});
      CHECK_HAS(failure.text,
                "the collective 1 must be done within 0.2 s, got no answer from rank " +
                    std::to_string(missing));
    }
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

void a_leader_passes_on_what_its_host_calls() {
  const auto call = [](int rank) { return calling(1, summed(6), data_of(1, rank)); };
  for (const int first : {2, 3}) {
    Leader leader(2, kThree);
    (*leader).hear_call(first, call(first));
    CHECK(leader.said().empty());
    (*leader).hear_call(5 - first, call(5 - first));
    const auto all = together(2, {call(2), call(3)}).words();
    CHECK((leader.said() == std::vector<Said>{{0, kRelaying, all}, {4, kRelaying, all}}));
    auto of_c = together(4, {call(4), call(5)}), of_a = together(0, {call(0), call(1)});
    (*leader).hear_calls(4, of_c);
    auto again = together(4, {call(4), call(5)});
    (*leader).hear_calls(4, again);  // counts once
    CHECK(leader.said().empty());
    (*leader).hear_calls(0, of_a);
    Payload go;
    go.put(1);
    put_all(go, all_data(1, 6));
    // The others first.
    CHECK((leader.said() == std::vector<Said>{{3, kGo, go.words()}, {2, kGo, go.words()}}));
    refused([&] { (*leader).hear_call(3, call(3)); });  // once more
    refused([&] { (*leader).hear_call(3, calling(3, summed(6), "3")); });
    CHECK(leader.said().empty());
  }
}

void a_leader_passes_on_what_is_for_each_host() {
  const auto call = [](int rank) { return encoded(Calling{summed(6), parts_of(1, rank, 6), 1}); };
  Leader leader(2, kThree);
  (*leader).hear_call(2, call(2));
  (*leader).hear_call(3, call(3));
  const auto passed_on = leader.said();
  CHECK(passed_on.size() == 2 && passed_on[0].rank == 0 && passed_on[1].rank == 4);
  for (const auto& said : passed_on) {
    CHECK(said.kind == kRelaying);
    Payload words(said.words);
    const auto all =
        CallReader(6, 3).take_relayed(words, [](int rank) { return rank == 2 || rank == 3; });
    CHECK(all.size() == 2 && all[0].first == 2 && all[1].first == 3);
    for (const auto& [from, passed] : all) {
      for (int to = 0; to < 6; ++to) {
        const bool is_for = to / 2 == said.rank / 2;  // two ranks on a host
        CHECK(passed.data->of(to) == (is_for ? part_of(1, from, to) : ""));
      }
    }
  }
  auto of_c = together(4, {call(4), call(5)}), of_a = together(0, {call(0), call(1)});
  (*leader).hear_calls(4, of_c);
  (*leader).hear_calls(0, of_a);
  std::vector<Said> expected;
  for (const int to : {3, 2}) {
    std::vector<Contribution> parts;
    for (int from = 0; from < 6; ++from) {
      parts.emplace_back(part_of(1, from, to));
    }
    Payload go;
    expected.push_back({to, kGo, put_all_of(go.put(1), parts, to).words()});
  }
  CHECK(leader.said() == expected);
}

constexpr ReducedBy kSum{DType::Float, ReduceOp::Sum};

std::string bytes_of(float value) {
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}

// Of values whose sum depends on the order: those of each host first, whoever reduces them.
void all_receive_what_leaders_make_of_it() {
  constexpr uint64_t kCalls = 60;
  const auto value = [](uint64_t call, int rank) {
    return static_cast<float>((static_cast<int>(call) * 7 + rank * 5) % 11 - 5) *
           ((call + static_cast<uint64_t>(rank)) % 2 == 0 ? 16777216.0F : 0.375F);
  };
  for (const auto& machines : kGroups) {
    Ranks ranks(machines);
    const auto size = static_cast<int>(machines.size());
    on_all(size, [&](int rank) {
      for (uint64_t i = 1; i <= kCalls; ++i) {
        // By host in the order of their first ranks.
        std::vector<std::pair<std::string, float>> hosts;
        for (int one = 0; one < size; ++one) {
          const auto found = std::find_if(hosts.begin(), hosts.end(), [&](const auto& host) {
            return host.first == machines[static_cast<size_t>(one)];
          });
          if (found == hosts.end()) {
            hosts.emplace_back(machines[static_cast<size_t>(one)], value(i, one));
          } else {
            found->second += value(i, one);
          }
        }
        float expected = hosts.front().second;
        for (size_t host = 1; host < hosts.size(); ++host) {
          expected += hosts[host].second;
        }
        Call call;
        const auto seq = ranks[rank].call(
            call.operation(summed(1), Contribution(bytes_of(value(i, rank))).to_be_reduced(kSum)));
        if (i % 3 != 0) {
          ranks[rank].help(seq, Clock::now() + kLong);
        }
        CHECK(call.begun() == i);
        CHECK((call.received() == std::vector<std::string>{bytes_of(expected)}));
        ranks[rank].done(i);
      }
    });
  }
}

void a_leader_passes_on_the_sum_of_its_host() {
  const auto call = [](const Contribution& data) { return encoded(Calling{summed(1), data, 1}); };
  const auto given = [](float value) { return Contribution(bytes_of(value)).to_be_reduced(kSum); };
  Leader leader(2, kThree);
  (*leader).hear_call(3, call(given(0.5F)));
  (*leader).hear_call(2, call(given(0.25F)));
  const auto all = together(2, {call(given(0.75F)), call(Contribution::in_first())}).words();
  CHECK((leader.said() == std::vector<Said>{{0, kRelaying, all}, {4, kRelaying, all}}));
}

// Also where it hears of each call by itself.
void rank_0_makes_the_same_of_it() {
  const auto given = [](float value) { return Contribution(bytes_of(value)).to_be_reduced(kSum); };
  const std::vector<Contribution> raw = {given(16777216.0F), given(0.75F), given(0.75F),
                                         given(0.75F)};
  const std::vector<std::vector<int>> hosts = {{0, 1}, {2, 3}};
  const std::vector<Contribution> summed_up = {given(16777216.0F), Contribution::in_first(),
                                               given(1.5F), Contribution::in_first()};
  for (const auto& data : {raw, summed_up}) {
    std::vector<Said> said;
    tell_go(3, data, {0, 1}, hosts, [&](int to, Says kind, const Payload& words) {
      said.push_back({to, kind, words.words()});
    });
    // 16777216 and 1.5: of 0.75 alone nothing would be left.
    const auto go = Payload().put(3).put(1).put_data(bytes_of(16777218.0F)).words();
    CHECK((said == std::vector<Said>{{1, kGo, go}, {0, kGo, go}}));
  }
}

void rank_0_passes_on_and_lets_the_coordinator_say_the_rest() {
  const auto call = [](int rank) { return calling(1, summed(6), data_of(1, rank)); };
  Leader leader(0, kThree);
  (*leader).hear_call(0, call(0));
  (*leader).hear_call(1, call(1));
  const auto all = together(0, {call(0), call(1)}).words();
  CHECK((leader.said() == std::vector<Said>{{2, kRelaying, all}, {4, kRelaying, all}}));
}

void a_leader_says_nothing_of_what_rank_0_decides() {
  const auto others = [](Leader& leader, const Fingerprint& last) {
    auto of_a = together(0, {calling(1, summed(6), "0"), calling(1, summed(6), "1")});
    auto of_c = together(4, {calling(1, summed(6), "4"), calling(1, last, "5")});
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
    CHECK(leader.said().empty());
    (*leader).hear_call(3, calling(1, summed(6), std::nullopt));
    // Rank 0 hears of that by the rank itself.
    const auto of_2 = together(2, {calling(1, summed(6), "2")}).words();
    CHECK((leader.said() == std::vector<Said>{{0, kRelaying, of_2}}));
    others(leader, summed(6));
    CHECK(leader.said().empty());
    // ... of which rank 0 has told, after the next one's first call here: that one goes on.
    (*leader).hear_call(3, calling(2, summed(6), "3"));
    (*leader).settle(1);
    (*leader).settle(3);
    (*leader).hear_call(2, calling(2, summed(6), "2"));
    CHECK(leader.said().size() == 2);
    // Nobody gives any.
    for (const int rank : {2, 3}) {
      (*leader).hear_call(rank, calling(3, summed(6), std::nullopt));
    }
    CHECK(leader.said().empty());
  }
}

// Who calls what others will not is not to wait for the rest of its host.
void once_somebody_has_left_rank_0_hears_of_each_call() {
  const auto call = [](int rank, uint64_t seq) {
    return calling(seq, summed(6), data_of(seq, rank));
  };
  const auto told = [&](int rank, uint64_t seq) {
    return Said{0, kRelaying, together(rank, {call(rank, seq)}).words()};
  };
  Leader leader(2, kThree);
  (*leader).hear_call(3, call(3, 1));
  (*leader).hear_call(3, calling(2, summed(6), std::nullopt));
  CHECK(leader.said().empty());
  CHECK(((*leader).counts() == std::vector<int64_t>{0, 2}));
  (*leader).pass_on_singly();
  CHECK((leader.said() == std::vector<Said>{told(3, 1)}));
  (*leader).pass_on_singly();
  (*leader).hear_call(3, call(3, 3));
  CHECK((leader.said() == std::vector<Said>{told(3, 3)}));
  (*leader).hear_call(2, call(2, 1));
  const auto all = together(2, {call(2, 1), call(3, 1)}).words();
  CHECK((leader.said() == std::vector<Said>{told(2, 1), {4, kRelaying, all}}));
}

// Ranks may have called many collectives without data behind one with data.
void rank_0_may_be_far_ahead() {
  Leader leader(1, {"a", "b"});
  for (uint64_t seq = 2; seq < 1000; ++seq) {
    (*leader).settle(seq);
  }
  (*leader).hear_call(1, calling(1, summed(6), "1"));
  auto of_a = together(0, {calling(1, summed(6), "0")});
  (*leader).hear_calls(0, of_a);
  const auto said = leader.said();
  CHECK(said.size() == 2 && said[0].kind == kRelaying && said[0].rank == 0);
  CHECK(said[1].kind == kGo && said[1].rank == 1);
}

void a_leader_refuses_nonsense() {
  Leader leader(2, kThree);
  const auto hear = [&](int from, std::vector<Payload> calls, int first = 4) {
    auto words = together(first, calls);
    (*leader).hear_calls(from, words);
  };
  refused([&] { hear(5, {calling(1, summed(6), "4"), calling(1, summed(6), "5")}); });
  refused([&] { hear(4, {calling(1, summed(6), "4"), calling(1, summed(6), "5")}, 0); });
  refused([&] { hear(4, {calling(1, summed(6), "4"), calling(1, summed(6), "5")}, -1); });
  refused([&] {
    auto twice = Payload().put(2);
    for (int i = 0; i < 2; ++i) {
      twice.put(4).put(calling(1, summed(6), "4"));
    }
    (*leader).hear_calls(4, twice);
  });
  refused([&] { hear(4, {calling(1, summed(6), "4")}); });
  refused([&] { (*leader).hear_call(4, calling(1, summed(6), "4")); });
  refused([&] { hear(4, {calling(1, summed(6), "4"), calling(2, summed(6), "5")}); });
  refused([&] { hear(4, {calling(1, summed(6), "4"), calling(1, summed(6), std::nullopt)}); });
  // Data that no word is about.
  refused([&] { (*leader).hear_call(3, Payload(calling(1, summed(6), "3").words(), "more")); });
  refused([&] {
    const auto calls = together(4, {calling(1, summed(6), "4"), calling(1, summed(6), "5")});
    Payload words(calls.words(), "more");
    (*leader).hear_calls(4, words);
  });
  // Calls with data are not far apart; others may be.
  refused([&] {
    for (uint64_t seq = 1; seq < 1000; ++seq) {
      (*leader).hear_call(3, calling(seq, summed(6), "3"));
    }
  });
  CHECK(((*leader).counts() == std::vector<int64_t>{0, 64}));
  Leader other(2, kThree);
  for (uint64_t seq = 1; seq < 1000; ++seq) {
    (*other).hear_call(3, calling(seq, summed(6), std::nullopt));
  }
  (*other).hear_call(3, calling(1000, summed(6), "3"));
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
    TEST(all_receive_what_leaders_make_of_it),
    TEST(a_leader_passes_on_the_sum_of_its_host),
    TEST(rank_0_makes_the_same_of_it),
    TEST(rank_0_passes_on_and_lets_the_coordinator_say_the_rest),
    TEST(a_leader_says_nothing_of_what_rank_0_decides),
    TEST(once_somebody_has_left_rank_0_hears_of_each_call),
    TEST(rank_0_may_be_far_ahead),
    TEST(a_leader_refuses_nonsense),
};

}  // namespace

int main(int count, char** names) {
  return run_tests(kTests, count, names);
}
