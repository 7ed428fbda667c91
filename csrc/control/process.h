#pragma once

// Processes of ranks as others see them, and descriptors that do not outlive a fork. No torch in
// here.

#include <cstdint>
#include <mutex>
#include <string>

namespace c10d_ext {

struct Peer {
  int pid = 0;
  uint64_t start_time = 0;  // field 22 of /proc/<pid>/stat: tells a reused pid; 0: not known
};

// This process, as a peer sees it.
Peer this_process();

// The state of a peer's process for error texts: "running", "sleeping", "stopped", "zombie",
// "dead", from /proc; "unknown" where that cannot be read.
std::string process_state(const Peer& peer);

// Whether it has ended, as far as can be seen.
bool has_ended(const Peer& peer);

// Grows by one in a forked child. What was made under another value belongs to the parent: it must
// not be used, only dropped. In the child every descriptor of every membership is closed at once,
// so that it does not keep its parent alive in the peers' eyes.
uint64_t fork_generation();

// Calls it in every forked child. Said under a ForkGuard, and called under one: the child's threads
// are gone, its memory is the parent's as it was. Of static functions, as many as there are kinds
// of threads to forget.
void at_fork_in_child(void (*forget)());

// While one exists no thread of this process can fork. Keep it for as long as it takes to open a
// descriptor and to own it, never across a wait.
class ForkGuard {
 public:
  ForkGuard();

 private:
  std::lock_guard<std::mutex> lock_;
};

// Owns a descriptor that is closed at once in forked children.
class FdOwner {
 public:
  FdOwner() = default;
  // Owns `fd` (-1: nothing), opened under `guard`.
  FdOwner(int fd, const ForkGuard& guard);
  ~FdOwner();
  FdOwner(FdOwner&& other) noexcept;
  FdOwner& operator=(FdOwner&& other) noexcept;

  int get() const {
    return fd_;
  }
  explicit operator bool() const {
    return fd_ >= 0;
  }

 private:
  int fd_ = -1;
  uint64_t generation_ = 0;
};

struct Pipe {
  FdOwner read_end, write_end;
  static Pipe open();
};

}  // namespace c10d_ext
