#pragma once

// A connection between two ranks, for a few words at a time, and data attached to them. No torch in
// here.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "control/frame_reader.h"
#include "control/payload.h"
#include "control/process.h"
#include "control/shared_bytes.h"

namespace c10d_ext {

// One end of a connection. Nothing here blocks.
class Connection {
 public:
  Connection() = default;
  explicit Connection(FdOwner socket) : socket_(std::move(socket)) {}

  bool is_open() const {
    return static_cast<bool>(socket_);
  }
  int fd() const {
    return socket_.get();
  }
  void close() {
    socket_ = {};
  }
  // What is left of it is said to nobody.
  FdOwner take_socket() {
    return std::move(socket_);
  }

  // Sends it, or keeps what the connection does not take for flush().
  void say(uint32_t kind, const Payload& sentence);
  void flush();
  bool has_unsent() const {
    return !unsent_.empty();
  }
  // Whether the other end's kernel is yet to have some of what was sent.
  bool is_on_its_way() const;
  // Whether it ended for want of an answer by the other machine, and not because somebody there has
  // ended it.
  bool is_unreachable() const;

  // Takes in what has come, not much more than a sentence of at most `limit` bytes where there is
  // no end to it. False: there will be no more, or one is too long. `find` may be empty; what it
  // finds is that of the sentence which is taken out next.
  bool listen(size_t limit, const FindLanding& find = {});
  // Whether that left something, so that there may be more without any coming.
  bool has_unheard() const {
    return has_unheard_;
  }
  std::optional<Frame> next() {
    return reader_.next();
  }

 private:
  // How much of those, one after the other.
  size_t send(std::span<const std::string_view> pieces);

  FdOwner socket_;
  std::deque<SharedBytes> unsent_;
  FrameReader reader_;
  bool has_unheard_ = false;
  int error_ = 0;  // what ended it
};

}  // namespace c10d_ext
