#pragma once

// Tells at once that the process at the other end of a connection is gone. No torch in here.
//
// The kernel closes what a process has open after it has freed its memory, 15 to 30 ms after a
// kill. A thread with a table of descriptors of its own ends before that (unless it is the last
// one), and the kernel closes what is in its table then. Nor does a fork of the process, or a
// program that it starts, keep any of it open.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <thread>
#include <vector>

#include "control/process.h"

namespace c10d_ext {

class DeathSockets {
 public:
  // Nothing else may be said over these sockets; what is not open is passed over.
  explicit DeathSockets(std::vector<FdOwner> ends);
  // Leaves, of which the other ends hear nothing.
  ~DeathSockets();
  DeathSockets(const DeathSockets&) = delete;
  DeathSockets& operator=(const DeathSockets&) = delete;

  // Can be read where there is a next_cut().
  int fd() const {
    return cuts_.get();
  }
  // The index of an end at whose other end a process is gone that has not left; each one once.
  std::optional<size_t> next_cut() const;

 private:
  std::vector<FdOwner> ends_;
  FdOwner cuts_, leave_;
  const uint64_t generation_;
  std::thread thread_;
};

}  // namespace c10d_ext
