#include "backends/checked/star.h"

#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <stdexcept>
#include <utility>

#include "control/handshake.h"

namespace c10d_ext {

namespace {

using Clock = Star::Clock;
using Milliseconds = std::chrono::milliseconds;

constexpr size_t kLongest = size_t{1} << 26;
// For epoll_wait(); -1: for ever.
int milliseconds_until(Clock::time_point time) {
  if (time == Clock::time_point::max()) {
    return -1;
  }
  const auto left = std::chrono::ceil<Milliseconds>(time - Clock::now());
  return static_cast<int>(std::clamp(left, Milliseconds(0), Milliseconds(60'000)).count());
}

// Which lines go to ranks of which nothing would be heard when a link is down. Of two hosts one
// line is enough.
std::vector<bool> far_ones(const std::vector<Connection>& lines, const Roster& roster) {
  const int self = roster.place().rank;
  std::vector<bool> is_far(lines.size());
  for (size_t i = 0; i < lines.size(); ++i) {
    const auto rank = static_cast<int>(i);
    const bool is_for_all =
        self == 0 || rank == 0 || (roster.is_leader(self) && roster.is_leader(rank));
    is_far[i] = lines[i].is_open() && is_for_all && roster.is_linked(rank) &&
                !roster.is_watched_by_root(rank);
  }
  return is_far;
}

FdOwner opened(int fd, const ForkGuard& guard) {
  if (fd < 0) {
    throw std::runtime_error("cannot watch connections: " + error_text(errno));
  }
  return FdOwner(fd, guard);
}

FdOwner new_event() {
  const ForkGuard guard;
  return opened(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), guard);
}

FdOwner new_set() {
  const ForkGuard guard;
  return opened(epoll_create1(EPOLL_CLOEXEC), guard);
}

void add(const FdOwner& set, int fd, uint32_t events, uint64_t key) {
  epoll_event event{.events = events, .data = {.u64 = key}};
  if (epoll_ctl(set.get(), EPOLL_CTL_ADD, fd, &event) == 0) {
    return;
  }
  // A kernel that does not know it wakes both.
  event.events = events & ~static_cast<uint32_t>(EPOLLEXCLUSIVE);
  if (errno != EINVAL || epoll_ctl(set.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    throw std::runtime_error("cannot watch connections: " + error_text(errno));
  }
}

void signal(const FdOwner& event) {
  [[maybe_unused]] const auto failed = eventfd_write(event.get(), 1);
}

void reset(const FdOwner& event) {
  eventfd_t count = 0;
  [[maybe_unused]] const auto failed = eventfd_read(event.get(), &count);
}

}  // namespace

Star::Star(const Roster& roster, Listener& listener, std::vector<Connection> lines,
           std::vector<FdOwner> death_sockets)
    : roster_(roster),
      listener_(listener),
      wake_(new_event()),
      wake_one_{new_event(), new_event()},
      watched_{new_set(), new_set()},
      watched_aside_(new_set()),
      lines_(std::move(lines)),
      watched_for_(lines_.size()),
      heartbeat_(far_ones(lines_, roster)),
      death_sockets_(std::in_place, std::move(death_sockets)) {
  for (size_t waiter = 0; waiter < watched_.size(); ++waiter) {
    add(watched_[waiter], wake_.get(), EPOLLIN | EPOLLEXCLUSIVE, kWoken);
    add(watched_[waiter], wake_one_[waiter].get(), EPOLLIN, kWokenAlone);
  }
  const auto thread = static_cast<size_t>(Waiter::Thread);
  add(watched_aside_, wake_.get(), EPOLLIN | EPOLLEXCLUSIVE, kWoken);
  add(watched_aside_, wake_one_[thread].get(), EPOLLIN, kWokenAlone);
  for (const auto* set : {&watched_[thread], &watched_aside_}) {
    add(*set, death_sockets_->fd(), EPOLLIN, kCut);
  }
  for (size_t i = 0; i < lines_.size(); ++i) {
    watch(i);
  }
}

void Star::wake() const {
  signal(wake_);
}

void Star::wake(Waiter waiter) const {
  signal(wake_one_[static_cast<size_t>(waiter)]);
}

Star::Ready Star::wait(Waiter waiter, Clock::time_point until,
                       Clock::time_point awake_until) const {
  return wait(watched_[static_cast<size_t>(waiter)], waiter, until, awake_until);
}

Star::Ready Star::wait_aside(Clock::time_point until) const {
  return wait(watched_aside_, Waiter::Thread, until, {});
}

Star::Ready Star::wait(const FdOwner& set, Waiter waiter, Clock::time_point until,
                       Clock::time_point awake_until) const {
  std::array<epoll_event, 64> events;
  const auto look = [&](int milliseconds) {
    return epoll_wait(set.get(), events.data(), events.size(), milliseconds);
  };
  int count = 0;
  for (auto now = Clock::now(); count == 0 && now < std::min(until, awake_until);
       now = Clock::now()) {
    count = look(0);
    if (count == 0) {
      sched_yield();
    }
  }
  if (count == 0) {
    count = look(milliseconds_until(until));
  }
  if (count < 0) {
    return everything();  // interrupted, maybe when something came
  }
  Ready ready;
  for (int i = 0; i < count; ++i) {
    ready.push_back(events[static_cast<size_t>(i)].data.u64);
  }
  const auto has = [&](uint64_t key) {
    return std::find(ready.begin(), ready.end(), key) != ready.end();
  };
  if (has(kWoken)) {
    reset(wake_);
  }
  if (has(kWokenAlone)) {
    reset(wake_one_[static_cast<size_t>(waiter)]);
    if (waiter == Waiter::Thread) {
      return everything();  // a caller may have gone with what it was woken for
    }
  }
  return ready;
}

Star::Ready Star::everything() const {
  Ready ready{kCut};
  for (size_t i = 0; i < lines_.size(); ++i) {
    ready.push_back(i);
  }
  return ready;
}

void Star::take_in(const Ready& ready) {
  for (const uint64_t one : ready) {
    if (one < lines_.size() && lines_[one].is_open()) {
      lines_[one].flush();
      hear_all(one);
      watch(one);
    }
  }
  if (death_sockets_ && std::find(ready.begin(), ready.end(), kCut) != ready.end()) {
    while (const auto line = death_sockets_->next_cut()) {
      cut(*line);
    }
  }
}

void Star::say(int rank, Says kind, const Payload& words) {
  say_over(static_cast<size_t>(rank), kind, words);
}

void Star::say_over(size_t line, Says kind, const Payload& words) {
  if (lines_[line].is_open()) {
    lines_[line].say(kind, words);
    watch(line);
  }
}

void Star::watch(size_t line) {
  const auto& connection = lines_[line];
  const uint32_t events =
      !connection.is_open() ? 0 : EPOLLIN | (connection.has_unsent() ? EPOLLOUT : 0U);
  if (events == watched_for_[line]) {
    return;
  }
  for (const auto& set : watched_) {  // the caller's first
    if (watched_for_[line] != 0) {
      epoll_ctl(set.get(), EPOLL_CTL_DEL, connection.fd(), nullptr);
    }
  }
  for (const auto& set : watched_) {
    if (events != 0) {
      add(set, connection.fd(), events | EPOLLEXCLUSIVE, line);
    }
  }
  watched_for_[line] = events;
}

void Star::close(size_t line) {
  // A fork may keep the socket open.
  for (const auto& set : watched_) {
    epoll_ctl(set.get(), EPOLL_CTL_DEL, lines_[line].fd(), nullptr);
  }
  lines_[line].close();
  watched_for_[line] = 0;
}

void Star::beat() {
  for (const size_t line : heartbeat_.take_due(Clock::now())) {
    say_over(line, kBeat, {});
  }
}

void Star::hear_all(size_t line) {
  do {
    hear(line);
  } while (lines_[line].is_open() && lines_[line].has_unheard());
}

// What comes over a line; rank 0's others, and theirs to rank 0.
void Star::hear(size_t line) {
  const auto find = [this, line](uint32_t kind, const std::string& words, size_t attached) {
    const auto to_come = SharedBytes::to_come(attached);
    return listener_.find_landing(static_cast<int>(line), kind, Payload(words, to_come));
  };
  const bool stays = lines_[line].listen(kLongest, find);
  try {
    while (auto sentence = lines_[line].next()) {
      heartbeat_.heard(line);
      if (sentence->kind != kBeat) {
        listener_.hear(static_cast<int>(line), sentence->kind, sentence->words);
      }
    }
  } catch (const std::runtime_error&) {
    lose(line);  // talks nonsense
    return;
  }
  if (!stays) {
    lose(line);
  }
}

// Before the kernel says so: what the rank has said still counts.
void Star::cut(size_t line) {
  if (lines_[line].is_open()) {
    hear_all(line);
  }
  if (lines_[line].is_open()) {
    lose(line);
  }
}

void Star::lose(size_t line) {
  const bool is_unreachable = lines_[line].is_unreachable();
  close(line);
  std::vector<int> ranks{static_cast<int>(line)};
  const auto now = Clock::now();
  for (size_t other = 0; is_unreachable && other < lines_.size(); ++other) {
    // With a machine all of its ranks are.
    if (lines_[other].is_open() && heartbeat_.is_quiet(other, now) &&
        roster_.are_on_one_machine(static_cast<int>(other), static_cast<int>(line))) {
      close(other);
      ranks.push_back(static_cast<int>(other));
    }
  }
  listener_.lose(ranks, is_unreachable ? kUnreachable : kGone);
}

void Star::leave(uint64_t after) {
  for (size_t i = 0; i < lines_.size(); ++i) {
    say_over(i, kLeaving, Payload().put(static_cast<int64_t>(after)));
  }
  death_sockets_.reset();
}

// A connection by TCP closed with words in it that nobody has read takes back what was said last.
void Star::linger(Milliseconds limit, const std::function<void(bool is_heard)>& look) {
  std::vector<bool> is_said(lines_.size());
  for (const auto until = Clock::now() + limit; Clock::now() < until;) {
    std::vector<pollfd> fds;
    bool is_heard = true;
    for (size_t i = 0; i < lines_.size(); ++i) {
      auto& line = lines_[i];
      if (!line.is_open()) {
        continue;
      }
      line.flush();  // data of messages may be left
      if (!line.has_unsent() && !is_said[i]) {
        ::shutdown(line.fd(), SHUT_WR);
        is_said[i] = true;
      }
      if (!line.listen(kLongest)) {
        line.close();  // nobody waits for it any more
      }
      while (line.next()) {
      }
      if (line.is_open()) {
        const int events = POLLIN | (line.has_unsent() ? POLLOUT : 0);
        fds.push_back({line.fd(), static_cast<short>(events), 0});
        is_heard &= is_said[i] && !line.is_on_its_way();
      }
    }
    look(is_heard);
    if (fds.empty()) {
      break;
    }
    ::poll(fds.data(), fds.size(), is_heard ? 100 : 5);  // nothing wakes for an acknowledgement
  }
  look(true);
}

}  // namespace c10d_ext
