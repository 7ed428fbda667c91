#include "control/process.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <fstream>
#include <optional>
#include <sstream>
#include <system_error>
#include <utility>
#include <vector>

namespace c10d_ext {

namespace {

struct Process {
  // Guards the rest, and what else is guarded by a ForkGuard. Held across fork(), so that the child
  // finds all of it consistent; nothing blocks while it is held.
  std::mutex mutex;
  std::vector<int> descriptors;
  std::vector<void (*)()> forgets;
  std::atomic<uint64_t> generation{0};
};

Process& process();

void before_fork() {
  process().mutex.lock();
}

void after_fork_in_parent() {
  process().mutex.unlock();
}

void after_fork_in_child() {
  auto& p = process();
  for (const int fd : p.descriptors) {
    close(fd);
  }
  p.descriptors.clear();
  p.generation.fetch_add(1, std::memory_order_relaxed);
  for (const auto forget : p.forgets) {
    forget();
  }
  p.mutex.unlock();
}

Process& process() {
  // Never destroyed: threads use it until the very end of the process.
  static auto* const it = [] {
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    return new Process();
  }();
  return *it;
}

}  // namespace

uint64_t fork_generation() {
  return process().generation.load(std::memory_order_relaxed);
}

void at_fork_in_child(void (*forget)()) {
  process().forgets.push_back(forget);
}

ForkGuard::ForkGuard() : lock_(process().mutex) {}

FdOwner::FdOwner(int fd, const ForkGuard&) : fd_(fd), generation_(fork_generation()) {
  if (fd_ >= 0) {
    process().descriptors.push_back(fd_);
  }
}

FdOwner::~FdOwner() {
  if (fd_ < 0 || generation_ != fork_generation()) {
    return;
  }
  const ForkGuard guard;
  std::erase(process().descriptors, fd_);
  close(fd_);
}

FdOwner::FdOwner(FdOwner&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), generation_(other.generation_) {}

FdOwner& FdOwner::operator=(FdOwner&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(generation_, other.generation_);
  return *this;
}

Pipe Pipe::open() {
  int fds[2];
  const ForkGuard guard;
  if (pipe2(fds, O_CLOEXEC) < 0) {
    throw std::system_error(errno, std::generic_category(), "cannot create a pipe");
  }
  return {FdOwner(fds[0], guard), FdOwner(fds[1], guard)};
}

namespace {

struct Stat {
  char state = '?';
  uint64_t start_time = 0;
};

std::optional<Stat> read_stat(const std::string& process) {
  std::ifstream file("/proc/" + process + "/stat");
  std::string line;
  if (!std::getline(file, line)) {
    return std::nullopt;
  }
  // The second field is the program's name in brackets, which may hold anything.
  std::istringstream fields(line.substr(line.rfind(')') + 1));
  Stat stat;
  fields >> stat.state;
  std::string skipped;
  for (int field = 4; field < 22; ++field) {
    fields >> skipped;
  }
  fields >> stat.start_time;
  return fields ? std::optional(stat) : std::nullopt;
}

}  // namespace

Peer this_process() {
  const auto stat = read_stat("self");
  return {static_cast<int>(getpid()), stat ? stat->start_time : 0};
}

std::string process_state(const Peer& peer) {
  if (peer.start_time == 0) {
    return "unknown";
  }
  const auto stat = read_stat(std::to_string(peer.pid));
  if (!stat) {
    return read_stat("self") ? "dead" : "unknown";
  }
  if (stat->start_time != peer.start_time) {
    return "dead";
  }
  switch (stat->state) {
    case 'R':
      return "running";
    case 'T':
    case 't':
      return "stopped";
    case 'Z':
      return "zombie";
    case 'X':
      return "dead";
    default:
      return "sleeping";
  }
}

bool has_ended(const Peer& peer) {
  const auto state = process_state(peer);
  return state == "zombie" || state == "dead";
}

}  // namespace c10d_ext
