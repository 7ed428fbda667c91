#pragma once

// What rendezvous need of c10d::Store. No torch in here.

#include <chrono>
#include <functional>
#include <string>

namespace c10d_ext {

// What is needed of c10d::Store. `get` is called for keys that `has` has seen, so it need not wait.
struct KeyValueStore {
  std::function<void(const std::string& key, const std::string& value)> set;
  std::function<std::string(const std::string& key, std::chrono::milliseconds timeout)> get;
  std::function<bool(const std::string& key)> has;
  // When set: called at least every 10 ms while a join waits. It may throw, which ends the join.
  std::function<void()> interrupt;
};

}  // namespace c10d_ext
