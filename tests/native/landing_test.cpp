// Data of messages that comes to the memory of who receives it. Run without arguments it runs every
// test; with arguments, those named.

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "agreement_ranks.h"
#include "backends/checked/protocol.h"
#include "control/frame_reader.h"
#include "one_rank.h"
#include "program.h"

using namespace c10d_ext;
using namespace std::chrono_literals;
using Kind = ErrorKind;

namespace {

// Rank 0's host and two others.
const std::vector<std::string> kHosts{"a", "a", "b", "b", "c", "c"};
constexpr size_t kSize = 100'000, kHalf = kSize / 2;

std::string data_of(char first) {
  std::string data(kSize, first);
  for (size_t i = 0; i < data.size(); ++i) {
    data[i] = static_cast<char>(first + i % 7);
  }
  return data;
}

std::string bytes_of(Says kind, const Payload& words) {
  const Heading heading{static_cast<uint32_t>(words.words().size()), kind, words.attached_bytes()};
  std::string bytes(reinterpret_cast<const char*>(&heading), sizeof(heading));
  bytes += words.words();
  for (const auto& piece : words.attached()) {
    bytes += std::string_view(piece);
  }
  return bytes;
}

// How a message of another rank with data comes to this one: over their own line, to rank 0, or
// with rank 0's word.
struct Way {
  int rank, by, from;
};
const std::vector<Way> kWays{{3, 5, 5}, {0, 4, 4}, {3, 0, 1}};

std::string message(const Way& way, uint64_t number, const std::string& data, int64_t tag = 0) {
  Posted send{.rank = way.from,
              .number = number,
              .sends = true,
              .peer = way.rank,
              .tag = tag,
              .bytes = data.size(),
              .data = data};
  if (way.rank == 0) {
    return bytes_of(kPosting, encoded(send).put(static_cast<int64_t>(number)));
  }
  if (way.by != 0) {
    return bytes_of(kDelivering, encoded_delivery(send));
  }
  Payload words;
  put(words.put(static_cast<int64_t>(number)), {way.from, number, Delivered::Nothing});
  put_data(words, send.data);
  return bytes_of(kGranted, words);
}

// A Speaker writes bytes to one line of a rank, which hears them call by call.
class Speaker {
 public:
  Speaker(Rank& rank, int peer) : rank_(rank), peer_(peer) {}
  void say(std::string_view bytes) {
    CHECK(::send(rank_.line(peer_).fd(), bytes.data(), bytes.size(), 0) ==
          static_cast<ssize_t>(bytes.size()));
    rank_.work();
  }

 private:
  Rank& rank_;
  const int peer_;
};

bool is_at(const Received& received, const std::string& memory) {
  return received.data && received.at == memory.data();
}

std::vector<int> others(int rank) {
  return rank == 0 ? std::vector{1, 2, 3, 4, 5} : std::vector{0, 2, 5};
}

void data_comes_to_where_it_belongs() {
  for (const auto& way : kWays) {
    Rank rank(way.rank, kHosts, others(way.rank));
    const auto data = data_of('a');
    std::string memory(kSize, '-');
    Received received;
    rank.receive(way.from, memory, received);
    const auto bytes = message(way, 1, data);
    Speaker speaker(rank, way.by);
    speaker.say(std::string_view(bytes).substr(0, kHalf));
    CHECK(memory.substr(0, kHalf / 2) == data.substr(0, kHalf / 2) && memory.back() == '-');
    CHECK(!received.data);
    speaker.say(std::string_view(bytes).substr(kHalf));
    CHECK(is_at(received, memory) && memory == data && received.from == way.from);
  }
}

// Two of them in one piece: the second one is not taken for the first one's receive.
void each_of_two_comes_to_its_own() {
  for (const auto& way : kWays) {
    for (const bool is_first_little : {false, true}) {
      Rank rank(way.rank, kHosts, others(way.rank));
      const auto one = is_first_little ? std::string("little") : data_of('a');
      const auto two = data_of('k');
      std::string here(one.size(), '-'), there(kSize, '-');
      Received first, second;
      rank.receive(way.from, here, first);
      rank.receive(way.from, there, second);
      const auto bytes = message(way, 1, one) + message(way, 2, two);
      Speaker speaker(rank, way.by);
      speaker.say(std::string_view(bytes).substr(0, bytes.size() - 1));
      CHECK(first.data == one && there.substr(0, kHalf) == two.substr(0, kHalf));
      CHECK(!second.data);
      speaker.say(std::string_view(bytes).substr(bytes.size() - 1));
      CHECK(is_at(second, there) && there == two);
    }
  }
}

// The memory is its owner's again, and what has come of the message is not lost.
void what_fails_gives_its_memory_back() {
  for (const auto& way : kWays) {
    Rank rank(way.rank, kHosts, others(way.rank));
    const auto data = data_of('a');
    std::string memory(kSize, '-'), later(kSize, '-');
    Received received, next;
    const auto bytes = message(way, 1, data);
    Speaker speaker(rank, way.by);
    rank.receive(way.from, memory, received, way.rank == 0 ? 50ms : kLong);
    speaker.say(std::string_view(bytes).substr(0, kHalf));
    if (way.by == 0) {
      rank.close(0);  // rank 0's word of it is on the same line
    } else if (way.rank == 0) {
      CHECK(eventually([&] {
        rank.work();
        return received.failure.has_value();
      }));
    } else {
      Payload words;
      words.put(1).put(static_cast<int64_t>(Kind::Timeout)).put("late");
      rank.say(0, kDenied, put(words.put(std::vector<int>{5}), OtherEnd()));
    }
    CHECK(received.failure && !received.data);
    memory.assign(kSize, '?');
    if (way.by != 0) {
      speaker.say(std::string_view(bytes).substr(kHalf));
      rank.receive(way.from, later, next);
      CHECK(next.data == data && !is_at(next, later));
    }
    CHECK(memory == std::string(kSize, '?') && !received.data);
  }
}

// It is asked whether the receive is to be given up, while the data comes; then it is, or not.
void what_is_in_doubt_is_kept_apart() {
  for (const bool is_granted : {false, true}) {
    const Way& way = kWays[0];
    Rank rank(way.rank, kHosts, others(way.rank));
    const auto data = data_of('a');
    std::string memory(kSize, '-'), later(kSize, '-');
    Received received, next;
    const auto bytes = message(way, 1, data);
    Speaker speaker(rank, way.by);
    rank.receive(way.from, memory, received, 50ms);
    speaker.say(std::string_view(bytes).substr(0, kHalf));
    CHECK(eventually([&] {
      rank.work();
      return !rank.heard_by(0, kOverdue).empty();
    }));
    speaker.say(std::string_view(bytes).substr(kHalf));
    CHECK(!received.data && !received.failure);
    Payload words = Payload().put(1);
    if (is_granted) {
      put(words, {5, 1, Delivered::Data}).put(0);
      rank.say(0, kGranted, words);
      CHECK(received.data == data);
      continue;
    }
    words.put(static_cast<int64_t>(Kind::Timeout)).put("late").put(std::vector<int>{5});
    rank.say(0, kDenied, put(words, OtherEnd()));
    CHECK(received.failure.has_value());
    memory.assign(kSize, '?');
    rank.receive(way.from, later, next);
    CHECK(next.data == data && memory == std::string(kSize, '?'));
  }
}

// Who receives it is known only once it is here, or it does not fit.
void what_may_be_anothers_does_not_come_at_once() {
  enum class Why { AnySource, BehindAnySource, Misfit, OfAnotherTag, Unposted };
  for (const auto& way : {kWays[0], kWays[1]}) {
    for (const auto why :
         {Why::AnySource, Why::BehindAnySource, Why::Misfit, Why::OfAnotherTag, Why::Unposted}) {
      Rank rank(way.rank, kHosts, others(way.rank));
      const auto data = data_of('a');
      std::string any(kSize, '-'), memory(why == Why::Misfit ? kSize + 1 : kSize, '-');
      const auto untouched = memory;
      Received from_any, received;
      if (why == Why::AnySource || why == Why::BehindAnySource) {
        rank.receive(-1, any, from_any);
      }
      if (why != Why::AnySource && why != Why::Unposted) {
        rank.receive(way.from, memory, received);
      }
      const auto bytes = message(way, 1, data, why == Why::OfAnotherTag ? 1 : 0);
      Speaker speaker(rank, way.by);
      speaker.say(std::string_view(bytes).substr(0, kHalf));
      CHECK(any == std::string(kSize, '-') && memory == untouched);
      speaker.say(std::string_view(bytes).substr(kHalf));
      CHECK(memory == untouched && !received.data);
      if (why == Why::Unposted) {
        rank.receive(way.from, memory, received);
        CHECK(received.data == data);
      }
    }
  }
}

// It waits for rank 0's word, since it does not fit; the next one would.
void what_is_behind_another_message_does_not_come_at_once() {
  const Way& way = kWays[0];
  Rank rank(way.rank, kHosts, others(way.rank));
  std::string memory(kSize, '-');
  Received received;
  rank.receive(way.from, memory, received);
  const auto bytes = message(way, 2, data_of('a'));
  Speaker speaker(rank, way.by);
  speaker.say(message(way, 1, "misfit"));
  speaker.say(std::string_view(bytes).substr(0, kHalf));
  speaker.say(std::string_view(bytes).substr(kHalf));
  CHECK(memory == std::string(kSize, '-') && !received.data);
}

// The sizes are compared again here.
void what_rank_0_grants_wrongly_does_not_come_at_once() {
  const Way& way = kWays[2];
  Rank rank(way.rank, kHosts, others(way.rank));
  std::string memory(kSize + 1, '-');
  Received received;
  rank.receive(way.from, memory, received);
  Speaker(rank, way.by).say(message(way, 1, data_of('a')));
  CHECK(memory == std::string(kSize + 1, '-') && received.data == data_of('a'));
}

// The engine writes the memory from there on, and nobody else.
void what_the_engine_receives_has_its_memory_alone() {
  const Way& way = kWays[0];
  Rank rank(way.rank, kHosts, others(way.rank));
  std::string memory(kSize, '-');
  Received received;
  rank.receive(way.from, memory, received);
  const auto bytes = message(way, 1, data_of('a'));
  Speaker speaker(rank, way.by);
  speaker.say(std::string_view(bytes).substr(0, kHalf));
  Payload words = Payload().put(1);
  rank.say(0, kGranted, put(words, {5, 1, Delivered::Nothing}).put(0));
  CHECK(received.has_begun);
  memory.assign(kSize, '?');
  speaker.say(std::string_view(bytes).substr(kHalf));
  CHECK(memory == std::string(kSize, '?') && !received.data);
}

// The line ends in the middle of a sentence.
void a_line_that_is_lost_leaves_nothing_behind() {
  for (const auto& way : {kWays[0], kWays[1]}) {
    Rank rank(way.rank, kHosts, others(way.rank));
    std::string memory(kSize, '-');
    Received received;
    rank.receive(way.from, memory, received);
    Speaker(rank, way.by).say(std::string_view(message(way, 1, data_of('a'))).substr(0, kHalf));
    CHECK(memory.front() == 'a');
    rank.close(way.by);
    if (way.rank != 0) {
      CHECK(!received.failure);  // rank 0 says what became of it
      rank.close(0);
    }
    CHECK(received.failure && received.failure->kind == Kind::RankLost && !received.data);
    CHECK(std::string_view(memory).substr(0, kHalf / 2) == data_of('a').substr(0, kHalf / 2));
    CHECK(memory.back() == '-');
  }
}

void what_a_rank_said_before_it_ended_is_heard() {
  constexpr int kFrom = 4;
  constexpr size_t kLittle = 10'000;
  Rank rank(0, kHosts, others(0));
  std::string said;
  std::vector<std::string> memory(3, std::string(kLittle, '-'));
  std::vector<Received> received(memory.size());
  for (size_t i = 0; i < memory.size(); ++i) {
    rank.receive(kFrom, memory[i], received[i]);
    said += message({0, kFrom, kFrom}, i + 1, std::string(kLittle, static_cast<char>('a' + i)));
  }
  CHECK(::send(rank.line(kFrom).fd(), said.data(), said.size(), 0) ==
        static_cast<ssize_t>(said.size()));
  rank.end(kFrom);
  for (size_t i = 0; i < memory.size(); ++i) {
    CHECK(!received[i].failure);
    CHECK(received[i].data == std::string(kLittle, static_cast<char>('a' + i)));
  }
}

const std::vector<Test> kTests = {
    TEST(data_comes_to_where_it_belongs),
    TEST(each_of_two_comes_to_its_own),
    TEST(what_fails_gives_its_memory_back),
    TEST(what_is_in_doubt_is_kept_apart),
    TEST(what_may_be_anothers_does_not_come_at_once),
    TEST(what_is_behind_another_message_does_not_come_at_once),
    TEST(what_rank_0_grants_wrongly_does_not_come_at_once),
    TEST(what_the_engine_receives_has_its_memory_alone),
    TEST(a_line_that_is_lost_leaves_nothing_behind),
    TEST(what_a_rank_said_before_it_ended_is_heard),
};

}  // namespace

int main(int count, char** names) {
  return run_tests(kTests, count, names);
}
