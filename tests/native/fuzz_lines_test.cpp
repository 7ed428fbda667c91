// What ranks say to each other over lines, changed at random: whoever hears it takes it, or throws
// std::runtime_error, and does nothing else. C10D_EXT_FUZZ_SECONDS: for how long.

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "backends/checked/coordinator.h"
#include "backends/checked/open_calls.h"
#include "backends/checked/participant.h"
#include "backends/checked/protocol.h"
#include "backends/checked/relay.h"
#include "backends/checked/roster.h"
#include "control/connection.h"
#include "program.h"

using namespace c10d_ext;

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRanks = 6;  // two on each host

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int64_t below(int64_t limit) {
    return static_cast<int64_t>(engine_() % static_cast<uint64_t>(limit));
  }
  bool one_in(int64_t times) {
    return below(times) == 0;
  }
  // Small ones, those at the ends of ranges, and any.
  int64_t number() {
    constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
    constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
    const std::vector<int64_t> all{0,
                                   1,
                                   -1,
                                   2,
                                   3,
                                   4,
                                   5,
                                   7,
                                   255,
                                   256,
                                   65536,
                                   INT32_MAX,
                                   kMin,
                                   kMax,
                                   kMin + 1,
                                   kMax - 1,
                                   INT32_MIN,
                                   UINT32_MAX,
                                   static_cast<int64_t>(engine_())};
    return all[static_cast<size_t>(below(static_cast<int64_t>(all.size())))];
  }
  std::string text() {
    std::string text;
    for (int64_t left = below(40); left > 0; --left) {
      text += static_cast<char>(below(256));
    }
    return text;
  }
  // At times as much as is attached.
  std::string data() {
    return (one_in(4) ? std::string(static_cast<size_t>(4090 + below(20)), 'x') : "") + text();
  }

 private:
  std::mt19937_64 engine_;
};

std::string changed(std::string bytes, Random& random) {
  for (int64_t changes = random.below(4); changes > 0; --changes) {
    const auto at =
        bytes.empty() ? 0 : static_cast<size_t>(random.below(static_cast<int64_t>(bytes.size())));
    switch (random.below(5)) {
      case 0:
        if (!bytes.empty()) {
          bytes[at] = static_cast<char>(random.below(256));
        }
        break;
      case 1:
        bytes.resize(at);
        break;
      case 2:
        bytes += random.text();
        break;
      case 3:
        if (const size_t word = at / 8 * 8; word + 8 <= bytes.size()) {
          const int64_t number = random.number();
          std::memcpy(bytes.data() + word, &number, sizeof(number));
        }
        break;
      default:
        bytes.insert(at, random.text());
        break;
    }
  }
  return bytes;
}

Payload changed(const Payload& words, Random& random) {
  std::string attached;
  for (const auto& piece : words.attached()) {
    attached += piece;
  }
  return Payload(changed(words.words(), random), changed(attached, random));
}

std::vector<int64_t> sizes(Random& random) {
  return std::vector<int64_t>(static_cast<size_t>(random.one_in(3) ? random.below(9) : kRanks),
                              random.below(100));
}

// Of a rank: the same for all, or parts.
Contribution given(Random& random) {
  const std::string bytes = random.data();
  if (random.one_in(2)) {
    return Contribution(bytes);
  }
  std::vector<int64_t> parts(kRanks);
  for (auto left = static_cast<int64_t>(bytes.size()); auto& part : parts) {
    part = &part == &parts.back() ? left : random.below(left + 1);
    left -= part;
  }
  return {bytes, parts};
}

// Of a message that is about the last of its rank.
OtherEnd other_end(uint64_t number, Random& random) {
  return {static_cast<int>(random.below(kRanks)), number - static_cast<uint64_t>(random.below(3)),
          static_cast<Delivered>(random.below(3))};
}

// What a sender says to the receiver.
Payload delivery(int to, uint64_t number, Random& random) {
  Posted send{.number = number,
              .sends = true,
              .peer = to,
              .tag = random.below(3),
              .bytes = static_cast<uint64_t>(random.below(3))};
  if (!random.one_in(4)) {
    send.data = std::string(send.bytes, 'x');
  }
  return encoded_delivery(send);
}

// A sentence that makes sense, of a rank whose next call and message are `seq` and `number`.
Payload sentence(uint32_t kind, uint64_t seq, uint64_t number, Random& random) {
  switch (kind) {
    case kCalling: {
      Fingerprint called;
      called.op_type = OpType::Barrier;
      called.unit = "float32";
      if (random.one_in(2)) {  // often alike on all ranks
        return encoded(Calling{called, given(random), seq});
      }
      called.op_type = static_cast<OpType>(random.below(12));
      called.reduce_op = static_cast<ReduceOp>(random.below(10));
      called.root = static_cast<int>(random.below(kRanks + 1)) - 1;
      called.count = random.below(10);
      if (random.one_in(2)) {
        called.sends = sizes(random);
        called.expects = sizes(random);
        called.is_uneven = true;
      }
      return encoded(
          Calling{called, random.one_in(2) ? std::optional(given(random)) : std::nullopt, seq});
    }
    case kPosting: {
      Posted posted{.sends = random.one_in(2),
                    .peer = static_cast<int>(random.below(kRanks + 1)) - 1,
                    .tag = random.below(3),
                    .bytes = static_cast<uint64_t>(random.below(3)),
                    .dtype = static_cast<DType>(random.below(21))};
      if (posted.sends && random.one_in(2)) {
        posted.data = std::string(posted.bytes, 'x');
      } else if (posted.sends) {
        posted.delivered = static_cast<Delivered>(random.below(3));
      }
      return encoded(posted).put(static_cast<int64_t>(number));
    }
    case kWithdrawn: {
      Payload words;
      return put(words, other_end(number, random));
    }
    default:
      return Payload().put(random.below(5)).put(random.text()).put(random.below(5));
  }
}

// Of all ranks, as it comes with the word to go.
Payload all_data(Random& random) {
  std::vector<Contribution> data;
  for (int rank = 0; rank < kRanks; ++rank) {
    data.push_back(given(random));
  }
  Payload words;
  return put_all_of(words, data, static_cast<int>(random.below(kRanks)));
}

std::vector<Member> members() {
  std::vector<Member> all;
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto host = "host " + std::to_string(rank / 2);
    all.push_back({this_process(), host, host, host});
  }
  return all;
}

constexpr int kSelf = 3;

// What rank 0 says to rank `kSelf`, or another rank.
Payload word(uint32_t kind, uint64_t number, Random& random) {
  switch (kind) {
    case kGo: {
      const auto data = random.one_in(2) ? all_data(random) : Payload().put(0);
      return Payload().put(static_cast<int64_t>(number)).put(data);
    }
    case kGranted: {
      Payload words;
      put(words.put(static_cast<int64_t>(number)), other_end(number, random));
      put_data(words, random.one_in(2) ? std::optional<SharedBytes>(random.data()) : std::nullopt);
      return words;
    }
    case kDelivering:
      return delivery(kSelf, number, random);
    case kTaken:
      return Payload().put(static_cast<int64_t>(number));
    case kWithdraw: {
      Payload words;
      return put(words, other_end(number, random)).put(random.below(3));
    }
    case kWanted:
      return encoded_wanted({.rank = static_cast<int>(random.below(kRanks)),
                             .number = number,
                             .peer = kSelf,
                             .tag = random.below(3),
                             .bytes = static_cast<uint64_t>(random.below(3))});
    case kUnwanted:
      return Payload()
          .put(random.below(kRanks))
          .put(random.below(3))
          .put(static_cast<int64_t>(number));
    case kDenied: {
      Payload words = Payload().put(static_cast<int64_t>(number)).put(random.below(6));
      return put(words.put(random.text()).put(std::vector<int>{1}), other_end(number, random));
    }
    case kOver:
      return encoded(
          End{ErrorKind::RankLost, {static_cast<int>(random.below(kRanks))}, "gone", kDataGrace});
    default:
      return Payload()
          .put(static_cast<int64_t>(number))
          .put(random.text())
          .put(std::vector<int>{1});
  }
}

double seconds() {
  const char* text = std::getenv("C10D_EXT_FUZZ_SECONDS");
  return text != nullptr ? std::atof(text) : 1.0;
}

// Or not all has happened that is to happen.
bool is_time_left(Clock::time_point began, bool has_all_happened = true) {
  const auto passed = Clock::now() - began;
  return std::chrono::duration<double>(passed).count() < seconds() / 5 ||
         (!has_all_happened && passed < kLong);
}

uint64_t seed() {
  const char* text = std::getenv("C10D_EXT_FUZZ_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : 1;
}

void a_coordinator_takes_anything() {
  Random random(seed());
  const auto began = Clock::now();
  uint64_t taken = 0, refused = 0, told = 0, begun = 0;
  while (is_time_left(began, taken > 0 && refused > 0 && told > 0 && begun > 0)) {
    const Roster roster({0, kRanks, "test"}, members());
    Coordinator coordinator(roster, [&](int rank, Says kind, const Payload&) {
      CHECK(rank >= 0 && rank < kRanks);
      ++told;
      begun += kind == kGo;
    });
    std::vector<uint64_t> seq(kRanks, 1), number(kRanks, 1);
    for (int i = 0; i < 200; ++i) {
      const auto rank = static_cast<int>(random.below(kRanks));
      const auto r = static_cast<size_t>(rank);
      const auto kind = static_cast<uint32_t>(random.one_in(3)   ? kCalling
                                              : random.one_in(2) ? kPosting
                                                                 : 14 + random.below(33));
      const bool is_changed = random.one_in(4);
      Payload words = sentence(kind, seq[r], number[r], random);
      // What a rank of another host calls, its leader says, but for what has no data.
      const bool by_leader = kind == kCalling && rank >= 2 && random.one_in(2);
      if (by_leader) {
        words = Payload().put(1).put(rank).put(words);
      }
      if (is_changed) {
        words = changed(words, random);
      }
      try {
        by_leader ? coordinator.hear(rank / 2 * 2, kRelaying, words)
                  : coordinator.hear(rank, kind, words);
        ++taken;
        seq[r] += kind == kCalling;
        number[r] += kind == kPosting;
      } catch (const std::runtime_error&) {
        ++refused;
      }
      if (random.one_in(20)) {
        coordinator.look(Clock::now() + std::chrono::hours(1));
      }
      if (random.one_in(200)) {
        coordinator.lose({rank}, random.one_in(2) ? kGone : kUnreachable);
      }
    }
  }
  CHECK(taken > 0 && refused > 0 && told > 0 && begun > 0);
  std::printf("coordinator: %llu taken, %llu refused\n", static_cast<unsigned long long>(taken),
              static_cast<unsigned long long>(refused));
}

// Of all ranks of host `first / 2`, as their leader passes them on.
Payload of_host(int first, uint64_t seq, Random& random) {
  const int count = random.one_in(9) ? 1 : 2;
  Payload all = Payload().put(count);
  for (int rank = first; rank < first + count; ++rank) {
    all.put(rank).put(sentence(kCalling, seq + random.one_in(9), 1, random));
  }
  return all;
}

void a_leader_takes_anything() {
  Random random(seed() + 3);
  const auto began = Clock::now();
  uint64_t taken = 0, refused = 0, begun = 0, passed_on = 0;
  while (is_time_left(began, taken > 0 && refused > 0 && begun > 0 && passed_on > 0)) {
    const Roster roster({2, kRanks, "test"}, members());
    Relay relay(roster, [&](int rank, Says kind, const Payload&) {
      CHECK(kind == kGo ? rank == 2 || rank == 3 : kind == kRelaying && (rank == 0 || rank == 4));
      begun += kind == kGo;
      passed_on += kind == kRelaying;
    });
    std::array<uint64_t, 2> own{1, 1};  // the next call of each rank of this host
    for (int i = 0; i < 200; ++i) {
      const uint64_t seq = std::min(own[0], own[1]) - random.one_in(2);
      const bool is_changed = random.one_in(4);
      const auto words_of = [&](const Payload& words) {
        return is_changed ? changed(words, random) : words;
      };
      try {
        if (random.one_in(2)) {
          const auto which = static_cast<size_t>(random.below(2));
          relay.hear_call(2 + static_cast<int>(which),
                          words_of(sentence(kCalling, own[which], 1, random)));
          ++own[which];
        } else {
          const int first = 2 * static_cast<int>(random.below(3));
          auto words = words_of(of_host(first, seq, random));
          relay.hear_calls(random.one_in(4) ? static_cast<int>(random.below(kRanks)) : first,
                           words);
        }
        ++taken;
      } catch (const std::runtime_error&) {
        ++refused;
      }
      if (random.one_in(6)) {
        relay.settle(random.one_in(50) ? static_cast<uint64_t>(random.number()) : seq - 1);
      }
      if (random.one_in(200)) {
        relay.pass_on_singly();
      }
    }
  }
  CHECK(taken > 0 && refused > 0 && begun > 0 && passed_on > 0);
  std::printf("leader: %llu taken, %llu refused, %llu begun\n",
              static_cast<unsigned long long>(taken), static_cast<unsigned long long>(refused),
              static_cast<unsigned long long>(begun));
}

// A rank with calls and messages of its own.
void a_rank_takes_anything() {
  Random random(seed() + 4);
  const auto began = Clock::now();
  uint64_t taken = 0, refused = 0, begun = 0, over = 0, failed = 0;
  while (is_time_left(began, taken > 0 && refused > 0 && begun > 0 && over > 0 && failed > 0)) {
    const Roster roster({kSelf, kRanks, "test"}, members());
    OpenCalls calls(roster, std::chrono::seconds(1));
    Participant rank(
        roster, calls, [](Says, const Payload&) {}, [](const Payload&) {},
        [](int, Says, const Payload&) {}, [] {}, {});
    uint64_t called = 0, posted = 0;
    const auto call = [&](std::optional<int64_t> tag) {
      OpenCall call{"op", tag, std::chrono::seconds(1), [&](uint64_t) { ++begun; },
                    [&](const Failure&) { ++failed; }};
      if (tag || random.one_in(2)) {  // each message is little
        call.receive = [&](uint64_t, const auto&) { ++over; };
      }
      return call;
    };
    for (int i = 0; i < 200; ++i) {
      if (random.one_in(3)) {
        calls.enter({}, call(std::nullopt));
        ++called;
      } else if (random.one_in(2)) {
        Posted end{.sends = random.one_in(2),
                   .peer = static_cast<int>(random.below(kRanks + 1)) - 1,
                   .tag = random.below(3),
                   .bytes = static_cast<uint64_t>(random.below(3))};
        auto message = call(end.tag);
        if (end.sends && random.one_in(2)) {
          end.data = std::string(end.bytes, 'x');
        }
        calls.enter_message(std::move(end), std::move(message));
        ++posted;
      }
      const auto kind = static_cast<uint32_t>(random.one_in(4)   ? kWanted
                                              : random.one_in(3) ? kDelivering
                                              : random.one_in(2) ? kGranted
                                              : random.one_in(2) ? kGo
                                                                 : 14 + random.below(33));
      const auto last = kind == kGo ? called : posted;
      const auto number = last - static_cast<uint64_t>(random.below(4));
      const bool is_changed = random.one_in(4);
      Payload words = word(kind, number, random);
      if (is_changed) {
        words = changed(words, random);
      }
      try {
        if (kind == kDelivering || kind == kTaken) {
          rank.hear_of_message(static_cast<int>(random.below(kRanks)), kind, words);
        } else {
          rank.obey(kind, words);
        }
        ++taken;
      } catch (const std::runtime_error&) {
        ++refused;
      }
      if (random.one_in(20)) {
        rank.look(Clock::now() + std::chrono::seconds(1));
      }
      rank.settle();
      calls.take_news();
    }
    for (auto& left : calls.close()) {
      left.call.fail(left.failure);
    }
  }
  CHECK(taken > 0 && refused > 0 && begun > 0 && over > 0 && failed > 0);
  std::printf("rank: %llu taken, %llu refused\n", static_cast<unsigned long long>(taken),
              static_cast<unsigned long long>(refused));
}

void words_are_taken_apart_or_refused() {
  Random random(seed() + 1);
  const auto began = Clock::now();
  uint64_t refused = 0;
  while (is_time_left(began)) {
    for (const auto& said :
         {changed(sentence(kCalling, 1, 1, random), random),
          changed(sentence(kPosting, 1, 1, random), random), changed(all_data(random), random),
          changed(delivery(kSelf, 1, random), random),
          changed(encoded(End{ErrorKind::RankLost, {1}, "gone", kDataGrace}), random),
          Payload(random.text())}) {
      for (int which = 0; which < 7; ++which) {
        Payload words = said;
        try {
          if (which == 0) {
            const auto called = take_fingerprint(words);
            CHECK(!text_of(called).empty());
          } else if (which == 1) {
            const auto posted = take_posted(words);
            CHECK(posted.dtype <= DType::Bytes);
          } else if (which == 2) {
            const auto call = take_call(words, kRanks, 3);
            for (int rank = 0; call.data && rank < kRanks; ++rank) {
              CHECK(call.data->of(rank).size() <= call.data->size());
            }
          } else if (which == 3) {
            const auto data = take_all(words, kRanks);
            CHECK(data.empty() || data.size() == kRanks);
          } else if (which == 4) {
            const auto send = take_delivery(words, 2, kSelf);
            CHECK(send.rank == 2 && send.peer == kSelf);
          } else if (which == 5) {
            const auto other = take_other_end(words, kRanks);
            CHECK(other.rank < kRanks && other.delivered <= Delivered::Data);
          } else {
            const auto end = take_end(words);
            CHECK(end.kind <= ErrorKind::Closed);
          }
        } catch (const std::runtime_error&) {
          ++refused;
        }
      }
    }
  }
  CHECK(refused > 0);
}

void a_line_takes_anything() {
  Random random(seed() + 2);
  const auto began = Clock::now();
  constexpr size_t kLimit = 8192;
  uint64_t heard = 0, ended = 0;
  while (is_time_left(began)) {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
    Connection line([&] {
      const ForkGuard guard;
      return FdOwner(ends[0], guard);
    }());
    bool stays = true;
    for (int i = 0; stays && i < 50; ++i) {
      std::string bytes;
      const auto said = sentence(kCalling, 1, 1, random);
      std::string attached;
      for (const auto& piece : said.attached()) {
        attached += piece;
      }
      const auto length = [&](size_t size) {
        return random.one_in(8) ? static_cast<uint64_t>(random.number()) : size;
      };
      const Heading heading{static_cast<uint32_t>(length(said.words().size())),
                            static_cast<uint32_t>(random.below(40)), length(attached.size())};
      bytes.append(reinterpret_cast<const char*>(&heading), sizeof(heading));
      bytes += said.words() + attached;
      if (random.one_in(6)) {
        bytes = changed(bytes, random);
      }
      if (::send(ends[1], bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) <= 0 &&
          !bytes.empty()) {
        break;
      }
      stays = line.listen(kLimit);
      while (auto frame = line.next()) {
        size_t size = frame->words.words().size();
        for (const auto& piece : frame->words.attached()) {
          size += piece.size();
        }
        CHECK(size <= kLimit);
        ++heard;
      }
    }
    ended += !stays;
    ::close(ends[1]);
  }
  CHECK(heard > 0 && ended > 0);
}

const std::vector<Test> kTests = {
    TEST(a_coordinator_takes_anything), TEST(a_leader_takes_anything),
    TEST(a_rank_takes_anything),        TEST(words_are_taken_apart_or_refused),
    TEST(a_line_takes_anything),
};

}  // namespace

int main(int count, char** names) {
  return run_tests(kTests, count, names);
}
