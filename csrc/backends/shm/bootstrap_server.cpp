// Rank 0's side of the rendezvous: it lets the other ranks in, hands the memory out and decides.

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <sstream>
#include <utility>

#include "backends/shm/bootstrap_messages.h"

namespace c10d_ext::shm::bootstrap {

namespace {

using Clock = Deadline::Clock;
using std::chrono::milliseconds;

// How long rank 0 waits until it can accept connections again.
constexpr milliseconds kAcceptRetryTime{2000};

std::string list(const std::vector<int>& ranks) {
  std::ostringstream out;
  out << (ranks.size() == 1 ? "rank " : "ranks ");
  for (size_t i = 0; i < ranks.size(); ++i) {
    out << (i > 0 ? ", " : "") << ranks[i];
  }
  return out.str();
}

// A rank as rank 0 knows it.
struct Client {
  Identity identity{};
  Obstacle cannot;
  FdOwner socket;  // of those that connected
  FdOwner end;
  std::string nonce;  // of those that could not

  bool here() const {
    return socket || !nonce.empty();
  }
};

// By rank, rank 0 included.
class Clients : public std::vector<Client> {
 public:
  using std::vector<Client>::vector;

  std::vector<int> absent() const {
    std::vector<int> ranks;
    for (int rank = 1; rank < count(); ++rank) {
      if (!(*this)[rank].here()) {
        ranks.push_back(rank);
      }
    }
    return ranks;
  }

  // The same on all ranks: the first rank that cannot, one without descriptors before all others,
  // and how many more there are.
  Obstacle obstacle() const {
    Obstacle first;
    int more = -1;
    for (int rank = 0; rank < count(); ++rank) {
      const auto& cannot = (*this)[rank].cannot;
      if (cannot && (++more == 0 || (cannot.out_of_descriptors && !first.out_of_descriptors))) {
        first = {"rank " + std::to_string(rank) + ": " + cannot.text, cannot.out_of_descriptors};
      }
    }
    if (more > 0) {
      first.text += " (and " + std::to_string(more) + (more == 1 ? " more rank)" : " more ranks)");
    }
    return first;
  }

  std::vector<Identity> identities() const {
    std::vector<Identity> all;
    for (const auto& client : (*this)) {
      all.push_back(client.identity);
    }
    return all;
  }

  std::string name(int rank) const {
    return "rank " + std::to_string(rank) + " (pid " +
           std::to_string((*this)[rank].identity.peer.pid) + ")";
  }

 private:
  int count() const {
    return static_cast<int>(size());
  }
};

class BootstrapServer {
 public:
  BootstrapServer(const KeyValueStore& store, int size, size_t bytes, Deadline deadline, Self self)
      : store_(store),
        bytes_(bytes),
        deadline_(std::move(deadline)),
        self_(std::move(self)),
        clients_(static_cast<size_t>(size)) {}

  Joined run() {
    clients_[0].identity = identity();
    clients_[0].cannot = obstacle_to([&] {
      check_able(self_.cannot);
      mapping_ = Mapping::create(with_pulses(bytes_, size()));
      pipe_ = Pipe::open();
    });
    const auto cannot_listen = obstacle_to([&] { listening_ = listen_at(session_); });
    if (!clients_[0].cannot) {
      clients_[0].cannot = cannot_listen;
    }
    store_.set(kAddress, session_ + token_ + self_.build);
    await_clients();
    auto why_not = clients_.obstacle();
    if (!why_not) {
      offer_memory();
      why_not = clients_.obstacle();
    }
    if (why_not.out_of_descriptors) {
      fail(why_not.text);
    }
    send_verdict(why_not ? Decision::No : Decision::Go, why_not.text);
    if (why_not) {
      return {nullptr, why_not.text, session_};
    }
    std::vector<FdOwner> ends;
    for (auto& client : clients_) {
      ends.push_back(std::move(client.end));
    }
    return {make_membership(std::move(mapping_), 0,
                            peers_of(clients_.identities(), clients_[0].identity),
                            std::move(pipe_.write_end), std::move(ends)),
            "", session_};
  }

 private:
  // Until every rank is connected or has said in the store why it cannot.
  void await_clients() {
    milliseconds slice{1};
    while (true) {
      const auto missing = clients_.absent();
      if (missing.empty()) {
        return;
      }
      if (deadline_.passed()) {
        fail(list(missing) + " did not join " + deadline_.within() +
             (accept_fails_since_ ? " (" + accept_error_ + ")" : ""));
      }
      if (serve_sockets(slice) || look_into_store(missing)) {
        slice = milliseconds(1);
      } else {
        slice = std::min(2 * slice, Deadline::kSlice);
      }
    }
  }

  bool serve_sockets(milliseconds slice) {
    std::vector<pollfd> fds{{listening_.get(), POLLIN, 0}};
    for (const auto& client : clients_) {
      fds.push_back({client.socket.get(), 0, 0});
    }
    for (const auto& connection : unidentified_) {
      fds.push_back({connection.get(), POLLIN, 0});
    }
    deadline_.poll(fds, slice);
    for (int rank = 1; rank < size(); ++rank) {
      if (fds[1 + rank].revents != 0) {
        fail(clients_.name(rank) + " left while joining");
      }
    }
    bool any = false;
    std::vector<FdOwner> still;
    for (size_t i = 0; i < unidentified_.size(); ++i) {
      if (fds[1 + clients_.size() + i].revents == 0) {
        still.push_back(std::move(unidentified_[i]));
      } else {
        any |= identify(std::move(unidentified_[i]));
      }
    }
    unidentified_ = std::move(still);
    if (fds[0].revents != 0) {
      any |= accept_connection();
    }
    return any;
  }

  bool accept_connection() {
    const auto accept = [&] {
      const ForkGuard guard;
      const int fd = accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
      return FdOwner(fd, guard);
    };
    auto connection = accept();
    if (!connection) {
      const int error = errno;
      if (error == EAGAIN || error == EINTR || error == ECONNABORTED) {
        return false;
      }
      accept_fails_since_ = accept_fails_since_.value_or(Clock::now());
      accept_error_ = "rank 0 cannot accept connections: " + error_text(error);
      if (Clock::now() - *accept_fails_since_ > kAcceptRetryTime) {
        fail(accept_error_);
      }
      deadline_.pause(milliseconds(10));
      return false;
    }
    accept_fails_since_.reset();
    if (user_behind(connection) != geteuid()) {
      return false;
    }
    unidentified_.push_back(std::move(connection));
    return true;
  }

  // Makes a client of a connection that knows the token; hangs up on all others.
  bool identify(FdOwner socket) {
    std::optional<Message> message;
    try {
      message = receive_now(socket);
    } catch (const PeerGone&) {
    }
    const auto hello = message ? message->head<Hello>(Kind::Hello) : std::nullopt;
    if (!hello || !is_same_secret({hello->token.data(), kSecretSize}, token_) || hello->rank < 1 ||
        hello->rank >= size() || clients_[hello->rank].here()) {
      return false;
    }
    auto& client = clients_[hello->rank];
    client.identity = hello->identity;
    client.cannot = {message->tail<Hello>(), hello->out_of_descriptors != 0};
    client.socket = std::move(socket);
    deadline_.shorten(milliseconds(hello->milliseconds_left));
    if (client.cannot) {
      return true;
    }
    if (hello->size != size() || hello->bytes != bytes_) {
      std::ostringstream text;
      text << "asks for " << hello->bytes << " bytes and " << hello->size << " ranks, rank 0 for "
           << bytes_ << " and " << size();
      client.cannot = {text.str()};
    } else if (message->descriptors.empty()) {
      client.cannot = {"rank 0 has too many open files", true};
    } else {
      client.end = std::move(message->descriptors[0]);
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
      clients_[rank].nonce = value.substr(0, kSecretSize);
      clients_[rank].cannot = {value.substr(kSecretSize + 1), value[kSecretSize] == '1'};
    }
    return true;
  }

  // Hands the memory out. One rank after the other: the kernel limits how many descriptors of one
  // user may be on their way at a time.
  void offer_memory() {
    const auto known = clients_.identities();
    const std::string table(reinterpret_cast<const char*>(known.data()),
                            known.size() * sizeof(Identity));
    for (int rank = 1; rank < size(); ++rank) {
      std::vector<int> fds{mapping_->fd()};
      for (int other = 0; other < size(); ++other) {
        if (other != rank) {
          fds.push_back(other == 0 ? pipe_.read_end.get() : clients_[other].end.get());
        }
      }
      auto& client = clients_[rank];
      try {
        for (size_t at = 0; at < fds.size(); at += kMaxDescriptors) {
          const auto from = fds.begin() + at;
          const auto count = std::min(kMaxDescriptors, fds.size() - at);
          send(client.socket, encode(Offer{Kind::Offer}, at == 0 ? table : ""),
               {from, from + count}, deadline_);
        }
        const auto message = receive(client.socket, deadline_);
        const auto answer = message.head<Answer>(Kind::Answer);
        if (!answer) {
          throw PeerGone("it sent something else");
        }
        client.cannot = {message.tail<Answer>(), answer->out_of_descriptors != 0};
      } catch (const PeerGone& gone) {
        fail(clients_.name(rank) + " left while joining: " + gone.what());
      }
    }
  }

  void send_verdict(Decision decision, const std::string& text) {
    // Before anyone can leave: who joins the next group of this name must not reach this socket.
    // Closing alone would leave it to a child that is being forked.
    shutdown(listening_.get(), SHUT_RDWR);
    listening_ = {};
    unidentified_.clear();
    std::string nonces;
    for (auto& client : clients_) {
      nonces += client.nonce;
      if (client.socket) {
        try {
          send(client.socket, encode(Verdict{Kind::Verdict, decision}, text), {},
               deadline_.extended(milliseconds(1000)));
        } catch (const PeerGone&) {
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
    send_verdict(Decision::Failed, text);
    throw std::runtime_error(text);
  }

  int size() const {
    return static_cast<int>(clients_.size());
  }

  const KeyValueStore& store_;
  size_t bytes_;
  Deadline deadline_;
  const Self self_;
  const std::string session_ = random_secret();
  const std::string token_ = random_secret();
  Clients clients_;
  std::shared_ptr<Mapping> mapping_;
  Pipe pipe_;
  FdOwner listening_;
  std::vector<FdOwner> unidentified_;  // connected, not yet known
  size_t looked_ = 0;
  std::optional<Clock::time_point> accept_fails_since_;
  std::string accept_error_;
};

}  // namespace

Joined serve(const KeyValueStore& store, int size, size_t bytes, const Deadline& deadline,
             const Self& self) {
  return BootstrapServer(store, size, bytes, deadline, self).run();
}

}  // namespace c10d_ext::shm::bootstrap
