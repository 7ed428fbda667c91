// An Ethernet switch between network namespaces, with the rate, the delay and the loss of a link to
// each of them: the kernels that tests run on need not have netem.
//
//   network RATE_MBIT DELAY_US LOSS_PERCENT /run/netns/a /run/netns/b ...
//
// makes a TAP device "eth0" in each namespace, says "ready", and forwards until its input ends.
// RATE_MBIT 0: as fast as it can. Commands come as lines: "down 1" and "up 1" cut the cable of the
// second namespace and mend it, "part 1 2" drops what the second and the third send each other,
// "loss 1.5" changes the loss.
//
// The namespaces share the machine's processors with this program, which is to take as little of
// them as a network card does. So kernels hand over up to 64 KiB of a connection in one frame, and
// are handed as much (segmentation offload), unless frames are to be lost. A frame is charged as
// the 1500-byte frames of which it is made, 94 % of whose time on the wire is for data. Before the
// wire connections take turns, as fq_codel has them do.

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

#include "fair_queue.h"

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

// How much of its time on the wire a sender may be ahead, as in the queue of a network card.
constexpr microseconds kAhead{500};
// What waits for a receiver for longer is dropped, as by a switch whose buffer is full.
constexpr milliseconds kBuffer{200};

// A frame on its way.
struct Due {
  Clock::time_point when;
  uint64_t number;
  size_t to;
  FramePtr frame;
  bool operator>(const Due& other) const {
    return when != other.when ? when > other.when : number > other.number;
  }
};

struct Port {
  int fd = -1;
  bool is_up = true;
  Clock::time_point sent{}, received{};  // until when its cable is in use
  FairQueue queue{};
};

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "network: %s: %s\n", what, std::strerror(errno));
  std::exit(1);
}

void set_offload(int fd, bool is_on) {
  if (ioctl(fd, TUNSETOFFLOAD, is_on ? TUN_F_CSUM | TUN_F_TSO4 : 0) != 0) {
    fail("TUNSETOFFLOAD");
  }
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
  request.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
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
  constexpr size_t kHeaders = kOffload + 66, kData = 1448, kWire = 1538;
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
    set_offload(ports.back().fd, loss <= 0);
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
  std::priority_queue<Due, std::vector<Due>, std::greater<>> frames;
  uint64_t number = 0;
  std::set<std::pair<size_t, size_t>> parted;
  std::string commands;
  std::array<char, 4096> said;
  for (;;) {
    auto now = Clock::now();
    while (!frames.empty() && frames.top().when <= now) {
      const auto& [when, nth, to, frame] = frames.top();
      if (ports[to].is_up) {
        [[maybe_unused]] const auto written = write(ports[to].fd, frame->bytes.data(), frame->size);
      }
      frames.pop();
    }
    std::vector<pollfd> fds{{STDIN_FILENO, POLLIN, 0}};
    auto next = frames.empty() ? now + milliseconds(100) : frames.top().when;
    for (auto& port : ports) {
      fds.push_back({port.queue.is_full() ? -1 : port.fd, POLLIN, 0});
      if (!port.queue.is_empty()) {
        next = std::min(next, port.sent - kAhead);
      }
    }
    const auto left = std::max<nanoseconds>(next - Clock::now(), nanoseconds(0));
    const timespec wait{left.count() / 1'000'000'000, left.count() % 1'000'000'000};
    if (ppoll(fds.data(), fds.size(), &wait, nullptr) < 0) {
      continue;
    }
    if (fds[0].revents != 0) {
      const ssize_t got = read(STDIN_FILENO, said.data(), said.size());
      if (got == 0) {
        return 0;
      }
      commands.append(said.data(), static_cast<size_t>(std::max<ssize_t>(got, 0)));
      for (size_t end; (end = commands.find('\n')) != commands.npos; commands.erase(0, end + 1)) {
        std::istringstream line(commands.substr(0, end));
        std::string what;
        double value = 0;
        line >> what >> value;
        if (what == "loss") {
          loss = value / 100;
          for (const auto& port : ports) {
            set_offload(port.fd, loss <= 0);
          }
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
      auto& port = ports[from];
      while (fds[from + 1].revents != 0 && !port.queue.is_full()) {
        auto frame = new_frame();
        const ssize_t got = read(port.fd, frame->bytes.data(), frame->bytes.size());
        if (got <= static_cast<ssize_t>(kOffload)) {
          break;
        }
        frame->size = static_cast<size_t>(got);
        port.queue.push(std::move(frame));
      }
      while (!port.queue.is_empty()) {
        now = Clock::now();
        if (port.sent > now + kAhead) {
          break;
        }
        const FramePtr frame = port.queue.pop();
        if (!port.is_up || (loss > 0 && chance(random) < loss)) {
          continue;
        }
        const auto time = time_on_wire(frame->size, mbit);
        port.sent = std::max(port.sent, now) + time;
        for (size_t to = 0; to < ports.size(); ++to) {
          const bool is_for_all = (frame->bytes[kOffload] & 1) != 0;
          if (to == from || parted.count({from, to}) != 0 ||
              (!is_for_all && static_cast<size_t>(frame->bytes[kOffload + 5]) != to)) {
            continue;
          }
          auto& other = ports[to];
          if (other.received > now + kBuffer) {
            continue;
          }
          other.received = std::max(other.received + time, port.sent);
          frames.push({other.received + delay, ++number, to, frame});
        }
      }
    }
  }
}
