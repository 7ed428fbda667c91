// Messages whose ends have had their time: who is named, and what becomes of their data. Run
// without arguments it runs every test; with arguments, those named.

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "agreement_ranks.h"
#include "backends/checked/posted_messages.h"
#include "backends/checked/protocol.h"
#include "backends/checked/questions.h"
#include "backends/checked/rank_progress.h"
#include "message_group.h"
#include "program.h"

using namespace c10d_ext;
using namespace std::chrono_literals;

namespace {

void a_send_is_given_up_at_both_ends() {
  for (const bool is_little : {true, false}) {
    for (const bool is_there : {true, false}) {
      Group group;
      auto& late = group.send(1, 3, 0, "late", is_little, 0ms);
      if (is_there) {
        group.hear(Group::direct(1, 3));
      }
      group.look(1);
      group.hear_all({1, 0});
      group.hear_all({0, 3});
      group.hear_all({3, 0});
      group.answer();
      group.hear_everything();
      CHECK(has_timed_out(late) && late.failure->ranks == std::vector<int>{3});
      CHECK_HAS(late.failure->text,
                "send: the message with tag 0 must be done within 0 s, got no "
                "answer from rank 3");
      CHECK(!group.has_messages());
      auto& received = group.receive(3, 1, 0, 4);
      group.hear_everything();
      CHECK(received.ends == 0);
      auto& next = group.send(1, 3, 0, "next");
      group.hear_everything();
      CHECK(received.data == "next" && is_over(next));
    }
  }
}

// It was received before the sender's time was over, of which rank 0 hears later.
void what_is_received_is_not_given_up() {
  Group group;
  auto& sent = group.send(1, 3, 0, "data", true, 0ms);
  group.hear(Group::direct(1, 3));
  auto& received = group.receive(3, 1, 0, 4);
  CHECK(received.data == "data");
  group.look(1);
  group.hear_all({1, 0});
  group.hear_everything();
  CHECK(is_over(sent) && !group.has_messages());
}

// As above, by a rank of rank 0's host, or another one's, while rank 0 is asked.
void what_is_received_meanwhile_is_not_given_up() {
  for (const int receiver : {3, 5}) {
    Group group;
    auto& sent = group.send(1, receiver, 0, "data", true, 0ms);
    group.look(1);
    group.hear_all({1, 0});
    group.answer_what_is_ripe();
    group.hear_all({0, 1});
    CHECK(sent.ends == 0);
    group.hear(Group::direct(1, receiver));
    CHECK(group.receive(receiver, 1, 0, 4).data == "data");
    group.hear_everything();
    CHECK(is_over(sent) && !group.has_messages());
  }
}

// It has been received when rank 0 asks, which hears of that before it hears an answer.
void what_is_received_is_told_before_an_answer() {
  for (const int receiver : {3, 5}) {
    Group group;
    auto& sent = group.send(1, receiver, 0, "data", true, 0ms);
    group.hear(Group::direct(1, receiver));
    group.look(1);
    group.hear_all({1, 0});
    group.set_busy(receiver, true);
    group.receive(receiver, 1, 0, 4);
    group.hear_all({0, receiver});
    group.hear({receiver, 0});
    group.answer_what_is_ripe();
    group.hear_all({0, 1});
    CHECK(is_over(sent));
    group.set_busy(receiver, false);
    group.hear_everything();
    CHECK(sent.ends == 1 && !group.has_messages());
  }
}

// A receive for which a rank was told that it waits: what it sends before it hears that rank 0 is
// asked to give it up is received, what it sends after that is not over.
void who_sends_to_a_late_receive_hears_what_became_of_it() {
  for (const int sender : {3, 5}) {
    for (const bool has_heard : {false, true}) {
      Group group;
      auto& late = group.receive(1, sender, 0, 4, 0ms);
      group.hear_all({1, 0});
      group.hear_all({0, sender});
      group.look(1);
      group.hear_all({1, 0});
      group.answer_what_is_ripe();
      if (has_heard) {
        group.hear_all({0, sender});
      }
      auto& sent = group.send(sender, 1, 0, "data");
      CHECK(is_over(sent) == !has_heard);
      if (has_heard) {
        group.hear({sender, 0});  // its answer
        group.answer_what_is_ripe();
      }
      group.hear_everything();
      CHECK(has_heard ? has_timed_out(late) && sent.ends == 0 : late.data == "data");
    }
  }
}

// The receives that come while one is withdrawn are not those that the next ones were for.
void who_waits_for_what_is_withdrawn_takes_the_next() {
  Group group;
  auto& late = group.send(1, 3, 0, "late", true, 0ms);
  group.hear(Group::direct(1, 3));
  group.look(1);
  group.hear_all({1, 0});
  group.hear_all({0, 3});
  auto& longer = group.receive(3, 1, 0, 8);
  auto& received = group.receive(3, 1, 0, 4);
  group.hear_all({3, 0});
  group.answer_what_is_ripe();
  group.hear_everything();
  CHECK(has_timed_out(late));
  auto& odd = group.send(1, 3, 0, "next");
  CHECK(odd.ends == 0);
  auto& last = group.send(1, 3, 0, "last");
  group.hear_everything();
  CHECK(odd.failure && odd.failure->kind == ErrorKind::Mismatch);
  CHECK(longer.failure && longer.failure->kind == ErrorKind::Mismatch);
  CHECK(received.data == "last" && is_over(last));
}

// The receive that comes then, before rank 0 has said so, takes the next one.
void what_is_withdrawn_is_not_received() {
  for (const int receiver : {3, 5}) {
    Group group;
    auto& late = group.send(1, receiver, 0, "late", true, 0ms);
    group.hear(Group::direct(1, receiver));
    group.look(1);
    group.hear_all({1, 0});
    group.hear_all({0, receiver});
    group.hear_all({receiver, 0});
    auto& received = group.receive(receiver, 1, 0, 4);
    group.hear_all({receiver, 0});
    group.hear_all({0, 1});
    CHECK(late.ends == 0);
    group.answer_what_is_ripe();
    group.hear_everything();
    CHECK(has_timed_out(late) && received.ends == 0);
    auto& next = group.send(1, receiver, 0, "next");
    group.hear_everything();
    CHECK(received.data == "next" && is_over(next));
  }
}

// Who receives does not answer: the sender's time is over, and the message is there until it does.
void a_silent_receiver_takes_it_later_or_lets_go() {
  for (const bool takes : {true, false}) {
    Group group;
    auto& sent = group.send(1, 3, 0, "data", true, 0ms);
    group.look(1);
    group.hear_all({1, 0});
    group.answer();
    group.hear_all({0, 1});
    CHECK(has_timed_out(sent));
    CHECK(!group.has_messages());  // nobody waits for it
    group.hear(Group::direct(1, 3));
    if (takes) {
      CHECK(group.receive(3, 1, 0, 4).data == "data");
      group.hear_everything();
    } else {
      group.hear_everything();
      auto& received = group.receive(3, 1, 0, 4);
      group.hear_everything();
      CHECK(received.ends == 0);
    }
    CHECK(sent.ends == 1);
  }
}

// Its sender has it, but stands still. It is named, and no other rank that does not answer either;
// by what the receiver knows of it before rank 0's word, or since.
void data_that_does_not_come_is_late() {
  for (const auto& [from, knows] :
       std::vector<std::pair<int, bool>>{{1, false}, {1, true}, {-1, true}}) {
    Group group;
    auto& received = group.receive(3, from, 6, 4, 0ms);
    group.hear_all({3, 0});
    auto& sent = group.send(1, 3, 6, "data");
    group.hear_all({1, 0});
    if (knows) {
      group.hear_all({0, 3});
    }
    group.hear_all({0, 1});
    CHECK(is_over(sent) && received.ends == 0);
    group.look(3);
    group.hear_all({3, 0});
    group.answer();
    group.hear_all({0, 3});
    CHECK(has_timed_out(received));
    CHECK_HAS(received.failure->text,
              "recv: the message with tag 6 must be done within 0 s, got no answer from rank 1 (");
    CHECK((received.failure->ranks == std::vector{1}));
    group.hear_everything();
    CHECK(received.ends == 1);
    group.send(1, 3, 6, "next");
    CHECK(group.receive(3, 1, 6, 4).ends == 0);
    group.hear_everything();
  }
}

// It is answered by the time at which the receiver would take rank 0 for the one that stands still.
void what_is_matched_while_it_is_late_is_answered() {
  for (const int from : {1, -1}) {
    Group group;
    auto& received = group.receive(3, from, 6, 4, 0ms);
    group.hear({3, 0});
    group.look(3);
    auto& sent = group.send(1, 3, 6, "data");
    if (from < 0) {  // rank 0 knows of no rank to wait for, and answers once it hears of it
      group.hear_all({1, 0});
    }
    group.hear_all({3, 0});
    group.hear_all({1, 0});
    if (from < 0) {
      group.answer();  // that it is matched, no more: its sender is asked for
    }
    group.hear_all({0, 3});
    CHECK(received.ends == 0);
    group.look(3);
    group.hear_all({3, 0});
    group.answer();
    group.hear_all({0, 3});
    CHECK(has_timed_out(received) && (received.failure->ranks == std::vector{1}));
    CHECK_HAS(received.failure->text,
              "recv: the message with tag 6 must be done within 0 s, got no answer from rank 1 (");
    group.hear_everything();
    CHECK(received.ends == 1 && is_over(sent));
  }
}

// What comes meanwhile is received.
void data_that_comes_while_rank_0_is_asked_is_received() {
  Group group;
  auto& received = group.receive(3, -1, 6, 4, 0ms);
  group.hear_all({3, 0});
  group.send(1, 3, 6, "data");
  group.hear_all({1, 0});
  group.look(3);
  group.hear_all({3, 0});
  group.hear_all({0, 3});
  group.look(3);  // asks again, of its sender
  group.hear_all(Group::direct(1, 3));
  CHECK(received.data == "data" && received.ends == 1);
  group.hear_all({3, 0});
  group.answer();
  group.hear_everything();
  CHECK(received.ends == 1 && !group.has_messages());
}

void whose_data_it_waits_for_a_rank_is_told() {
  for (const bool knows : {true, false}) {  // as it asks
    Group group;
    auto& received = group.receive(3, -1, 6, 4);
    group.hear_all({3, 0});
    group.send(1, 3, 6, "data");
    group.hear_all({1, 0});
    if (knows) {
      group.hear_all({0, 3});
    }
    const OpenCalls::Asked asked{kAskingOfMessage, 1};
    group.calls(3).expect_answer(asked);
    for (int turn = 0; turn < (knows ? 1 : 2); ++turn) {
      group.look(3);
      group.hear_all({3, 0});
      group.answer();
      group.hear_all({0, 3});
    }
    const auto who = group.calls(3).answer(asked, 0ms, true);
    CHECK(who && (who->ranks == std::vector{1}) && received.ends == 0);
  }
}

void who_has_sent_and_left_is_named_as_such() {
  Group group;
  auto& received = group.receive(3, 1, 6, 4, 0ms);
  group.send(1, 3, 6, "data");
  group.leave(1);
  group.hear_all({3, 0});
  group.hear_all({1, 0});
  group.look(3);
  group.hear_all({3, 0});
  group.answer();
  group.hear_all({0, 3});
  CHECK(has_timed_out(received) && (received.failure->ranks == std::vector{1}));
  CHECK_HAS(received.failure->text, ", left the group)");
}

// Rank 0 asks nobody about it any more.
void what_is_given_up_does_not_wait() {
  const Roster roster = roster_of(0, kHosts);
  const RankProgress progress(roster);
  PostedMessages messages(roster, progress, [](int, Says, const Payload&) {});
  for (const bool is_first : {true, false}) {
    const uint64_t number = is_first ? 1 : 2;
    messages.add({.rank = 1,
                  .number = number,
                  .sends = true,
                  .peer = 3,
                  .bytes = 4,
                  .delivered = Delivered::Data});
    messages.withdraw(1, number);
    const Question late{number, kOverdue, "it must be done", 1};
    const auto waits = [&] { return messages.awaited_by(late) == std::vector{3}; };
    const auto let_go = [&] { messages.hear_withdrawn(3, 1, number); };
    if (is_first) {
      let_go();
    }
    CHECK(waits());
    messages.answer(late, [](int) { return "alive"; });
    CHECK(!waits());
    let_go();
    CHECK(!waits() && messages.is_empty());
  }
}

const std::vector<Test> kTests = {
    TEST(a_send_is_given_up_at_both_ends),
    TEST(what_is_received_is_not_given_up),
    TEST(what_is_received_meanwhile_is_not_given_up),
    TEST(what_is_received_is_told_before_an_answer),
    TEST(who_sends_to_a_late_receive_hears_what_became_of_it),
    TEST(who_waits_for_what_is_withdrawn_takes_the_next),
    TEST(what_is_withdrawn_is_not_received),
    TEST(a_silent_receiver_takes_it_later_or_lets_go),
    TEST(data_that_does_not_come_is_late),
    TEST(what_is_matched_while_it_is_late_is_answered),
    TEST(data_that_comes_while_rank_0_is_asked_is_received),
    TEST(whose_data_it_waits_for_a_rank_is_told),
    TEST(who_has_sent_and_left_is_named_as_such),
    TEST(what_is_given_up_does_not_wait),
};

}  // namespace

int main(int count, char** names) {
  return run_tests(kTests, count, names);
}
