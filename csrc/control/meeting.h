#pragma once

// How the ranks of a group meet over sockets: rank 0 with each of the others, and where they are on
// a few hosts, the first rank of each host, its leader, with the other leaders and with the ranks
// of its host; and those of rank 0's host with the next host's leader. Where they are few, each
// with all on other hosts. No torch in here.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/errors.h"
#include "control/connection.h"
#include "control/process.h"
#include "control/store.h"

namespace c10d_ext {

// The process of a rank and where it runs.
struct Member {
  Peer peer;
  std::string machine;  // processes on the same one can see each other
  std::string host;     // its name, for texts; empty: none is told
  std::string network;  // between those of one there is no link that could be down
};

// With more hosts little data goes through rank 0: fewer messages in all.
constexpr size_t kMostLeaders = 16;
// The ranks of each network, the first of which is its leader; where leaders have no lines to each
// other, as there is one network or too many, none.
std::vector<std::vector<int>> ranks_by_leader(const std::vector<Member>& members);

// In a larger group a rank would have too many lines.
constexpr size_t kMostDirect = 64;
// Whether two ranks of a group with leaders have a line for what nobody else need hear: there is a
// link between them, and neither is rank 0, which hears everything.
bool are_direct(const std::vector<Member>& members, int one, int other);

// What ranks say as they meet; all that comes after a welcome is of protocol.h.
enum Meets : uint32_t { kHello = 1, kWelcome, kDeathSocket };
// Where a rank puts its token, port and addresses into the store.
std::string key_of(int rank);

struct Connections {
  // By rank; rank 0 has one to every other rank, the others have one to rank 0, leaders and the
  // ranks of their hosts also those among them. Rank 0's host has its own to the next leader. And
  // those that are direct.
  std::vector<Connection> lines;
  // To rank 0 or from it, by rank, for DeathSockets.
  std::vector<FdOwner> death_sockets;
  std::vector<Member> members;
};

// Collective over the ranks of `place`. Throws std::runtime_error, which names ranks or addresses,
// where they do not find each other in time. `machine`: where this process runs, found out where it
// is empty.
Connections meet(const KeyValueStore& store, const Place& place, std::chrono::milliseconds timeout,
                 const std::string& machine);

}  // namespace c10d_ext
