#pragma once

// A rank of a group, alone with its lines to the others.

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "agreement_ranks.h"
#include "backends/checked/duties.h"
#include "backends/checked/open_calls.h"
#include "backends/checked/protocol.h"
#include "backends/checked/questions.h"
#include "backends/checked/roster.h"
#include "control/connection.h"
#include "control/landing.h"
#include "control/shared_bytes.h"
#include "program.h"

namespace c10d_ext {

// What has become of a receive.
struct Received {
  int from = -1;
  std::optional<std::string> data = std::nullopt;
  const char* at = nullptr;  // where it was
  bool has_begun = false;    // by the engine
  std::optional<Failure> failure = std::nullopt;
};

// One rank, and the other ends of its lines.
class Rank {
 public:
  Rank(int rank, const std::vector<std::string>& hosts, const std::vector<int>& peers)
      : roster_(roster_of(rank, hosts)),
        calls_(roster_, kVerdict),
        duties_(roster_, calls_, connect(hosts.size(), peers), watch(hosts.size(), peers), {}) {}

  // Calls a collective with data of its own.
  void call(Call& call, Contribution data = Contribution("mine")) {
    auto operation = call.operation(summed(6), std::move(data));
    OpenCall entered{operation.op, std::nullopt, kLong, operation.begin, operation.fail};
    entered.receive = operation.receive;
    calls_.enter(std::move(operation.called), std::move(operation.data), std::move(entered));
    work();
  }
  // Calls one whose data is long on its way.
  void call_long(Call& call) {
    auto operation = call.operation(summed(6), kLong);
    OpenCall entered{operation.op, std::nullopt, kLong, operation.begin, operation.fail};
    entered.is_long = true;
    calls_.enter(summed(6), std::nullopt, std::move(entered));
    work();
  }
  static Payload called_long() {
    Payload words;
    words.put(Called(summed(6)).words());
    put(words, std::optional<Contribution>());
    return words;
  }
  void done(uint64_t seq) {
    CHECK(calls_.done(seq));
    work();
  }
  // Sends a message. Whether it is over, with which its data changes.
  bool send(int peer, const std::string& data) {
    const auto lent = std::make_shared<std::string>(data);
    bool is_over = false;
    OpenCall call{"send", 0, kLong, [](uint64_t) { CHECK(false); },
                  [](const Failure&) { CHECK(false); }};
    call.receive = [&](uint64_t, const auto&) { is_over = true; };
    Posted posted{.sends = true, .peer = peer, .bytes = data.size()};
    posted.data = SharedBytes::lent({lent, lent->data()}, lent->size());
    calls_.enter_message(std::move(posted), std::move(call));
    work();
    if (is_over) {
      std::fill(lent->begin(), lent->end(), '?');
    }
    return is_over;
  }
  // Receives a message to that memory.
  void receive(int peer, std::string& memory, Received& received,
               std::chrono::milliseconds timeout = kLong) {
    OpenCall call{"recv", 0, timeout, [&received](uint64_t) { received.has_begun = true; },
                  [&received](const Failure& failure) { received.failure = failure; }};
    call.receive = [&received](uint64_t from, const std::vector<SharedBytes>& data) {
      received.from = static_cast<int>(from);
      received.data = std::string(data.front());
      received.at = data.front().data();
    };
    call.landing = std::make_shared<Landing>(
        std::shared_ptr<char>(std::shared_ptr<char>(), memory.data()), memory.size());
    calls_.enter_message({.peer = peer, .bytes = memory.size()}, std::move(call));
    work();
  }
  void leave() {
    duties_.say_goodbye();
  }
  Connection& line(int peer) {
    return ends_.at(peer);
  }
  void close(int peer) {
    ends_.at(peer).close();
    work();
  }
  // A peer ends, and that is known before what it has said is heard.
  void end(int peer) {
    lives_.erase(peer);
    duties_.work(duties_.star().wait_aside(Duties::Clock::now() + kLong));
  }
  void work() {
    duties_.work(duties_.star().everything());
  }
  Duties::Clock::time_point next_beat() const {
    return duties_.star().next_beat();
  }
  void say(int peer, Says kind, const Payload& words) {
    ends_.at(peer).say(kind, words);
    work();
  }
  // The next that it has said to a peer, but for heartbeats, which come whenever it is time.
  auto next_of(int peer) {
    auto said = line(peer).next();
    while (said && said->kind == kBeat) {
      said = line(peer).next();
    }
    return said;
  }
  // What the rank has said to a peer since, without those; none where it has closed the line.
  std::optional<std::vector<uint32_t>> heard_by(int peer) {
    std::vector<uint32_t> kinds;
    bool beats = false;
    do {
      if (!line(peer).listen(4096)) {
        return std::nullopt;
      }
      beats = false;
      while (const auto said = line(peer).next()) {
        said->kind == kBeat ? static_cast<void>(beats = true) : kinds.push_back(said->kind);
      }
    } while (beats && kinds.empty());  // the line may be closed behind them
    return kinds;
  }
  // The numbers in what it has said of one kind; what it has said of others is dropped.
  std::vector<int64_t> heard_by(int peer, Says kind) {
    auto& end = ends_.at(peer);
    CHECK(end.listen(4096));
    std::vector<int64_t> numbers;
    while (auto said = end.next()) {
      if (said->kind == kind) {
        numbers.push_back(said->words.number());
      }
    }
    return numbers;
  }

 private:
  std::vector<Connection> connect(size_t size, const std::vector<int>& peers) {
    std::vector<Connection> lines(size);
    for (const int peer : peers) {
      std::array<int, 2> ends{};
      CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) == 0);
      const int little = 4096;
      CHECK(setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &little, sizeof(little)) == 0);
      const ForkGuard guard;
      lines[static_cast<size_t>(peer)] = Connection(FdOwner(ends[0], guard));
      ends_.emplace(peer, FdOwner(ends[1], guard));
    }
    return lines;
  }

  std::vector<FdOwner> watch(size_t size, const std::vector<int>& peers) {
    std::vector<FdOwner> sockets(size);
    for (const int peer : peers) {
      std::array<int, 2> ends{};
      CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) == 0);
      const ForkGuard guard;
      sockets[static_cast<size_t>(peer)] = FdOwner(ends[0], guard);
      lives_.emplace(peer, FdOwner(ends[1], guard));
    }
    return sockets;
  }

  std::map<int, Connection> ends_;
  std::map<int, FdOwner> lives_;
  const Roster roster_;
  OpenCalls calls_;
  Duties duties_;
};

}  // namespace c10d_ext
