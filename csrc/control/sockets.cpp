#include "control/sockets.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace c10d_ext {

namespace {

using std::chrono::milliseconds;

// For one address to answer at all.
constexpr milliseconds kReach{3000};

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error(what + ": " + error_text(errno));
}

FdOwner open_socket(int family) {
  const ForkGuard guard;
  return FdOwner(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), guard);
}

void set(const FdOwner& socket, int level, int option, int value) {
  // What cannot be set is only slower, or noticed later.
  (void)setsockopt(socket.get(), level, option, &value, sizeof(value));
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

}  // namespace

std::optional<Address> parse_address(const std::string& text, int port) {
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

// In Linux's abstract namespace, of which each network has its own: no file is left behind.
std::optional<Address> address_of_name(const std::string& name) {
  Address address;
  auto* local = reinterpret_cast<sockaddr_un*>(&address.storage);
  if (name.empty() || name.size() >= sizeof(local->sun_path)) {
    return std::nullopt;
  }
  local->sun_family = AF_UNIX;
  std::memcpy(local->sun_path + 1, name.data(), name.size());
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

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

void tune_for_link(int fd) {
  const auto value = static_cast<int>(link_timeout().count());
  (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &value, sizeof(value));
}

Listening listen_anywhere() {
  FdOwner socket = open_socket(AF_INET6);
  Address any = *parse_address("::", 0);
  if (socket) {
    set(socket, IPPROTO_IPV6, IPV6_V6ONLY, 0);
  }
  if (!socket || bind(socket.get(), any.get(), any.length) != 0) {
    socket = open_socket(AF_INET);
    any = *parse_address("0.0.0.0", 0);
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

FdOwner listen_by_name(const std::string& name) {
  const auto address = address_of_name(name);
  FdOwner socket = open_socket(AF_UNIX);
  const bool listens = address && socket &&
                       bind(socket.get(), address->get(), address->length) == 0 &&
                       ::listen(socket.get(), SOMAXCONN) == 0;
  return listens ? std::move(socket) : FdOwner();
}

FdOwner accept_socket(const FdOwner& listening) {
  FdOwner socket;
  {
    const ForkGuard guard;
    socket =
        FdOwner(accept4(listening.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK), guard);
  }
  if (socket) {
    tune(socket);
  }
  return socket;
}

std::string address_of_peer(int fd) {
  Address peer;
  peer.length = sizeof(peer.storage);
  std::array<char, NI_MAXHOST> text{};
  const bool is_known =
      getpeername(fd, reinterpret_cast<sockaddr*>(&peer.storage), &peer.length) == 0 &&
      peer.storage.ss_family != AF_UNIX &&
      getnameinfo(peer.get(), peer.length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) ==
          0;
  return is_known ? text.data() : std::string();
}

std::string reach(const Address& address, const Deadline& deadline, FdOwner& reached) {
  FdOwner socket = open_socket(address.storage.ss_family);
  if (!socket) {
    return error_text(errno);
  }
  tune(socket);
  const Deadline soon = deadline.shortened(kReach);
  int failed = connect(socket.get(), address.get(), address.length);
  while (failed != 0 && errno == EAGAIN && !soon.passed()) {
    soon.pause(milliseconds(1));  // too many are at a door that has a name
    failed = connect(socket.get(), address.get(), address.length);
  }
  if (failed != 0) {
    if (errno != EINPROGRESS) {
      return error_text(errno);
    }
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
  reached = std::move(socket);
  return {};
}

}  // namespace c10d_ext
