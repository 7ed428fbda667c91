#pragma once

// What the two meetings of a group's ranks are made of: over shared memory (shm/bootstrap.cpp) and
// over sockets (control/connection.cpp). No torch in here.

#include <poll.h>
#include <sys/random.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <functional>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "base/timeouts.h"

namespace c10d_ext {

inline std::string error_text(int error) {
  return std::generic_category().message(error);
}

constexpr size_t kSecretSize = 32;

// 128 random bits in hexadecimal.
inline std::string random_secret() {
  std::array<unsigned char, kSecretSize / 2> bytes;
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw std::system_error(errno, std::generic_category(), "cannot get random bytes");
  }
  std::string text;
  for (const unsigned char byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

// In a time that does not depend on where they differ.
inline bool is_same_secret(std::string_view a, std::string_view b) {
  unsigned char difference = a.size() != b.size();
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  }
  return difference == 0;
}

// The end of all waits of one meeting, each of which may be interrupted.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;
  using milliseconds = std::chrono::milliseconds;

  // How long one look at descriptors takes at most.
  static constexpr milliseconds kSlice{50};

  Deadline(milliseconds timeout, std::function<void()> interrupt)
      : timeout_(bounded(timeout)),
        at_(Clock::now() + timeout_),
        interrupt_(std::move(interrupt)) {}

  bool passed() const {
    return Clock::now() >= at_;
  }
  milliseconds left() const {
    return std::max(milliseconds(0), std::chrono::ceil<milliseconds>(at_ - Clock::now()));
  }
  // Moves it to `left` from now where that is earlier (later: nothing).
  void shorten(milliseconds left) {
    at_ = std::min(at_, Clock::now() + bounded(left));
  }
  Deadline shortened(milliseconds left) const {
    auto other = *this;
    other.shorten(left);
    return other;
  }
  Deadline extended(milliseconds by) const {
    auto other = *this;
    other.at_ += by;
    return other;
  }
  // "within 1.5 s": what it was made with.
  std::string within() const {
    std::ostringstream out;
    out << "within " << std::chrono::duration<double>(timeout_).count() << " s";
    return out.str();
  }

  // Returns once something happened to one of `fds`, or after `at_most`, the deadline, or a while.
  void poll(std::vector<pollfd>& fds, milliseconds at_most = kSlice) const {
    for (auto slice = std::min({at_most, kSlice, left()});;) {
      if (interrupt_) {
        interrupt_();
      }
      const auto look = std::min(slice, kLook);
      slice -= look;
      const int ready = ::poll(fds.data(), fds.size(), static_cast<int>(look.count()));
      if (ready < 0) {
        for (auto& fd : fds) {
          fd.revents = 0;
        }
      }
      if (ready != 0 || slice <= milliseconds(0)) {
        return;
      }
    }
  }

  // True once `fd` is ready for `events` (or hung up), false at the deadline.
  bool wait(int fd, short events) const {
    std::vector<pollfd> fds{{fd, events, 0}};
    do {
      poll(fds);
      if (fds[0].revents != 0) {
        return true;
      }
    } while (!passed());
    return false;
  }

  void pause(milliseconds time) const {
    std::vector<pollfd> none;
    poll(none, time);
  }

 private:
  // Between two looks at what else may end a wait.
  static constexpr milliseconds kLook{10};

  milliseconds timeout_;
  Clock::time_point at_;
  std::function<void()> interrupt_;
};

}  // namespace c10d_ext
