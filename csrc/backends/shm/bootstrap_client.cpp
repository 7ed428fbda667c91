// The side of every other rank in the rendezvous.

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "backends/shm/bootstrap_messages.h"

namespace c10d_ext::shm::bootstrap {

namespace {

using std::chrono::milliseconds;

class BootstrapClient {
 public:
  BootstrapClient(const KeyValueStore& store, int rank, int size, size_t bytes,
                  const Deadline& deadline, Self self)
      : store_(store),
        rank_(rank),
        size_(size),
        bytes_(bytes),
        deadline_(deadline),
        // Rank 0 knows best whom it waits for: what it says at the deadline still counts.
        answer_deadline_(deadline.extended(milliseconds(2000))),
        self_(std::move(self)) {}

  Joined run() {
    while (true) {
      const auto address = await_address();
      const auto session = address.substr(0, kSecretSize);
      const auto token = address.substr(kSecretSize, kSecretSize);
      const auto build = address.substr(2 * kSecretSize);
      FdOwner socket;
      const auto cannot = build == self_.build ? connect(session, socket) : stranger_to(build);
      auto joined =
          cannot ? report_in_store(address, session, cannot) : join_over_socket(socket, token);
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
    if (address.size() < 2 * kSecretSize) {
      throw std::runtime_error("rank 0 put no address into the store but '" + address + "'");
    }
    return address;
  }

  // What it says otherwise may mean something else.
  Obstacle stranger_to(const std::string& build) const {
    return {"runs the build " + self_.build + ", rank 0 " +
            (build.empty() ? "an earlier one" : build)};
  }

  // Why it is impossible, if it is.
  Obstacle connect(const std::string& session, FdOwner& socket) {
    FdOwner made;
    if (auto obstacle = obstacle_to([&] { made = open_socket(); })) {
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
  std::optional<Joined> report_in_store(const std::string& address, const std::string& session,
                                        const Obstacle& cannot) {
    store_.set(key_of(session, rank_),
               nonce_ + (cannot.out_of_descriptors ? "1" : "0") + cannot.text);
    for (milliseconds slice{1}; !answer_deadline_.passed();
         slice = std::min(2 * slice, Deadline::kSlice)) {
      if (store_.has(verdict_key(session))) {
        const auto verdict = store_.get(verdict_key(session), answer_deadline_.left());
        const auto line = verdict.find('\n');
        if (verdict.find(nonce_) < line && line + 1 < verdict.size()) {
          return refused(static_cast<Decision>(verdict[line + 1] - '0'), verdict.substr(line + 2));
        }
      }
      if (store_.get(kAddress, answer_deadline_.left()) != address) {
        return std::nullopt;
      }
      answer_deadline_.pause(slice);
    }
    throw std::runtime_error("rank 0 did not answer " + deadline_.within());
  }

  std::optional<Joined> join_over_socket(const FdOwner& socket, const std::string& token) {
    Pipe pipe;
    const auto cannot = obstacle_to([&] {
      check_able(self_.cannot);
      pipe = Pipe::open();
    });
    const auto own = identity();
    Hello hello{
        Kind::Hello, rank_, size_, {}, cannot.out_of_descriptors, bytes_, deadline_.left().count(),
        own};
    std::copy_n(token.begin(), kSecretSize, hello.token.begin());
    try {
      send(socket, encode(hello, cannot.text),
           cannot ? std::vector<int>{} : std::vector<int>{pipe.read_end.get()}, deadline_);
      auto message = receive(socket, answer_deadline_);
      std::unique_ptr<Membership> membership;
      if (message.head<Offer>(Kind::Offer)) {
        const auto refused = accept(socket, message, own, pipe, membership);
        send(socket, encode(Answer{Kind::Answer, refused.out_of_descriptors}, refused.text), {},
             answer_deadline_);
        message = receive(socket, answer_deadline_);
      }
      const auto verdict = message.head<Verdict>(Kind::Verdict);
      if (!verdict) {
        throw PeerGone("it sent something else");
      }
      if (verdict->decision == Decision::Go) {
        return Joined{std::move(membership), "", ""};
      }
      return refused(verdict->decision, message.tail<Verdict>());
    } catch (const PeerGone& gone) {
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
      auto more = receive(socket, answer_deadline_);
      std::move(more.descriptors.begin(), more.descriptors.end(), std::back_inserter(fds));
    }
    return obstacle_to([&] {
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

  static Joined refused(Decision decision, const std::string& text) {
    if (decision == Decision::No) {
      return {nullptr, text, ""};
    }
    throw std::runtime_error(text);
  }

  const KeyValueStore& store_;
  int rank_, size_;
  size_t bytes_;
  Deadline deadline_, answer_deadline_;
  const Self self_;
  const std::string nonce_ = random_secret();
};

}  // namespace

Joined connect(const KeyValueStore& store, int rank, int size, size_t bytes,
               const Deadline& deadline, const Self& self) {
  return BootstrapClient(store, rank, size, bytes, deadline, self).run();
}

}  // namespace c10d_ext::shm::bootstrap
