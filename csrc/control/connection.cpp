#include "control/connection.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string>

namespace c10d_ext {

namespace {

// So many pieces are sent at a time, and so many bytes come at a time of what is not attached.
constexpr size_t kMostPieces = 64;
constexpr size_t kWords = 16384;
// Behind so many bytes sentences are taken before more is heard.
constexpr size_t kMuch = 65536;

iovec piece_of(std::string_view bytes) {
  return {const_cast<char*>(bytes.data()), bytes.size()};
}

}  // namespace

void Connection::say(uint32_t kind, const Payload& sentence) {
  const auto& words = sentence.words();
  const Heading heading{static_cast<uint32_t>(words.size()), kind, sentence.attached_bytes()};
  const std::string_view head(reinterpret_cast<const char*>(&heading), sizeof(heading));
  size_t sent = 0;
  if (unsent_.empty() && sentence.attached().empty()) {
    sent = send(std::array{head, std::string_view(words)});
  } else if (unsent_.empty()) {
    std::vector<std::string_view> pieces{head, words};
    pieces.insert(pieces.end(), sentence.attached().begin(), sentence.attached().end());
    sent = send(pieces);
  }

  // What is attached is kept as it is.
  const auto take = [&sent](size_t size) {
    const size_t taken = std::min(sent, size);
    sent -= taken;
    return taken;
  };
  std::string rest;
  for (const auto text : {head, std::string_view(words)}) {
    rest += text.substr(take(text.size()));
  }
  if (!rest.empty()) {
    unsent_.emplace_back(std::move(rest));
  }
  for (const auto& piece : sentence.attached()) {
    if (const size_t taken = take(piece.size()); taken < piece.size()) {
      unsent_.push_back(piece.part(taken, piece.size() - taken).kept());
    }
  }
}

void Connection::flush() {
  size_t sent = send(std::vector<std::string_view>(unsent_.begin(), unsent_.end()));
  while (sent > 0) {
    auto& first = unsent_.front();
    const size_t size = first.size();
    if (sent < size) {
      first = first.part(sent, size - sent);
      return;
    }
    sent -= size;
    unsent_.pop_front();
  }
}

size_t Connection::send(std::span<const std::string_view> pieces) {
  size_t all_sent = 0, sent_of_first = 0;
  for (size_t first = 0; first < pieces.size();) {
    std::array<iovec, kMostPieces> parts;
    const size_t count = std::min(parts.size(), pieces.size() - first);
    for (size_t i = 0; i < count; ++i) {
      parts[i] = piece_of(pieces[first + i].substr(i == 0 ? sent_of_first : 0));
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = count;
    const ssize_t now = ::sendmsg(fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (now < 0 && errno == EINTR) {
      continue;
    }
    if (now < 0 && errno != EAGAIN && errno != EWOULDBLOCK) {
      error_ = error_ != 0 ? error_ : errno;
      size_t all = 0;
      for (const auto piece : pieces) {
        all += piece.size();
      }
      return all;  // nobody there: listen() tells
    }
    if (now < 0) {
      break;
    }
    all_sent += static_cast<size_t>(now);
    sent_of_first += static_cast<size_t>(now);
    while (first < pieces.size() && sent_of_first >= pieces[first].size()) {
      sent_of_first -= pieces[first++].size();
    }
  }
  return all_sent;
}

bool Connection::listen(size_t limit, const FindLanding& find) {
  std::array<char, kWords> some;
  has_unheard_ = false;
  size_t heard = 0;
  const size_t most_heard = sizeof(Heading) + limit;
  const auto is_enough = [&] {
    return heard > (reader_.has_next() ? std::min(most_heard, kMuch) : most_heard);
  };
  bool is_allowed = reader_.take({}, limit, find);
  while (is_allowed && !reader_.has_postponed() && !is_enough()) {
    const auto [room, most] = reader_.attached_room();
    std::array<iovec, 2> parts{iovec{room, most}, iovec{some.data(), some.size()}};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    const ssize_t now = ::recvmsg(fd(), &message, MSG_DONTWAIT);
    if (now > 0) {
      const auto count = static_cast<size_t>(now), attached = std::min(count, most);
      heard += count;
      if (attached > 0) {
        reader_.take_attached(attached);
      }
      is_allowed = reader_.take({some.data(), count - attached}, limit, find);
      if (is_allowed && !reader_.has_postponed() && count < most + some.size()) {
        return true;  // there was no more
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
  has_unheard_ = is_allowed;  // sentences are there; the rest waits
  return is_allowed;
}

bool Connection::is_on_its_way() const {
  int domain = 0, left = 0;
  socklen_t size = sizeof(domain);
  const bool is_there_at_once =
      getsockopt(fd(), SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && domain == AF_UNIX;
  return !is_there_at_once && ::ioctl(fd(), SIOCOUTQ, &left) == 0 && left > 0;
}

bool Connection::is_unreachable() const {
  return error_ == ETIMEDOUT || error_ == EHOSTUNREACH || error_ == ENETUNREACH ||
         error_ == EHOSTDOWN || error_ == ENETDOWN;
}

}  // namespace c10d_ext
