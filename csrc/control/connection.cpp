#include "control/connection.h"

#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace c10d_ext {

Payload& Payload::put(int64_t number) {
  bytes_.append(reinterpret_cast<const char*>(&number), sizeof(number));
  return *this;
}

Payload& Payload::put(const std::string& text) {
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
  const Heading heading{static_cast<uint32_t>(words.bytes().size()), kind};
  unsent_.append(reinterpret_cast<const char*>(&heading), sizeof(heading));
  unsent_ += words.bytes();
  flush();
}

void Connection::flush() {
  size_t sent = 0;
  while (sent < unsent_.size()) {
    const ssize_t now =
        ::send(fd(), unsent_.data() + sent, unsent_.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (now < 0 && errno == EINTR) {
      continue;
    }
    if (now < 0 && errno != EAGAIN && errno != EWOULDBLOCK) {
      error_ = error_ != 0 ? error_ : errno;
      sent = unsent_.size();  // nobody there: listen() tells
    }
    if (now <= 0) {
      break;
    }
    sent += static_cast<size_t>(now);
  }
  unsent_.erase(0, sent);
}

bool Connection::listen(size_t limit) {
  std::array<char, 4096> some;
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
