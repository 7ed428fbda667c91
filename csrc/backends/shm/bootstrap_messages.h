#pragma once

// What the two sides of the rendezvous say to each other, and how: see bootstrap.cpp.

#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <type_traits>
#include <vector>

#include "backends/shm/bootstrap.h"
#include "backends/shm/liveness.h"
#include "control/handshake.h"

namespace c10d_ext::shm::bootstrap {

enum class Kind : uint32_t { Hello, Offer, Answer, Verdict };

enum class Decision : uint32_t { Go, No, Failed };

struct Identity {
  Peer peer;
  uint64_t pid_namespace;
};

struct Hello {
  Kind kind;
  int32_t rank;
  int32_t size;
  std::array<char, kSecretSize> token;
  uint32_t out_of_descriptors;
  uint64_t bytes;
  int64_t milliseconds_left;
  Identity identity;
};  // followed by why the rank cannot join, or nothing

struct Offer {
  Kind kind;
};  // followed by an Identity per rank in the first of them; the descriptors may take several

struct Answer {
  Kind kind;
  uint32_t out_of_descriptors;
};  // followed by why the rank cannot join, or nothing

struct Verdict {
  Kind kind;
  Decision decision;
};  // followed by the text

// The kernel passes at most 253 descriptors with one message.
constexpr size_t kMaxDescriptors = 250;
constexpr size_t kMaxMessage = 128 * 1024;

struct Message {
  std::string content;
  std::vector<FdOwner> descriptors;

  // The head, where the message is of this kind.
  template <class Head>
  std::optional<Head> head(Kind kind) const {
    static_assert(std::is_trivially_copyable_v<Head>);
    Head head;
    if (content.size() < sizeof(Head)) {
      return std::nullopt;
    }
    std::memcpy(&head, content.data(), sizeof(Head));
    return head.kind == kind ? std::optional(head) : std::nullopt;
  }
  template <class Head>
  std::string tail() const {
    return content.substr(sizeof(Head));
  }
};

template <class Head>
std::string encode(const Head& head, const std::string& tail) {
  return std::string(reinterpret_cast<const char*>(&head), sizeof(Head)) + tail;
}

// The peer hung up, or did not answer before the deadline.
struct PeerGone : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void send(const FdOwner& socket, const std::string& content, const std::vector<int>& fds,
          const Deadline& deadline);
// What is there to be received now, or nothing.
std::optional<Message> receive_now(const FdOwner& socket);
Message receive(const FdOwner& socket, const Deadline& deadline);

struct Address {
  sockaddr_un name{};
  socklen_t length;

  explicit Address(const std::string& session) {
    const auto text = "c10d_ext-" + session;
    name.sun_family = AF_UNIX;
    std::memcpy(name.sun_path + 1, text.data(), text.size());  // after a zero: abstract
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  }
  const sockaddr* get() const {
    return reinterpret_cast<const sockaddr*>(&name);
  }
};

// Keeps the boundaries of messages, and each message's descriptors with it.
FdOwner open_socket();
FdOwner listen_at(const std::string& session);
// The user on the other side, as seen from this process' user namespace.
uid_t user_behind(const FdOwner& socket);

// Why a rank cannot share memory.
struct Obstacle {
  std::string text;
  // Sockets want more of what is missing than memory does: the ranks cannot do without it either.
  bool out_of_descriptors = false;

  explicit operator bool() const {
    return !text.empty();
  }
};

// Why `prepare` failed, if it did. It must not wait.
template <class F>
Obstacle obstacle_to(F&& prepare) {
  try {
    prepare();
    return {};
  } catch (const std::system_error& error) {
    const int code = error.code().value();
    return {error.what(), code == EMFILE || code == ENFILE};
  } catch (const std::exception& error) {
    return {error.what()};
  }
}

// Throws where this rank may not share memory. `cannot`: why, where that is known.
void check_able(const std::string& cannot);
Identity identity();
// A pid of another pid namespace means nothing here: its start time is dropped.
std::vector<Peer> peers_of(const std::vector<Identity>& identities, const Identity& own);

// The store's keys. All but the address carry the session, so that what is left there by an
// earlier group of the same name is never taken for an answer.
constexpr const char* kAddress = "address";  // session, token and build: of all builds
// nonce, "1" if the rank is out of descriptors, the text; of all builds, as the verdict is
std::string key_of(const std::string& session, int rank);
// For ranks that could not connect: their nonces, a line break, a Decision's digit, the text.
std::string verdict_key(const std::string& session);

// The two sides of join().
Joined serve(const KeyValueStore& store, int size, size_t bytes, const Deadline& deadline,
             const Self& self);
Joined connect(const KeyValueStore& store, int rank, int size, size_t bytes,
               const Deadline& deadline, const Self& self);

}  // namespace c10d_ext::shm::bootstrap
