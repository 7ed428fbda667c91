// What rank 0 makes of the calls of ranks on several hosts, and of what it hears of them. Run
// without arguments it runs every test; with arguments, those named.

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "agreement_ranks.h"
#include "backends/checked/coordinator.h"
#include "passed_on.h"
#include "program.h"

using namespace c10d_ext;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Kind = ErrorKind;

namespace {

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
    call(rank, seq, data_of(seq, rank));
  }
  // As it says it, or its leader where that tells of it.
  void call(int rank, uint64_t seq, const std::optional<std::string>& data) {
    const auto words = calling(seq, summed(6), data);
    if (data && roster_.calls_by_leader(rank)) {
      hear(roster_.leader_of(rank), kRelaying, together(rank, {words}));
    } else {
      hear(rank, kCalling, words);
    }
  }
  void look(Clock::time_point now = Clock::now()) {
    coordinator_.look(now);
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
  // The ranks that it names to who has asked.
  std::vector<int> answer() {
    CHECK(told(kAwaited).size() == 1);
    Payload words(last_);
    words.number();
    words.number();
    words.text();
    return words.numbers<int>();
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

Payload pong(int64_t count, const std::vector<int64_t>& of_host = {}) {
  return Payload().put(count).put(of_host);
}

void rank_0_gives_its_own_host_the_word_to_go() {
  Root root(kThree);
  for (int rank = 0; rank < 6; ++rank) {
    root.call(rank, 1);
  }
  CHECK((root.told(kGo) == std::vector<int>{1, 0}));  // itself last
  for (int rank = 0; rank < 6; ++rank) {
    root.call(rank, 2, rank == 4 ? std::nullopt : std::optional<std::string>("x"));
  }
  CHECK((root.told(kGo) == std::vector<int>{1, 0, 5, 4, 3, 2, 1, 0}));
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
      root.hear(rank, kPong, pong(1));
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

// A rank that is well, on a busy machine, may take a while to answer.
void who_does_not_answer_is_silent_after_a_while() {
  for (const auto kind : {kLate, kBroken}) {
    Root root(kThree);
    for (int rank = 0; rank < 6; ++rank) {
      if (kind == kBroken || rank != 3) {
        root.call(rank, 1);
      }
    }
    const auto before = Clock::now();
    root.hear(0, kind, Payload().put(1).put("what is the matter"));
    const auto asked = root.told(kPing);
    CHECK(std::find(asked.begin(), asked.end(), 3) != asked.end());
    for (const int rank : {2, 4, 5}) {
      root.hear(rank, kPong, pong(1));
    }
    root.look(before + kSilent - 1ms);
    CHECK(root.told(kOver).empty());
    root.look(Clock::now() + kSilent);
    const End end = root.end();
    CHECK((end.kind == Kind::Timeout && end.ranks == std::vector<int>{3}));
    CHECK_HAS(end.why, "on b, silent)");
  }
}

void who_leaves_is_asked_no_more() {
  Root root(kThree);
  for (int rank = 0; rank < 6; ++rank) {
    root.call(rank, 1);
  }
  root.hear(0, kBroken, Payload().put(1).put("no data"));
  for (const int rank : {2, 4, 5}) {
    root.hear(rank, kPong, pong(1));
  }
  root.hear(3, kLeaving, Payload().put(1));
  root.look(Clock::now() + kSilent / 3);
  CHECK_HAS(root.end().why, "on b, left the group)");
}

// While it is not known yet who does not answer, what else is the matter is asked, too.
void one_question_does_not_keep_another() {
  const auto ended = [](Says kind, Payload words) {
    Root root(kThree);
    for (int rank = 0; rank < 6; ++rank) {
      root.call(rank, 1);
    }
    root.hear(0, kLate, Payload().put(1).put("first"));
    root.hear(2, kind, std::move(words));
    for (int rank = 2; rank < 6; ++rank) {
      root.hear(rank, kPong, pong(1));  // nobody is late for the first
    }
    root.look_later();
    return root.end();
  };
  const auto severed = ended(kSevered, Payload().put(4));
  CHECK(severed.kind == Kind::RankLost);
  CHECK_HAS(severed.why, "on c, unreachable)");
  const auto broken = ended(kBroken, Payload().put(1).put("no data"));
  CHECK(broken.kind == Kind::Timeout);
  CHECK_HAS(broken.why, "got no data");
  const auto late = ended(kLate, Payload().put(2).put("second"));
  CHECK((late.kind == Kind::Timeout && late.ranks.size() == 6));
  CHECK_HAS(late.why, "the second, got no answer from");
}

// By leaders, and by the ranks themselves what has no data, which may be sooner.
void rank_0_takes_calls_in_their_order() {
  Root root(kThree);
  for (int rank = 0; rank < 6; ++rank) {
    if (rank != 3) {
      root.call(rank, 1);
    }
    root.call(rank, 2, std::nullopt);
  }
  CHECK(root.told(kGo).empty());
  root.call(3, 1);
  CHECK((root.told(kGo) == std::vector<int>{1, 0, 5, 4, 3, 2, 1, 0}));
  // Not twice, not of others' ranks, not with data by the rank, nor without by its leader.
  const auto call = [](std::optional<std::string> data, uint64_t seq = 3) {
    return calling(seq, summed(6), data);
  };
  refused([&] { root.call(3, 2, std::nullopt); });
  root.call(3, 3);
  refused([&] { root.call(3, 3); });
  refused([&] { root.hear(2, kRelaying, together(4, {call("4")})); });
  refused([&] { root.hear(3, kRelaying, together(3, {call("3", 4)})); });
  refused([&] { root.hear(1, kRelaying, together(0, {call("0"), call("1")})); });
  refused([&] { root.hear(2, kCalling, call("2")); });
  refused([&] { root.hear(2, kRelaying, together(2, {call(std::nullopt)})); });
  refused([&] { root.hear(2, kRelaying, together(2, {})); });
  // A rank of rank 0's host, which is heard itself, misses none.
  refused([&] { root.call(1, 4); });
}

// What its leader has not told of.
void a_rank_says_how_many_it_has_called() {
  for (const bool leaves : {false, true}) {
    Root root(kThree);
    for (const int rank : {0, 1, 4, 5}) {
      root.call(rank, 1);
    }
    if (leaves) {
      root.hear(2, kLeaving, Payload().put(0));
      CHECK((root.told(kSingly) == std::vector<int>{2, 4}));
      CHECK((root.end().kind == Kind::RankLost && root.end().ranks == std::vector<int>{2}));
      continue;
    }
    root.hear(0, kLate, Payload().put(1).put("collective 1 must be done within 1 s"));
    CHECK((root.told(kPing) == std::vector<int>{2, 3, 4, 5}));
    for (const int rank : {2, 3, 4, 5}) {
      root.hear(rank, kPong, pong(rank == 3 ? 0 : 1));
    }
    root.look();
    CHECK((root.end().kind == Kind::Timeout && root.end().ranks == std::vector<int>{3}));
    CHECK_HAS(root.end().why, "; rank 3 is before its first collective");
  }
  // Of the last rank that is to call, whose leader has left.
  Root root(kThree);
  root.hear(2, kLeaving, Payload().put(0));
  CHECK(root.told(kOver).empty());
  root.hear(3, kPong, pong(1));
  CHECK((root.end().kind == Kind::RankLost && root.end().ranks == std::vector<int>{2}));
}

// Or its leader says so, where the rank does not answer.
void a_leader_says_how_many_its_host_has_called() {
  for (const bool has_called : {false, true}) {
    Root root(kThree);
    for (const int rank : {0, 1, 4, 5}) {
      root.call(rank, 1);
    }
    root.hear(0, kLate, Payload().put(1).put("collective 1 must be done within 1 s"));
    root.hear(2, kPong, pong(0, {0, has_called ? 1 : 0}));
    root.look_later();
    CHECK_HAS(root.end().why, "; rank 2 is before its first collective");
    const bool is_behind = root.end().why.find("; rank 3 is before") != std::string::npos;
    CHECK(is_behind != has_called);
  }
  Root root(kThree);
  refused([&] { root.hear(2, kPong, pong(-1)); });
  refused([&] { root.hear(2, kPong, pong(0, {0, -1})); });
  refused([&] { root.hear(2, kPong, pong(0, {1})); });
  refused([&] { root.hear(3, kPong, pong(0, {1, 1})); });
}

// All have called, but the leader that is to tell of it does not.
void a_leader_that_keeps_calls_is_named() {
  for (const bool answers : {true, false}) {
    Root root(kThree);
    for (const int rank : {0, 1, 4, 5}) {
      root.call(rank, 1);
    }
    root.hear(2, kPong, pong(1, {1, 0}));
    root.hear(3, kPong, pong(1));
    root.hear(0, kLate, Payload().put(1).put("collective 1 must be done within 1 s"));
    for (const int rank : {2, 3, 4, 5}) {
      if (answers || rank != 2) {
        root.hear(rank, kPong, pong(1));
      }
    }
    root.look_later();
    CHECK(root.told(kOver).empty() == answers);
    if (!answers) {
      CHECK((root.end().kind == Kind::Timeout && root.end().ranks == std::vector<int>{2}));
    }
  }
}

// It has told its leader, which says so, and not rank 0.
void a_rank_that_does_not_tell_is_named() {
  for (const bool answers : {true, false}) {
    Root root(kThree);
    for (const int rank : {0, 1, 2, 4, 5}) {
      root.call(rank, 1, std::nullopt);
    }
    root.hear(0, kLate, Payload().put(1).put("collective 1 must be done within 1 s"));
    for (const int rank : {2, 3, 4, 5}) {
      if (answers || rank != 3) {
        root.hear(rank, kPong, rank == 2 ? pong(1, {1, 1}) : pong(1));
      }
    }
    root.look_later();
    CHECK(root.told(kOver).empty() == answers);
    if (!answers) {
      CHECK((root.end().kind == Kind::Timeout && root.end().ranks == std::vector<int>{3}));
    }
  }
}

void who_waits_longer_is_told_who_has_not_called() {
  const auto asked = [](int missing, bool answers) {
    Root root(kThree);
    for (const int rank : {0, 1, 4, 5}) {
      root.call(rank, 1);
    }
    root.hear(0, kAsking, Payload().put(1).put(-1));
    CHECK((root.told(kPing) == std::vector<int>{2, 3}));
    for (const int rank : {2, 3}) {
      if (answers || rank != 2) {
        root.hear(rank, kPong, pong(rank == missing ? 0 : 1));
      }
    }
    root.look_later();
    return root.answer();
  };
  CHECK(asked(3, true) == std::vector<int>{3});
  CHECK((asked(3, false) == std::vector<int>{2, 3}));
  CHECK(asked(-1, true).empty());  // it is on its way
}

void leaders_are_told_once_that_somebody_has_left() {
  Root root(kThree);
  root.hear(1, kLeaving, Payload().put(0));
  root.hear(3, kLeaving, Payload().put(0));
  CHECK((root.told(kSingly) == std::vector<int>{2, 4}));
}

// A loss that shows once an earlier collective is agreed on.
void what_is_lost_is_told_once_it_is_next() {
  Root root(kThree);
  for (const int rank : {0, 1, 2, 3, 4}) {
    root.call(rank, 1);
  }
  root.hear(2, kLeaving, Payload().put(1));
  root.hear(3, kPong, pong(2));
  CHECK(root.told(kOver).empty());
  root.call(5, 1);
  CHECK((root.end().kind == Kind::RankLost && root.end().ranks == std::vector<int>{2}));
  CHECK(root.end().agreed == 1);
}

void leaders_that_lose_each_other_end_the_group() {
  for (const bool ends : {false, true}) {
    for (const bool backwards : {false, true}) {  // whoever says so
      Root root(kThree);
      const auto now = Clock::now();
      root.hear(backwards ? 4 : 2, kSevered, Payload().put(backwards ? 2 : 4));
      root.look(now);
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
  for (const int nobody : {-1, 0, 2, 6}) {
    Root root(kThree);
    refused([&] { root.hear(2, kSevered, Payload().put(nobody)); });
  }
}

void whose_host_does_not_answer_is_named() {
  for (const int silent : {2, 4}) {
    for (const auto& [who, of] : std::vector<std::pair<int, int>>{{2, 4}, {5, 3}}) {
      Root root(kThree);
      root.hear(who, kSevered, Payload().put(of));
      const std::vector<int> leaders = who == 2 ? std::vector{2, 4} : std::vector{4, 2};
      CHECK(root.told(kPing) == leaders);
      root.hear(6 - silent, kPong, pong(0, {0, 0}));
      root.look_later();
      CHECK(root.end().ranks == std::vector<int>{silent});
    }
  }
}

// Its line is closed, as far as the others know.
void who_has_left_is_not_lost() {
  Root root(kThree);
  root.hear(5, kLeaving, Payload().put(0));
  for (const auto& [who, of] : std::vector<std::pair<int, int>>{{2, 5}, {3, 5}, {5, 2}}) {
    root.hear(who, kSevered, Payload().put(of));
    root.look_later();
  }
  CHECK(root.told(kOver).empty());
  // Others may be; then who is not there any more is named with them, and how.
  root.hear(3, kSevered, Payload().put(4));
  root.look_later();
  CHECK((root.end().kind == Kind::RankLost && root.end().ranks == std::vector<int>{4, 5}));
  CHECK_HAS(root.end().why, "on c, unreachable)");
  CHECK_HAS(root.end().why, "on c, left the group)");
}

const std::vector<Test> kTests = {
    TEST(rank_0_gives_its_own_host_the_word_to_go),
    TEST(a_call_that_a_leader_has_agreed_on_is_waited_for),
    TEST(a_leader_that_does_not_pass_on_is_named),
    TEST(who_does_not_answer_is_silent_after_a_while),
    TEST(who_leaves_is_asked_no_more),
    TEST(one_question_does_not_keep_another),
    TEST(rank_0_takes_calls_in_their_order),
    TEST(a_rank_says_how_many_it_has_called),
    TEST(a_leader_says_how_many_its_host_has_called),
    TEST(a_leader_that_keeps_calls_is_named),
    TEST(a_rank_that_does_not_tell_is_named),
    TEST(who_waits_longer_is_told_who_has_not_called),
    TEST(leaders_are_told_once_that_somebody_has_left),
    TEST(what_is_lost_is_told_once_it_is_next),
    TEST(leaders_that_lose_each_other_end_the_group),
    TEST(whose_host_does_not_answer_is_named),
    TEST(who_has_left_is_not_lost),
};

}  // namespace

int main(int count, char** names) {
  return run_tests(kTests, count, names);
}
