// What a rank makes of what it hears. Run without arguments it runs every test; with arguments,
// those named.

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "agreement_ranks.h"
#include "backends/checked/last_words.h"
#include "backends/checked/open_calls.h"
#include "backends/checked/participant.h"
#include "backends/checked/posted_messages.h"
#include "backends/checked/rank_progress.h"
#include "program.h"

using namespace c10d_ext;
using namespace std::chrono_literals;
using Kind = ErrorKind;

namespace {

// A rank that waits for its first collective when it hears of the end.
class Waiting {
 public:
  explicit Waiting(const std::vector<std::string>& machines, bool gives = true,
                   bool is_long = false)
      : roster_(roster_of(1, machines)), calls_(roster_, 2s) {
    auto operation = call_.operation(summed(6), "mine");
    OpenCall call{operation.op, std::nullopt, kLong, operation.begin, operation.fail};
    call.receive = gives ? operation.receive : nullptr;
    call.is_long = is_long;
    calls_.enter({}, std::nullopt, std::move(call));
  }
  OpenCalls& operator*() {
    return calls_;
  }
  Call& call() {
    return call_;
  }
  void go(uint64_t seq, const std::vector<SharedBytes>& data) {
    calls_.hear_of_calls([&](CallTable& calls) { calls.go(seq, data); });
  }
  void finish(const End& end) {
    calls_.hear_of_calls([&](CallTable& calls) { calls.finish(end); });
  }
  void settle() {
    auto [grants, fails, next] = calls_.take_settled();
    for (; next; next = calls_.next_to_begin()) {
      next->second(next->first);
    }
    for (auto& failed : fails) {
      failed.call.fail(failed.failure);
    }
  }

 private:
  const Roster roster_;
  OpenCalls calls_;
  Call call_;
};

End lost(uint64_t agreed, std::chrono::milliseconds word = 1h) {
  return {Kind::RankLost, {0}, "rank 0 (gone)", kDataGrace, agreed, word};
}

void what_rank_0_has_agreed_on_is_done_after_the_end() {
  const std::vector<std::string> two = {"a", "b"};
  {
    Waiting rank(two);
    rank.finish(lost(1));
    rank.settle();
    CHECK(!rank.call().has_failed() && !(*rank).is_waiting(1));
    rank.go(1, {"of 0", "mine"});
    rank.settle();
    CHECK(rank.call().begun() == 1 && rank.call().received().front() == "of 0");
    CHECK((*rank).agreed() == 1 && !(*rank).has_abandoned());
  }
  {  // the word does not come
    Waiting rank(two);
    rank.finish(lost(1, 1ms));
    CHECK(eventually([&] {
      rank.settle();
      return rank.call().has_failed();
    }));
    CHECK(rank.call().failure().kind == Kind::RankLost && !(*rank).has_abandoned());
  }
  const auto fails = [](const std::vector<std::string>& machines, bool gives, uint64_t agreed) {
    Waiting rank(machines, gives);
    rank.finish(lost(agreed));
    rank.settle();
    CHECK(rank.call().has_failed());
    rank.go(1, {"of 0", "mine"});
    rank.settle();
    CHECK(!rank.call().has_begun());
  };
  fails(two, true, 0);   // not agreed on
  fails(two, false, 1);  // no leader says it
  fails({"a", "a"}, true, 1);
}

// Rank 0 may hear of it later than a leader, and what is done must have begun.
void what_came_with_the_calls_is_not_said_to_be_done() {
  const auto says = [](const std::vector<SharedBytes>& data) {
    Waiting rank({"a", "b"}, true, /*is_long=*/true);
    CHECK((*rank).take_news().size() == 1);  // the call
    rank.go(1, data);
    rank.settle();
    CHECK(rank.call().begun() == 1);
    const bool is_to_be_said = (*rank).done(1);
    const auto news = (*rank).take_news();
    CHECK(news.size() == (is_to_be_said ? 1 : 0) && (news.empty() || news.front().kind == kDone));
    return is_to_be_said;
  };
  CHECK(!says({"of 0", "mine"}));
  CHECK(says({}));
}

// Its data may be another's by then.
void a_message_that_has_failed_is_not_said() {
  const Roster roster = roster_of(1, {"a", "b"});
  OpenCalls calls(roster, 2s);
  Participant rank(
      roster, calls, [](Says, const Payload&) { CHECK(false); }, [](const Calling&) {},
      [](int, Says, const Payload&) { CHECK(false); }, [] {}, {});
  bool has_failed = false;
  OpenCall call{"send", 0, kLong, [](uint64_t) { CHECK(false); },
                [&](const Failure&) { has_failed = true; }};
  CHECK(
      !calls.enter_message({.sends = true, .peer = 0, .bytes = 4, .data = "data"}, std::move(call))
           .second);
  calls.hear_of_calls([](CallTable& table) { table.finish(lost(0)); });
  rank.settle();
  CHECK(has_failed);
  rank.tell_news();
}

// Whoever moves the data sends nothing more to ranks that are gone, for it could not bear that.
void lost_ranks_are_told_of_at_once() {
  const auto told = [](const std::function<void(Participant&)>& happens) {
    const Roster roster = roster_of(1, {"a", "a", "b"});
    OpenCalls calls(roster, 2s);
    std::vector<int> lost;
    Participant rank(
        roster, calls, [](Says, const Payload&) {}, [](const Calling&) {},
        [](int, Says, const Payload&) {}, [] {},
        [&](const std::vector<int>& ranks) {
          CHECK(!calls.end());  // before anything fails
          lost.insert(lost.end(), ranks.begin(), ranks.end());
        });
    happens(rank);
    CHECK(calls.end());
    return std::set<int>(lost.begin(), lost.end());
  };
  const auto over = [&](Kind kind, std::chrono::milliseconds grace) {
    return told([&](Participant& rank) {
      Payload words = encoded({kind, {2}, "why", grace});
      rank.obey(kOver, words);
    });
  };
  using Ranks = std::set<int>;
  CHECK(over(Kind::RankLost, kDataGrace) == Ranks{2});
  CHECK(over(Kind::RankLost, kUnlimited).empty());  // it has left, and sent what it owes
  CHECK(over(Kind::Timeout, kDataGrace).empty());
  for (const int nobody : {-1, 3}) {
    const Roster roster = roster_of(1, {"a", "a", "b"});
    OpenCalls calls(roster, 2s);
    Participant rank(
        roster, calls, [](Says, const Payload&) {}, [](const Calling&) {},
        [](int, Says, const Payload&) {}, [] {}, [](const std::vector<int>&) { CHECK(false); });
    Payload words = encoded({Kind::RankLost, {2, nobody}, "why", kDataGrace});
    bool is_refused = false;
    try {
      rank.obey(kOver, words);
    } catch (const std::runtime_error&) {
      is_refused = true;
    }
    CHECK(is_refused && !calls.end());
  }
  // Nobody tells of who ends because of that.
  CHECK((told([](Participant& rank) { rank.lose_root(kGone); }) == Ranks{0, 2}));
  CHECK(told([](Participant& rank) {
          Payload words;
          rank.obey(kLeaving, words);
        }).empty());
}

// Rank 0 would have told; without it, those whose part breaks off do.
void what_is_broken_is_told_where_rank_0_is_lost() {
  struct Rank {
    explicit Rank(int rank)
        : roster(roster_of(rank, {"a", "a", "b", "b", "b", "c"})),
          words(
              roster, [this](int to, const Payload& seq) { said[to].push_back(seq.words()); },
              [this](uint64_t seq) { doomed.push_back(seq); }) {}
    const Roster roster;
    std::map<int, std::vector<std::string>> said;
    std::vector<uint64_t> doomed;
    LastWords words;
  };
  const auto seven = std::vector{Payload().put(7).words()};
  using Said = std::map<int, std::vector<std::string>>;
  const std::vector<Said> expected{
      {},                                                // rank 0's own words are a coordinator's
      {{2, seven}},                                      // its leader was rank 0
      {{1, seven}, {3, seven}, {4, seven}, {5, seven}},  // a leader, the next after rank 0
      {{2, seven}},
      {{2, seven}},
      {{2, seven}},
  };
  for (int rank = 1; rank < 6; ++rank) {
    for (const bool before : {false, true}) {
      Rank one(rank);
      if (before) {
        one.words.add(7);
        CHECK(one.said.empty() && one.doomed.empty());
      }
      one.words.lose_root();
      one.words.add(7);
      one.words.add(7);  // as somebody else says it, too
      CHECK(one.said == expected[static_cast<size_t>(rank)]);
      CHECK(one.doomed == std::vector<uint64_t>{7});
    }
  }
}

template <class F>
bool is_refused(const F& what) {
  try {
    what();
  } catch (const std::runtime_error&) {
    return true;
  }
  return false;
}

void data_that_is_no_messages_is_refused() {
  const auto take = [](bool sends, uint64_t bytes, size_t data) {
    Posted posted{.sends = sends, .peer = 0, .bytes = bytes};
    posted.data = std::string(data, 'x');
    Payload words = encoded(posted);
    take_posted(words);
  };
  CHECK(!is_refused([&] { take(true, 4, 4); }));
  CHECK(!is_refused([&] { take(true, kLittleMessage, kLittleMessage); }));
  CHECK(is_refused([&] { take(true, 4, 5); }));
  CHECK(is_refused([&] { take(false, 4, 4); }));
  CHECK(is_refused([&] { take(true, kLittleMessage + 1, kLittleMessage + 1); }));

  const Roster roster = roster_of(1, {"a", "a", "b"});
  for (const bool is_little : {false, true}) {
    OpenCalls calls(roster, 2s);
    Participant rank(
        roster, calls, [](Says, const Payload&) {}, [](const Calling&) {},
        [](int, Says, const Payload&) {}, [] {}, {});
    std::vector<std::string> received;
    OpenCall call{"recv", 0, kLong, [](uint64_t) { CHECK(false); }, [](const Failure&) {}};
    if (is_little) {
      call.receive = [&](uint64_t, const auto& data) { received.assign(data.begin(), data.end()); };
    }
    calls.enter_message({.peer = 2, .bytes = 4}, std::move(call));
    Payload words = Payload().put(1);
    put_data(put(words, OtherEnd{.rank = 2, .number = 1}), "data");
    CHECK(is_refused([&] { rank.obey(kGranted, words); }) == !is_little);
    rank.settle();
    CHECK((received == std::vector<std::string>(is_little ? 1 : 0, "data")));
  }
}

// Rank 1 of three, which sends.
class Sender {
 public:
  uint64_t send(int peer, const std::string& data, int64_t tag = 0, bool with_data = true) {
    Posted posted{.sends = true, .peer = peer, .tag = tag, .bytes = data.size()};
    if (with_data) {
      posted.data = data;
    }
    const auto number = ++last_;
    OpenCall call{"send", tag, kLong, [this, number](uint64_t) { over_.push_back(number); },
                  [this, number](const Failure&) { failed_.push_back(number); }};
    call.receive = [this, number](uint64_t, const auto&) { over_.push_back(number); };
    calls_.enter_message(std::move(posted), std::move(call));
    rank_.settle();
    CHECK(!is_over(number));  // not before it is said
    rank_.tell_news();
    rank_.settle();
    return number;
  }
  void hear(Says kind, Payload words) {
    rank_.obey(kind, words);
    rank_.settle();
  }
  void hear_of_message(int rank, Says kind, Payload words) {
    rank_.hear_of_message(rank, kind, words);
    rank_.settle();
  }
  // A receive of rank `rank` waits.
  void want(int rank, uint64_t bytes, int64_t tag = 0, uint64_t number = 1) {
    hear(kWanted,
         encoded_wanted({.rank = rank, .number = number, .peer = 1, .tag = tag, .bytes = bytes}));
  }
  void grant(uint64_t number, int peer) {
    Payload words = Payload().put(static_cast<int64_t>(number));
    put_data(put(words, OtherEnd{.rank = peer}), "");
    hear(kGranted, words);
  }
  void deny(uint64_t number, const std::vector<int>& ranks) {
    Payload words = Payload().put(static_cast<int64_t>(number)).put(0).put("no").put(ranks);
    hear(kDenied, put(words, OtherEnd()));
  }
  bool is_over(uint64_t number) const {
    return std::count(over_.begin(), over_.end(), number) == 1;
  }
  bool has_failed(uint64_t number) const {
    return std::count(failed_.begin(), failed_.end(), number) == 1;
  }

 private:
  const Roster roster_ = roster_of(1, {"a", "b", "c"});
  OpenCalls calls_{roster_, 2s};
  Participant rank_{roster_,
                    calls_,
                    [](Says, const Payload&) {},
                    [](const Calling&) {},
                    [](int, Says, const Payload&) {},
                    [] {},
                    {}};
  uint64_t last_ = 0;
  std::vector<uint64_t> over_, failed_;
};

void what_is_wanted_is_over_once_it_is_said() {
  Sender rank;
  // Wanted before it is sent, or after.
  rank.want(2, 4);
  CHECK(rank.is_over(rank.send(2, "data")));
  const auto second = rank.send(2, "data");
  CHECK(!rank.is_over(second));
  rank.want(2, 4);
  CHECK(rank.is_over(second));
  // What rank 0 says of them later changes nothing.
  rank.grant(1, 2);
  rank.grant(second, 2);
  CHECK(rank.is_over(1) && rank.is_over(second));
  // By another rank, or with another tag.
  rank.want(0, 4);
  rank.want(2, 4, 7);
  const auto third = rank.send(2, "data");
  CHECK(!rank.is_over(third));
  rank.grant(third, 2);
  CHECK(rank.is_over(third));
  CHECK(rank.is_over(rank.send(0, "data")) && rank.is_over(rank.send(2, "data", 7)));
  // No longer.
  rank.want(2, 4, 0, 5);
  rank.want(2, 4, 0, 6);
  rank.hear(kUnwanted, Payload().put(2).put(0).put(5));
  rank.hear(kUnwanted, Payload().put(0).put(0).put(6));
  CHECK(rank.is_over(rank.send(2, "data")));
  CHECK(!rank.is_over(rank.send(2, "data")));
}

void what_is_taken_is_over() {
  Sender rank;
  const auto number = rank.send(2, "data");
  const auto taken_by = [&](int who, uint64_t what) {
    rank.hear_of_message(who, kTaken, Payload().put(static_cast<int64_t>(what)));
  };
  taken_by(0, number);  // it is not for that one
  taken_by(2, number + 1);
  CHECK(!rank.is_over(number));
  CHECK(is_refused([&] { rank.hear(kTaken, Payload().put(1)); }));  // from rank 0
  CHECK(!rank.is_over(number));
  taken_by(2, number);
  CHECK(rank.is_over(number));
}

void what_is_wanted_but_does_not_fit_waits_for_rank_0() {
  Sender rank;
  rank.want(2, 5);
  const auto wrong = rank.send(2, "data");
  rank.want(2, 4);
  const auto right = rank.send(2, "data");
  CHECK(!rank.is_over(wrong) && rank.is_over(right));
  rank.deny(wrong, {1, 2});
  CHECK(rank.has_failed(wrong));
  // So does what travels without its data.
  rank.want(2, 4);
  const auto large = rank.send(2, "data", 0, /*with_data=*/false);
  rank.want(2, 4);
  CHECK(!rank.is_over(large));
  CHECK(rank.is_over(rank.send(2, "data")));
  // One that rank 0 has answered is nobody's any more.
  const auto given_up = rank.send(0, "data");
  rank.deny(given_up, {1, 0});
  rank.want(0, 4);
  CHECK(!rank.is_over(given_up) && rank.is_over(rank.send(0, "data")));
}

void wants_that_mean_nothing_are_refused() {
  Sender rank;
  const auto is_wrong = [&](Posted receive) {
    return is_refused([&] { rank.hear(kWanted, encoded_wanted(receive)); });
  };
  const Posted right{.rank = 2, .number = 1, .peer = 1, .bytes = 4};
  CHECK(!is_wrong(right));
  for (const auto& change : std::vector<std::function<void(Posted&)>>{
           [](auto& posted) { posted.rank = 1; }, [](auto& posted) { posted.rank = 3; },
           [](auto& posted) { posted.rank = -1; }, [](auto& posted) { posted.peer = 0; },
           [](auto& posted) { posted.sends = true; },
           [](auto& posted) { posted.bytes = kLittleMessage + 1; }}) {
    Posted wrong = right;
    change(wrong);
    CHECK(is_wrong(wrong));
  }
}

// Rank 0, as three ranks tell it of their messages.
void rank_0_tells_who_is_wanted() {
  const Roster roster = roster_of(0, {"a", "b", "c"});
  const RankProgress progress(roster);
  std::vector<std::pair<int, Says>> told;
  PostedMessages messages(roster, progress, [&](int rank, Says kind, const Payload&) {
    told.emplace_back(rank, kind);
  });
  uint64_t number = 0;
  using Told = std::vector<std::pair<int, Says>>;
  const auto post = [&](int rank, bool sends, int peer, uint64_t bytes = 4, int64_t tag = 0) {
    told.clear();
    messages.add({.rank = rank,
                  .number = ++number,
                  .sends = sends,
                  .peer = peer,
                  .tag = tag,
                  .bytes = bytes});
    return told;
  };
  CHECK((post(2, false, 1) == Told{{1, kWanted}}));
  CHECK((post(2, false, 1) == Told{{1, kWanted}}));
  CHECK((post(2, false, 0) == Told{}));  // rank 0 knows
  CHECK((post(0, false, 1) == Told{{1, kWanted}}));
  CHECK((post(2, false, 1, kLittleMessage + 1) == Told{}));
  CHECK((post(2, false, 1) == Told{}));  // the one before would have it
  // The first from anybody: what is sent may be for that one.
  CHECK((post(1, false, -1) == Told{}));
  CHECK((post(1, false, 2) == Told{}));
  CHECK((post(1, false, 2, 4, 9) == Told{{2, kWanted}}));
  // There is one already.
  CHECK((post(1, true, 0, 4, 3) == Told{}));
  CHECK((post(0, false, 1, 4, 3) == Told{{1, kGranted}, {0, kGranted}}));
  // Whatever their numbers are.
  number -= 1;
  CHECK((post(1, false, 2, 4, 11) == Told{{2, kWanted}}));
  number -= 1;
  CHECK((post(1, false, -1, 4, 12) == Told{}));
  number -= 1;
  CHECK((post(1, false, 2, 4, 12) == Told{}));
  // They wait no longer.
  const auto late = number + 1;
  CHECK((post(2, false, 1, 4, 4) == Told{{1, kWanted}}));
  told.clear();
  messages.answer({late, kOverdue, "it must be done", 2}, [](int) { return "alive"; });
  CHECK((told == Told{{1, kUnwanted}, {2, kDenied}}));
  told.clear();
  messages.leave(0);
  CHECK((told == Told{{1, kUnwanted}}));
}

const std::vector<Test> kTests = {
    TEST(what_rank_0_has_agreed_on_is_done_after_the_end),
    TEST(what_came_with_the_calls_is_not_said_to_be_done),
    TEST(a_message_that_has_failed_is_not_said),
    TEST(lost_ranks_are_told_of_at_once),
    TEST(what_is_broken_is_told_where_rank_0_is_lost),
    TEST(data_that_is_no_messages_is_refused),
    TEST(what_is_wanted_is_over_once_it_is_said),
    TEST(what_is_taken_is_over),
    TEST(what_is_wanted_but_does_not_fit_waits_for_rank_0),
    TEST(wants_that_mean_nothing_are_refused),
    TEST(rank_0_tells_who_is_wanted),
};

}  // namespace

int main(int count, char** names) {
  return run_tests(kTests, count, names);
}
