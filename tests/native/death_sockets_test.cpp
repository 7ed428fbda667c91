// Processes that hold death_sockets, and end in one way or another. Run without arguments it runs
// every test; with arguments, those named.

#include "control/death_sockets.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <optional>

#include "program.h"

using namespace c10d_ext;

namespace {

struct Connection {
  FdOwner ours, theirs;
};

Connection connection() {
  std::array<int, 2> fds;
  const ForkGuard guard;
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds.data()) == 0);
  return {FdOwner(fds[0], guard), FdOwner(fds[1], guard)};
}

std::vector<FdOwner> list(FdOwner end) {
  std::vector<FdOwner> ends;
  ends.push_back(std::move(end));
  return ends;
}

// The end that was cut, if one is in time.
std::optional<size_t> wait_for_cut(const DeathSockets& death_sockets,
                                   std::chrono::milliseconds timeout) {
  pollfd fd{death_sockets.fd(), POLLIN, 0};
  CHECK(poll(&fd, 1, static_cast<int>(timeout.count())) >= 0);
  return death_sockets.next_cut();
}

constexpr std::chrono::milliseconds kNothing{200};  // comes in this time where nothing should

// A process that holds the other end, until a word comes.
pid_t hold(Connection& connection, const std::function<void(std::optional<DeathSockets>&)>& then) {
  // A fork closes every FdOwner of this process.
  const int end = dup(connection.theirs.get());
  const pid_t child = start([&] {
    const auto own = [&] {
      const ForkGuard guard;
      return FdOwner(end, guard);
    };
    std::optional<DeathSockets> held(std::in_place, list(own()));
    then(held);
  });
  close(end);
  connection.theirs = {};
  return child;
}

void who_is_killed_is_noticed() {
  auto line = connection();
  std::array<int, 2> ends;
  CHECK(pipe(ends.data()) == 0);
  const pid_t child = hold(line, [&](auto&) {
    CHECK(write(ends[1], "!", 1) == 1);
    pause();
  });
  const DeathSockets ours(list(std::move(line.ours)));
  char word = 0;
  CHECK(read(ends[0], &word, 1) == 1);  // it holds its end
  CHECK(!wait_for_cut(ours, kNothing));
  CHECK(kill(child, SIGKILL) == 0);
  CHECK(wait_for_cut(ours, kLong) == size_t{0});
  CHECK(!wait_for_cut(ours, kNothing));  // once
  finish(child);
  for (const int fd : ends) {
    close(fd);
  }
}

// Without a table of its own the thread's sockets would be open in the copy as well.
void what_a_copy_of_the_process_has_open_does_not_hide_it() {
  if (syscall(SYS_close_range, ~0U, ~0U, 0) != 0 && errno == ENOSYS) {
    return;  // before Linux 5.9
  }
  auto line = connection();
  std::array<int, 2> pids;
  CHECK(pipe(pids.data()) == 0);
  const pid_t child = hold(line, [&](auto&) {
    // Of which nobody hears who asks to hear of forks.
    const auto copy = static_cast<pid_t>(syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0));
    if (copy == 0) {
      alarm(60);
      pause();
      _exit(0);
    }
    CHECK(write(pids[1], &copy, sizeof(copy)) == sizeof(copy));
    raise(SIGKILL);
  });
  pid_t copy = 0;
  CHECK(read(pids[0], &copy, sizeof(copy)) == sizeof(copy) && copy > 0);
  const DeathSockets ours(list(std::move(line.ours)));
  const auto cut = wait_for_cut(ours, kLong);
  CHECK(kill(copy, SIGKILL) == 0);
  CHECK(cut == size_t{0});
  finish(child);
  for (const int fd : pids) {
    close(fd);
  }
}

void who_leaves_is_not_missed() {
  auto line = connection();
  const pid_t child = hold(line, [](auto& held) {
    held.reset();
    raise(SIGKILL);
  });
  const DeathSockets ours(list(std::move(line.ours)));
  finish(child);
  CHECK(!wait_for_cut(ours, kNothing));
}

void what_does_not_end_in_good_order_is_cut() {
  auto exits = connection(), talks = connection(), stays = connection();
  const pid_t first = hold(exits, [](auto&) { _exit(0); });
  std::vector<FdOwner> ends;
  ends.push_back(std::move(stays.ours));
  ends.emplace_back();  // not open
  ends.push_back(std::move(exits.ours));
  ends.push_back(std::move(talks.ours));
  const DeathSockets ours(std::move(ends));
  CHECK(wait_for_cut(ours, kLong) == size_t{2});
  CHECK(write(talks.theirs.get(), "?", 1) == 1);
  CHECK(wait_for_cut(ours, kLong) == size_t{3});
  stays.theirs = {};
  CHECK(wait_for_cut(ours, kLong) == size_t{0});
  finish(first);
}

void leaving_says_so_on_every_line() {
  auto first = connection(), second = connection();
  {
    std::vector<FdOwner> ends;
    ends.push_back(std::move(first.ours));
    ends.push_back(std::move(second.ours));
    const DeathSockets ours(std::move(ends));
  }
  const DeathSockets one(list(std::move(first.theirs))), other(list(std::move(second.theirs)));
  CHECK(!wait_for_cut(one, kNothing));
  CHECK(!wait_for_cut(other, kNothing));
}

const std::vector<Test> kTests = {
    TEST(who_is_killed_is_noticed),      TEST(what_a_copy_of_the_process_has_open_does_not_hide_it),
    TEST(who_leaves_is_not_missed),      TEST(what_does_not_end_in_good_order_is_cut),
    TEST(leaving_says_so_on_every_line),
};

}  // namespace

int main(int count, char** names) {
  return run_tests(kTests, count, names);
}
