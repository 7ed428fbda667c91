// How ranks meet, to the byte. Run without arguments it runs every test; with arguments, those
// named.

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "agreement_ranks.h"
#include "backends/checked/protocol.h"
#include "control/connection.h"
#include "control/handshake.h"
#include "control/meeting.h"
#include "control/sockets.h"
#include "program.h"

using namespace c10d_ext;
using namespace std::chrono_literals;

namespace {

// A rank 0 that says a word in one piece with its welcome. Its connections to rank 1.
std::vector<Connection> welcomed(Store& store, const Payload& word, Says kind) {
  const Listening listening = listen_anywhere();
  store.view().set(key_of(0), "token " + std::to_string(listening.port) + " 127.0.0.1");
  const auto next = [&] {
    const Deadline deadline(kLong, store.view().interrupt);
    std::vector<pollfd> fds{{listening.socket.get(), POLLIN, 0}};
    deadline.poll(fds);
    Connection line(accept_socket(listening.socket));
    std::optional<Frame> hello;
    while (!hello) {
      fds = {{line.fd(), POLLIN, 0}};
      deadline.poll(fds);
      CHECK(!deadline.passed() && line.listen(1024));
      hello = line.next();
    }
    return std::pair(std::move(line), std::move(*hello));
  };
  auto [line, hello] = next();
  auto death_socket = next();
  CHECK(hello.kind == kHello && death_socket.second.kind == kDeathSocket);
  CHECK(hello.words.text() == "token" && hello.words.number() == 1);
  const auto pid = hello.words.number(), start_time = hello.words.number();
  const auto machine = hello.words.text(), host = hello.words.text(), network = hello.words.text();
  Payload welcome;
  for (const auto& its_network : {"not " + network, network}) {
    welcome.put(pid).put(start_time).put(machine).put(host).put(its_network);
  }
  const auto framed = [](uint32_t kind, const std::string& bytes) {
    const std::array<uint32_t, 2> heading{static_cast<uint32_t>(bytes.size()), kind};
    return std::string(reinterpret_cast<const char*>(heading.data()), sizeof(heading)) + bytes;
  };
  const auto all = framed(kWelcome, welcome.bytes()) + framed(kind, word.bytes());
  CHECK(::send(line.fd(), all.data(), all.size(), 0) == static_cast<ssize_t>(all.size()));
  std::vector<Connection> lines;
  lines.push_back(std::move(line));
  lines.push_back(std::move(death_socket.first));
  return lines;
}

void what_comes_with_the_welcome_is_heard() {
  Store store;
  const End end{ErrorKind::Closed, {0}, "said with the welcome", 0ms};
  std::vector<Connection> lines;
  std::thread rank_0([&] { lines = welcomed(store, encoded(end), kOver); });
  const auto rank_1 = Agreement::join(store.view(), {1, 2, "test"}, kLong, "a");
  rank_0.join();
  std::this_thread::sleep_for(100ms);  // the first call may have the thread look at all lines
  Call call;
  rank_1->call(call.operation(summed(1), kLong));
  CHECK(call.failure().text.find("said with the welcome") != std::string::npos);
}

const std::vector<Test> kTests = {
    TEST(what_comes_with_the_welcome_is_heard),
};

}  // namespace

int main(int count, char** names) {
  return run_tests(kTests, count, names);
}
