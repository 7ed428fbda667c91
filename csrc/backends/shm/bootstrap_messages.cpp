#include "backends/shm/bootstrap_messages.h"

#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <utility>

namespace c10d_ext::shm::bootstrap {

using std::chrono::milliseconds;

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
      throw PeerGone(error_text(errno));
    }
    if (deadline.passed()) {
      throw PeerGone("no answer " + deadline.within());
    }
  }
}

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
    throw PeerGone(size < 0 ? error_text(errno) : "it hung up");
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
  throw PeerGone("no answer " + deadline.within());
}

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

uid_t user_behind(const FdOwner& socket) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) < 0) {
    return static_cast<uid_t>(-1);
  }
  return credentials.uid;
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

std::string key_of(const std::string& session, int rank) {
  return session + "/" + std::to_string(rank);
}

std::string verdict_key(const std::string& session) {
  return session + "/verdict";
}

}  // namespace c10d_ext::shm::bootstrap
