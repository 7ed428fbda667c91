// What ranks give to collectives of little data, and what is taken of it. Run without arguments it
// runs every test; with arguments, those named.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "agreement_ranks.h"
#include "backends/checked/contribution.h"
#include "backends/checked/coordinator.h"
#include "backends/checked/host_sums.h"
#include "backends/checked/protocol.h"
#include "backends/checked/rank_progress.h"
#include "passed_on.h"
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

const ReducedBy kSumOfInts{DType::Int32, ReduceOp::Sum};

std::string ints(const std::vector<int32_t>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(int32_t)};
}

Contribution to_reduce(const std::vector<int32_t>& values, const std::vector<int64_t>& parts = {}) {
  const auto bytes = ints(values);
  return (parts.empty() ? Contribution(bytes) : Contribution(bytes, parts))
      .to_be_reduced(kSumOfInts);
}

void what_is_to_be_reduced_is_taken_so() {
  for (const auto& given : {to_reduce({1, 2}), to_reduce({}), to_reduce({1, 2, 3}, {4, 0, 8})}) {
    for (const auto& passed : {given, given.of(std::vector<int>{0, 2})}) {
      Payload words;
      put(words, passed).put(7);
      const auto taken = take_contribution(words, 3);
      CHECK(taken && taken->fits(passed) && of_all(*taken, 3) == of_all(given, 3));
      CHECK(taken->reduced_by() == kSumOfInts && words.number() == 7);
    }
  }
  Payload words;
  CHECK(take_contribution(put(words, Contribution::in_first()), 3)->is_in_first());
}

void what_cannot_be_reduced_is_refused() {
  const auto reduced = [](DType dtype, ReduceOp op, const std::string& bytes,
                          const std::vector<int64_t>& parts = {}) {
    (parts.empty() ? Contribution(bytes) : Contribution(bytes, parts)).to_be_reduced({dtype, op});
  };
  reduced(DType::Float, ReduceOp::Sum, "12345678");
  reduced(DType::Float, ReduceOp::Sum, "12345678", {4, 0, 4});
  refused([&] { reduced(DType::Float, ReduceOp::Sum, "123456"); });
  refused([&] { reduced(DType::Float, ReduceOp::Sum, "12345678", {3, 1, 4}); });
  refused([&] { reduced(DType::Float, ReduceOp::Band, "12345678"); });
  refused([&] { reduced(DType::Float, ReduceOp::Avg, "12345678"); });
  refused([&] { reduced(DType::Float, ReduceOp::PremulSum, "12345678"); });
  refused([&] { reduced(DType::Bytes, ReduceOp::Sum, "12345678"); });
  for (const DType rounded : {DType::Half, DType::BFloat16, DType::ComplexHalf}) {
    refused([&] { reduced(rounded, ReduceOp::Sum, "12345678"); });
  }
  // Over a line, too, and once.
  const auto take = [](const std::vector<int64_t>& numbers) {
    Payload words;
    for (const int64_t number : numbers) {
      words.put(number);
    }
    words.put_data("12345678");
    return take_contribution(words, 3);
  };
  constexpr int64_t kWhole = 1, kToReduce = 3, kUnknown = 5;
  const auto dtype = static_cast<int64_t>(DType::Float), op = static_cast<int64_t>(ReduceOp::Sum);
  CHECK(take({kToReduce, dtype, op, kWhole})->reduced_by().has_value());
  refused([&] { take({kToReduce, dtype, op, kToReduce, dtype, op, kWhole}); });
  refused([&] { take({kToReduce, dtype, static_cast<int64_t>(ReduceOp::Avg), kWhole}); });
  refused([&] { take({kToReduce, dtype, 1000, kWhole}); });
  refused([&] { take({kToReduce, 1000, op, kWhole}); });
  refused([&] { take({kUnknown}); });
}

const std::vector<std::vector<int>> kHosts = {{0, 2}, {1}, {3, 4, 5}};

using Calls = std::vector<std::pair<int, Calling>>;

Calling& call_of(int rank, Calls& calls) {
  return std::find_if(calls.begin(), calls.end(), [rank](auto& one) { return one.first == rank; })
      ->second;
}

void hosts_are_reduced_first_and_then_all() {
  const auto called = [](int rank, const Contribution& data, int64_t count = 6) {
    return std::pair<int, Calling>(rank, {summed(count), data, 1});
  };
  // Of each rank for each: a part may be empty.
  const std::vector<int64_t> parts = {4, 0, 4, 8, 4, 0};
  const auto of = [&](int rank) {
    return to_reduce({rank, 10 * rank, 100 * rank, 1000 * rank, 7}, parts);
  };
  std::vector<Contribution> raw, some, all;
  for (int rank = 0; rank < 6; ++rank) {
    raw.push_back(of(rank));
  }
  some = all = raw;
  for (const auto& ranks : kHosts) {
    Calls calls;
    for (const int rank : ranks) {
      calls.push_back(called(rank, of(rank)));
    }
    reduce_on_host(calls);
    for (const int rank : ranks) {
      const auto& data = *call_of(rank, calls).data;
      CHECK(data.is_in_first() == (rank != ranks.front()));
      all[static_cast<size_t>(rank)] = data;
      if (ranks.front() == 3) {
        some[static_cast<size_t>(rank)] = data.is_in_first() ? data : data.of(kHosts[1]);
      }
    }
  }
  CHECK(all[3].of(3) == ints({1200, 12000}) && all[3].of(4) == ints({21}));
  // To one host its parts alone are passed on.
  CHECK(some[3].of(0).empty() && *reduced(some, kHosts, 1) == ints({}));
  const std::vector<std::string> expected = {ints({15}),          ints({}),   ints({150}),
                                             ints({1500, 15000}), ints({42}), ints({})};
  for (int rank = 0; rank < 6; ++rank) {
    CHECK(*reduced(raw, kHosts, rank) == expected[static_cast<size_t>(rank)]);
    CHECK(*reduced(all, kHosts, rank) == expected[static_cast<size_t>(rank)]);
  }

  // Of parts that differ ranks say different things.
  Calls uneven{called(3, to_reduce({1, 2}), 6), called(4, to_reduce({10, 20}), 7)};
  reduce_on_host(uneven);
  CHECK(call_of(3, uneven).data->bytes() == ints({11, 22}) &&
        call_of(4, uneven).data->is_in_first());

  // What does not fit together stays as it is.
  const auto stays = [&](const Calls& calls) {
    auto after = calls;
    reduce_on_host(after);
    for (const auto& [rank, call] : calls) {
      const auto& data = call_of(rank, after).data;
      CHECK(data.has_value() == call.data.has_value());
      CHECK(!data || (data->bytes() == call.data->bytes() && !data->is_in_first()));
    }
  };
  const auto one = to_reduce({1, 2}), whole = Contribution(ints({1, 2}));
  stays({called(3, one)});
  stays({called(3, whole), called(4, whole)});
  stays({called(3, one), called(4, whole)});
  stays({called(3, one), called(4, to_reduce({1}))});
  stays({called(3, one), called(4, to_reduce({1, 2}, {0, 0, 4, 4, 0, 0}))});
  auto without_data = Calls{called(3, one), called(4, one)};
  call_of(4, without_data).data.reset();
  stays(without_data);
  const auto of_all_but = [&](size_t rank, const Contribution& other) {
    std::vector<Contribution> given(6, one);
    given[rank] = other;
    return reduced(given, kHosts, 0);
  };
  CHECK(*of_all_but(0, one) == ints({6, 12}));
  CHECK(!of_all_but(4, whole) && !of_all_but(0, whole) && !of_all_but(1, to_reduce({1})));
  CHECK(!of_all_but(4, Contribution::in_first()) && !of_all_but(1, Contribution::in_first()));
  CHECK(!reduced({one, one}, {}, 0));
}

void values_that_are_not_aligned_are_reduced() {
  const std::string bytes = "x" + ints({1, 2, 3});
  const auto shifted = SharedBytes(bytes).part(1, bytes.size() - 1);
  const auto given = Contribution(shifted).to_be_reduced(kSumOfInts);
  CHECK(*reduced({given, given, given}, {{0, 1}, {2}}, 0) == ints({3, 6, 9}));
}

// Who says that its values are in another's is the one who is passed on with it.
void a_call_with_the_data_of_another_is_refused() {
  const auto call = [](const Contribution& data) { return encoded(Calling{summed(6), data, 1}); };
  const auto in_first = call(Contribution::in_first()), sum = call(to_reduce({1})),
             whole = call(Contribution("data"));
  refused([&] {
    auto words = in_first;
    CallReader(4, 2).take(words);
  });
  const auto take = [](const std::vector<Payload>& calls) {
    auto words = together(2, calls);
    return CallReader(4, 2).take_relayed(words, [](int) { return true; });
  };
  CHECK(take({sum, in_first})[1].second.data->is_in_first());
  refused([&] { take({in_first, sum}); });
  refused([&] { take({in_first, in_first}); });
  refused([&] { take({whole, in_first}); });
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
      CHECK(take_all(words, 3).front() == data);  // the result alone
      refused([&] { take_all(words, 3); });
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
  const auto take = [](OpType type, size_t bytes, size_t hosts, bool is_reduced = false) {
    auto called = summed(6);
    called.op_type = type;
    Contribution data(std::string(bytes, 'x'));
    if (is_reduced) {
      data = std::move(data).to_be_reduced({DType::UInt8, ReduceOp::Sum});
    }
    Payload words = encoded(Calling{called, data, 1});
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
  // What leaders reduce is as much as that of one rank of each host.
  for (const auto& [type, most] :
       {std::pair(OpType::AllReduce, kMostData / 2), std::pair(OpType::ReduceScatter, kMostData)}) {
    take(type, most, 2, true);
    refused([&, type = type, most = most] { take(type, most + 1, 2, true); });
    refused([&, type = type] { take(type, kMostData / 4 + 1, 0, true); });
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
    TEST(what_is_to_be_reduced_is_taken_so),
    TEST(what_cannot_be_reduced_is_refused),
    TEST(hosts_are_reduced_first_and_then_all),
    TEST(values_that_are_not_aligned_are_reduced),
    TEST(a_call_with_the_data_of_another_is_refused),
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
