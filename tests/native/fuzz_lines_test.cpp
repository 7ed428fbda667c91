// What ranks say to each other over lines, changed at random: whoever hears it takes it, or throws
// std::runtime_error, and does nothing else.

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "backends/checked/coordinator.h"
#include "backends/checked/duties.h"
#include "backends/checked/open_calls.h"
#include "backends/checked/participant.h"
#include "backends/checked/protocol.h"
#include "backends/checked/relay.h"
#include "backends/checked/roster.h"
#include "control/connection.h"
#include "fuzz.h"
#include "program.h"

using namespace c10d_ext;

namespace {

using namespace fuzz;

constexpr int kSelf = 3;

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

// One end of a message of rank `self`, as its callers may have it.
Posted posted_by(int self, Random& random) {
  Posted end{.sends = random.one_in(2),
             .peer = (self + 1 + static_cast<int>(random.below(kRanks - 1))) % kRanks,
             .tag = random.below(3),
             .bytes = message_bytes(random)};
  if (!end.sends && random.one_in(4)) {
    end.peer = -1;
  }
  if (end.sends && random.one_in(2)) {
    end.data = std::string(end.bytes, 'x');
  }
  return end;
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
        roster, calls, [](Says, const Payload&) {}, [](const Calling&) {},
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
        calls.enter({}, std::nullopt, call(std::nullopt));
        ++called;
      } else if (random.one_in(2)) {
        Posted end = posted_by(kSelf, random);
        auto message = call(end.tag);
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
      Payload words = word(kind, number, kSelf, random);
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
    const auto [grants, fails] = calls.close();
    for (const auto& [peer, begin] : grants) {
      begin(peer);
    }
    for (const auto& failed : fails) {
      failed.call.fail(failed.failure);
    }
  }
  CHECK(taken > 0 && refused > 0 && begun > 0 && over > 0 && failed > 0);
  std::printf("rank: %llu taken, %llu refused\n", static_cast<unsigned long long>(taken),
              static_cast<unsigned long long>(refused));
}

std::pair<Connection, Connection> connected() {
  std::array<int, 2> ends{};
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) == 0);
  const ForkGuard guard;
  return {Connection(FdOwner(ends[0], guard)), Connection(FdOwner(ends[1], guard))};
}

// What another rank may well say to rank `self`.
uint32_t likely(int from, int self, Random& random) {
  if (random.one_in(8)) {
    return static_cast<uint32_t>(14 + random.below(33));
  }
  if (self == 0) {
    return random.one_in(2) ? kCalling : kPosting;
  }
  if (from == 0) {
    return random.one_in(2) ? kGranted : random.one_in(2) ? kGo : kWanted;
  }
  const bool leads = self % 2 == 0;
  if (from / 2 == self / 2) {
    return leads ? kCalling : kGo;
  }
  return leads && from % 2 == 0 && random.one_in(2) ? kRelaying
         : random.one_in(3)                         ? kTaken
                                                    : kDelivering;
}

// Rank 0, a leader or another rank, with calls and messages of its own: over the lines it has.
// Whoever says what makes no sense is lost.
void a_rank_with_lines_takes_anything() {
  Random random(seed() + 5);
  const auto began = Clock::now();
  uint64_t said = 0, lost = 0, begun = 0, over = 0, failed = 0, landed = 0;
  const auto has_all_happened = [&] {
    return lost > 0 && begun > 0 && over > 0 && failed > 0 && landed > 0;
  };
  while (is_time_left(began, has_all_happened())) {
    constexpr std::array<int, 3> kSelves{0, 2, 3};
    const int self = kSelves[static_cast<size_t>(random.below(3))];
    const Roster roster({self, kRanks, "test"}, members());
    std::vector<Connection> lines(kRanks), others(kRanks);
    for (size_t rank = 0; rank < kRanks; ++rank) {
      if (static_cast<int>(rank) != self) {
        std::tie(lines[rank], others[rank]) = connected();
      }
    }
    OpenCalls calls(roster, std::chrono::seconds(1));
    // Of receives, the end of which is the last that is written there.
    constexpr char kEnded = '?';
    std::vector<std::shared_ptr<std::string>> memories;
    Duties duties(roster, calls, std::move(lines), {}, {});
    std::vector<uint64_t> seq(kRanks, 1), number(kRanks, 1);
    const auto call = [&](std::optional<int64_t> tag) {
      // Some messages are late at once.
      OpenCall one{"op", tag, tag && random.one_in(4) ? std::chrono::milliseconds(0) : kLong,
                   [&](uint64_t) { ++begun; }, [&](const Failure&) { ++failed; }};
      if (tag || random.one_in(2)) {
        one.receive = [&](uint64_t, const auto&) { ++over; };
      }
      return one;
    };
    for (int i = 0; i < 100; ++i) {
      if (random.one_in(3)) {
        Fingerprint mine;
        mine.op_type = OpType::Barrier;
        mine.unit = "float32";
        calls.enter(std::move(mine), std::nullopt, call(std::nullopt));
        ++seq[static_cast<size_t>(self)];
      } else if (random.one_in(2)) {
        Posted end = posted_by(self, random);
        auto message = call(end.tag);
        if (!end.sends && random.one_in(2)) {
          const auto memory = memories.emplace_back(std::make_shared<std::string>(end.bytes, '-'));
          message.landing = std::make_shared<Landing>(std::shared_ptr<char>(memory, memory->data()),
                                                      memory->size());
          const auto end_of = [memory](auto what) {
            return [memory, what](const auto& how) {
              what(how);
              memory->assign(memory->size(), kEnded);
            };
          };
          message.begin = end_of(message.begin);
          message.fail = end_of(message.fail);
          if (message.receive) {
            message.receive = [memory, receive = message.receive, &landed](uint64_t from,
                                                                           const auto& data) {
              receive(from, data);
              landed += data.front().data() == memory->data() && !memory->empty();
              memory->assign(memory->size(), kEnded);
            };
          }
        }
        if (auto refused = calls.enter_message(std::move(end), std::move(message)).second) {
          refused->call.fail(refused->failure);
        }
        ++number[static_cast<size_t>(self)];
      }
      const auto from = static_cast<int>(random.below(kRanks));
      auto& line = others[static_cast<size_t>(from)];
      if (line.is_open()) {
        const auto f = static_cast<size_t>(from), s = static_cast<size_t>(self);
        const uint32_t kind = likely(from, self, random);
        Payload words;
        if (self == 0 || kind == kCalling) {
          words = sentence(kind, seq[f], number[f], random);
        } else if (kind == kRelaying) {
          words = of_host(from / 2 * 2, seq[s] - 1, random);
        } else if (kind == kDelivering) {
          words = word(kind, number[f], self, random);
        } else {
          const auto last = (kind == kGo ? seq : number)[s];
          words = word(kind, last - static_cast<uint64_t>(random.below(3)), self, random);
        }
        seq[f] += kind == kCalling;
        number[f] += kind == kPosting || kind == kDelivering;
        line.say(kind, random.one_in(30) ? changed(words, random) : words);
        ++said;
      }
      duties.work(duties.star().everything());
      for (auto& other : others) {
        if (other.is_open() && !other.listen(size_t{1} << 20)) {
          other.close();
          ++lost;
        }
        while (other.next()) {
        }
      }
    }
    const auto [grants, fails] = calls.close();
    for (const auto& [peer, begin] : grants) {
      begin(peer);
    }
    for (const auto& failed : fails) {
      failed.call.fail(failed.failure);
    }
    for (const auto& memory : memories) {
      CHECK(memory->find_first_not_of(kEnded) == std::string::npos);
    }
  }
  CHECK(has_all_happened());
  std::printf("lines: %llu said, %llu lost, %llu begun, %llu over, %llu where they belong\n",
              static_cast<unsigned long long>(said), static_cast<unsigned long long>(lost),
              static_cast<unsigned long long>(begun), static_cast<unsigned long long>(over),
              static_cast<unsigned long long>(landed));
}

void words_are_taken_apart_or_refused() {
  Random random(seed() + 1);
  const auto began = Clock::now();
  uint64_t refused = 0;
  while (is_time_left(began, refused > 0)) {
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
            Payload own(words.text());
            const auto called = take_fingerprint(own);
            CHECK(!text_of(called).empty());
          } else if (which == 1) {
            const auto posted = take_posted(words);
            CHECK(posted.dtype <= DType::Bytes);
          } else if (which == 2) {
            const auto call = CallReader(kRanks, 3).take(words);
            for (int rank = 0; call.data && rank < kRanks; ++rank) {
              CHECK(call.data->of(rank).size() <= call.data->size());
            }
          } else if (which == 3) {
            const auto data = take_all(words, kRanks);
            CHECK(data.size() <= 1 || data.size() == kRanks);
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
  while (is_time_left(began, heard > 0 && ended > 0)) {
    auto [line, end] = connected();
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
      if (::send(end.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) <= 0 &&
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
  }
  CHECK(heard > 0 && ended > 0);
}

const std::vector<Test> kTests = {
    TEST(a_coordinator_takes_anything),
    TEST(a_leader_takes_anything),
    TEST(a_rank_takes_anything),
    TEST(a_rank_with_lines_takes_anything),
    TEST(words_are_taken_apart_or_refused),
    TEST(a_line_takes_anything),
};

}  // namespace

int main(int count, char** names) {
  return run_tests(kTests, count, names);
}
