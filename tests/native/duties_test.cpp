// What a rank does with its lines to other ranks, the other ends of which are here. Run without
// arguments it runs every test; with arguments, those named.

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "agreement_ranks.h"
#include "backends/checked/duties.h"
#include "backends/checked/open_calls.h"
#include "backends/checked/protocol.h"
#include "backends/checked/roster.h"
#include "control/connection.h"
#include "control/shared_bytes.h"
#include "one_rank.h"
#include "program.h"

using namespace c10d_ext;
using namespace std::chrono_literals;
using Clock = Duties::Clock;

namespace {

using Kinds = std::vector<uint32_t>;
using Numbers = std::vector<int64_t>;

Payload number(int64_t seq) {
  return Payload().put(seq);
}

// Rank 0's host and two others.
const std::vector<std::string> kHosts{"a", "a", "b", "b", "c", "c"};

void heartbeats_go_where_nobody_else_would_notice() {
  const auto beats = [](int rank, const std::vector<int>& peers) {
    Rank own(rank, kHosts, peers);
    CHECK(own.next_beat() < Clock::now() + kLong);
    std::this_thread::sleep_until(own.next_beat());
    own.work();
    std::vector<int> who;
    for (const int peer : peers) {
      CHECK(own.line(peer).listen(4096));
      if (const auto said = own.line(peer).next()) {
        CHECK(said->kind == kBeat && !own.line(peer).next());
        who.push_back(peer);
      }
    }
    return who;
  };
  CHECK((beats(0, {1, 2, 3, 4, 5}) == std::vector<int>{2, 3, 4, 5}));
  // A leader, which is rank 0's host's, too: rank 0 hears of that link itself.
  CHECK((beats(2, {0, 1, 3, 4, 5}) == std::vector<int>{0, 4}));
  CHECK((beats(4, {0, 1, 2, 3, 5}) == std::vector<int>{0, 2}));
  // Between two hosts leaders are enough.
  CHECK((beats(3, {0, 1, 2, 4, 5}) == std::vector<int>{0}));
  // None at all.
  CHECK(Rank(1, kHosts, {0, 2, 3, 4, 5}).next_beat() == Clock::time_point::max());
}

Payload go(uint64_t seq) {
  Payload words = Payload().put(static_cast<int64_t>(seq));
  put_all(words, std::vector<std::string>(kHosts.size(), "data"));
  return words;
}

void rank_0_hears_what_is_for_its_host() {
  const std::string letters = "abcdef";
  const Contribution parts(letters, std::vector<int64_t>(kHosts.size(), 1));
  // Of each rank whose call a peer has heard of.
  const auto heard = [](Rank& rank, int peer, Says kind) {
    CHECK(rank.line(peer).listen(4096));
    auto said = rank.next_of(peer);
    CHECK(said && said->kind == kind);
    const auto size = static_cast<int>(kHosts.size());
    std::vector<std::pair<int, Calling>> calls;
    if (kind == kCalling) {
      calls.emplace_back(0, CallReader(size, 3).take(said->words));
    } else {
      calls = CallReader(size, 3).take_relayed(said->words, [](int) { return true; });
    }
    std::vector<std::string> data;
    for (const auto& [caller, call] : calls) {
      CHECK(call.seq == 1 && call.data);
      auto& all = data.emplace_back();
      for (int to = 0; to < size; ++to) {
        all += call.data->of(to);
      }
    }
    return data;
  };
  using Data = std::vector<std::string>;
  Call call;
  Rank there(3, kHosts, {0, 2}), leader(2, kHosts, {0, 3, 4}), beside(1, kHosts, {0, 2});
  there.call(call, parts);
  CHECK(heard(there, 2, kCalling) == Data{letters} && there.heard_by(0) == Kinds());
  leader.call(call, parts);
  CHECK(leader.heard_by(0) == Kinds());
  leader.say(3, kCalling, encoded(Calling{summed(6), parts, 1}));
  CHECK((heard(leader, 0, kRelaying) == Data{"ab", "ab"}));
  CHECK((heard(leader, 4, kRelaying) == Data{"ef", "ef"}));
  // Rank 0 leads this one.
  beside.call(call, parts);
  CHECK(heard(beside, 0, kCalling) == Data{letters} && beside.heard_by(2) == Kinds());
}

// So that rank 0 knows that it waits in vain.
void a_rank_whose_leader_has_left_says_that_it_calls() {
  for (const bool is_first : {true, false}) {
    Call call;
    Rank rank(3, kHosts, {0, 2});
    if (is_first) {
      rank.say(2, kLeaving, number(0));
      CHECK(rank.heard_by(0, kPong) == Numbers{0});
      rank.call(call);
    } else {
      rank.call(call);
      CHECK(rank.heard_by(0) == Kinds());
      rank.say(2, kLeaving, number(0));
    }
    CHECK(rank.heard_by(0, kPong) == Numbers{1});
    CHECK(rank.heard_by(2) == (is_first ? Kinds{} : Kinds{kCalling}));
  }
  // Another host's leader is not its own.
  Rank rank(1, kHosts, {0, 2});
  rank.say(2, kLeaving, number(0));
  CHECK(rank.heard_by(0) == Kinds());
}

void what_has_no_data_is_told_to_the_leader_and_rank_0() {
  Call call;
  Rank rank(3, kHosts, {0, 2}), leader(2, kHosts, {0, 3, 4});
  rank.call_long(call);
  CHECK(rank.heard_by(0) == Kinds{kCalling} && rank.heard_by(2) == Kinds{kCalling});
  // Asked, each tells how many it has called, and a leader those of its host.
  const auto counts = [](Rank& asked) {
    asked.say(0, kPing, {});
    CHECK(asked.line(0).listen(4096));
    auto said = asked.next_of(0);
    CHECK(said && said->kind == kPong);
    const auto own = said->words.number();
    return std::pair(own, said->words.numbers());
  };
  CHECK(counts(rank) == std::pair(int64_t{1}, Numbers()));
  leader.say(3, kCalling, Rank::called_long().put(1));
  CHECK(counts(leader) == std::pair(int64_t{0}, Numbers{0, 1}));
  leader.call_long(call);
  CHECK(leader.heard_by(0) == Kinds{kCalling} && leader.heard_by(4) == Kinds());
}

void the_word_to_go_is_rank_0s_and_the_own_leaders() {
  for (const int from : {0, 2}) {
    Call call;
    Rank rank(3, kHosts, {0, 2});
    rank.call(call);
    CHECK(rank.heard_by(0) == Kinds() && rank.heard_by(2) == Kinds{kCalling});
    rank.say(from, kGo, go(1));
    CHECK(call.begun() == 1 && call.received()[5] == "data");
  }
  // The next host's leader is there for rank 0's host, but does not lead it. A leader has nobody's
  // word but rank 0's.
  for (const auto& [self, peers, stranger] :
       std::vector<std::tuple<int, std::vector<int>, int>>{{1, {0, 2}, 2}, {4, {0, 2, 5}, 2}}) {
    Call call;
    Rank rank(self, kHosts, peers);
    rank.call(call);
    rank.say(stranger, kGo, go(1));
    CHECK(!call.has_begun());
    CHECK(!rank.heard_by(stranger));
    rank.say(0, kGo, go(1));
    CHECK(call.begun() == 1);
  }
}

void what_a_rank_has_sent_is_heard_though_it_leaves() {
  const std::string data(kLittleMessage, 'd');
  // By rank 0, or over a line of the two.
  for (const int by : {0, 5}) {
    Rank rank(3, kHosts, {0, 2, 5});
    rank.say(0, kWanted,
             encoded_wanted({.rank = by, .number = 1, .peer = 3, .bytes = data.size()}));
    CHECK(rank.send(by, data));
    CHECK(!Agreement::serves(0ms));
    const auto began = Clock::now();
    std::thread leaving([&] { rank.leave(); });
    // Until it is said the process does not end.
    CHECK(eventually([] { return Agreement::serves(0ms); }));
    Kinds heard;
    CHECK(eventually([&, by = by] {
      const bool stays = rank.line(by).listen(data.size() + 1024);
      while (auto said = rank.next_of(by)) {
        heard.push_back(said->kind);
        if (said->kind == kPosting) {
          CHECK(take_posted(said->words).data == data);
        } else if (said->kind == kDelivering) {
          CHECK(take_delivery(said->words, 3, by).data == data);
        }
      }
      return !stays;
    }));
    CHECK((heard == Kinds{by == 0 ? kPosting : kDelivering, kLeaving}));
    // What the others are yet to hear their kernels have: before it would be given up.
    const auto left = began + kLinger - 50ms - Clock::now();
    CHECK(!Agreement::serves(std::chrono::duration_cast<std::chrono::milliseconds>(left)));
    for (const int peer : {0, 2, 5}) {
      rank.line(peer).close();
    }
    leaving.join();
  }
}

// Rank 0 has the group end, but for those who have left.
void rank_0_hears_of_lines_that_are_lost() {
  for (const int self : {1, 3}) {
    for (const bool has_left : {false, true}) {
      Rank rank(self, kHosts, {0, 2, 5});
      if (has_left) {
        rank.say(5, kLeaving, number(0));
      }
      rank.close(5);
      CHECK(rank.heard_by(0, kSevered) == (has_left ? Numbers{} : Numbers{5}));
    }
  }
}

// Of two hosts, whoever is first to say so.
void the_same_rank_is_named_for_a_link() {
  for (const auto& [who, of, named] : std::vector<std::tuple<int, int, int>>{
           {2, 4, 4}, {3, 5, 4}, {5, 2, 4}, {4, 3, 4}, {1, 5, 4}, {1, 3, 2}, {3, 1, 2}}) {
    Rank root(0, kHosts, {1, 2, 3, 4, 5});
    Call call;
    root.call(call);
    root.say(who, kSevered, number(of));
    CHECK(eventually([&] {
      root.work();
      return call.has_failed();
    }));
    CHECK(call.failure().kind == ErrorKind::RankLost);
    CHECK(call.failure().ranks == std::vector<int>{named});
  }
}

void messages_are_heard_of_who_sends_them() {
  const auto delivery = [](int to) {
    return encoded_delivery({.number = 1, .sends = true, .peer = to, .bytes = 4, .data = "data"});
  };
  // Of ranks on other hosts; rank 0 has other words.
  for (const auto& [from, to, is_right] : std::vector<std::tuple<int, int, bool>>{
           {5, 3, true}, {1, 3, true}, {5, 2, false}, {2, 3, false}, {0, 3, false}}) {
    Rank rank(3, kHosts, {0, 1, 2, 4, 5});
    rank.say(from, kDelivering, delivery(to));
    CHECK(rank.heard_by(from).has_value() == is_right);
  }
  // Rank 0 itself has no such lines, and a leader passes nothing on.
  Rank root(0, kHosts, {1, 2, 3, 4, 5}), leader(2, kHosts, {0, 1, 3, 4, 5});
  root.say(5, kDelivering, delivery(0));
  CHECK(!root.heard_by(5));
  leader.say(3, kDelivering, delivery(5));
  CHECK(!leader.heard_by(3) && leader.heard_by(5) == Kinds());
  // What cannot be done any more leaders say, and ranks to theirs.
  for (const auto& [self, from, is_right] : std::vector<std::tuple<int, int, bool>>{
           {3, 2, true}, {3, 4, true}, {3, 5, false}, {2, 3, true}, {2, 1, true}, {2, 5, false}}) {
    Rank rank(self, kHosts, {0, 1, 2, 3, 4, 5});
    rank.say(from, kDoomed, number(1));
    CHECK(rank.heard_by(from).has_value() == is_right);
  }
}

// Two long collectives that all ranks of `rank`'s group have called: the first has begun.
struct TwoLong {
  TwoLong(Rank& rank, const std::vector<int>& others) {
    for (auto* call : {&first, &second}) {
      const int64_t seq = call == &first ? 1 : 2;
      rank.call_long(*call);
      for (const int other : others) {
        rank.say(other, kCalling, Rank::called_long().put(seq));
      }
    }
  }
  Call first, second;
};

// Rank 0 knows what a rank that is gone had done, and what of it the others need not wait for.
void what_a_lost_rank_had_not_done_fails_at_once() {
  const std::vector<int> others{1, 2, 3, 4, 5};
  for (const int64_t done : {0, 1, 2}) {
    Rank rank(0, kHosts, others);
    TwoLong calls(rank, others);
    CHECK(calls.first.begun() == 1);
    for (int64_t seq = 1; seq <= done; ++seq) {
      rank.say(3, kDone, number(seq));
    }
    rank.close(3);
    CHECK(calls.first.has_failed() == (done < 1) && calls.second.has_failed() == (done < 2));
    for (const int other : {1, 2, 4, 5}) {
      CHECK(rank.heard_by(other, kDoomed) == Numbers{done + 1});
    }
    if (done < 2) {
      CHECK(calls.second.failure().kind == ErrorKind::RankLost);
      CHECK(calls.second.failure().ranks == std::vector<int>{3});
    }
  }
}

void what_was_not_begun_is_not_done() {
  for (const auto& numbers : std::vector<Numbers>{{1}, {3}, {1, 1}}) {
    const std::vector<int> others{1, 2, 3, 4, 5};
    Rank rank(0, kHosts, others);
    std::optional<TwoLong> calls;
    if (numbers != Numbers{1}) {
      calls.emplace(rank, others);
    }
    for (const int64_t seq : numbers) {
      rank.say(3, kDone, number(seq));
    }
    rank.heard_by(3);
    CHECK(!rank.heard_by(3));  // its line is closed
  }
}

void rank_0_tells_leaders_and_its_host_what_it_has_done() {
  const std::vector<int> others{1, 2, 3, 4, 5};
  Rank rank(0, kHosts, others);
  TwoLong calls(rank, others);
  CHECK(calls.first.begun() == 1);
  rank.done(1);
  CHECK(calls.second.begun() == 2);
  for (const int other : others) {
    const bool is_told = other == 1 || other == 2 || other == 4;
    CHECK(rank.heard_by(other, kDone) == (is_told ? Numbers{1} : Numbers{}));
  }
}

// And leaders the others, once it is gone.
void what_rank_0_had_not_done_fails_at_once() {
  enum class End { Gone, Leaves };
  for (const auto end : {End::Gone, End::Leaves}) {
    for (const int64_t done : {0, 1, 2}) {
      Rank rank(2, kHosts, {0, 1, 3, 4});
      TwoLong calls(rank, {});
      for (const int64_t seq : {1, 2}) {
        Payload go = number(seq);
        put_all(go, {});
        rank.say(0, kGo, go);
      }
      CHECK(calls.first.begun() == 1);
      if (done > 0) {
        rank.say(0, kDone, number(done));
      }
      if (end == End::Leaves) {
        rank.say(0, kLeaving, number(2));
      }
      rank.close(0);
      const bool is_gone = end == End::Gone;
      CHECK(calls.first.has_failed() == (is_gone && done < 1));
      CHECK(calls.second.has_failed() == (is_gone && done < 2));
      for (const int other : {1, 3, 4}) {
        CHECK(rank.heard_by(other, kDoomed) == (is_gone ? Numbers{done + 1} : Numbers{}));
      }
    }
  }
}

const std::vector<Test> kTests = {
    TEST(heartbeats_go_where_nobody_else_would_notice),
    TEST(rank_0_hears_what_is_for_its_host),
    TEST(a_rank_whose_leader_has_left_says_that_it_calls),
    TEST(what_has_no_data_is_told_to_the_leader_and_rank_0),
    TEST(the_word_to_go_is_rank_0s_and_the_own_leaders),
    TEST(what_a_rank_has_sent_is_heard_though_it_leaves),
    TEST(rank_0_hears_of_lines_that_are_lost),
    TEST(the_same_rank_is_named_for_a_link),
    TEST(messages_are_heard_of_who_sends_them),
    TEST(what_a_lost_rank_had_not_done_fails_at_once),
    TEST(what_was_not_begun_is_not_done),
    TEST(rank_0_tells_leaders_and_its_host_what_it_has_done),
    TEST(what_rank_0_had_not_done_fails_at_once),
};

}  // namespace

int main(int count, char** names) {
  return run_tests(kTests, count, names);
}
