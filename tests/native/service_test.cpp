// How long rank 0 goes on for the others after it has left. A process of its own for each test, as
// one ends its service once. Run without arguments it runs every test; with arguments, those named.

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "agreement_ranks.h"
#include "backends/checked/agreement.h"
#include "backends/checked/protocol.h"
#include "program.h"

using namespace c10d_ext;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

namespace {

constexpr uint64_t kBytes = 2 * kLittleMessage;

// Both ends of a message from rank 1 to rank 2, which the agreement lets begin.
class Between {
 public:
  // Rank 0 has heard of it, once it answers who is awaited.
  void send(Ranks& ranks) {
    const auto number = ranks[1].post(end(true, 2));
    CHECK(ranks[1].awaited_by_message(number, kLong).first == std::vector<int>{2});
  }
  void receive(Ranks& ranks) {
    ranks[2].post(end(false, 1));
  }
  bool has_begun() const {
    return *begun_ == 2;
  }

 private:
  Agreement::Message end(bool sends, int peer) {
    return {sends,
            peer,
            0,
            kBytes,
            DType::Float,
            kLong,
            [begun = begun_](int) { ++*begun; },
            [](const Failure&) {}};
  }
  const std::shared_ptr<std::atomic<int>> begun_ = std::make_shared<std::atomic<int>>(0);
};

void in_a_process(const std::function<void(Ranks&)>& body) {
  CHECK(finish(start([&] {
          Ranks ranks(3, /*apart=*/true);
          ranks.drop(0);
          CHECK(Agreement::serves(0ms));
          body(ranks);
        })) == 0);
}

void exchange(Ranks& ranks) {
  Between message;
  message.send(ranks);
  message.receive(ranks);
  CHECK(eventually([&] { return message.has_begun(); }));
}

// Long before a message's time is over.
bool has_ended() {
  return eventually([] { return !Agreement::serves(0ms); }, kLong / 2);
}

void it_serves_until_all_have_left() {
  in_a_process([](Ranks& ranks) {
    exchange(ranks);
    ranks.drop(1);
    CHECK(Agreement::serves(50ms));
    ranks.drop(2);
    CHECK(has_ended());
  });
}

void at_the_end_of_the_process_others_have_a_while() {
  in_a_process([](Ranks& ranks) {
    exchange(ranks);
    const auto began = Clock::now();
    Agreement::end_service(300ms);
    CHECK(has_ended() && Clock::now() - began >= 300ms);
  });
}

void a_message_that_waits_has_longer() {
  in_a_process([](Ranks& ranks) {
    Between message;
    message.send(ranks);
    Agreement::end_service(1ms);
    CHECK(Agreement::serves(200ms));
    message.receive(ranks);
    CHECK(eventually([&] { return message.has_begun(); }));
    CHECK(has_ended());
  });
}

void at_once_a_message_has_no_time_either() {
  in_a_process([](Ranks& ranks) {
    Between message;
    message.send(ranks);
    Agreement::end_service(0ms);
    CHECK(has_ended() && !message.has_begun());
  });
}

const std::vector<Test> kTests = {
    TEST(it_serves_until_all_have_left),
    TEST(at_the_end_of_the_process_others_have_a_while),
    TEST(a_message_that_waits_has_longer),
    TEST(at_once_a_message_has_no_time_either),
};

}  // namespace

int main(int count, char** names) {
  return run_tests(kTests, count, names);
}
