#pragma once

#include <chrono>
#include <map>
#include <string>
#include <string_view>

namespace c10d_ext {

// While one lives, its thread of the program is held by a collective of `backend`. Counted once
// start() was called, and only by the outermost one of a thread.
class WaitTimer {
 public:
  explicit WaitTimer(std::string_view backend);
  ~WaitTimer();
  WaitTimer(const WaitTimer&) = delete;
  WaitTimer& operator=(const WaitTimer&) = delete;

  static void start();
  // From now on times() has this backend, whose waits are all counted.
  static void expect(std::string_view backend);
  // The time that threads were held, in sum. A backend whose waits nobody counts is not there.
  using Times = std::map<std::string, std::chrono::steady_clock::duration, std::less<>>;
  static Times times();

 private:
  std::string_view backend_;  // empty: not counted
  std::chrono::steady_clock::time_point since_;
};

}  // namespace c10d_ext
