#include "control/death_sockets.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <future>
#include <iterator>
#include <utility>

#include "base/signal_masked_thread.h"

namespace c10d_ext {

namespace {

// Said by those who leave.
constexpr char kBye = 'b';

// Gives the calling thread a table of descriptors of its own, with nothing in it but `kept`. False:
// the kernel has no such call, before Linux 5.9; nothing is changed.
bool keep_to_oneself(std::vector<int> kept) {
#ifdef SYS_close_range
  constexpr unsigned kUnshare = 1U << 1;
  std::sort(kept.begin(), kept.end());
  unsigned first = 0;
  for (const int fd : kept) {
    const auto last = static_cast<unsigned>(fd);
    if (first < last && syscall(SYS_close_range, first, last - 1, kUnshare) != 0) {
      return false;
    }
    first = last + 1;
  }
  return syscall(SYS_close_range, first, ~0U, kUnshare) == 0;
#else
  return false;
#endif
}

// Until there is something to read at `leave`. Writes to `cuts` which ends were cut.
void watch_apart(const std::vector<int>& ends, int cuts, int leave) {
  std::vector<pollfd> fds;
  for (const int end : ends) {
    fds.push_back({end, POLLIN, 0});  // what is negative is passed over
  }
  fds.push_back({leave, POLLIN, 0});
  while (fds.back().revents == 0) {
    if (::poll(fds.data(), fds.size(), -1) < 0) {
      continue;
    }
    for (size_t i = 0; i < ends.size(); ++i) {
      char word = 0;
      if (fds[i].revents == 0) {
        continue;
      }
      const auto got = ::recv(ends[i], &word, 1, MSG_DONTWAIT);
      if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
        continue;
      }
      fds[i].fd = -1;
      if (got != 1 || word != kBye) {
        [[maybe_unused]] const auto written = ::write(cuts, &i, sizeof(i));
      }
    }
  }
  for (const int end : ends) {
    if (end >= 0) {
      ::send(end, &kBye, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
  }
}

}  // namespace

DeathSockets::DeathSockets(std::vector<FdOwner> ends)
    : ends_(std::move(ends)), generation_(fork_generation()) {
  auto cuts = Pipe::open();
  auto leave = Pipe::open();
  fcntl(cuts.read_end.get(), F_SETFL, O_NONBLOCK);
  std::vector<int> fds;
  for (const auto& end : ends_) {
    fds.push_back(end.get());
  }
  std::promise<bool> started;
  auto is_apart = started.get_future();
  thread_ = signal_masked_thread("c10d_ext_life", [fds, cuts = cuts.write_end.get(),
                                                   leave = leave.read_end.get(),
                                                   started = std::move(started)]() mutable {
    std::vector<int> kept{cuts, leave};
    std::copy_if(fds.begin(), fds.end(), std::back_inserter(kept), [](int fd) { return fd >= 0; });
    started.set_value(keep_to_oneself(std::move(kept)));
    watch_apart(fds, cuts, leave);
  });
  if (is_apart.get()) {
    ends_.clear();
  } else {
    ends_.push_back(std::move(cuts.write_end));
    ends_.push_back(std::move(leave.read_end));
  }
  cuts_ = std::move(cuts.read_end);
  leave_ = std::move(leave.write_end);
}

DeathSockets::~DeathSockets() {
  if (fork_generation() != generation_) {
    thread_.detach();  // there is none
    return;
  }
  [[maybe_unused]] const auto written = ::write(leave_.get(), &kBye, 1);
  thread_.join();
}

std::optional<size_t> DeathSockets::next_cut() const {
  size_t end = 0;
  const bool is_there = ::read(fd(), &end, sizeof(end)) == sizeof(end);
  return is_there ? std::optional(end) : std::nullopt;
}

}  // namespace c10d_ext
