#pragma once

// When to say something over lines to ranks on other hosts, of which nothing would be heard when a
// link is down: what a kernel does not acknowledge in time ends its connection (control/
// connection.cpp). A process that is stopped has a kernel that does. No torch in here.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

namespace c10d_ext {

class Heartbeat {
 public:
  using Clock = std::chrono::steady_clock;
  using Milliseconds = std::chrono::milliseconds;

  // `is_far`: by line.
  explicit Heartbeat(const std::vector<bool>& is_far) : lines_(is_far.size()) {
    size_t far = 0;
    for (size_t i = 0; i < is_far.size(); ++i) {
      lines_[i].is_far = is_far[i];
      far += is_far[i];
    }
    // Of many ranks each says less, so that rank 0 has time for other things.
    pause_ = kPause * std::max<size_t>(1, far / kMany);
    next_ = far == 0 ? Clock::time_point::max() : Clock::now() + pause_;
  }

  Clock::time_point next() const {
    return next_;
  }
  void heard(size_t line) {
    lines_[line].unanswered = 0;
    lines_[line].last = Clock::now();
  }
  // Whether it is long that anything was heard.
  bool is_quiet(size_t line, Clock::time_point now) const {
    return lines_[line].is_far && now - lines_[line].last > kQuiet * pause_;
  }
  // The lines over which to say something now.
  std::vector<size_t> take_due(Clock::time_point now) {
    std::vector<size_t> due;
    if (now < next_) {
      return due;
    }
    next_ = now + pause_;
    for (size_t i = 0; i < lines_.size(); ++i) {
      auto& line = lines_[i];
      // What is said to a stopped process stays in its kernel, which has room for much of it.
      if (line.is_far && (line.unanswered < kUnanswered || line.unanswered % kUnanswered == 0)) {
        due.push_back(i);
      }
      line.unanswered += line.is_far;
    }
    return due;
  }

 private:
  static constexpr Milliseconds kPause{200};
  static constexpr size_t kMany = 256;
  static constexpr int kQuiet = 3;
  static constexpr size_t kUnanswered = 64;

  struct Line {
    bool is_far = false;
    size_t unanswered = 0;
    Clock::time_point last = Clock::now();
  };
  std::vector<Line> lines_;
  Milliseconds pause_{};
  Clock::time_point next_;
};

}  // namespace c10d_ext
