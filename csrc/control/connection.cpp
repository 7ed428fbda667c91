// Rank 0 listens at a port that it puts into the store, with its addresses and a random token; the
// others try the addresses one after the other, connect twice, and say the token. Rank 0 answers
// once all are there and listens no longer.

#include "control/connection.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <system_error>

#include "control/handshake.h"

namespace c10d_ext {

namespace {

using std::chrono::milliseconds;

constexpr char kKey[] = "lines";
constexpr uint32_t kHello = 1;
constexpr uint32_t kWelcome = 2;
constexpr uint32_t kDeathSocket = 3;
// Of what strangers may say before they are known.
constexpr size_t kShort = 1024;
constexpr size_t kMostStrangers = 1024;
constexpr size_t kMostOfAName = 64;
// Between two looks into the store.
constexpr milliseconds kRetryPause{10};
// For one address to answer at all.
constexpr milliseconds kReach{3000};

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error(what + ": " + error_text(errno));
}

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

struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;

  const sockaddr* get() const {
    return reinterpret_cast<const sockaddr*>(&storage);
  }
};

std::optional<Address> parse(const std::string& text, int port) {
  Address address;
  auto* v4 = reinterpret_cast<sockaddr_in*>(&address.storage);
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&address.storage);
  if (inet_pton(AF_INET, text.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(static_cast<uint16_t>(port));
    address.length = sizeof(sockaddr_in);
    return address;
  }
  if (inet_pton(AF_INET6, text.c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(static_cast<uint16_t>(port));
    address.length = sizeof(sockaddr_in6);
    return address;
  }
  return std::nullopt;
}

// Of this machine, those that only it can reach last.
std::vector<std::string> own_addresses() {
  std::vector<std::string> outside, inside;
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) {
    fail("cannot list the addresses of this machine");
  }
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || (one->ifa_flags & IFF_UP) == 0) {
      continue;
    }
    std::array<char, INET6_ADDRSTRLEN> text{};
    if (one->ifa_addr->sa_family == AF_INET) {
      const auto* v4 = reinterpret_cast<const sockaddr_in*>(one->ifa_addr);
      inet_ntop(AF_INET, &v4->sin_addr, text.data(), text.size());
    } else if (one->ifa_addr->sa_family == AF_INET6) {
      const auto* v6 = reinterpret_cast<const sockaddr_in6*>(one->ifa_addr);
      if (IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr)) {
        continue;  // means something on one link alone
      }
      inet_ntop(AF_INET6, &v6->sin6_addr, text.data(), text.size());
    } else {
      continue;
    }
    ((one->ifa_flags & IFF_LOOPBACK) != 0 ? inside : outside).emplace_back(text.data());
  }
  freeifaddrs(all);
  outside.insert(outside.end(), inside.begin(), inside.end());
  return outside;
}

FdOwner open_socket(int family) {
  const ForkGuard guard;
  return FdOwner(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), guard);
}

void set(const FdOwner& socket, int level, int option, int value) {
  // What cannot be set is only slower, or noticed later.
  (void)setsockopt(socket.get(), level, option, &value, sizeof(value));
}

// For how long what is said to another machine may stay without an acknowledgement of its kernel.
milliseconds link_timeout() {
  constexpr char kName[] = "TORCH_C10D_EXT_LINK_TIMEOUT_MS";
  constexpr int64_t kDefault = 1200, kLeast = 500, kMost = 600'000;
  const char* text = std::getenv(kName);
  if (text == nullptr || *text == '\0') {
    return milliseconds(kDefault);
  }
  int64_t value = 0;
  const char* end = text + std::strlen(text);
  const auto [rest, error] = std::from_chars(text, end, value);
  if (error != std::errc() || rest != end || value < kLeast || value > kMost) {
    throw std::runtime_error(std::string(kName) + " must be a whole number from " +
                             std::to_string(kLeast) + " to " + std::to_string(kMost) + ", got '" +
                             text + "'");
  }
  return milliseconds(value);
}

// Payload leave at once, and a machine that is gone is noticed in half a minute.
void tune(const FdOwner& socket) {
  set(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(socket, IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set(socket, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(socket, IPPROTO_TCP, TCP_KEEPCNT, 4);
  set(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, 30'000);
}

// Lines between ranks without a link between them never lose anything. The others are in use all
// the time, see Heartbeat.
void tune_line(const Connection& line, const Member& one, const Member& other) {
  if (line.is_open() && one.network != other.network) {
    const auto value = static_cast<int>(link_timeout().count());
    (void)setsockopt(line.fd(), IPPROTO_TCP, TCP_USER_TIMEOUT, &value, sizeof(value));
  }
}

struct Listening {
  FdOwner socket;
  int port;
};

Listening listen_anywhere() {
  FdOwner socket = open_socket(AF_INET6);
  Address any = *parse("::", 0);
  if (socket) {
    set(socket, IPPROTO_IPV6, IPV6_V6ONLY, 0);
  }
  if (!socket || bind(socket.get(), any.get(), any.length) != 0) {
    socket = open_socket(AF_INET);
    any = *parse("0.0.0.0", 0);
    if (!socket || bind(socket.get(), any.get(), any.length) != 0) {
      fail("cannot bind a socket");
    }
  }
  Address bound;
  bound.length = sizeof(bound.storage);
  if (::listen(socket.get(), SOMAXCONN) != 0 ||
      getsockname(socket.get(), reinterpret_cast<sockaddr*>(&bound.storage), &bound.length) != 0) {
    fail("cannot listen");
  }
  const int port = bound.storage.ss_family == AF_INET6
                       ? ntohs(reinterpret_cast<sockaddr_in6*>(&bound.storage)->sin6_port)
                       : ntohs(reinterpret_cast<sockaddr_in*>(&bound.storage)->sin_port);
  return {std::move(socket), port};
}

Connection accept_line(const FdOwner& listening) {
  FdOwner socket;
  {
    const ForkGuard guard;
    socket =
        FdOwner(accept4(listening.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK), guard);
  }
  if (socket) {
    tune(socket);
  }
  return Connection(std::move(socket));
}

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
    deadline.poll(fds);
    if (fds[0].revents != 0 && !line.listen(limit)) {
      return line.next();
    }
  }
}

Connections gather_lines(const KeyValueStore& store, const Place& place, const Member& self,
                         const Deadline& deadline) {
  const auto size = static_cast<size_t>(place.size);
  Connections star;
  star.lines.resize(size);
  star.death_sockets.resize(size);
  star.members.resize(size);
  star.members[0] = self;
  const auto is_missing = [&](size_t rank) {
    return rank > 0 && !(star.lines[rank].is_open() && star.death_sockets[rank]);
  };
  std::vector<size_t> missing;
  auto listening = listen_anywhere();
  const std::string token = random_secret();
  std::ostringstream at;
  at << token << ' ' << listening.port;
  for (const auto& address : own_addresses()) {
    at << ' ' << address;
  }
  store.set(kKey, at.str());

  std::vector<Connection> strangers;
  for (;;) {
    missing.clear();
    for (size_t rank = 0; rank < size; ++rank) {
      if (is_missing(rank)) {
        missing.push_back(rank);
      }
    }
    if (missing.empty()) {
      break;
    }
    if (deadline.passed()) {
      std::ostringstream text;
      const char* separator = missing.size() == 1 ? "rank " : "ranks ";
      for (const size_t rank : missing) {
        text << separator << rank;
        separator = ", ";
      }
      text << " did not connect to rank 0 " << deadline.within();
      throw std::runtime_error(text.str());
    }
    std::vector<pollfd> fds{{listening.socket.get(), POLLIN, 0}};
    for (const auto& stranger : strangers) {
      fds.push_back({stranger.fd(), POLLIN, 0});
    }
    deadline.poll(fds);
    for (size_t i = 0; i < strangers.size(); ++i) {
      if (fds[i + 1].revents == 0) {
        continue;
      }
      const bool stays = strangers[i].listen(kShort);
      auto hello = strangers[i].next();
      if (!hello && stays) {
        continue;
      }
      Connection line = std::move(strangers[i]);
      strangers[i] = Connection();
      try {
        const bool known = hello && (hello->kind == kHello || hello->kind == kDeathSocket);
        if (!known || !is_same_secret(hello->words.text(), token)) {
          continue;  // not one of this group
        }
        const int64_t said = hello->words.number();
        if (said < 1 || said >= place.size) {
          continue;
        }
        const auto rank = static_cast<size_t>(said);
        // A rank that tries once more means the later one.
        if (hello->kind == kDeathSocket) {
          star.death_sockets[rank] = line.take_socket();
        } else {
          star.members[rank] = take_member(hello->words);
          tune_line(line, self, star.members[rank]);
          star.lines[rank] = std::move(line);
        }
      } catch (const std::runtime_error&) {
        // It says something else.
      }
    }
    std::erase_if(strangers, [](const Connection& line) { return !line.is_open(); });
    if (fds[0].revents != 0 && strangers.size() < kMostStrangers) {
      if (Connection line = accept_line(listening.socket); line.is_open()) {
        strangers.push_back(std::move(line));
      }
    }
  }
  Payload all;
  for (const auto& member : star.members) {
    put(all, member);
  }
  for (size_t rank = 1; rank < size; ++rank) {
    star.lines[rank].say(kWelcome, all);
  }
  return star;
}

// To rank 0, or why there is none.
std::string reach(const Address& address, const Deadline& deadline, Connection& line) {
  FdOwner socket = open_socket(address.storage.ss_family);
  if (!socket) {
    return error_text(errno);
  }
  tune(socket);
  if (connect(socket.get(), address.get(), address.length) != 0) {
    if (errno != EINPROGRESS) {
      return error_text(errno);
    }
    const Deadline soon = deadline.shortened(kReach);
    std::vector<pollfd> fds{{socket.get(), POLLOUT, 0}};
    while (fds[0].revents == 0) {
      if (soon.passed()) {
        return "no answer";
      }
      soon.poll(fds);
    }
    int error = 0;
    socklen_t length = sizeof(error);
    if (getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0 || error != 0) {
      return error_text(error != 0 ? error : errno);
    }
  }
  line = Connection(std::move(socket));
  return {};
}

Connections join_lines(const KeyValueStore& store, const Place& place, const Member& self,
                       const Deadline& deadline) {
  while (!store.has(kKey)) {
    if (deadline.passed()) {
      throw std::runtime_error("rank 0 did not say where it is " + deadline.within());
    }
    deadline.pause(kRetryPause);
  }
  std::istringstream where(store.get(kKey, milliseconds(5000)));
  std::string token;
  int port = 0;
  where >> token >> port;
  Payload hello, death_hello;
  hello.put(token).put(place.rank);
  put(hello, self);
  death_hello.put(token).put(place.rank);

  std::ostringstream tried;
  std::string text;
  while (where >> text) {
    const auto address = parse(text, port);
    Connection line, death_socket;
    std::string why = address ? reach(*address, deadline, line) : "not an address";
    if (why.empty()) {
      why = reach(*address, deadline, death_socket);
    }
    if (why.empty()) {
      line.say(kHello, hello);
      death_socket.say(kDeathSocket, death_hello);
      // Rank 0 answers when the last rank is there. Somebody else there would hang up, or not know
      // what this is about.
      auto welcome = await(line, deadline, size_t{1} << 20);
      if (welcome && welcome->kind == kWelcome) {
        Connections star;
        star.lines.push_back(std::move(line));
        star.death_sockets.push_back(death_socket.take_socket());
        for (int rank = 0; rank < place.size; ++rank) {
          star.members.push_back(take_member(welcome->words));
        }
        tune_line(star.lines[0], self, star.members[0]);
        return star;
      }
      why = deadline.passed() ? "no welcome " + deadline.within() : "somebody else";
    }
    tried << (tried.str().empty() ? "" : ", ") << text << " (" << why << ")";
  }
  throw std::runtime_error("rank 0 cannot be reached at port " + std::to_string(port) + " of " +
                           tried.str());
}

}  // namespace

Payload& Payload::put(int64_t number) {
  bytes_.append(reinterpret_cast<const char*>(&number), sizeof(number));
  return *this;
}

Payload& Payload::put(const std::string& text) {
  put(static_cast<int64_t>(text.size()));
  bytes_ += text;
  return *this;
}

int64_t Payload::number() {
  int64_t number = 0;
  if (bytes_.size() - at_ < sizeof(number)) {
    throw std::runtime_error("a sentence is too short");
  }
  std::memcpy(&number, bytes_.data() + at_, sizeof(number));
  at_ += sizeof(number);
  return number;
}

size_t Payload::size() {
  const int64_t size = number();
  if (size < 0 || static_cast<uint64_t>(size) > bytes_.size() - at_) {
    throw std::runtime_error("a sentence is too short");
  }
  return static_cast<size_t>(size);
}

std::string Payload::text() {
  const size_t count = size();
  std::string text = bytes_.substr(at_, count);
  at_ += count;
  return text;
}

namespace {

// Before the words.
struct Heading {
  uint32_t bytes;
  uint32_t kind;
};

}  // namespace

void Connection::say(uint32_t kind, const Payload& words) {
  const Heading heading{static_cast<uint32_t>(words.bytes().size()), kind};
  unsent_.append(reinterpret_cast<const char*>(&heading), sizeof(heading));
  unsent_ += words.bytes();
  flush();
}

void Connection::flush() {
  size_t sent = 0;
  while (sent < unsent_.size()) {
    const ssize_t now =
        ::send(fd(), unsent_.data() + sent, unsent_.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (now < 0 && errno == EINTR) {
      continue;
    }
    if (now < 0 && errno != EAGAIN && errno != EWOULDBLOCK) {
      error_ = error_ != 0 ? error_ : errno;
      sent = unsent_.size();  // nobody there: listen() tells
    }
    if (now <= 0) {
      break;
    }
    sent += static_cast<size_t>(now);
  }
  unsent_.erase(0, sent);
}

bool Connection::listen(size_t limit) {
  std::array<char, 4096> some;
  has_unheard_ = false;
  for (;;) {
    const ssize_t now = ::recv(fd(), some.data(), some.size(), MSG_DONTWAIT);
    if (now > 0) {
      heard_.append(some.data(), static_cast<size_t>(now));
      Heading heading{};
      if (heard_.size() >= sizeof(heading)) {
        std::memcpy(&heading, heard_.data(), sizeof(heading));
      }
      if (heading.bytes > limit) {
        return false;
      }
      if (heard_.size() > sizeof(heading) + limit) {
        has_unheard_ = true;  // a sentence is there; the rest waits
        return true;
      }
      continue;
    }
    if (now == 0) {
      return false;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return true;
    }
    if (errno != EINTR) {
      error_ = error_ != 0 ? error_ : errno;
      return false;
    }
  }
}

bool Connection::is_unreachable() const {
  return error_ == ETIMEDOUT || error_ == EHOSTUNREACH || error_ == ENETUNREACH ||
         error_ == EHOSTDOWN || error_ == ENETDOWN;
}

std::optional<Frame> Connection::next() {
  Heading heading;
  if (heard_.size() < sizeof(heading)) {
    return std::nullopt;
  }
  std::memcpy(&heading, heard_.data(), sizeof(heading));
  if (heard_.size() - sizeof(heading) < heading.bytes) {
    return std::nullopt;
  }
  Frame sentence{heading.kind, Payload(heard_.substr(sizeof(heading), heading.bytes))};
  heard_.erase(0, sizeof(heading) + heading.bytes);
  return sentence;
}

Connections connect_to_coordinator(const KeyValueStore& store, const Place& place,
                                   std::chrono::milliseconds timeout, const std::string& machine) {
  const Deadline deadline(timeout, store.interrupt);
  (void)link_timeout();  // before anybody waits
  const Member self = this_member(machine);
  return place.rank == 0 ? gather_lines(store, place, self, deadline)
                         : join_lines(store, place, self, deadline);
}

}  // namespace c10d_ext
