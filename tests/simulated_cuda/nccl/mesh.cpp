#include "nccl/mesh.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <thread>

namespace simulated_nccl {

namespace {

// How often somebody who waits looks whether the communicator was aborted.
constexpr int kLookMilliseconds = 5;

struct Header {
  uint64_t tag;
  uint64_t bytes;
};

// An address that no file stands for, and that goes with the process.
socklen_t address_of(const std::string& name, int rank, sockaddr_un* out) {
  std::memset(out, 0, sizeof *out);
  out->sun_family = AF_UNIX;
  const std::string text = name + "/" + std::to_string(rank);
  std::memcpy(out->sun_path + 1, text.data(), std::min(text.size(), sizeof out->sun_path - 2));
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 +
                                std::min(text.size(), sizeof out->sun_path - 2));
}

int new_socket() {
  const int made = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (made < 0) {
    throw Broken(std::string("no socket: ") + std::strerror(errno));
  }
  return made;
}

// What one end of a connection has still to send or to receive.
struct Queue {
  std::deque<Part> parts;
  Header header{};
  size_t moved = 0;  // of the first part, its header included
};

}  // namespace

Mesh::Mesh(const std::string& name, int rank, int size, std::function<bool()> aborted)
    : rank_(rank), size_(size), aborted_(std::move(aborted)), sockets_(size, -1) {
  const int listener = new_socket();
  sockaddr_un address;
  const socklen_t length = address_of(name, rank, &address);
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(listener, size) != 0) {
    close(listener);
    throw Broken("rank " + std::to_string(rank) + " joins twice: " + std::strerror(errno));
  }
  try {
    for (int peer = 0; peer < rank; ++peer) {
      connect_to(peer, name);
    }
    for (int peer = rank + 1; peer < size; ++peer) {
      accept_one(listener);
    }
  } catch (...) {
    close(listener);
    throw;
  }
  close(listener);
}

Mesh::~Mesh() {
  for (const int socket : sockets_) {
    if (socket >= 0) {
      close(socket);
    }
  }
}

void Mesh::shut_down() {
  for (const int socket : sockets_) {
    if (socket >= 0) {
      shutdown(socket, SHUT_RDWR);
    }
  }
}

void Mesh::connect_to(int peer, const std::string& name) {
  sockaddr_un address;
  const socklen_t length = address_of(name, peer, &address);
  while (true) {
    if (aborted_()) {
      throw Aborted();
    }
    const int made = new_socket();
    if (connect(made, reinterpret_cast<sockaddr*>(&address), length) == 0) {
      sockets_[peer] = made;
      const int32_t me = rank_;
      if (send(made, &me, sizeof me, MSG_NOSIGNAL) == sizeof me) {
        return;
      }
    }
    close(made);
    std::this_thread::sleep_for(std::chrono::milliseconds(kLookMilliseconds));
  }
}

void Mesh::accept_one(int listener) {
  while (true) {
    if (aborted_()) {
      throw Aborted();
    }
    pollfd wanted{listener, POLLIN, 0};
    if (poll(&wanted, 1, kLookMilliseconds) <= 0) {
      continue;
    }
    const int made = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    int32_t peer = -1;
    if (made < 0 || recv(made, &peer, sizeof peer, MSG_WAITALL) != sizeof peer || peer < 0 ||
        peer >= size_) {
      throw Broken("a rank went while it joined");
    }
    sockets_[peer] = made;
    return;
  }
}

void Mesh::exchange(const std::vector<Part>& sends, const std::vector<Part>& receives) {
  std::vector<Queue> out(size_);
  std::vector<Queue> in(size_);
  size_t left = sends.size() + receives.size();
  for (const auto& part : sends) {
    out[part.peer].parts.push_back(part);
  }
  for (const auto& part : receives) {
    in[part.peer].parts.push_back(part);
  }
  // Moves what it can of a queue's first part. False: the socket has no more to take or to give.
  const auto move_some = [&](int peer, Queue& queue, bool is_send) {
    Part& part = queue.parts.front();
    if (is_send) {
      queue.header = {part.tag, part.bytes};
    }
    const bool in_header = queue.moved < sizeof(Header);
    char* at = in_header ? reinterpret_cast<char*>(&queue.header) + queue.moved
                         : part.data + (queue.moved - sizeof(Header));
    const size_t bytes =
        in_header ? sizeof(Header) - queue.moved : sizeof(Header) + part.bytes - queue.moved;
    const ssize_t moved = bytes == 0 ? 0
                          : is_send  ? send(sockets_[peer], at, bytes, MSG_DONTWAIT | MSG_NOSIGNAL)
                                     : recv(sockets_[peer], at, bytes, MSG_DONTWAIT);
    if (moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
      return false;
    }
    if (moved < 0 || (moved == 0 && bytes != 0)) {
      throw Broken("rank " + std::to_string(peer) + " is gone");
    }
    queue.moved += static_cast<size_t>(moved);
    if (!is_send && in_header && queue.moved == sizeof(Header) &&
        (queue.header.tag != part.tag || queue.header.bytes != part.bytes)) {
      throw Broken("rank " + std::to_string(peer) + " does something else: tag " +
                   std::to_string(queue.header.tag) + ", " + std::to_string(queue.header.bytes) +
                   " bytes, instead of tag " + std::to_string(part.tag) + ", " +
                   std::to_string(part.bytes) + " bytes");
    }
    if (queue.moved == sizeof(Header) + part.bytes) {
      queue.parts.pop_front();
      queue.moved = 0;
      --left;
    }
    return true;
  };
  while (left > 0) {
    if (aborted_()) {
      throw Aborted();
    }
    std::vector<pollfd> wanted;
    bool moved = false;
    for (int peer = 0; peer < size_; ++peer) {
      short events = 0;
      while (!out[peer].parts.empty()) {
        if (!move_some(peer, out[peer], true)) {
          events |= POLLOUT;
          break;
        }
        moved = true;
      }
      while (!in[peer].parts.empty()) {
        if (!move_some(peer, in[peer], false)) {
          events |= POLLIN;
          break;
        }
        moved = true;
      }
      if (events != 0) {
        wanted.push_back({sockets_[peer], events, 0});
      }
    }
    if (!moved && left > 0) {
      poll(wanted.data(), wanted.size(), kLookMilliseconds);
    }
  }
}

std::vector<uint64_t> Mesh::gather(uint64_t value) {
  constexpr uint64_t kTag = 0x6761746865720000;
  std::vector<uint64_t> values(size_, value);
  std::vector<Part> sends;
  std::vector<Part> receives;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) {
      sends.push_back({peer, kTag, reinterpret_cast<char*>(&value), sizeof value});
      receives.push_back({peer, kTag, reinterpret_cast<char*>(&values[peer]), sizeof value});
    }
  }
  exchange(sends, receives);
  return values;
}

}  // namespace simulated_nccl
