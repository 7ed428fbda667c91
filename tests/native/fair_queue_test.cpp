// In which order the hosts of an emulated network send what they have.

#include "../harness/fair_queue.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "program.h"

namespace {

// Of TCP, from a port of its own to a host. It has a number.
FramePtr sent(uint16_t port, int number, size_t size = 1500, char to = 1) {
  auto frame = new_frame();
  frame->bytes.fill(0);
  frame->size = kOffload + size;
  char* ethernet = frame->bytes.data() + kOffload;
  ethernet[12] = 8;     // IPv4
  ethernet[14] = 0x45;  // of 20 bytes
  ethernet[23] = 6;     // TCP
  ethernet[14 + 19] = to;
  std::memcpy(ethernet + 34, &port, sizeof(port));
  std::memcpy(ethernet + 60, &number, sizeof(number));
  return frame;
}

int number_of(const FramePtr& frame) {
  int number = 0;
  std::memcpy(&number, frame->bytes.data() + kOffload + 60, sizeof(number));
  return number;
}

uint16_t port_of(const FramePtr& frame) {
  uint16_t port = 0;
  std::memcpy(&port, frame->bytes.data() + kOffload + 34, sizeof(port));
  return port;
}

void a_connection_keeps_its_order() {
  FairQueue queue;
  for (int i = 0; i < 300; ++i) {
    queue.push(sent(static_cast<uint16_t>(i % 3), i, i % 2 == 0 ? 100 : 60'000));
  }
  std::map<uint16_t, int> last{{0, -3}, {1, -2}, {2, -1}};
  for (int i = 0; i < 300; ++i) {
    CHECK(!queue.is_empty());
    const auto frame = queue.pop();
    CHECK(number_of(frame) == std::exchange(last[port_of(frame)], number_of(frame)) + 3);
  }
  CHECK(queue.is_empty());
}

// With 9000 bytes, which six frames are; then they take turns.
void who_had_nothing_to_send_goes_first() {
  FairQueue queue;
  const auto push = [&](uint16_t port, int count) {
    for (int i = 0; i < count; ++i) {
      queue.push(sent(port, i));
    }
  };
  const auto next = [&](int count) {
    std::string ports;
    while (count-- > 0) {
      ports += static_cast<char>('0' + port_of(queue.pop()));
    }
    return ports;
  };
  push(1, 50);
  CHECK(next(8) == "11111111");
  push(2, 7);
  CHECK(next(14) == "22222211112111");
  push(2, 1);  // its last turn is over
  CHECK(next(3) == "211");
  // One that has sent what it had before its turn was over has the rest of that, and then none.
  push(3, 5);
  CHECK(next(5) == "33333");
  push(3, 2);
  CHECK(next(3) == "313");
}

// Whatever the size of their frames, and where they have the same port, to whom they go.
void connections_get_as_much() {
  for (const bool by_host : {false, true}) {
    const auto port = [&](int which) { return static_cast<uint16_t>(by_host ? 1 : which); };
    const auto host = [&](int which) { return static_cast<char>(by_host ? which : 1); };
    FairQueue queue;
    for (int i = 0; i < 40; ++i) {
      queue.push(sent(port(1), 1, 60'000, host(1)));
    }
    for (int i = 0; i < 2000; ++i) {
      queue.push(sent(port(2), 2, 1'000, host(2)));
    }
    std::map<int, size_t> bytes;
    while (bytes[1] + bytes[2] < 2'000'000) {
      const auto frame = queue.pop();
      bytes[number_of(frame)] += frame->size;
      const auto [least, most] = std::minmax(bytes[1], bytes[2]);
      CHECK(most - least <= 60'000 + 2 * 9'000);
    }
  }
}

void what_is_not_tcp_is_one_connection() {
  FairQueue queue;
  for (int i = 0; i < 40; ++i) {
    auto frame = sent(static_cast<uint16_t>(i), i);
    frame->bytes[kOffload + std::vector<size_t>{12, 13, 23}[i % 3]] = 17;  // not IPv4, or UDP
    queue.push(std::move(frame));
  }
  for (int i = 0; i < 40; ++i) {
    CHECK(number_of(queue.pop()) == i);
  }
}

void it_takes_so_many() {
  FairQueue queue;
  int count = 0;
  while (!queue.is_full()) {
    queue.push(sent(static_cast<uint16_t>(count % 7), count, 100));
    ++count;
  }
  CHECK(count == 4096);
  while (!queue.is_empty()) {
    queue.pop();
    --count;
  }
  CHECK(count == 0);
}

const std::vector<Test> kTests = {
    TEST(a_connection_keeps_its_order),
    TEST(who_had_nothing_to_send_goes_first),
    TEST(connections_get_as_much),
    TEST(what_is_not_tcp_is_one_connection),
    TEST(it_takes_so_many),
};

}  // namespace

int main(int count, char** names) {
  return run_tests(kTests, count, names);
}
