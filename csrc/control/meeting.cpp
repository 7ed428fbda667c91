// Whom others connect to listens at a port that it puts into the store, with its addresses and a
// random token; the others try the addresses one after the other, and say the token. Those of its
// network find there by which name it listens, too, and try that first. They connect to rank 0
// twice, which answers once all are there; to others once, who answer at once.

#include "control/meeting.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "control/handshake.h"
#include "control/sockets.h"

namespace c10d_ext {

namespace {

using std::chrono::milliseconds;

// Of what strangers may say before they are known.
constexpr size_t kShort = 1024;
constexpr size_t kMostStrangers = 1024;
constexpr size_t kMostOfAName = 64;
// What a rank hears as it is welcome.
constexpr size_t kMostOfAWelcome = size_t{1} << 22;
// Between two looks into the store.
constexpr milliseconds kRetryPause{10};

// Fit for texts, whoever has said it.
std::string printable(std::string text) {
  std::erase_if(text, [](unsigned char c) { return c < 0x20 || c == 0x7f; });
  return text.substr(0, kMostOfAName);
}

Member this_member(const std::string& machine) {
  Member member{this_process(), machine, {}, machine};
  if (!machine.empty()) {
    return member;
  }
  std::array<char, kMostOfAName + 1> name{};
  gethostname(name.data(), name.size() - 1);
  const char* given = std::getenv("TORCH_C10D_EXT_SHM_HOST");
  member.host = printable(given != nullptr && *given != '\0' ? given : name.data());
  std::ifstream boot("/proc/sys/kernel/random/boot_id");
  std::getline(boot, member.machine);
  std::array<char, 64> space{};
  if (readlink("/proc/self/ns/pid", space.data(), space.size() - 1) > 0) {
    member.machine += std::string(" ") + space.data();
  } else {
    member.machine = random_secret();  // like no other
  }
  space = {};
  if (readlink("/proc/self/ns/net", space.data(), space.size() - 1) > 0) {
    member.network = member.machine + " " + space.data();
  } else {
    member.network = random_secret();
  }
  return member;
}

void put(Payload& words, const Member& member) {
  words.put(member.peer.pid).put(static_cast<int64_t>(member.peer.start_time));
  words.put(member.machine).put(member.host).put(member.network);
}

Member take_member(Payload& words) {
  Member member;
  const int64_t pid = words.number();
  if (pid < 1 || pid > std::numeric_limits<int>::max()) {
    throw std::runtime_error("no number of a process");
  }
  member.peer.pid = static_cast<int>(pid);
  member.peer.start_time = static_cast<uint64_t>(words.number());
  member.machine = words.text();
  member.host = printable(words.text());
  member.network = words.text();
  return member;
}

// Lines between ranks without a link between them never lose anything.
void tune_line(const Connection& line, const Member& one, const Member& other) {
  if (line.is_open() && one.network != other.network) {
    tune_for_link(line.fd());
  }
}

// Where a rank puts the name for those of its network.
std::string key_of_name(int rank, const std::string& network) {
  return key_of(rank) + " in " + network;
}

// Where other ranks connect to this one.
class Entrance {
 public:
  Entrance(const KeyValueStore& store, int rank, const std::string& network)
      : rank_(rank), token_(random_secret()), listening_(listen_anywhere()) {
    const std::string name = "c10d_ext-" + random_secret();
    by_name_ = listen_by_name(name);
    if (by_name_) {  // told first: who sees where this rank is looks for it
      store.set(key_of_name(rank, network), name);
    }
    std::ostringstream at;
    at << token_ << ' ' << listening_.port;
    for (const auto& address : own_addresses()) {
      at << ' ' << address;
    }
    store.set(key_of(rank), at.str());
  }

  // Calls `enter` with each rank that comes, until none is missing. What it throws is the caller's
  // fault.
  void admit(const Deadline& deadline, const std::function<std::vector<int>()>& missing,
             const std::function<void(int rank, Frame& hello, Connection line)>& enter) {
    for (auto awaited = missing(); !awaited.empty(); awaited = missing()) {
      if (deadline.passed()) {
        throw std::runtime_error(text_of_missing(awaited) + deadline.within());
      }
      std::vector<pollfd> fds{{listening_.socket.get(), POLLIN, 0}, {by_name_.get(), POLLIN, 0}};
      for (const auto& stranger : strangers_) {
        fds.push_back({stranger.fd(), POLLIN, 0});
      }
      deadline.poll(fds);
      for (size_t i = 0; i < strangers_.size(); ++i) {
        if (fds[i + 2].revents != 0) {
          hear(strangers_[i], enter);
        }
      }
      std::erase_if(strangers_, [](const Connection& line) { return !line.is_open(); });
      admit_strangers(fds[0], listening_.socket);
      admit_strangers(fds[1], by_name_);
    }
  }

 private:
  // All who are at the door.
  void admit_strangers(const pollfd& door, const FdOwner& listening) {
    while (door.revents != 0 && strangers_.size() < kMostStrangers) {
      FdOwner socket = accept_socket(listening);
      if (!socket) {
        return;
      }
      strangers_.emplace_back(std::move(socket));
    }
  }

  std::string text_of_missing(const std::vector<int>& ranks) const {
    std::ostringstream text;
    const char* separator = ranks.size() == 1 ? "rank " : "ranks ";
    for (const int rank : ranks) {
      text << separator << rank;
      separator = ", ";
    }
    text << " did not connect to rank " << rank_ << ' ';
    return text.str();
  }

  // Leaves the stranger as it is, or takes its line.
  template <class Enter>
  void hear(Connection& stranger, const Enter& enter) {
    const bool stays = stranger.listen(kShort);
    auto hello = stranger.next();
    if (!hello && stays) {
      return;
    }
    Connection line = std::exchange(stranger, {});
    try {
      const bool is_known = hello && (hello->kind == kHello || hello->kind == kDeathSocket);
      if (is_known && is_same_secret(hello->words.text(), token_)) {
        const int64_t rank = hello->words.number();
        if (rank >= 0 && rank <= std::numeric_limits<int>::max()) {
          enter(static_cast<int>(rank), *hello, std::move(line));
        }
      }
    } catch (const std::runtime_error&) {
      // It says something else.
    }
  }

  const int rank_;
  const std::string token_;
  const Listening listening_;
  FdOwner by_name_;  // where that can be
  std::vector<Connection> strangers_;
};

// The next sentence, or none by the deadline, or at the end of the line.
std::optional<Frame> await(Connection& line, const Deadline& deadline, size_t limit) {
  for (;;) {
    if (auto sentence = line.next()) {
      return sentence;
    }
    if (deadline.passed()) {
      return std::nullopt;
    }
    std::vector<pollfd> fds{{line.fd(), POLLIN, 0}};
    if (!line.has_unheard()) {
      deadline.poll(fds);
    }
    if ((line.has_unheard() || fds[0].revents != 0) && !line.listen(limit)) {
      return line.next();
    }
  }
}

// How much of the two is the same, from the beginning.
size_t common(const std::string& one, const std::string& other) {
  const auto end = std::mismatch(one.begin(), one.end(), other.begin(), other.end()).first;
  return static_cast<size_t>(end - one.begin());
}

// The other side of an Entrance: tries the name of `rank` in `network`, where that is known to be
// its own, or may be, and its addresses, until `attempt` says nothing, which is told the rank's
// token, or else why that was not it. Addresses most like `nearest` come first. The one at which it
// was reached, or where that was by its name, the first one.
std::string visit(
    const KeyValueStore& store, int rank, const Deadline& deadline, const std::string& network,
    const std::string& nearest,
    const std::function<std::string(const Address&, const std::string& token)>& attempt) {
  const std::string key = key_of(rank);
  const std::string whom = "rank " + std::to_string(rank);
  while (!store.has(key)) {
    if (deadline.passed()) {
      throw std::runtime_error(whom + " did not say where it is " + deadline.within());
    }
    deadline.pause(kRetryPause);
  }
  std::istringstream where(store.get(key, milliseconds(5000)));
  std::string token;
  int port = 0;
  where >> token >> port;
  std::vector<std::string> addresses{std::istream_iterator<std::string>(where), {}};
  std::stable_sort(addresses.begin(), addresses.end(), [&](const auto& one, const auto& other) {
    return common(one, nearest) > common(other, nearest);
  });
  std::string by_name;
  if (const auto key_here = key_of_name(rank, network); !network.empty() && store.has(key_here)) {
    const auto name = address_of_name(store.get(key_here, milliseconds(5000)));
    const std::string why = name ? attempt(*name, token) : "not a name";
    if (why.empty()) {
      return addresses.empty() ? std::string() : addresses.front();
    }
    by_name = " by its name in this network (" + why + ")";
  }
  std::ostringstream tried;
  for (const auto& text : addresses) {
    if (!by_name.empty() && deadline.passed()) {
      break;
    }
    const auto address = parse_address(text, port);
    const std::string why = address ? attempt(*address, token) : "not an address";
    if (why.empty()) {
      return text;
    }
    tried << (tried.str().empty() ? " at port " + std::to_string(port) + " of " : ", ");
    tried << text << " (" << why << ")";
  }
  const char* nor = tried.str().empty() || by_name.empty() ? "" : ", nor";
  throw std::runtime_error(whom + " cannot be reached" + tried.str() + nor + by_name);
}

// Somebody else would hang up, or not know what this is about.
std::string why_not_welcome(const std::optional<Frame>& said, const Deadline& deadline) {
  return said && said->kind == kWelcome ? std::string()
         : deadline.passed()            ? "no welcome " + deadline.within()
                                        : "somebody else";
}

Connections gather_lines(const KeyValueStore& store, const Place& place, const Member& self,
                         const Deadline& deadline) {
  const auto size = static_cast<size_t>(place.size);
  Connections star;
  star.lines.resize(size);
  star.death_sockets.resize(size);
  star.members.resize(size);
  star.members[0] = self;
  Entrance entrance(store, place.rank, self.network);
  entrance.admit(
      deadline,
      [&] {
        std::vector<int> missing;
        for (size_t rank = 1; rank < size; ++rank) {
          if (!star.lines[rank].is_open() || !star.death_sockets[rank]) {
            missing.push_back(static_cast<int>(rank));
          }
        }
        return missing;
      },
      [&](int said, Frame& hello, Connection line) {
        const auto rank = static_cast<size_t>(said);
        if (rank < 1 || rank >= size) {
          return;
        }
        // A rank that tries once more means the later one.
        if (hello.kind == kDeathSocket) {
          star.death_sockets[rank] = line.take_socket();
        } else {
          star.members[rank] = take_member(hello.words);
          tune_line(line, self, star.members[rank]);
          star.lines[rank] = std::move(line);
        }
      });
  Payload all;
  for (const auto& member : star.members) {
    put(all, member);
  }
  for (size_t rank = 1; rank < size; ++rank) {
    star.lines[rank].say(kWelcome, all);
  }
  return star;
}

// `reached`: an address of rank 0.
Connections join_lines(const KeyValueStore& store, const Place& place, const Member& self,
                       const Deadline& deadline, std::string& reached) {
  Connections star;
  const auto size = static_cast<size_t>(place.size);
  star.lines.resize(size);
  star.death_sockets.resize(size);
  reached = visit(store, 0, deadline, self.network, {},
                  [&](const Address& address, const std::string& token) -> std::string {
                    FdOwner socket, death_socket;
                    for (auto* end : {&socket, &death_socket}) {
                      if (auto why = reach(address, deadline, *end); !why.empty()) {
                        return why;
                      }
                    }
                    Connection line(std::move(socket)), death_line(std::move(death_socket));
                    Payload hello, death_hello;
                    hello.put(token).put(place.rank);
                    put(hello, self);
                    death_hello.put(token).put(place.rank);
                    line.say(kHello, hello);
                    death_line.say(kDeathSocket, death_hello);
                    // Rank 0 answers when the last rank is there.
                    auto welcome = await(line, deadline, kMostOfAWelcome);
                    if (auto why = why_not_welcome(welcome, deadline); !why.empty()) {
                      return why;
                    }
                    for (int rank = 0; rank < place.size; ++rank) {
                      star.members.push_back(take_member(welcome->words));
                    }
                    tune_line(line, self, star.members[0]);
                    star.lines[0] = std::move(line);
                    star.death_sockets[0] = death_line.take_socket();
                    return {};
                  });
  return star;
}

// A line to another rank than rank 0.
Connection reach_other(const KeyValueStore& store, int other, int rank, const std::string& network,
                       const std::string& nearest, const Deadline& deadline) {
  Connection line;
  visit(store, other, deadline, network, nearest,
        [&](const Address& address, const std::string& token) -> std::string {
          FdOwner socket;
          if (auto why = reach(address, deadline, socket); !why.empty()) {
            return why;
          }
          line = Connection(std::move(socket));
          line.say(kHello, Payload().put(token).put(rank));
          return why_not_welcome(await(line, deadline, kShort), deadline);
        });
  return line;
}

// The lines of those that connect to this one.
void admit_others(Entrance& entrance, const std::vector<int>& ranks, const Deadline& deadline,
                  std::vector<Connection>& lines) {
  entrance.admit(
      deadline,
      [&] {
        auto missing = ranks;
        std::erase_if(missing,
                      [&](int rank) { return lines[static_cast<size_t>(rank)].is_open(); });
        return missing;
      },
      [&](int rank, Frame& /*hello*/, Connection line) {
        if (std::find(ranks.begin(), ranks.end(), rank) != ranks.end()) {
          line.say(kWelcome, {});
          lines[static_cast<size_t>(rank)] = std::move(line);
        }
      });
}

bool has(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

// With whom a rank has lines, beside rank 0, in a group with leaders: the same for both.
std::vector<int> partners_of(int rank, const std::vector<Member>& members,
                             const std::vector<std::vector<int>>& hosts) {
  std::set<int> partners;
  for (size_t other = 0; other < members.size(); ++other) {
    if (are_direct(members, rank, static_cast<int>(other))) {
      partners.insert(static_cast<int>(other));
    }
  }
  const auto add = [&](const std::vector<int>& ranks) {
    partners.insert(ranks.begin(), ranks.end());
  };
  const auto own = std::find_if(hosts.begin(), hosts.end(),
                                [rank](const auto& ranks) { return has(ranks, rank); });
  // Rank 0's host has the next leader, too, who is there once rank 0 is not.
  const auto next = hosts.begin() + 1;
  if (own->front() != rank) {
    partners.insert(own == hosts.begin() ? next->front() : own->front());
  } else {
    add(*own);
    for (const auto& ranks : hosts) {
      partners.insert(ranks.front());
    }
    if (own == next) {
      add(hosts.front());
    }
  }
  partners.erase(0);
  partners.erase(rank);
  return {partners.begin(), partners.end()};
}

// Each connects to those before it; rank 0 has all lines that it needs. `nearest`: over which
// addresses.
void meet_others(const KeyValueStore& store, const Place& place, const Deadline& deadline,
                 std::string nearest, Connections& met) {
  const auto hosts = ranks_by_leader(met.members);
  if (hosts.empty() || place.rank == 0) {
    return;
  }
  const auto partners = partners_of(place.rank, met.members, hosts);
  const auto before = std::lower_bound(partners.begin(), partners.end(), place.rank);
  const auto network = [&](int rank) -> const std::string& {
    return met.members[static_cast<size_t>(rank)].network;
  };
  std::optional<Entrance> entrance;
  if (before != partners.end()) {
    entrance.emplace(store, place.rank, network(place.rank));
  }
  for (auto other = partners.begin(); other != before; ++other) {
    auto& line = met.lines[static_cast<size_t>(*other)];
    const bool is_near = network(*other) == network(place.rank);
    line = reach_other(store, *other, place.rank, is_near ? network(*other) : std::string(),
                       nearest, deadline);
    // Where a machine has several networks, that over which the last one was reached will do.
    if (!is_near) {
      nearest = address_of_peer(line.fd());
    }
  }
  if (entrance) {
    admit_others(*entrance, {before, partners.end()}, deadline, met.lines);
  }
  // What a link does is seen by those that always say something, the leaders' lines: who is stopped
  // hears nothing of a message for a while, and its line is as it should be.
  std::vector<int> leaders;
  for (const auto& ranks : hosts) {
    leaders.push_back(ranks.front());
  }
  for (const int other : has(leaders, place.rank) ? leaders : std::vector<int>()) {
    const auto rank = static_cast<size_t>(other);
    tune_line(met.lines[rank], met.members[static_cast<size_t>(place.rank)], met.members[rank]);
  }
}

}  // namespace

std::string key_of(int rank) {
  return rank == 0 ? "lines" : "lines of " + std::to_string(rank);
}

std::vector<std::vector<int>> ranks_by_leader(const std::vector<Member>& members) {
  std::map<std::string, std::vector<int>> ranks;
  for (size_t rank = 0; rank < members.size(); ++rank) {
    ranks[members[rank].network].push_back(static_cast<int>(rank));
  }
  std::vector<std::vector<int>> hosts;
  if (ranks.size() >= 2 && ranks.size() <= kMostLeaders) {
    for (auto& [network, own] : ranks) {
      hosts.push_back(std::move(own));
    }
    std::sort(hosts.begin(), hosts.end());  // by their leaders
  }
  return hosts;
}

bool are_direct(const std::vector<Member>& members, int one, int other) {
  const auto network = [&](int rank) -> const std::string& {
    return members[static_cast<size_t>(rank)].network;
  };
  return members.size() <= kMostDirect && one != 0 && other != 0 && network(one) != network(other);
}

Connections meet(const KeyValueStore& store, const Place& place, milliseconds timeout,
                 const std::string& machine) {
  const Deadline deadline(timeout, store.interrupt);
  (void)link_timeout();  // before anybody waits
  const Member self = this_member(machine);
  std::string reached;
  Connections met = place.rank == 0 ? gather_lines(store, place, self, deadline)
                                    : join_lines(store, place, self, deadline, reached);
  meet_others(store, place, deadline, reached, met);
  return met;
}

}  // namespace c10d_ext
