#include "backends/checked/star.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <utility>

namespace c10d_ext {

namespace {

using Clock = Star::Clock;
using Milliseconds = std::chrono::milliseconds;

constexpr size_t kLongest = size_t{1} << 26;

// For poll(); -1: for ever.
int milliseconds_until(Clock::time_point time) {
  if (time == Clock::time_point::max()) {
    return -1;
  }
  const auto left = std::chrono::ceil<Milliseconds>(time - Clock::now());
  return static_cast<int>(std::clamp(left, Milliseconds(0), Milliseconds(60'000)).count());
}

// Which lines go to ranks of which nothing would be heard when a link is down.
std::vector<bool> far_ones(const std::vector<Connection>& lines, const Roster& roster) {
  std::vector<bool> is_far(lines.size());
  for (size_t i = 0; i < lines.size(); ++i) {
    is_far[i] = lines[i].is_open() && roster.is_linked(static_cast<int>(i));
  }
  return is_far;
}

}  // namespace

Star::Star(const Roster& roster, Listener& listener, std::vector<Connection> lines,
           std::vector<FdOwner> death_sockets)
    : roster_(roster),
      listener_(listener),
      wake_(Pipe::open()),
      lines_(std::move(lines)),
      heartbeat_(far_ones(lines_, roster)),
      death_sockets_(std::in_place, std::move(death_sockets)) {
  for (const auto* end : {&wake_.read_end, &wake_.write_end}) {
    fcntl(end->get(), F_SETFL, fcntl(end->get(), F_GETFL) | O_NONBLOCK);
  }
}

void Star::wake() const {
  const char word = 0;
  [[maybe_unused]] const auto written = ::write(wake_.write_end.get(), &word, 1);
}

bool Star::listen(Clock::time_point until) {
  std::vector<pollfd> fds{{wake_.read_end.get(), POLLIN, 0}, {death_sockets_->fd(), POLLIN, 0}};
  const size_t others = fds.size();
  std::vector<size_t> of;
  for (size_t i = 0; i < lines_.size(); ++i) {
    if (lines_[i].is_open()) {
      const int events = POLLIN | (lines_[i].has_unsent() ? POLLOUT : 0);
      fds.push_back({lines_[i].fd(), static_cast<int16_t>(events), 0});
      of.push_back(i);
    }
  }
  if (::poll(fds.data(), fds.size(), milliseconds_until(until)) < 0) {
    return false;
  }
  if (fds[0].revents != 0) {
    std::array<char, 64> words;
    while (::read(wake_.read_end.get(), words.data(), words.size()) > 0) {
    }
  }
  for (size_t i = 0; i < of.size(); ++i) {
    if (fds[others + i].revents != 0) {
      lines_[of[i]].flush();
      hear(of[i]);
    }
  }
  while (const auto line = death_sockets_->next_cut()) {
    cut(*line);
  }
  return true;
}

void Star::say(int rank, Says kind, const Payload& words) {
  if (auto& line = lines_[static_cast<size_t>(rank)]; line.is_open()) {
    line.say(kind, words);
  }
}

void Star::beat() {
  for (const size_t line : heartbeat_.take_due(Clock::now())) {
    if (lines_[line].is_open()) {
      lines_[line].say(kBeat, {});
    }
  }
}

// What comes over a line; rank 0's others, and theirs to rank 0.
void Star::hear(size_t line) {
  const bool stays = lines_[line].listen(kLongest);
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
    hear(line);
  }
  if (lines_[line].is_open()) {
    lose(line);
  }
}

void Star::lose(size_t line) {
  const bool is_unreachable = lines_[line].is_unreachable();
  lines_[line].close();
  std::vector<int> ranks{static_cast<int>(line)};
  const auto now = Clock::now();
  for (size_t other = 0; is_unreachable && other < lines_.size(); ++other) {
    // With a machine all of its ranks are.
    if (lines_[other].is_open() && heartbeat_.is_quiet(other, now) &&
        roster_.are_on_one_machine(static_cast<int>(other), static_cast<int>(line))) {
      lines_[other].close();
      ranks.push_back(static_cast<int>(other));
    }
  }
  listener_.lose(ranks, is_unreachable ? kUnreachable : kGone);
}

void Star::leave() {
  for (auto& line : lines_) {
    if (line.is_open()) {
      line.say(kLeaving, {});
    }
  }
  death_sockets_.reset();
}

// A connection closed with words in it that nobody has read takes back what was said last.
void Star::linger(Milliseconds limit) {
  for (const auto& line : lines_) {
    if (line.is_open()) {
      ::shutdown(line.fd(), SHUT_WR);
    }
  }
  for (const auto until = Clock::now() + limit; Clock::now() < until;) {
    std::vector<pollfd> fds;
    for (auto& line : lines_) {
      if (line.is_open() && !line.listen(kLongest)) {
        line.close();
      }
      while (line.next()) {
      }
      if (line.is_open()) {
        fds.push_back({line.fd(), POLLIN, 0});
      }
    }
    if (fds.empty()) {
      break;
    }
    ::poll(fds.data(), fds.size(), 100);
  }
}

}  // namespace c10d_ext
