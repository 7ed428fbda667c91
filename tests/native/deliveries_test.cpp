// Messages that ranks say to each other, while rank 0 hears of both ends. Run without arguments it
// runs every test; with arguments, those named.

#include <chrono>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "agreement_ranks.h"
#include "backends/checked/coordinator.h"
#include "backends/checked/deliveries.h"
#include "backends/checked/protocol.h"
#include "message_group.h"
#include "program.h"

using namespace c10d_ext;
using namespace std::chrono_literals;
using Kind = ErrorKind;

namespace {

void a_message_is_there_before_rank_0_has_heard_of_it() {
  for (const bool sent_first : {false, true}) {
    Group group;
    Ending* received = nullptr;
    if (!sent_first) {
      received = &group.receive(3, 1, 7, 4);
    }
    auto& sent = group.send(1, 3, 7, "data");
    group.hear(Group::direct(1, 3));
    if (sent_first) {
      received = &group.receive(3, 1, 7, 4);
    }
    CHECK(is_over(*received) && received->data == "data" && received->peer == 1);
    CHECK(sent.ends == 0);  // it may not fit, as far as the sender knows
    CHECK(group.hear(Group::direct(3, 1)) && is_over(sent));
    group.hear_everything();
    CHECK(sent.ends == 1 && received->ends == 1);
    CHECK(!group.has_messages());
  }
}

void rank_0s_word_waits_for_the_data() {
  Group group;
  auto& received = group.receive(4, -1, 0, 4);
  auto& sent = group.send(2, 4, 0, "data");
  group.hear({4, 0});
  group.hear({2, 0});
  group.hear_all({0, 4});
  CHECK(received.ends == 0);
  group.hear_everything();
  CHECK(received.data == "data" && received.peer == 2 && is_over(sent));
}

// What rank 0 will match a message with, this rank cannot know.
void what_is_not_sure_waits_for_rank_0() {
  enum class Why { AnySource, Misfit, OfAnotherType, AfterLarge, InDoubt };
  for (const auto why :
       {Why::AnySource, Why::Misfit, Why::OfAnotherType, Why::AfterLarge, Why::InDoubt}) {
    Group group;
    auto& first = group.receive(3, why == Why::AnySource ? -1 : 1, 0, why == Why::Misfit ? 5 : 4,
                                why == Why::InDoubt ? 0ms : 1h,
                                why == Why::OfAnotherType ? DType::Float : DType::Bytes);
    auto& second = group.receive(3, 1, 0, 4);
    if (why == Why::InDoubt) {
      group.look(3);
    }
    auto& one = group.send(1, 3, 0, "ones", why != Why::AfterLarge);
    auto& two = group.send(1, 3, 0, "twos");
    group.hear_all(Group::direct(1, 3));
    CHECK(first.ends == 0 && second.ends == 0);
    if (why == Why::InDoubt) {
      group.hear_all({3, 0});
      group.answer();
    }
    group.hear_everything();
    if (why == Why::InDoubt) {
      CHECK(has_timed_out(first) && second.data == "ones");
      CHECK(group.receive(3, 1, 0, 4).data == "twos");
      continue;
    }
    CHECK(second.data == "twos" && is_over(two));
    if (why == Why::Misfit || why == Why::OfAnotherType) {
      CHECK(first.failure->kind == Kind::Mismatch && one.failure->kind == Kind::Mismatch);
    } else if (why == Why::AfterLarge) {
      CHECK(first.has_begun && one.has_begun && first.peer == 1);
    } else {
      CHECK(first.data == "ones" && is_over(one));
    }
  }
}

void receives_from_any_source_may_be_others() {
  Group group;
  auto& any = group.receive(3, -1, 0, 4);
  auto& from_1 = group.receive(3, 1, 0, 4);
  group.hear({3, 0});
  group.hear({3, 0});
  group.send(1, 3, 0, "ones");
  group.hear(Group::direct(1, 3));
  CHECK(any.ends == 0 && from_1.ends == 0);
  group.send(0, 3, 0, "zero");  // rank 0 hears of it first
  group.hear_all({0, 3});
  CHECK(any.data == "zero" && from_1.data == "ones");
  group.hear_everything();
  CHECK(any.ends == 1 && from_1.ends == 1 && !group.has_messages());
}

void what_a_rank_that_left_has_sent_is_let_go() {
  Group group;
  group.send(1, 3, 0, "data");
  group.leave(1);
  group.hear_everything();
  auto& received = group.receive(3, 1, 0, 4);
  group.hear_everything();
  CHECK(received.ends == 1 && received.failure && received.failure->kind == Kind::RankLost);
}

void so_much_of_a_rank_is_on_its_way() {
  Group group;
  const std::string large(kLittleAmongWords, 'l');
  std::vector<Ending*> sent, received;
  for (int i = 0; i < 5; ++i) {
    sent.push_back(&group.send(1, i % 2 == 0 ? 3 : 4, 0, large));
  }
  for (int i = 0; i < 5; ++i) {
    received.push_back(&group.receive(i % 2 == 0 ? 3 : 4, 1, 0, large.size()));
  }
  group.hear_everything();
  for (size_t i = 0; i < 5; ++i) {
    CHECK(is_over(*sent[i]) == (i < 4) && sent[i]->has_begun == (i == 4));
    CHECK(is_over(*received[i]) == (i < 4) && received[i]->has_begun == (i == 4));
  }
}

void ends_on_one_host_and_rank_0_have_no_line() {
  Group group;
  for (const auto& [from, to, most] :
       std::vector<std::tuple<int, int, size_t>>{{1, 3, kLittleAmongWords},
                                                 {1, 0, kLittleAmongWords},
                                                 {2, 0, kLittleMessage},
                                                 {1, 5, kLittleMessage},
                                                 {5, 1, kLittleMessage},
                                                 {1, 2, kLittleOnDetour},
                                                 {1, -1, kLittleOnDetour}}) {
    CHECK(group.calls(from).most_with_words(to) == most);
  }
  for (const auto& [from, to, is_direct] : std::vector<std::tuple<int, int, bool>>{{1, 4, true},
                                                                                   {5, 4, true},
                                                                                   {4, 5, true},
                                                                                   {2, 1, false},
                                                                                   {0, 4, false},
                                                                                   {4, 0, false},
                                                                                   {5, 0, false}}) {
    auto& sent = group.send(from, to, 0, "data");
    auto& received = group.receive(to, from, 0, 4);
    CHECK(group.hear(Group::direct(from, to)) == is_direct);
    group.hear_everything();
    CHECK(is_over(sent) && received.data == "data");
  }
}

void deliveries_that_make_no_sense_are_refused() {
  const Roster roster = roster_of(3, kHosts);
  const Posted right{.rank = 1, .number = 4, .sends = true, .peer = 3, .bytes = 4, .data = "data"};
  const auto add = [&](const Posted& send) {
    Deliveries deliveries(roster);
    deliveries.add(right);
    deliveries.add(send);
  };
  const auto changed = [&](int rank, uint64_t number, int peer) {
    Posted send = right;
    send.rank = rank;
    send.number = number;
    send.peer = peer;
    return send;
  };
  add(changed(1, 5, 3));
  for (const auto& wrong :
       {changed(1, 4, 3), changed(1, 3, 3), changed(1, 5, 4), changed(0, 5, 3), changed(3, 5, 3)}) {
    refused([&] { add(wrong); });
  }
  // So much is held of a rank.
  Deliveries deliveries(roster);
  Posted large = right;
  large.bytes = kLittleMessage;
  large.data = std::string(kLittleMessage, 'x');
  deliveries.post({.number = 1, .peer = -1, .bytes = kLittleMessage + 1});
  deliveries.post({.number = 2, .peer = -1, .bytes = kLittleMessage});
  deliveries.post({.number = 3, .peer = 0, .bytes = kLittleMessage});  // by rank 0
  for (size_t held = 0; held < (size_t{1} << 22) + 2 * kLittleMessage; held += kLittleMessage) {
    ++large.number;
    deliveries.add(large);
  }
  ++large.number;
  refused([&] { deliveries.add(large); });
  CHECK(!deliveries.grant(2, {1, 5, Delivered::Data}));
  refused([&] { deliveries.add(large); });  // one less is held, and one less expected
  // Another message than the one that has come, or one that came otherwise.
  for (const auto& other :
       {OtherEnd{1, 5, Delivered::Data}, OtherEnd{2, 4, Delivered::Data}, OtherEnd{}}) {
    Deliveries some(roster);
    some.post({.number = 1, .peer = 1, .bytes = 4});
    some.add(right);
    CHECK(some.take_received().size() == 1);
    refused([&] { some.grant(1, other); });
  }
  for (const auto& other : {OtherEnd{1, 5, Delivered::Data}, OtherEnd{1, 4, Delivered::Words}}) {
    Deliveries some(roster);
    some.post({.number = 1, .peer = -1, .bytes = 4});
    some.add(right);
    refused([&] { some.grant(1, other); });
  }
  Deliveries some(roster);
  some.post({.number = 1, .peer = 1, .bytes = 4});
  CHECK(!some.grant(1, {1, 4, Delivered::Data}));
  Posted without = right;
  without.data.reset();
  refused([&] { some.add(without); });
}

void words_of_other_messages_are_refused() {
  const auto is_taken = [](const Posted& send, int from, int to) {
    Payload words = encoded_delivery(send);
    const Posted taken = take_delivery(words, from, to);
    return taken.rank == from && taken.peer == to && taken.number == send.number;
  };
  const Posted right{.rank = 1, .number = 4, .sends = true, .peer = 3};
  CHECK(is_taken(right, 1, 3));
  refused([&] { is_taken(right, 1, 4); });
  refused([&] { is_taken({.rank = 1, .peer = 3}, 1, 3); });
  // Rank 0 knows who has lines.
  const Roster roster = roster_of(0, kHosts);
  Coordinator coordinator(roster, [](int, Says, const Payload&) {});
  for (const int to : {3, 5, 0, 2}) {
    Payload words = encoded({.sends = true, .peer = to, .delivered = Delivered::Words}).put(1);
    const auto hear = [&] { coordinator.hear(1, kPosting, words); };
    to == 3 || to == 5 ? hear() : refused(hear);
  }
}

void a_message_is_withdrawn_once() {
  const Roster roster = roster_of(3, kHosts);
  const Posted send{.rank = 1, .number = 4, .sends = true, .peer = 3, .bytes = 4, .data = "data"};
  const OtherEnd other{1, 4, Delivered::Data};
  {
    // It was received, of which rank 0 hears later.
    Deliveries deliveries(roster);
    deliveries.post({.number = 1, .peer = 1, .bytes = 4});
    deliveries.add(send);
    deliveries.withdraw(other, 0);
    CHECK(!deliveries.grant(1, other) && deliveries.take_received().size() == 1);
    CHECK(deliveries.take_withdrawn().empty());
  }
  {
    // It is to be received, of which rank 0 hears later.
    Deliveries deliveries(roster);
    deliveries.post({.number = 1, .peer = -1, .bytes = 4});
    deliveries.withdraw(other, 0);
    CHECK(!deliveries.grant(1, other));
    deliveries.add(send);
    CHECK(deliveries.take_received().size() == 1 && deliveries.take_withdrawn().empty());
  }
  {
    Deliveries deliveries(roster);
    deliveries.withdraw(other, 0);
    CHECK(deliveries.take_withdrawn() == std::vector{Deliveries::Send(1, 4)});
    deliveries.add(send);
    deliveries.post({.number = 1, .peer = 1, .bytes = 4});
    CHECK(deliveries.take_received().empty() && deliveries.take_withdrawn().empty());
  }
}

struct Chances {
  bool of_late_sends;
  bool of_late_receives;
};

// Any messages in any order: each end ends once, data is that of a message that was sent to who
// receives it, in the order of sends, and no rank refuses what another one says.
void in_any_order(uint64_t seed, const Chances& chances) {
  std::mt19937_64 engine(seed);
  const auto below = [&](int limit) {
    return static_cast<int>(engine() % static_cast<uint64_t>(limit));
  };
  const auto rank = [&] { return below(Group::size()); };
  Group group;
  std::vector<Ending*> sends, receives;
  std::map<std::string, Ending*> by_data;
  constexpr int kTags = 2;
  for (int step = 0; step < 400; ++step) {
    const auto timeout = [&](bool can_be_late) {
      return can_be_late && below(3) == 0 ? 0ms : std::chrono::milliseconds(1h);
    };
    const int what = step < 250 ? below(10) : 9;
    const int one = rank(), other = (one + 1 + below(Group::size() - 1)) % Group::size();
    const int64_t tag = below(kTags);
    const uint64_t bytes = below(8) == 0 ? 9 : 8;
    if (what < 2) {
      auto data = std::to_string(100000 + step);
      data.resize(bytes, 'x');
      sends.push_back(
          &group.send(one, other, tag, data, below(5) != 0, timeout(chances.of_late_sends)));
      by_data[data] = sends.back();
    } else if (what < 4) {
      receives.push_back(&group.receive(one, below(4) == 0 ? -1 : other, tag, bytes,
                                        timeout(chances.of_late_receives)));
    } else if (what == 4) {
      group.look(one);
    } else if (what == 5) {
      group.answer();
    } else if (const auto routes = group.routes(); !routes.empty()) {
      group.hear(routes[static_cast<size_t>(below(static_cast<int>(routes.size())))]);
    }
  }
  for (int r = 0; r < Group::size(); ++r) {
    group.look(r);
  }
  for (int times = 0; times < 3; ++times) {
    group.hear_everything();
    group.answer();
  }
  // Whoever sends meets somebody.
  for (const auto* ending : sends) {
    for (size_t others = 0; ending->ends == 0; ++others) {
      CHECK(others <= sends.size());
      receives.push_back(&group.receive(ending->peer, -1, ending->tag, ending->bytes));
      group.hear_everything();
    }
  }
  std::set<std::string> received;
  std::map<std::tuple<int, int, int64_t>, std::string> last;
  std::map<std::tuple<int, int, int64_t>, std::pair<int, int>> begun;
  for (const auto* ending : receives) {
    CHECK(ending->ends <= 1);
    if (ending->data) {
      const auto* sent = by_data.at(*ending->data);
      CHECK(sent->rank == ending->peer && sent->tag == ending->tag);
      CHECK(sent->data.has_value() || chances.of_late_sends);
      CHECK(received.insert(*ending->data).second);
    } else if (ending->has_begun) {
      ++begun[{ending->peer, ending->rank, ending->tag}].first;
    }
  }
  for (const auto* ending : sends) {
    CHECK(ending->ends == 1);
    if (ending->has_begun) {
      ++begun[{ending->rank, ending->peer, ending->tag}].second;
    }
  }
  for (const auto& [channel, counts] : begun) {
    CHECK(counts.first == counts.second);
  }
  if (!chances.of_late_receives) {
    for (const auto& [data, sent] : by_data) {
      CHECK(!sent->data || received.count(data) == 1);
    }
  }
}

void messages_are_those_that_rank_0_matches() {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    in_any_order(seed, {});
    in_any_order(seed, {.of_late_sends = true, .of_late_receives = false});
    in_any_order(seed, {.of_late_sends = false, .of_late_receives = true});
    in_any_order(seed, {.of_late_sends = true, .of_late_receives = true});
  }
}

const std::vector<Test> kTests = {
    TEST(a_message_is_there_before_rank_0_has_heard_of_it),
    TEST(rank_0s_word_waits_for_the_data),
    TEST(what_is_not_sure_waits_for_rank_0),
    TEST(receives_from_any_source_may_be_others),
    TEST(what_a_rank_that_left_has_sent_is_let_go),
    TEST(so_much_of_a_rank_is_on_its_way),
    TEST(ends_on_one_host_and_rank_0_have_no_line),
    TEST(deliveries_that_make_no_sense_are_refused),
    TEST(words_of_other_messages_are_refused),
    TEST(a_message_is_withdrawn_once),
    TEST(messages_are_those_that_rank_0_matches),
};

}  // namespace

int main(int count, char** names) {
  return run_tests(kTests, count, names);
}
