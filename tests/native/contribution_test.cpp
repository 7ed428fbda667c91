// What ranks give to collectives of little data, and what is taken of it. Run without arguments it
// runs every test; with arguments, those named.

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "agreement_ranks.h"
#include "backends/checked/contribution.h"
#include "backends/checked/coordinator.h"
#include "backends/checked/protocol.h"
#include "backends/checked/rank_progress.h"
#include "program.h"

using namespace c10d_ext;

namespace {

std::vector<std::string> of_all(const Contribution& contribution, int ranks) {
  std::vector<std::string> all;
  for (int rank = 0; rank < ranks; ++rank) {
    all.emplace_back(contribution.of(rank));
  }
  return all;
}

using Texts = std::vector<std::string>;

void what_is_given_is_what_is_taken() {
  const Contribution whole("abcd"), nothing(""), parts("abcd", {1, 0, 3}),
      even("abcdef", {2, 2, 2}), empty("", {0, 0, 0});
  for (const auto& [given, expected] :
       std::vector<std::pair<Contribution, Texts>>{{whole, {"abcd", "abcd", "abcd"}},
                                                   {nothing, {"", "", ""}},
                                                   {parts, {"a", "", "bcd"}},
                                                   {even, {"ab", "cd", "ef"}},
                                                   {empty, {"", "", ""}}}) {
    Payload words;
    put(words, given).put(7);
    const auto taken = take_contribution(words, 3);
    CHECK(taken && of_all(*taken, 3) == expected && taken->has_parts() == given.has_parts());
    CHECK(words.number() == 7);
  }
  Payload words;
  put(words, std::optional<Contribution>());
  CHECK(!take_contribution(words, 3));
}

void much_data_is_passed_on_without_a_copy() {
  const SharedBytes much(std::string(5000, 'm')), more(std::string(6000, 'n')), little("abc");
  const Payload words = Payload().put(1).put_data(much).put_data(little).put_data(more).put(2);
  CHECK(words.attached().size() == 2 && words.words().size() < 100);
  Payload onward = Payload().put(7).put(words);
  CHECK(onward.number() == 7 && onward.number() == 1);
  const auto first = onward.data();
  CHECK(first.data() == much.data() && first == much && onward.data() == little);
  CHECK(onward.data().data() == more.data() && onward.number() == 2);
  // As it comes over a line, in one piece, where it stays.
  const SharedBytes all(std::string(5000, 'm') + std::string(6000, 'n'));
  Payload heard(words.words(), all);
  CHECK(heard.number() == 1 && heard.data().data() == all.data() && heard.data() == little);
  CHECK(heard.data() == more && heard.number() == 2);
}

void data_that_is_not_there_is_refused() {
  for (const auto& attached : {SharedBytes(), SharedBytes(std::string(4999, 'm'))}) {
    Payload words(Payload().put(5000).put(1).words(), attached);
    refused([&] { words.data(); });
  }
  for (const int64_t size : {int64_t{-1}, int64_t{4}, int64_t{1} << 62}) {
    Payload words(Payload().put(size).words() + "abc");
    refused([&] { words.data(); });
  }
}

void little_data_outlives_the_words_it_came_with() {
  std::vector<SharedBytes> taken;
  {
    Payload words;
    words.put("first").put_data("ab").put(7).put_data("").put_data("cde");
    CHECK(words.text() == "first");
    taken.push_back(words.data());
    Payload copy = words;
    CHECK(copy.number() == 7 && copy.data().empty() && copy.data() == "cde");
    copy.expect_end();
    CHECK(words.number() == 7);
    words.put_data("fg").put("last");  // behind what was handed out
    Payload moved = std::move(words);
    for (int i = 0; i < 3; ++i) {
      taken.push_back(moved.data());
    }
    CHECK(moved.text() == "last");
    moved.expect_end();
  }
  CHECK((taken == std::vector<SharedBytes>{"ab", "", "cde", "fg"}));
}

// Who holds a part would hold it all.
void what_goes_on_behind_a_sentence_is_refused() {
  const std::string data = "data";
  const auto call = [&](const std::string& more) {
    return encoded(Calling{summed(6), Contribution(data), 1}).put(Payload(more));
  };
  const Posted send{.number = 1, .sends = true, .peer = 1, .bytes = 4, .data = data};
  const Posted receive{.rank = 1, .number = 1, .peer = 0, .bytes = 4};
  for (const std::string more : {"", "x", "more words"}) {
    const auto is_taken = [&](const auto& take) { more.empty() ? take() : refused(take); };
    const auto said = [&](Payload words) { return words.put(Payload(more)); };
    is_taken([&] {
      auto words = said(Payload().put(1).put_data(data));
      CHECK(take_all(words, 1).front() == data);
    });
    is_taken([&] {
      auto words = said(encoded_delivery(send));
      CHECK(take_delivery(words, 0, 1).data == data);
    });
    is_taken([&] {
      auto words = said(encoded_wanted(receive));
      take_wanted(words, 0, 2);
    });
    is_taken([&] {
      auto words = call(more);
      const Roster roster({0, 2, "test"}, {Member(), Member()});
      RankProgress(roster).hear_call(1, words);
    });
    is_taken([&] {
      auto words = said(Payload().put(1).put(0).put(call("")));
      CallReader(2, 2).take_relayed(words, [](int) { return true; });
    });
    is_taken([&] {
      auto words = Payload().put(encoded(summed(6)).put(Payload(more)).words());
      words.put(0).put(1);
      CallReader(2, 2).take(words);
    });
    is_taken([&] {
      const Roster roster({0, 2, "test"}, {Member(), Member()});
      Coordinator rank_0(roster, [](int, Says, const Payload&) {});
      auto words = said(encoded(Posted{.sends = true, .peer = 0, .bytes = 4, .data = data}).put(1));
      rank_0.hear(1, kPosting, words);
    });
  }
}

// The same.
void data_that_no_word_is_about_is_refused() {
  const std::string little(5000, 'm'), much(9000, 'm');
  for (const auto& attached : {little, much}) {
    const auto said = [&](const Payload& words) { return Payload(words.words(), attached); };
    const auto is_taken = [&](const auto& take) { attached == little ? take() : refused(take); };
    is_taken([&] {
      auto words = said(Payload().put(1).put_data(little));
      CHECK(take_data(words) == little);
    });
    is_taken([&] {
      auto words = said(Payload().put(1).put_data(little));
      CHECK(take_all(words, 1).front() == little);
    });
    is_taken([&] {
      const Roster roster({0, 2, "test"}, {Member(), Member()});
      RankProgress progress(roster);
      auto words = said(encoded(Calling{summed(6), Contribution(little), 1}));
      progress.hear_call(1, words);
    });
  }
}

void some_ranks_parts_are_passed_on() {
  const Contribution parts("abcdefg", {1, 0, 3, 2, 1});
  CHECK((of_all(parts.of(std::vector<int>{4, 2}), 5) == Texts{"", "", "bcd", "", "g"}));
  CHECK((of_all(parts.of(std::vector<int>{}), 5) == Texts(5)));
  CHECK((of_all(Contribution("ab").of(std::vector<int>{1}), 2) == Texts{"ab", "ab"}));
}

void parts_that_are_none_are_refused() {
  const auto take = [](const std::vector<int64_t>& runs, const std::string& bytes) {
    Payload words;
    words.put(2).put(runs).put(bytes);
    return take_contribution(words, 3);
  };
  CHECK(take({1, 2, 2, 1}, "abcd")->of(0) == "ab" && take({1, 2, 2, 1}, "abcd")->of(2) == "d");
  for (const auto& runs : std::vector<std::vector<int64_t>>{{2, 2},  // too few
                                                            {4, 1},  // too many
                                                            {3, 1},  // less than there is
                                                            {3, 2},  // more
                                                            {1, -1, 1, 5, 1, 0},  // of no size
                                                            {-1, 4, 4, 1},        // of no rank
                                                            {0, 4, 3, 1},         //
                                                            {1, 2, 2, 1, 1},      // half a run
                                                            {1, 2, 1, 2, int64_t{1} << 62, 0},
                                                            {1, 2, 2, int64_t{1} << 62}}) {
    refused([&] { take(runs, "abcd"); });
  }
}

void too_much_data_is_refused() {
  // What a rank of four on two hosts gives at most; and where rank 0 passes it on.
  const auto take = [](OpType type, size_t bytes, size_t hosts) {
    auto called = summed(6);
    called.op_type = type;
    Payload words = encoded(Calling{called, Contribution(std::string(bytes, 'x')), 1});
    CallReader(4, hosts).take(words);
  };
  for (const auto& [type, most] :
       std::vector<std::pair<OpType, size_t>>{{OpType::AllReduce, kMostData / 4},
                                              {OpType::Gather, kMostData / 4},
                                              {OpType::Broadcast, kMostData},
                                              {OpType::AllToAll, kMostData / 2},
                                              {OpType::ReduceScatter, kMostData / 2},
                                              {OpType::Scatter, kMostData * 2}}) {
    take(type, most, 2);
    refused([&, type = type, most = most] { take(type, most + 1, 2); });
  }
  take(OpType::AllToAll, kMostData / 4, 0);
  refused([&] { take(OpType::AllToAll, kMostData / 4 + 1, 0); });
}

void calls_that_are_alike_share_what_is_said() {
  const auto said = [](const Fingerprint& called, uint64_t seq) {
    return encoded(Calling{called, Contribution("data"), seq});
  };
  CallReader reader(2, 2);
  const auto take = [&](Payload words) { return reader.take(words); };
  const auto first = take(said(summed(6), 1)), second = take(said(summed(6), 2));
  CHECK(first.seq == 1 && second.seq == 2 && second.data->of(0) == "data");
  CHECK(&first.called.fingerprint() == &second.called.fingerprint());
  const auto other = take(said(summed(7), 3));
  CHECK(other.called.fingerprint().count == 7 && !(other.called == first.called));
  CHECK(take(said(summed(6), 4)).called == first.called);
  // What is none does not come to be known.
  auto of_another_group = summed(6);
  of_another_group.root = 2;
  for (int i = 0; i < 2; ++i) {
    refused([&] { take(said(of_another_group, 5)); });
    refused([&] { take(Payload().put("no fingerprint").put(0).put(5)); });
  }
  CHECK(take(said(summed(6), 5)).called == first.called);
}

void calls_that_are_alike_need_not_fit_together() {
  // Each sends one element to rank 0 and two to rank 1, and expects as many from them.
  const auto exchange = [] { return summed(6).exchanged({1, 2}, {1, 2}); };
  const auto found = difference({Called(exchange()), Called(exchange())}, 3);
  CHECK(found && (found->ranks == std::vector<int>{0, 1}));
  CHECK(!difference({Called(summed(6)), Called(summed(6))}, 3));
  CHECK(difference({Called(summed(6)), Called(summed(7))}, 3)->ranks == std::vector<int>{1});
}

const std::vector<Test> kTests = {
    TEST(calls_that_are_alike_share_what_is_said),
    TEST(calls_that_are_alike_need_not_fit_together),
    TEST(what_is_given_is_what_is_taken),
    TEST(much_data_is_passed_on_without_a_copy),
    TEST(data_that_is_not_there_is_refused),
    TEST(little_data_outlives_the_words_it_came_with),
    TEST(what_goes_on_behind_a_sentence_is_refused),
    TEST(data_that_no_word_is_about_is_refused),
    TEST(some_ranks_parts_are_passed_on),
    TEST(parts_that_are_none_are_refused),
    TEST(too_much_data_is_refused),
};

}  // namespace

int main(int count, char** names) {
  return run_tests(kTests, count, names);
}
