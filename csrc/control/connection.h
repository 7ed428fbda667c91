#pragma once

// A connection between two ranks, for a few words at a time. No torch in here.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "control/process.h"

namespace c10d_ext {

// What is said over a line: numbers and texts in the order in which they are taken out again.
class Payload {
 public:
  Payload() = default;
  explicit Payload(std::string bytes) : bytes_(std::move(bytes)) {}

  Payload& put(int64_t number);
  Payload& put(std::string_view text);
  template <class Number>
  Payload& put(const std::vector<Number>& numbers) {
    put(static_cast<int64_t>(numbers.size()));
    for (const Number number : numbers) {
      put(static_cast<int64_t>(number));
    }
    return *this;
  }

  // That so many bytes more will be put.
  void reserve(size_t bytes) {
    bytes_.reserve(bytes_.size() + bytes);
  }

  // Throw std::runtime_error where there is no such thing left.
  int64_t number();
  std::string text();
  template <class Number = int64_t>
  std::vector<Number> numbers() {
    const auto count = size();
    std::vector<Number> all;
    for (size_t i = 0; i < count; ++i) {
      all.push_back(static_cast<Number>(number()));
    }
    return all;
  }

  const std::string& bytes() const {
    return bytes_;
  }

 private:
  // A length, of something that may be there.
  size_t size();

  std::string bytes_;
  size_t at_ = 0;
};

struct Frame {
  uint32_t kind;
  Payload words;
};

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
  void say(uint32_t kind, const Payload& words);
  void flush();
  bool has_unsent() const {
    return !unsent_.empty();
  }
  // Whether it ended for want of an answer by the other machine, and not because somebody there has
  // ended it.
  bool is_unreachable() const;

  // Takes in what has come, not much more than a sentence of at most `limit` bytes where there is
  // no end to it. False: there will be no more, or one is too long.
  bool listen(size_t limit);
  // Whether that left something, so that there may be more without any coming.
  bool has_unheard() const {
    return has_unheard_;
  }
  std::optional<Frame> next();

 private:
  size_t send(std::string_view first, std::string_view second);

  FdOwner socket_;
  std::string unsent_, heard_;
  bool has_unheard_ = false;
  int error_ = 0;  // what ended it
};

}  // namespace c10d_ext
