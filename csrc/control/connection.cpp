#include "control/connection.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace c10d_ext {

Payload& Payload::put(int64_t number) {
  bytes_.append(reinterpret_cast<const char*>(&number), sizeof(number));
  return *this;
}

Payload& Payload::put(std::string_view text) {
  reserve(sizeof(int64_t) + text.size());
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
  const std::string& bytes = words.bytes();
  Heading heading{static_cast<uint32_t>(bytes.size()), kind};
  const std::string_view head(reinterpret_cast<const char*>(&heading), sizeof(heading));
  size_t sent = 0;
  if (unsent_.empty()) {
    sent = send(head, bytes);
  }
  const size_t sent_of_head = std::min(sent, head.size());
  unsent_ += head.substr(sent_of_head);
  unsent_.append(bytes, sent - sent_of_head);
}

void Connection::flush() {
  unsent_.erase(0, send(unsent_, {}));
}

// How much of the two, one after the other.
size_t Connection::send(std::string_view first, std::string_view second) {
  const size_t all = first.size() + second.size();
  size_t sent = 0;
  while (sent < all) {
    const size_t of_first = std::min(sent, first.size());
    const auto part = [](std::string_view text, size_t from) {
      return iovec{const_cast<char*>(text.data()) + from, text.size() - from};
    };
    std::array<iovec, 2> parts{part(first, of_first), part(second, sent - of_first)};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    const ssize_t now = ::sendmsg(fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (now < 0 && errno == EINTR) {
      continue;
    }
    if (now < 0 && errno != EAGAIN && errno != EWOULDBLOCK) {
      error_ = error_ != 0 ? error_ : errno;
      return all;  // nobody there: listen() tells
    }
    if (now <= 0) {
      break;
    }
    sent += static_cast<size_t>(now);
  }
  return sent;
}

bool Connection::listen(size_t limit) {
  std::array<char, 65536> some;
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

}  // namespace c10d_ext
