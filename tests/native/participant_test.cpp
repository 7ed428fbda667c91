// What a rank makes of what it hears. Run without arguments it runs every test; with arguments,
// those named.

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
#include "program.h"

using namespace c10d_ext;
using namespace std::chrono_literals;
using Kind = ErrorKind;

namespace {

Roster roster_of(int rank, const std::vector<std::string>& machines) {
  std::vector<Member> members;
  for (const auto& machine : machines) {
    members.push_back({this_process(), machine, machine, machine});
  }
  return {{rank, static_cast<int>(machines.size()), "test"}, std::move(members)};
}

// A rank that waits for its first collective when it hears of the end.
class Waiting {
 public:
  explicit Waiting(const std::vector<std::string>& machines, bool gives = true)
      : roster_(roster_of(1, machines)), calls_(roster_, 2s) {
    auto operation = call_.operation(summed(6), "mine");
    OpenCall call{operation.op, std::nullopt, kLong, operation.begin, operation.fail};
    call.receive = gives ? operation.receive : nullptr;
    calls_.enter(kCalling, {}, std::move(call));
  }
  OpenCalls& operator*() {
    return calls_;
  }
  Call& call() {
    return call_;
  }
  void settle() {
    auto [grants, fails] = calls_.take_settled();
    while (auto next = calls_.next_to_begin()) {
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
    (*rank).finish(lost(1));
    rank.settle();
    CHECK(!rank.call().has_failed() && !(*rank).is_waiting(1));
    (*rank).go(1, {"of 0", "mine"});
    rank.settle();
    CHECK(rank.call().begun() == 1 && rank.call().received().front() == "of 0");
    CHECK((*rank).agreed() == 1 && !(*rank).has_abandoned());
  }
  {  // the word does not come
    Waiting rank(two);
    (*rank).finish(lost(1, 1ms));
    CHECK(eventually([&] {
      rank.settle();
      return rank.call().has_failed();
    }));
    CHECK(rank.call().failure().kind == Kind::RankLost && !(*rank).has_abandoned());
  }
  const auto fails = [](const std::vector<std::string>& machines, bool gives, uint64_t agreed) {
    Waiting rank(machines, gives);
    (*rank).finish(lost(agreed));
    rank.settle();
    CHECK(rank.call().has_failed());
    (*rank).go(1, {"of 0", "mine"});
    rank.settle();
    CHECK(!rank.call().has_begun());
  };
  fails(two, true, 0);   // not agreed on
  fails(two, false, 1);  // no leader says it
  fails({"a", "a"}, true, 1);
}

// Whoever moves the data sends nothing more to ranks that are gone, for it could not bear that.
void lost_ranks_are_told_of_at_once() {
  const auto told = [](const std::function<void(Participant&)>& happens) {
    const Roster roster = roster_of(1, {"a", "a", "b"});
    OpenCalls calls(roster, 2s);
    std::vector<int> lost;
    Participant rank(
        roster, calls, [](Says, const Payload&) {}, [](const Payload&) {}, [] {},
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
      Payload words(encoded({kind, {2}, "why", grace}).bytes());
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
        roster, calls, [](Says, const Payload&) {}, [](const Payload&) {}, [] {},
        [](const std::vector<int>&) { CHECK(false); });
    Payload words(encoded({Kind::RankLost, {2, nobody}, "why", kDataGrace}).bytes());
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
              roster, [this](int to, const Payload& seq) { said[to].push_back(seq.bytes()); },
              [this](uint64_t seq) { doomed.push_back(seq); }) {}
    const Roster roster;
    std::map<int, std::vector<std::string>> said;
    std::vector<uint64_t> doomed;
    LastWords words;
  };
  const auto seven = std::vector{Payload().put(7).bytes()};
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
    Payload words(encoded(posted).bytes());
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
    Participant rank(roster, calls, [](Says, const Payload&) {}, [](const Payload&) {}, [] {}, {});
    std::vector<std::string> received;
    OpenCall call{"recv", 0, kLong, [](uint64_t) { CHECK(false); }, [](const Failure&) {}};
    if (is_little) {
      call.receive = [&](uint64_t, const auto& data) { received = data; };
    }
    calls.enter(kPosting, {}, std::move(call));
    Payload words = Payload().put(1).put(2);
    put_data(words, "data");
    CHECK(is_refused([&] { rank.obey(kGranted, words); }) == !is_little);
    rank.settle();
    CHECK((received == std::vector<std::string>(is_little ? 1 : 0, "data")));
  }
}

const std::vector<Test> kTests = {
    TEST(what_rank_0_has_agreed_on_is_done_after_the_end),
    TEST(lost_ranks_are_told_of_at_once),
    TEST(what_is_broken_is_told_where_rank_0_is_lost),
    TEST(data_that_is_no_messages_is_refused),
};

}  // namespace

int main(int count, char** names) {
  return run_tests(kTests, count, names);
}
