// An Ethernet switch between network namespaces, with the rate, the delay and the loss of a link to
// each of them: the kernels that tests run on need not have netem.
//
//   network RATE_MBIT DELAY_US LOSS_PERCENT /run/netns/a /run/netns/b ...
//
// makes a TAP device "eth0" in each namespace, says "ready", and forwards until its input ends.
// RATE_MBIT 0: as fast as it can. A frame is charged as the 1500-byte frames of which it is made,
// 94 % of whose time on the wire is for data. Commands come as lines: "down 1" and "up 1" cut the
// cable of the second namespace and mend it, "part 1 2" drops what the second and the third send
// each other, "loss 1.5" changes the loss.

#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <queue>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

// How much of its time on the wire a sender may be ahead; the rest waits in its kernel.
constexpr milliseconds kAhead{1};
// What waits for a receiver for longer is dropped, as by a switch whose buffer is full.
constexpr milliseconds kBuffer{200};

struct Frame {
  Clock::time_point due;
  uint64_t number;
  size_t to;
  std::vector<char> bytes;
  bool operator>(const Frame& other) const {
    return due != other.due ? due > other.due : number > other.number;
  }
};

struct Port {
  int fd = -1;
  bool is_up = true;
  Clock::time_point sent{}, received{};  // until when its cable is in use
};

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "network: %s: %s\n", what, std::strerror(errno));
  std::exit(1);
}

int make_tap(const char* space, size_t number) {
  const int at = open(space, O_RDONLY | O_CLOEXEC);
  if (at < 0 || setns(at, CLONE_NEWNET) != 0) {
    fail(space);
  }
  close(at);
  const int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) {
    fail("/dev/net/tun");
  }
  ifreq request{};
  std::strcpy(request.ifr_name, "eth0");
  request.ifr_flags = IFF_TAP | IFF_NO_PI;
  if (ioctl(fd, TUNSETIFF, &request) != 0) {
    fail("TUNSETIFF");
  }
  const int control = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  request.ifr_hwaddr.sa_family = 1;
  const std::array<char, 6> address{2, 0, 0, 0, 0, static_cast<char>(number)};
  std::memcpy(request.ifr_hwaddr.sa_data, address.data(), address.size());
  if (ioctl(control, SIOCSIFHWADDR, &request) != 0) {
    fail("SIOCSIFHWADDR");
  }
  close(control);
  return fd;
}

nanoseconds time_on_wire(size_t bytes, double mbit) {
  if (mbit <= 0) {
    return nanoseconds(0);
  }
  constexpr size_t kHeaders = 66, kData = 1448, kWire = 1538;
  const size_t data = bytes > kHeaders ? bytes - kHeaders : 0;
  const size_t frames = std::max<size_t>(1, (data + kData - 1) / kData);
  const double wire = static_cast<double>(data + frames * (kWire - kData));
  return nanoseconds(static_cast<int64_t>(wire * 8000.0 / mbit));
}

}  // namespace

int main(int count, char** words) {
  if (count < 6) {
    std::fprintf(stderr, "network RATE_MBIT DELAY_US LOSS_PERCENT NAMESPACE NAMESPACE ...\n");
    return 2;
  }
  const double mbit = std::atof(words[1]);
  const microseconds delay(std::atoi(words[2]));
  double loss = std::atof(words[3]) / 100;
  std::vector<Port> ports;
  for (int i = 4; i < count; ++i) {
    ports.push_back({make_tap(words[i], ports.size())});
  }
  // On time, where that is allowed.
  prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
  const sched_param first{.sched_priority = 1};
  (void)sched_setscheduler(0, SCHED_FIFO, &first);
  fcntl(STDIN_FILENO, F_SETFL, fcntl(STDIN_FILENO, F_GETFL) | O_NONBLOCK);
  std::puts("ready");
  std::fflush(stdout);

  std::mt19937 random(1);
  std::uniform_real_distribution<double> chance(0, 1);
  std::priority_queue<Frame, std::vector<Frame>, std::greater<>> frames;
  uint64_t number = 0;
  std::set<std::pair<size_t, size_t>> parted;
  std::string commands;
  std::array<char, 65536> buffer;
  for (;;) {
    auto now = Clock::now();
    while (!frames.empty() && frames.top().due <= now) {
      const Frame& frame = frames.top();
      if (ports[frame.to].is_up) {
        [[maybe_unused]] const auto written =
            write(ports[frame.to].fd, frame.bytes.data(), frame.bytes.size());
      }
      frames.pop();
    }
    std::vector<pollfd> fds{{STDIN_FILENO, POLLIN, 0}};
    auto next = frames.empty() ? now + milliseconds(100) : frames.top().due;
    for (auto& port : ports) {
      const bool is_full = port.sent > now + kAhead;
      fds.push_back({is_full ? -1 : port.fd, POLLIN, 0});
      if (is_full) {
        next = std::min(next, port.sent - kAhead);
      }
    }
    const auto left = std::max<nanoseconds>(next - Clock::now(), nanoseconds(0));
    const timespec wait{left.count() / 1'000'000'000, left.count() % 1'000'000'000};
    if (ppoll(fds.data(), fds.size(), &wait, nullptr) < 0) {
      continue;
    }
    if (fds[0].revents != 0) {
      const ssize_t got = read(STDIN_FILENO, buffer.data(), buffer.size());
      if (got == 0) {
        return 0;
      }
      commands.append(buffer.data(), static_cast<size_t>(std::max<ssize_t>(got, 0)));
      for (size_t end; (end = commands.find('\n')) != commands.npos; commands.erase(0, end + 1)) {
        std::istringstream line(commands.substr(0, end));
        std::string what;
        double value = 0;
        line >> what >> value;
        if (what == "loss") {
          loss = value / 100;
        } else if (what == "part") {
          size_t other = 0;
          line >> other;
          parted.insert({static_cast<size_t>(value), other});
          parted.insert({other, static_cast<size_t>(value)});
        } else if (static_cast<size_t>(value) < ports.size()) {
          ports[static_cast<size_t>(value)].is_up = what == "up";
        }
        std::puts("done");
        std::fflush(stdout);
      }
    }
    for (size_t from = 0; from < ports.size(); ++from) {
      if (fds[from + 1].fd < 0 || fds[from + 1].revents == 0) {
        continue;
      }
      for (int i = 0; i < 16; ++i) {
        now = Clock::now();
        if (ports[from].sent > now + kAhead) {
          break;
        }
        const ssize_t got = read(ports[from].fd, buffer.data(), buffer.size());
        if (got <= 0) {
          break;
        }
        if (!ports[from].is_up || (loss > 0 && chance(random) < loss)) {
          continue;
        }
        const auto bytes = static_cast<size_t>(got);
        const auto time = time_on_wire(bytes, mbit);
        ports[from].sent = std::max(ports[from].sent, now) + time;
        for (size_t to = 0; to < ports.size(); ++to) {
          const bool is_for_all = (buffer[0] & 1) != 0;
          if (to == from || parted.count({from, to}) != 0 ||
              (!is_for_all && static_cast<size_t>(buffer[5]) != to)) {
            continue;
          }
          auto& port = ports[to];
          if (port.received > now + kBuffer) {
            continue;
          }
          port.received = std::max(port.received + time, ports[from].sent);
          frames.push(
              {port.received + delay, ++number, to, {buffer.data(), buffer.data() + bytes}});
        }
      }
    }
  }
}
