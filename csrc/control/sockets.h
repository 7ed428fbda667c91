#pragma once

// Sockets between ranks: where one listens, and how another reaches it. By TCP, and inside a
// network by a name, which takes less time and no address. No torch in here.

#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "control/handshake.h"
#include "control/process.h"

namespace c10d_ext {

struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;

  const sockaddr* get() const {
    return reinterpret_cast<const sockaddr*>(&storage);
  }
};

std::optional<Address> parse_address(const std::string& text, int port);
// That of listen_by_name().
std::optional<Address> address_of_name(const std::string& name);
// Of this machine, those that only it can reach last.
std::vector<std::string> own_addresses();

struct Listening {
  FdOwner socket;
  int port;
};
// At all addresses of this machine.
Listening listen_anywhere();
// Where processes of this network alone find it; nowhere, if that cannot be.
FdOwner listen_by_name(const std::string& name);
// Who has come; none where that went wrong.
FdOwner accept_socket(const FdOwner& listening);
// Who is at the other end of a connection, as own_addresses() says it; empty: there is no address,
// or it is not known.
std::string address_of_peer(int fd);
// A connection to whoever listens there, in `reached`; or why there is none.
std::string reach(const Address& address, const Deadline& deadline, FdOwner& reached);

// For how long what is said to another machine may stay without an acknowledgement of its kernel.
// Throws std::runtime_error where the setting makes no sense.
std::chrono::milliseconds link_timeout();
// Has the kernel end the connection after that time.
void tune_for_link(int fd);

}  // namespace c10d_ext
