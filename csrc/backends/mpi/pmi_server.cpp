#include "backends/mpi/pmi_server.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <exception>
#include <map>
#include <memory>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "base/signal_masked_thread.h"
#include "control/handshake.h"
#include "control/host.h"

namespace c10d_ext::mpi {

namespace {

using std::chrono::milliseconds;

constexpr std::string_view kMapping = "PMI_process_mapping";
// Longer ones the library does not take.
constexpr int kKeySize = 256;
constexpr int kValueSize = 1024;
// A rank may take its time before it comes: other ranks' look at the store must cost it nothing.
constexpr milliseconds kFirstPause{1};
constexpr milliseconds kLastPause{20};

// The library's memory has names, in what is mounted there.
std::string shared_memory() {
  struct stat there{};
  return stat("/dev/shm", &there) == 0 ? std::to_string(there.st_dev) : std::string("none");
}

class Session {
 public:
  Session(int fd, KeyValueStore store, Count count, int rank, int size)
      : fd_(fd), store_(std::move(store)), count_(std::move(count)), rank_(rank), size_(size) {}

  ~Session() {
    close(fd_);
  }

  void run() {
    // It may be asked for before anybody has met: this rank's part is there from the start.
    store_.set("host/" + std::to_string(rank_), this_host() + ' ' + shared_memory());
    std::string line;
    while (receive(line)) {
      if (!answer(line)) {
        return;
      }
    }
  }

 private:
  using Fields = std::map<std::string, std::string, std::less<>>;

  // A command up to its newline; false: the library has gone.
  bool receive(std::string& line) {
    for (;;) {
      const auto end = received_.find('\n');
      if (end != std::string::npos) {
        line = received_.substr(0, end);
        received_.erase(0, end + 1);
        return true;
      }
      std::array<char, 4096> more;
      const ssize_t count = recv(fd_, more.data(), more.size(), 0);
      if (count < 0 && errno == EINTR) {
        continue;
      }
      if (count <= 0) {
        return false;
      }
      received_.append(more.data(), static_cast<size_t>(count));
    }
  }

  bool say(std::string text) {
    text += '\n';
    for (size_t sent = 0; sent < text.size();) {
      const ssize_t count = send(fd_, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
      if (count < 0 && errno == EINTR) {
        continue;
      }
      if (count <= 0) {
        return false;
      }
      sent += static_cast<size_t>(count);
    }
    return true;
  }

  // "cmd=put kvsname=kvs key=k value=v". The value comes last and may hold anything.
  static Fields fields_of(std::string_view line) {
    Fields fields;
    while (!line.empty()) {
      const auto start = line.find_first_not_of(' ');
      if (start == std::string_view::npos) {
        break;
      }
      line.remove_prefix(start);
      const auto equals = line.find('=');
      if (equals == std::string_view::npos) {
        break;
      }
      const auto name = std::string(line.substr(0, equals));
      line.remove_prefix(equals + 1);
      const auto end = name == "value" ? line.size() : std::min(line.find(' '), line.size());
      fields[name] = line.substr(0, end);
      line.remove_prefix(end);
    }
    return fields;
  }

  // False once there is nothing more to come.
  bool answer(const std::string& line) {
    auto fields = fields_of(line);
    const auto& command = fields["cmd"];
    if (command == "init") {
      return say("cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0");
    }
    if (command == "get_maxes") {
      return say("cmd=maxes kvsname_max=" + std::to_string(kKeySize) + " keylen_max=" +
                 std::to_string(kKeySize) + " vallen_max=" + std::to_string(kValueSize));
    }
    if (command == "get_appnum") {
      return say("cmd=appnum appnum=0");
    }
    if (command == "get_my_kvsname") {
      std::string name;
      return attempt([&] { name = world_name(); }) && say("cmd=my_kvsname kvsname=" + name);
    }
    if (command == "get_universe_size") {
      return say("cmd=universe_size size=" + std::to_string(size_));
    }
    if (command == "put") {
      return say(attempt([&] { store_.set("kvs/" + fields["key"], fields["value"]); })
                     ? "cmd=put_result rc=0 msg=success"
                     : "cmd=put_result rc=-1 msg=no_store");
    }
    if (command == "get") {
      std::string value;
      const bool found = attempt([&] { value = get(fields["key"]); }) && !value.empty();
      return say(found ? "cmd=get_result rc=0 msg=success value=" + value
                       : "cmd=get_result rc=-1 msg=key_not_found value=unknown");
    }
    if (command == "barrier_in") {
      // Without the store, whose process has ended, everybody is on the way out.
      attempt([&] { barrier(); });
      return say("cmd=barrier_out rc=0");
    }
    if (command == "finalize") {
      say("cmd=finalize_ack rc=0");
      return false;
    }
    if (command == "abort") {
      return false;
    }
    return say("cmd=" + command + "_result rc=-1 msg=not_supported");
  }

  template <class Do>
  static bool attempt(const Do& act) {
    try {
      act();
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }

  std::string get(const std::string& key) {
    if (key == kMapping) {
      return mapping();
    }
    const auto place = "kvs/" + key;
    return store_.has(place) ? store_.get(place, milliseconds(0)) : std::string();
  }

  // Nobody else's: the library names shared memory of the host after it.
  std::string world_name() {
    if (rank_ == 0 && !store_.has("name")) {
      store_.set("name", "c10d_ext_" + random_secret());
    }
    return await("name");
  }

  // Rank 0 finds it out, for all.
  std::string mapping() {
    if (rank_ == 0) {
      std::vector<std::string> hosts;
      for (int rank = 0; rank < size_; ++rank) {
        hosts.push_back(await("host/" + std::to_string(rank)));
      }
      store_.set("mapping", process_mapping(hosts));
    }
    return await("mapping");
  }

  void barrier() {
    const auto name = "barrier/" + std::to_string(barriers_++);
    if (count_(name, 1) == size_) {
      store_.set(name + "/over", "1");
    }
    await(name + "/over");
  }

  // Looks now and then: a wait would keep others of this process from the store.
  std::string await(const std::string& key) {
    for (auto pause = kFirstPause; !store_.has(key); pause = std::min(2 * pause, kLastPause)) {
      std::this_thread::sleep_for(pause);
    }
    return store_.get(key, milliseconds(0));
  }

  const int fd_;
  const KeyValueStore store_;
  const Count count_;
  const int rank_, size_;
  std::string received_;
  int barriers_ = 0;
};

}  // namespace

std::string process_mapping(const std::vector<std::string>& hosts) {
  // Runs of (first node, nodes, ranks on each), one node each.
  std::map<std::string, int> nodes;
  std::string text = "(vector";
  for (size_t first = 0; first < hosts.size();) {
    size_t end = first;
    while (end < hosts.size() && hosts[end] == hosts[first]) {
      ++end;
    }
    const int node = nodes.emplace(hosts[first], static_cast<int>(nodes.size())).first->second;
    text += ",(" + std::to_string(node) + ",1," + std::to_string(end - first) + ")";
    first = end;
  }
  text += ')';
  // The library then asks every rank for the name of its host.
  return text.size() < static_cast<size_t>(kValueSize) ? text : std::string();
}

PmiServer PmiServer::start(KeyValueStore store, Count count, int rank, int size) {
  std::array<int, 2> ends;
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    throw std::system_error(errno, std::generic_category(), "cannot make a pair of sockets");
  }
  auto session = std::make_shared<Session>(ends[0], std::move(store), std::move(count), rank, size);
  signal_masked_thread("c10d_ext_pmi", [session = std::move(session)] {
    try {
      session->run();
    } catch (const std::exception&) {
      // The library hears of it by the end of the connection.
    }
  }).detach();
  return PmiServer(ends[1]);
}

}  // namespace c10d_ext::mpi
