// How ranks meet, to the byte. Run without arguments it runs every test; with arguments, those
// named.

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "agreement_ranks.h"
#include "backends/checked/protocol.h"
#include "control/connection.h"
#include "control/handshake.h"
#include "control/meeting.h"
#include "control/sockets.h"
#include "program.h"

using namespace c10d_ext;
using namespace std::chrono_literals;

namespace {

Frame hear(Connection& line, const Deadline& deadline) {
  std::optional<Frame> said = line.next();
  while (!said) {
    std::vector<pollfd> fds{{line.fd(), POLLIN, 0}};
    deadline.poll(fds);
    CHECK(!deadline.passed() && line.listen(1024));
    said = line.next();
  }
  return std::move(*said);
}

// A line of `rank` to another one, which has put its place into the store, or is about to.
Connection visiting(Store& store, int other, int rank) {
  const auto view = store.view();
  CHECK(eventually([&] { return view.has(key_of(other)); }));
  std::istringstream where(view.get(key_of(other), kLong));
  std::string token;
  int port = 0;
  where >> token >> port;
  FdOwner socket;
  const Deadline deadline(kLong, [] {});
  CHECK(reach(*parse_address("127.0.0.1", port), deadline, socket).empty());
  Connection line(std::move(socket));
  line.say(kHello, Payload().put(token).put(rank));
  CHECK(hear(line, deadline).kind == kWelcome);
  return line;
}

// What others connect to, whose place is in the store.
class Door {
 public:
  Door(Store& store, int rank) {
    store.view().set(key_of(rank), "token " + std::to_string(listening_.port) + " 127.0.0.1");
  }

  // Who comes next, who has the token, and is rank 1.
  std::pair<Connection, Frame> next(Meets kind) {
    FdOwner socket;
    while (!socket) {
      std::vector<pollfd> fds{{listening_.socket.get(), POLLIN, 0}};
      deadline_.poll(fds);
      CHECK(!deadline_.passed());
      socket = accept_socket(listening_.socket);
    }
    Connection line(std::move(socket));
    Frame hello = hear(line, deadline_);
    CHECK(hello.kind == kind && hello.words.text() == "token" && hello.words.number() == 1);
    return {std::move(line), std::move(hello)};
  }

 private:
  const Listening listening_ = listen_anywhere();
  const Deadline deadline_{kLong, [] {}};
};

// As it goes over a connection.
std::string framed(uint32_t kind, const std::string& words) {
  const Heading heading{static_cast<uint32_t>(words.size()), kind, 0};
  return std::string(reinterpret_cast<const char*>(&heading), sizeof(heading)) + words;
}

// Sentences of any length, and as much data, over a socket that takes little at a time.
void what_a_connection_does_not_take_is_kept() {
  std::array<int, 2> ends{};
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) == 0);
  const auto owned = [](int fd) {
    const ForkGuard guard;
    return FdOwner(fd, guard);
  };
  Connection speaker(owned(ends[0])), listener(owned(ends[1]));
  const int little = 4096;
  CHECK(setsockopt(speaker.fd(), SOL_SOCKET, SO_SNDBUF, &little, sizeof(little)) == 0);
  const auto length = [](uint32_t i) { return i % 3 == 0 ? size_t{i} : size_t{i} * 10'000; };
  const auto words = [&](uint32_t i) {
    return std::string(length(i), static_cast<char>('a' + i % 26));
  };
  // One that ends otherwise than it begins.
  const auto data = [&](uint32_t i) { return words(i / 2) + std::string(i % 4 * 9'000, 'z'); };
  constexpr uint32_t kSentences = 30;
  uint32_t heard = 0;
  bool was_kept = false;
  const auto hear = [&] {
    CHECK(listener.listen(1'000'000));
    while (auto said = listener.next()) {
      CHECK(said->kind == heard && said->words.text() == words(heard));
      CHECK(said->words.data() == data(heard) && said->words.data() == data(heard + 1));
      CHECK(said->words.number() == 7);
      ++heard;
    }
  };
  for (uint32_t i = 0; i < kSentences; ++i) {
    speaker.say(i, Payload().put(words(i)).put_data(data(i)).put_data(data(i + 1)).put(7));
    was_kept |= speaker.has_unsent();
    if (i % 5 == 0) {
      hear();
    }
  }
  CHECK(was_kept);
  CHECK(eventually([&] {
    speaker.flush();
    hear();
    return heard == kSentences;
  }));
  CHECK(!speaker.has_unsent());
}

// Behind a short sentence, in one piece with it, comes a long one, for who listens then.
void what_is_too_long_behind_another_sentence_is_kept() {
  const std::string long_one(3000, 'l');
  for (const bool is_first : {false, true}) {
    std::array<int, 2> ends{};
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) == 0);
    const auto owned = [](int fd) {
      const ForkGuard guard;
      return FdOwner(fd, guard);
    };
    const FdOwner speaker = owned(ends[0]);
    Connection listener(owned(ends[1]));
    const auto say = [&](const std::string& bytes) {
      CHECK(::send(speaker.get(), bytes.data(), bytes.size(), 0) ==
            static_cast<ssize_t>(bytes.size()));
    };
    say((is_first ? "" : framed(1, "short")) + framed(2, long_one) + framed(3, "last"));
    if (is_first) {  // who says that is not heard any more, whatever is allowed then
      CHECK(!listener.listen(1024) && !listener.next());
      CHECK(!listener.listen(4096) && !listener.next());
      continue;
    }
    CHECK(listener.listen(1024) && listener.has_unheard());
    say(framed(4, "later"));
    CHECK(listener.listen(1024) && listener.has_unheard());  // nobody has taken the first one
    const auto first = listener.next();
    CHECK(first && first->kind == 1 && first->words.words() == "short" && !listener.next());
    CHECK(listener.listen(4096) && !listener.has_unheard());
    for (const auto& [kind, words] :
         std::vector<std::pair<uint32_t, std::string>>{{2, long_one}, {3, "last"}, {4, "later"}}) {
      const auto said = listener.next();
      CHECK(said && said->kind == kind && said->words.words() == words);
    }
    CHECK(!listener.next());
  }
}

Connection line_of(int fd) {
  const ForkGuard guard;
  return Connection(FdOwner(fd, guard));
}

// Two ends of a connection: by TCP, or inside a network.
std::pair<Connection, Connection> connected(bool by_tcp) {
  if (!by_tcp) {
    std::array<int, 2> ends{};
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) == 0);
    return {line_of(ends[0]), line_of(ends[1])};
  }
  const Deadline deadline(kLong, [] {});
  const auto listening = listen_anywhere();
  FdOwner one, other;
  CHECK(reach(*parse_address("127.0.0.1", listening.port), deadline, one).empty());
  CHECK(deadline.wait(listening.socket.get(), POLLIN));
  other = accept_socket(listening.socket);
  return {Connection(std::move(one)), Connection(std::move(other))};
}

// By TCP only what the other end's kernel has acknowledged is there; inside a network, all that was
// said.
void what_is_said_is_on_its_way_until_the_other_kernel_has_it() {
  for (const bool by_tcp : {true, false}) {
    auto [speaker, listener] = connected(by_tcp);
    const int little = 32768;
    CHECK(setsockopt(listener.fd(), SOL_SOCKET, SO_RCVBUF, &little, sizeof(little)) == 0);
    CHECK(setsockopt(speaker.fd(), SOL_SOCKET, SO_SNDBUF, &little, sizeof(little)) == 0);
    while (!speaker.has_unsent()) {  // until neither kernel takes more
      speaker.say(1, Payload().put(std::string(10'000, 'x')));
    }
    CHECK(speaker.is_on_its_way() == by_tcp);
    CHECK(eventually([&, &s = speaker, &l = listener] {
      s.flush();
      CHECK(l.listen(1 << 20));
      while (l.next()) {
      }
      return !s.has_unsent() && !s.is_on_its_way();
    }));
  }
}

// Though the speaker is gone, and had words to hear.
void what_was_said_inside_a_network_is_heard() {
  auto [speaker, listener] = connected(/*by_tcp=*/false);
  listener.say(1, Payload().put("never heard"));
  speaker.say(2, Payload().put("heard"));
  speaker.close();
  bool stays = true;
  std::vector<std::string> heard;
  CHECK(eventually([&, &l = listener] {
    stays = l.listen(1024);
    while (auto said = l.next()) {
      heard.push_back(said->words.text());
    }
    return !stays;
  }));
  CHECK(heard == std::vector<std::string>{"heard"} && !listener.is_unreachable());
}

// More at a time than may wait at a door that has a name.
void who_finds_the_door_full_tries_again() {
  const std::string name = "c10d_ext-test-" + random_secret();
  const FdOwner door = listen_by_name(name);
  CHECK(door && ::listen(door.get(), 0) == 0);  // room for one
  const Deadline deadline(kLong, [] {});
  std::vector<FdOwner> visitors;
  std::string why;
  while (why.empty()) {  // until there is no room, and nobody opens
    FdOwner visitor;
    const auto begun = Deadline::Clock::now();
    why = reach(*address_of_name(name), Deadline(20ms, [] {}), visitor);
    if (why.empty()) {
      visitors.push_back(std::move(visitor));
    } else {
      CHECK(Deadline::Clock::now() - begun >= 20ms);  // it has tried for so long
    }
  }
  CHECK(!visitors.empty() && why == error_text(EAGAIN));
  FdOwner last;
  std::thread visits([&] { CHECK(reach(*address_of_name(name), deadline, last).empty()); });
  std::vector<FdOwner> admitted;
  while (admitted.size() < visitors.size() + 1) {
    CHECK(deadline.wait(door.get(), POLLIN));
    if (auto socket = accept_socket(door)) {
      admitted.push_back(std::move(socket));
    }
  }
  visits.join();
  FdOwner nobody;
  CHECK(!reach(*address_of_name(name + "?"), deadline, nobody).empty() && !nobody);
  for (const auto& no_name : {std::string(), std::string(200, 'x')}) {
    CHECK(!address_of_name(no_name) && !listen_by_name(no_name));
  }
}

// Which door was tried, and why it was not the one.
void an_error_tells_what_was_tried() {
  const auto error_of_rank_1 = [](const std::string& name, const std::string& address, auto time) {
    Store store;
    const auto view = store.view();
    if (!name.empty()) {
      view.set("lines in a", name);
    }
    view.set(key_of(0), "token 9" + address);
    try {
      meet(view, {1, 2, "test"}, time, "a");
    } catch (const std::runtime_error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const std::string refused = "Connection refused";
  CHECK(error_of_rank_1("", " 127.0.0.1", kLong) ==
        "rank 0 cannot be reached at port 9 of 127.0.0.1 (" + refused + ")");
  CHECK(error_of_rank_1("nobody's", " 127.0.0.1 127.0.1.1", kLong) ==
        "rank 0 cannot be reached at port 9 of 127.0.0.1 (" + refused + "), 127.0.1.1 (" + refused +
            "), nor by its name in this network (" + refused + ")");
  CHECK(error_of_rank_1(std::string(200, 'x'), "", kLong) ==
        "rank 0 cannot be reached by its name in this network (not a name)");
  // Somebody is there who says nothing.
  const std::string name = "c10d_ext-test-" + random_secret();
  const FdOwner door = listen_by_name(name);
  CHECK(error_of_rank_1(name, " 127.0.0.1", 200ms) ==
        "rank 0 cannot be reached by its name in this network (no welcome within 0.2 s)");
}

// Nor is more taken in than allowed, however much comes.
void no_more_is_heard_at_a_time_than_is_allowed() {
  std::array<int, 2> ends{};
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) == 0);
  const auto owned = [](int fd) {
    const ForkGuard guard;
    return FdOwner(fd, guard);
  };
  const FdOwner speaker = owned(ends[0]);
  Connection listener(owned(ends[1]));
  constexpr uint32_t kSentences = 1000;
  constexpr size_t kBytes = 84, kRead = 16384;  // of each, and at a time
  std::string all;
  for (uint32_t i = 0; i < kSentences; ++i) {
    all += framed(i, std::string(kBytes - sizeof(Heading), 'x'));
  }
  CHECK(::send(speaker.get(), all.data(), all.size(), 0) == static_cast<ssize_t>(all.size()));
  uint32_t next = 0;
  for (size_t listens = 1; next < kSentences; ++listens) {
    CHECK(listener.listen(1024));
    uint32_t heard = 0;
    while (const auto said = listener.next()) {
      CHECK(said->kind == next++);
      ++heard;
    }
    CHECK(heard > 0 && heard <= kRead / kBytes && listens < kSentences);
    CHECK(next == kSentences || listener.has_unheard());
  }
}

// A rank 0 that says some words in one piece with its welcome. Its connections to rank 1. `near`:
// which of the others are in its network.
std::vector<Connection> welcomed(Store& store, const std::vector<bool>& near,
                                 const std::vector<std::pair<Says, Payload>>& said) {
  Door door(store, 0);
  auto [line, hello] = door.next(kHello);
  auto death_socket = door.next(kDeathSocket);
  const auto pid = hello.words.number(), start_time = hello.words.number();
  const auto machine = hello.words.text(), host = hello.words.text(), network = hello.words.text();
  Payload welcome;
  for (const bool is_near : near) {
    welcome.put(pid).put(start_time).put(machine).put(host);
    welcome.put(is_near ? network : "not " + network);
  }
  std::string all = framed(kWelcome, welcome.words());
  for (const auto& [kind, words] : said) {
    all += framed(kind, words.words());
  }
  CHECK(::send(line.fd(), all.data(), all.size(), 0) == static_cast<ssize_t>(all.size()));
  std::vector<Connection> lines;
  lines.push_back(std::move(line));
  lines.push_back(std::move(death_socket.first));
  return lines;
}

void what_comes_with_the_welcome_is_heard() {
  Store store;
  const End end{ErrorKind::Closed, {0}, "said with the welcome", 0ms};
  std::vector<Connection> lines;
  std::thread rank_0([&] { lines = welcomed(store, {false, true}, {{kOver, encoded(end)}}); });
  const auto rank_1 = Agreement::join(store.view(), {1, 2, "test"}, kLong, "a");
  rank_0.join();
  std::this_thread::sleep_for(100ms);  // the first call may have the thread look at all lines
  Call call;
  rank_1->call(call.operation(summed(1), kLong));
  CHECK(call.failure().text.find("said with the welcome") != std::string::npos);
}

// Once rank 0 is not there, ranks of its host have the next host's leader.
void the_next_leader_hears_and_tells_what_rank_0_cannot() {
  for (const bool breaks_here : {false, true}) {
    Store store;
    std::vector<Connection> lines;
    std::thread rank_0([&] { lines = welcomed(store, {true, true, false}, {}); });
    Connection line;
    std::thread rank_2([&] { line = visiting(store, 1, 2); });
    const auto rank_1 = Agreement::join(store.view(), {1, 3, "test"}, kLong, "a");
    rank_0.join();
    rank_2.join();
    Call call;
    CHECK(rank_1->call(call.operation(summed(1), kLong)) == 1);
    Payload go = Payload().put(1);
    put_all(go, {});
    lines[0].say(kGo, go);
    CHECK(call.begun() == 1);
    // Who leaves in good order has sent what it owes: it would be waited for, for ever.
    lines[0].say(kLeaving, Payload().put(1));
    lines.clear();
    if (breaks_here) {
      rank_1->broke(1, "its data does not come");
      auto said = hear(line, Deadline(kLong, [] {}));
      CHECK(said.kind == kDoomed && said.words.number() == 1);
    } else {
      line.say(kDoomed, Payload().put(1));
    }
    const auto failure = call.failure();
    CHECK(failure.kind == ErrorKind::RankLost && failure.ranks == std::vector<int>{0});
    line.close();  // nobody lingers for it
  }
}

// In groups that are not too large, of several hosts.
void ranks_on_different_hosts_are_direct() {
  const auto members = [](size_t count) {
    std::vector<Member> all(count);
    for (size_t rank = 0; rank < count; ++rank) {
      all[rank].network = rank % 2 == 0 ? "a" : "b";
    }
    return all;
  };
  CHECK(are_direct(members(64), 1, 2) && are_direct(members(64), 63, 2));
  CHECK(!are_direct(members(65), 1, 2));
  CHECK(!are_direct(members(64), 1, 3) && !are_direct(members(64), 0, 1));
  CHECK(!are_direct(members(64), 1, 0));
}

// Ranks of these machines that have met, where the store is told `told(rank, key, value)`.
std::vector<Connections> met(const std::vector<std::string>& machines,
                             const std::function<std::string(size_t rank, const std::string& key,
                                                             const std::string& value)>& told) {
  Store store;
  std::vector<Connections> all(machines.size());
  std::vector<std::thread> ranks;
  for (size_t rank = 0; rank < machines.size(); ++rank) {
    ranks.emplace_back([&, rank] {
      KeyValueStore view = store.view();
      view.set = [&, set = view.set](const std::string& key, const std::string& value) {
        set(key, told(rank, key, value));
      };
      const Place place{static_cast<int>(rank), static_cast<int>(machines.size()), "test"};
      all[rank] = meet(view, place, kLong, machines[rank]);
    });
  }
  for (auto& rank : ranks) {
    rank.join();
  }
  return all;
}

// Whether it is where a rank tells its name, and not its addresses.
bool is_of_name(const std::string& key) {
  return key.find(" in ") != key.npos;
}

std::vector<Connections> met_at(const std::vector<std::string>& machines,
                                const std::vector<std::string>& addresses) {
  return met(machines, [&](size_t rank, const std::string& key, const std::string& value) {
    const size_t end_of_port = value.find(' ', value.find(' ') + 1);
    return is_of_name(key) ? value : value.substr(0, end_of_port) + addresses[rank];
  });
}

// An address that nobody answers at costs seconds: over which network other machines are reached is
// known after the first one.
void addresses_like_the_last_that_was_reached_come_first() {
  const auto met = met_at(
      {"a", "b", "a", "b", "a"},
      {" 127.0.1.1", " 127.0.2.1", " 127.0.3.1 127.0.1.1", " 127.0.3.1 127.0.2.1", " 127.0.1.1"});
  const auto reached = [&](size_t rank, size_t other) {
    return address_of_peer(met[rank].lines[other].fd());
  };
  // Rank 0's machine is another one, and then this one: to that there is no link, nor an address.
  CHECK(reached(3, 0) == "127.0.1.1" && reached(3, 2) == "127.0.1.1");
  CHECK(reached(4, 0).empty() && reached(4, 2).empty());
  CHECK(reached(4, 1) == "127.0.2.1" && reached(4, 3) == "127.0.2.1");
}

// As if it had been reached by that.
void addresses_like_the_first_of_rank_0_come_first_on_its_machine() {
  const auto met = met_at({"a", "b", "a"}, {" 127.0.1.1", " 127.0.3.1 127.0.1.1", " 127.0.1.1"});
  CHECK(address_of_peer(met[2].lines[0].fd()).empty());
  CHECK(address_of_peer(met[2].lines[1].fd()) == "127.0.1.1");
}

// Inside a network a rank is found by a name; from outside, and where that leads nowhere, by its
// addresses.
void ranks_of_a_network_need_no_address() {
  for (const bool is_lost : {false, true}) {
    const std::vector<std::string> networks{"a", "b", "a", "b"};
    const auto all = met(networks, [&](size_t, const std::string& key, const std::string& value) {
      return is_lost && is_of_name(key) ? "nobody's" : value;
    });
    const auto is_by_name = [](int fd) {
      int domain = 0;
      socklen_t size = sizeof(domain);
      CHECK(getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0);
      return domain == AF_UNIX;
    };
    int lines = 0;
    for (size_t rank = 0; rank < networks.size(); ++rank) {
      for (size_t other = 0; other < networks.size(); ++other) {
        const bool is_near = networks[rank] == networks[other] && !is_lost;
        if (const auto& line = all[rank].lines[other]; line.is_open()) {
          CHECK(is_by_name(line.fd()) == is_near);
          ++lines;
        }
        if (const auto& socket = all[rank].death_sockets[other]) {
          CHECK(is_by_name(socket.get()) == is_near);
        }
      }
    }
    CHECK(lines == 12);
  }
}

const std::vector<Test> kTests = {
    TEST(ranks_of_a_network_need_no_address),
    TEST(what_is_said_is_on_its_way_until_the_other_kernel_has_it),
    TEST(what_was_said_inside_a_network_is_heard),
    TEST(who_finds_the_door_full_tries_again),
    TEST(an_error_tells_what_was_tried),
    TEST(addresses_like_the_last_that_was_reached_come_first),
    TEST(addresses_like_the_first_of_rank_0_come_first_on_its_machine),
    TEST(ranks_on_different_hosts_are_direct),
    TEST(what_a_connection_does_not_take_is_kept),
    TEST(what_is_too_long_behind_another_sentence_is_kept),
    TEST(no_more_is_heard_at_a_time_than_is_allowed),
    TEST(what_comes_with_the_welcome_is_heard),
    TEST(the_next_leader_hears_and_tells_what_rank_0_cannot),
};

}  // namespace

int main(int count, char** names) {
  return run_tests(kTests, count, names);
}
