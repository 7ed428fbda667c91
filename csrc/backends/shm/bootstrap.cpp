// The rendezvous. Rank 0 listens on a socket in Linux' abstract namespace (no file, nothing to
// clean up), under a random name that it puts into the store together with a random token; the
// other ranks connect, or put the reason why they cannot into the store. That a rank gets through
// to the socket is the test for being on one machine.
//
//   rank r                                    rank 0
//   Hello: token, who it is, why it cannot ->
//     + the read end of its pipe
//                                          <- Offer: the peers
//                                             + the memory, the read ends of all other pipes
//   Answer: why it cannot, or empty        ->
//                                          <- Verdict: go / no, and why / failed, and how
//
// Rank 0 alone decides, so all ranks come to the same end. A Verdict may come in place of an Offer.

#include "backends/shm/bootstrap.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <type_traits>
#include <utility>

#include "backends/shm/liveness.h"
#include "control/handshake.h"

namespace c10d_ext::shm {

namespace {

using Clock = Deadline::Clock;
using std::chrono::milliseconds;

// --- texts -------------------------------------------------------------------------------------

std::string list(const std::vector<int>& ranks) {
  std::ostringstream out;
  out << (ranks.size() == 1 ? "rank " : "ranks ");
  for (size_t i = 0; i < ranks.size(); ++i) {
    out << (i > 0 ? ", " : "") << ranks[i];
  }
  return out.str();
}

// --- waiting -----------------------------------------------------------------------------------

// How long rank 0 waits until it can accept connections again.
constexpr milliseconds kDeaf{2000};

// --- messages ----------------------------------------------------------------------------------

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
  uint32_t hopeless;
  uint64_t bytes;
  int64_t milliseconds_left;
  Identity identity;
};  // followed by why the rank cannot join, or nothing

struct Offer {
  Kind kind;
};  // followed by an Identity per rank in the first of them; the descriptors may take several

struct Answer {
  Kind kind;
  uint32_t hopeless;
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
struct Gone : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void send(const FdOwner& socket, const std::string& content, const std::vector<int>& fds,
          const Deadline& deadline) {
  iovec part{const_cast<char*>(content.data()), content.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxDescriptors * sizeof(int))> control{};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (!fds.empty()) {
    header.msg_control = control.data();
    header.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    auto* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(rights), fds.data(), fds.size() * sizeof(int));
  }
  while (sendmsg(socket.get(), &header, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    if (errno == EAGAIN) {
      deadline.wait(socket.get(), POLLOUT);
    } else if (errno == ETOOMANYREFS || errno == ENOBUFS || errno == ENOMEM) {
      // Too many descriptors of this user are on their way: receivers will take them out.
      deadline.pause(milliseconds(1));
    } else if (errno != EINTR) {
      throw Gone(error_text(errno));
    }
    if (deadline.passed()) {
      throw Gone("no answer " + deadline.within());
    }
  }
}

// What is there to be received now, or nothing.
std::optional<Message> receive_now(const FdOwner& socket) {
  std::string content(kMaxMessage, '\0');
  iovec part{content.data(), content.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxDescriptors * sizeof(int))> control{};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control.data();
  header.msg_controllen = control.size();

  Message message;
  const ForkGuard guard;
  const ssize_t size = recvmsg(socket.get(), &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) {
    return std::nullopt;
  }
  if (size <= 0) {
    throw Gone(size < 0 ? error_text(errno) : "it hung up");
  }
  for (auto* c = CMSG_FIRSTHDR(&header); c != nullptr; c = CMSG_NXTHDR(&header, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) {
      continue;
    }
    for (size_t at = 0; CMSG_LEN(at + sizeof(int)) <= c->cmsg_len; at += sizeof(int)) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(c) + at, sizeof(int));
      message.descriptors.emplace_back(fd, guard);
    }
  }
  content.resize(static_cast<size_t>(size));
  message.content = std::move(content);
  return message;
}

Message receive(const FdOwner& socket, const Deadline& deadline) {
  while (deadline.wait(socket.get(), POLLIN)) {
    if (auto message = receive_now(socket)) {
      return std::move(*message);
    }
  }
  throw Gone("no answer " + deadline.within());
}

// --- sockets -----------------------------------------------------------------------------------

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
FdOwner open_socket() {
  const ForkGuard guard;
  FdOwner made(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), guard);
  if (!made) {
    throw std::system_error(errno, std::generic_category(), "cannot open a socket");
  }
  return made;
}

FdOwner listen_at(const std::string& session) {
  auto made = open_socket();
  const Address address(session);
  if (bind(made.get(), address.get(), address.length) < 0 || listen(made.get(), SOMAXCONN) < 0) {
    throw std::system_error(errno, std::generic_category(), "cannot listen on a socket");
  }
  return made;
}

// The user on the other side, as seen from this process' user namespace.
uid_t user_behind(const FdOwner& socket) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) < 0) {
    return static_cast<uid_t>(-1);
  }
  return credentials.uid;
}

// --- what both sides do ------------------------------------------------------------------------

// Why a rank cannot share memory.
struct Obstacle {
  std::string text;
  // Sockets want more of what is missing than memory does: the ranks cannot do without it either.
  bool hopeless = false;

  explicit operator bool() const {
    return !text.empty();
  }
};

// Why `prepare` failed, if it did. It must not wait.
template <class F>
Obstacle attempt(F&& prepare) {
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

void check_able(const std::string& cannot) {
  if (!cannot.empty()) {
    throw std::runtime_error(cannot);
  }
  const char* value = std::getenv("TORCH_C10D_EXT_SHM_DISABLE");
  if (value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0) {
    throw std::runtime_error("TORCH_C10D_EXT_SHM_DISABLE=" + std::string(value));
  }
}

Identity identity() {
  struct stat pids{};
  stat("/proc/self/ns/pid", &pids);
  return {this_process(), pids.st_ino};
}

// A pid of another pid namespace means nothing here: its start time is dropped.
std::vector<Peer> peers_of(const std::vector<Identity>& identities, const Identity& own) {
  std::vector<Peer> peers;
  for (const auto& identity : identities) {
    peers.push_back(identity.peer);
    if (identity.pid_namespace != own.pid_namespace) {
      peers.back().start_time = 0;
    }
  }
  return peers;
}

// The store's keys. All but the address carry the session, so that what is left there by an
// earlier group of the same name is never taken for an answer.
constexpr const char* kAddress = "address";  // session and token

std::string key_of(const std::string& session, int rank) {  // nonce, "1" if hopeless, the text
  return session + "/" + std::to_string(rank);
}

// For ranks that could not connect: their nonces, a line break, a Decision's digit, the text.
std::string verdict_key(const std::string& session) {
  return session + "/verdict";
}

// --- rank 0 ------------------------------------------------------------------------------------

class Host {
 public:
  Host(const KeyValueStore& store, int size, size_t bytes, Deadline deadline, std::string cannot)
      : store_(store),
        bytes_(bytes),
        deadline_(std::move(deadline)),
        cannot_(std::move(cannot)),
        guests_(size) {}

  Joined run() {
    guests_[0].identity = identity();
    guests_[0].cannot = attempt([&] {
      check_able(cannot_);
      mapping_ = Mapping::create(with_pulses(bytes_, size()));
      pipe_ = Pipe::open();
    });
    const auto deaf = attempt([&] { listening_ = listen_at(session_); });
    if (!guests_[0].cannot) {
      guests_[0].cannot = deaf;
    }
    store_.set(kAddress, session_ + token_);
    gather();
    auto why_not = reasons();
    if (!why_not) {
      share();
      why_not = reasons();
    }
    if (why_not.hopeless) {
      fail(why_not.text);
    }
    announce(why_not ? Decision::No : Decision::Go, why_not.text);
    if (why_not) {
      return {nullptr, why_not.text, session_};
    }
    std::vector<FdOwner> ends;
    for (auto& guest : guests_) {
      ends.push_back(std::move(guest.end));
    }
    return {make_membership(std::move(mapping_), 0, peers_of(identities(), guests_[0].identity),
                            std::move(pipe_.write_end), std::move(ends)),
            "", session_};
  }

 private:
  struct Guest {
    Identity identity{};
    Obstacle cannot;
    FdOwner socket;  // of those that connected
    FdOwner end;
    std::string nonce;  // of those that could not

    bool here() const {
      return socket || !nonce.empty();
    }
  };

  // Until every rank is connected or has said in the store why it cannot.
  void gather() {
    milliseconds slice{1};
    while (true) {
      const auto missing = absent();
      if (missing.empty()) {
        return;
      }
      if (deadline_.passed()) {
        fail(list(missing) + " did not join " + deadline_.within() +
             (deaf_since_ ? " (" + deafness_ + ")" : ""));
      }
      if (serve_sockets(slice) || look_into_store(missing)) {
        slice = milliseconds(1);
      } else {
        slice = std::min(2 * slice, Deadline::kSlice);
      }
    }
  }

  std::vector<int> absent() const {
    std::vector<int> ranks;
    for (int rank = 1; rank < size(); ++rank) {
      if (!guests_[rank].here()) {
        ranks.push_back(rank);
      }
    }
    return ranks;
  }

  bool serve_sockets(milliseconds slice) {
    std::vector<pollfd> fds{{listening_.get(), POLLIN, 0}};
    for (const auto& guest : guests_) {
      fds.push_back({guest.socket.get(), 0, 0});
    }
    for (const auto& stranger : strangers_) {
      fds.push_back({stranger.get(), POLLIN, 0});
    }
    deadline_.poll(fds, slice);
    for (int rank = 1; rank < size(); ++rank) {
      if (fds[1 + rank].revents != 0) {
        fail(name(rank) + " left while joining");
      }
    }
    bool any = false;
    std::vector<FdOwner> still;
    for (size_t i = 0; i < strangers_.size(); ++i) {
      if (fds[1 + guests_.size() + i].revents == 0) {
        still.push_back(std::move(strangers_[i]));
      } else {
        any |= meet(std::move(strangers_[i]));
      }
    }
    strangers_ = std::move(still);
    if (fds[0].revents != 0) {
      any |= let_in();
    }
    return any;
  }

  bool let_in() {
    const auto accept = [&] {
      const ForkGuard guard;
      const int fd = accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
      return FdOwner(fd, guard);
    };
    auto stranger = accept();
    if (!stranger) {
      const int error = errno;
      if (error == EAGAIN || error == EINTR || error == ECONNABORTED) {
        return false;
      }
      deaf_since_ = deaf_since_.value_or(Clock::now());
      deafness_ = "rank 0 cannot accept connections: " + error_text(error);
      if (Clock::now() - *deaf_since_ > kDeaf) {
        fail(deafness_);
      }
      deadline_.pause(milliseconds(10));
      return false;
    }
    deaf_since_.reset();
    if (user_behind(stranger) != geteuid()) {
      return false;
    }
    strangers_.push_back(std::move(stranger));
    return true;
  }

  // Makes a guest of a stranger that knows the token; hangs up on all others.
  bool meet(FdOwner socket) {
    std::optional<Message> message;
    try {
      message = receive_now(socket);
    } catch (const Gone&) {
    }
    const auto hello = message ? message->head<Hello>(Kind::Hello) : std::nullopt;
    if (!hello || !is_same_secret({hello->token.data(), kSecretSize}, token_) || hello->rank < 1 ||
        hello->rank >= size() || guests_[hello->rank].here()) {
      return false;
    }
    auto& guest = guests_[hello->rank];
    guest.identity = hello->identity;
    guest.cannot = {message->tail<Hello>(), hello->hopeless != 0};
    guest.socket = std::move(socket);
    deadline_.shorten(milliseconds(hello->milliseconds_left));
    if (guest.cannot) {
      return true;
    }
    if (hello->size != size() || hello->bytes != bytes_) {
      std::ostringstream text;
      text << "asks for " << hello->bytes << " bytes and " << hello->size << " ranks, rank 0 for "
           << bytes_ << " and " << size();
      guest.cannot = {text.str()};
    } else if (message->descriptors.empty()) {
      guest.cannot = {"rank 0 has too many open files", true};
    } else {
      guest.end = std::move(message->descriptors[0]);
    }
    return true;
  }

  // One rank at a time, so that a store with many clients is not kept busy by the wait.
  bool look_into_store(const std::vector<int>& missing) {
    const int rank = missing[looked_++ % missing.size()];
    const auto key = key_of(session_, rank);
    if (!store_.has(key)) {
      return false;
    }
    const auto value = store_.get(key, deadline_.left());
    if (value.size() > kSecretSize) {
      guests_[rank].nonce = value.substr(0, kSecretSize);
      guests_[rank].cannot = {value.substr(kSecretSize + 1), value[kSecretSize] == '1'};
    }
    return true;
  }

  // Hands the memory out. One rank after the other: the kernel limits how many descriptors of one
  // user may be on their way at a time.
  void share() {
    const auto known = identities();
    const std::string table(reinterpret_cast<const char*>(known.data()),
                            known.size() * sizeof(Identity));
    for (int rank = 1; rank < size(); ++rank) {
      std::vector<int> fds{mapping_->fd()};
      for (int other = 0; other < size(); ++other) {
        if (other != rank) {
          fds.push_back(other == 0 ? pipe_.read_end.get() : guests_[other].end.get());
        }
      }
      auto& guest = guests_[rank];
      try {
        for (size_t at = 0; at < fds.size(); at += kMaxDescriptors) {
          const auto from = fds.begin() + at;
          const auto count = std::min(kMaxDescriptors, fds.size() - at);
          send(guest.socket, encode(Offer{Kind::Offer}, at == 0 ? table : ""), {from, from + count},
               deadline_);
        }
        const auto message = receive(guest.socket, deadline_);
        const auto answer = message.head<Answer>(Kind::Answer);
        if (!answer) {
          throw Gone("it sent something else");
        }
        guest.cannot = {message.tail<Answer>(), answer->hopeless != 0};
      } catch (const Gone& gone) {
        fail(name(rank) + " left while joining: " + gone.what());
      }
    }
  }

  // The same on all ranks: the first rank that cannot, for which there is no hope if there is one,
  // and how many more there are.
  Obstacle reasons() const {
    Obstacle first;
    int more = -1;
    for (int rank = 0; rank < size(); ++rank) {
      const auto& cannot = guests_[rank].cannot;
      if (cannot && (++more == 0 || (cannot.hopeless && !first.hopeless))) {
        first = {"rank " + std::to_string(rank) + ": " + cannot.text, cannot.hopeless};
      }
    }
    if (more > 0) {
      first.text += " (and " + std::to_string(more) + (more == 1 ? " more rank)" : " more ranks)");
    }
    return first;
  }

  void announce(Decision decision, const std::string& text) {
    // Before anyone can leave: who joins the next group of this name must not reach this socket.
    // Closing alone would leave it to a child that is being forked.
    shutdown(listening_.get(), SHUT_RDWR);
    listening_ = {};
    strangers_.clear();
    std::string nonces;
    for (auto& guest : guests_) {
      nonces += guest.nonce;
      if (guest.socket) {
        try {
          send(guest.socket, encode(Verdict{Kind::Verdict, decision}, text), {},
               deadline_.extended(milliseconds(1000)));
        } catch (const Gone&) {
          // Lost: the others learn it as they would have a moment later.
        }
      }
    }
    if (!nonces.empty()) {
      const char digit = static_cast<char>('0' + static_cast<int>(decision));
      store_.set(verdict_key(session_), nonces + "\n" + digit + text);
    }
  }

  [[noreturn]] void fail(const std::string& text) {
    announce(Decision::Failed, text);
    throw std::runtime_error(text);
  }

  std::vector<Identity> identities() const {
    std::vector<Identity> all;
    for (const auto& guest : guests_) {
      all.push_back(guest.identity);
    }
    return all;
  }

  std::string name(int rank) const {
    return "rank " + std::to_string(rank) + " (pid " +
           std::to_string(guests_[rank].identity.peer.pid) + ")";
  }

  int size() const {
    return static_cast<int>(guests_.size());
  }

  const KeyValueStore& store_;
  size_t bytes_;
  Deadline deadline_;
  const std::string cannot_;
  const std::string session_ = random_secret();
  const std::string token_ = random_secret();
  std::vector<Guest> guests_;  // by rank, rank 0 included
  std::shared_ptr<Mapping> mapping_;
  Pipe pipe_;
  FdOwner listening_;
  std::vector<FdOwner> strangers_;  // connected, not yet known
  size_t looked_ = 0;
  std::optional<Clock::time_point> deaf_since_;
  std::string deafness_;
};

// --- the other ranks ---------------------------------------------------------------------------

class Visitor {
 public:
  Visitor(const KeyValueStore& store, int rank, int size, size_t bytes, const Deadline& deadline,
          std::string cannot)
      : store_(store),
        rank_(rank),
        size_(size),
        bytes_(bytes),
        deadline_(deadline),
        // Rank 0 knows best whom it waits for: what it says at the deadline still counts.
        patience_(deadline.extended(milliseconds(2000))),
        cannot_(std::move(cannot)) {}

  Joined run() {
    while (true) {
      const auto address = await_address();
      const auto session = address.substr(0, kSecretSize);
      const auto token = address.substr(kSecretSize);
      FdOwner socket;
      const auto cannot = connect(session, socket);
      auto joined = cannot ? report(address, session, cannot) : talk(socket, token);
      if (joined) {
        joined->session = session;
        return std::move(*joined);
      }
    }
  }

 private:
  std::string await_address() {
    for (milliseconds slice{1}; !store_.has(kAddress);
         slice = std::min(2 * slice, Deadline::kSlice)) {
      if (deadline_.passed()) {
        throw std::runtime_error("rank 0 did not join " + deadline_.within());
      }
      deadline_.pause(slice);
    }
    auto address = store_.get(kAddress, deadline_.left());
    if (address.size() != 2 * kSecretSize) {
      throw std::runtime_error("rank 0 put no address into the store but '" + address + "'");
    }
    return address;
  }

  // Why it is impossible, if it is.
  Obstacle connect(const std::string& session, FdOwner& socket) {
    FdOwner made;
    if (auto obstacle = attempt([&] { made = open_socket(); })) {
      return obstacle;
    }
    const Address address(session);
    while (::connect(made.get(), address.get(), address.length) < 0) {
      if ((errno != EAGAIN && errno != EINTR) || deadline_.passed()) {
        return {"cannot reach rank 0's socket: " + error_text(errno)};
      }
      deadline_.pause(milliseconds(1));  // many ranks come at the same time
    }
    if (user_behind(made) != geteuid()) {
      return {"runs as user " + std::to_string(geteuid()) + ", rank 0 as user " +
              std::to_string(user_behind(made))};
    }
    socket = std::move(made);
    return {};
  }

  // Through the store. Nothing when the address was one of an earlier group and rank 0 has put a
  // new one there: what is found under the old one does not name our nonce.
  std::optional<Joined> report(const std::string& address, const std::string& session,
                               const Obstacle& cannot) {
    store_.set(key_of(session, rank_), nonce_ + (cannot.hopeless ? "1" : "0") + cannot.text);
    for (milliseconds slice{1}; !patience_.passed();
         slice = std::min(2 * slice, Deadline::kSlice)) {
      if (store_.has(verdict_key(session))) {
        const auto verdict = store_.get(verdict_key(session), patience_.left());
        const auto line = verdict.find('\n');
        if (verdict.find(nonce_) < line && line + 1 < verdict.size()) {
          return judged(static_cast<Decision>(verdict[line + 1] - '0'), verdict.substr(line + 2));
        }
      }
      if (store_.get(kAddress, patience_.left()) != address) {
        return std::nullopt;
      }
      patience_.pause(slice);
    }
    throw std::runtime_error("rank 0 did not answer " + deadline_.within());
  }

  std::optional<Joined> talk(const FdOwner& socket, const std::string& token) {
    Pipe pipe;
    const auto cannot = attempt([&] {
      check_able(cannot_);
      pipe = Pipe::open();
    });
    const auto own = identity();
    Hello hello{Kind::Hello, rank_, size_, {}, cannot.hopeless, bytes_, deadline_.left().count(),
                own};
    std::copy_n(token.begin(), kSecretSize, hello.token.begin());
    try {
      send(socket, encode(hello, cannot.text),
           cannot ? std::vector<int>{} : std::vector<int>{pipe.read_end.get()}, deadline_);
      auto message = receive(socket, patience_);
      std::unique_ptr<Membership> membership;
      if (message.head<Offer>(Kind::Offer)) {
        const auto refused = accept(socket, message, own, pipe, membership);
        send(socket, encode(Answer{Kind::Answer, refused.hopeless}, refused.text), {}, patience_);
        message = receive(socket, patience_);
      }
      const auto verdict = message.head<Verdict>(Kind::Verdict);
      if (!verdict) {
        throw Gone("it sent something else");
      }
      if (verdict->decision == Decision::Go) {
        return Joined{std::move(membership), "", ""};
      }
      return judged(verdict->decision, message.tail<Verdict>());
    } catch (const Gone& gone) {
      throw std::runtime_error("rank 0 left while joining: " + std::string(gone.what()));
    }
  }

  // Takes the memory and the pipes of all peers. Returns why that is impossible, if it is.
  Obstacle accept(const FdOwner& socket, Message& offer, const Identity& own, Pipe& pipe,
                  std::unique_ptr<Membership>& membership) {
    const auto table = offer.tail<Offer>();
    auto fds = std::move(offer.descriptors);
    for (size_t sent = kMaxDescriptors; sent < static_cast<size_t>(size_);
         sent += kMaxDescriptors) {
      auto more = receive(socket, patience_);
      std::move(more.descriptors.begin(), more.descriptors.end(), std::back_inserter(fds));
    }
    return attempt([&] {
      if (fds.size() != static_cast<size_t>(size_)) {  // the memory, and a pipe of each other rank
        throw std::system_error(EMFILE, std::generic_category(), "cannot take the shared memory");
      }
      std::vector<Identity> identities(size_);
      if (table.size() != identities.size() * sizeof(Identity)) {
        throw std::runtime_error("rank 0 sent no table of the ranks");
      }
      std::memcpy(identities.data(), table.data(), table.size());
      const int fd = fcntl(fds[0].get(), F_DUPFD_CLOEXEC, 0);
      if (fd < 0) {
        throw std::system_error(errno, std::generic_category(), "cannot take the shared memory");
      }
      auto mapping = Mapping::adopt(fd, with_pulses(bytes_, size_));
      std::vector<FdOwner> ends;
      for (int rank = 0, next = 1; rank < size_; ++rank) {
        ends.push_back(rank == rank_ ? FdOwner() : std::move(fds[next++]));
      }
      membership = make_membership(std::move(mapping), rank_, peers_of(identities, own),
                                   std::move(pipe.write_end), std::move(ends));
    });
  }

  static Joined judged(Decision decision, const std::string& text) {
    if (decision == Decision::No) {
      return {nullptr, text, ""};
    }
    throw std::runtime_error(text);
  }

  const KeyValueStore& store_;
  int rank_, size_;
  size_t bytes_;
  Deadline deadline_, patience_;
  const std::string cannot_;
  const std::string nonce_ = random_secret();
};

}  // namespace

Joined join(const KeyValueStore& store, int rank, int size, size_t bytes,
            std::chrono::milliseconds timeout, const std::string& cannot) {
  const Deadline deadline(timeout, store.interrupt);
  if (size > 1) {
    return rank == 0 ? Host(store, size, bytes, deadline, cannot).run()
                     : Visitor(store, rank, size, bytes, deadline, cannot).run();
  }
  const auto session = random_secret();
  std::shared_ptr<Mapping> mapping;
  const auto why_not = attempt([&] {
    check_able(cannot);
    mapping = Mapping::create(with_pulses(bytes, 1));
  });
  if (why_not.hopeless) {
    throw std::runtime_error("rank 0: " + why_not.text);
  }
  if (why_not) {
    return {nullptr, "rank 0: " + why_not.text, session};
  }
  return {make_membership(std::move(mapping), 0, {this_process()}, {}, {}), "", session};
}

}  // namespace c10d_ext::shm
