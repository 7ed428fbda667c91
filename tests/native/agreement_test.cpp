// Ranks that agree on collectives. Run without arguments it runs every test; with arguments, those
// named.
// One file, for its tests share the threads that are ranks.

#include "backends/checked/agreement.h"
#include "backends/checked/protocol.h"
#include "control/meeting.h"
#include "control/sockets.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <tuple>

#include "agreement_ranks.h"
#include "program.h"

using namespace c10d_ext;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Kind = ErrorKind;

namespace {

Fingerprint of(OpType op_type) {
  Fingerprint called;
  called.op_type = op_type;
  called.unit = "int64";
  return called;
}

void begins_what_all_have_called() {
  Ranks ranks(3);
  constexpr uint64_t kCalls = 200;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      std::vector<Call> calls(kCalls);
      for (auto& call : calls) {
        const auto seq = ranks[rank].call(call.operation(summed(6), kLong));
        CHECK(seq == static_cast<uint64_t>(&call - calls.data()) + 1);
      }
      for (uint64_t i = 0; i < kCalls; ++i) {
        CHECK(calls[i].begun() == i + 1);
        ranks[rank].done(i + 1);
      }
      CHECK(ranks[rank].count() == kCalls);
      CHECK(!ranks[rank].failure("all_reduce", 1, 0ms));
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
}

void little_data_travels_with_the_calls() {
  Ranks ranks(3);
  const auto data_of = [](int rank) { return std::string("\0of rank ", 9) + std::to_string(rank); };
  // What each rank received where those of `giving` gave their data.
  const auto call = [&](const std::vector<int>& giving, const Fingerprint& last) {
    std::vector<Call> calls(3);
    for (int rank = 0; rank < 3; ++rank) {
      auto& own = calls[static_cast<size_t>(rank)];
      const bool gives = std::find(giving.begin(), giving.end(), rank) != giving.end();
      const auto called = rank == 2 ? last : summed(6);
      ranks[rank].call(gives ? own.operation(called, data_of(rank)) : own.operation(called, kLong));
      if (rank < 2) {
        CHECK(ranks[rank].has_collectives());  // it waits for the last one
      }
    }
    return calls;
  };
  auto all = call({0, 1, 2}, summed(6));
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(all[static_cast<size_t>(rank)].begun() == 1);
    CHECK((all[static_cast<size_t>(rank)].received() ==
           std::vector<std::string>{data_of(0), data_of(1), data_of(2)}));
    ranks[rank].done(1);
    CHECK(!ranks[rank].has_collectives());
  }
  // One that gives none: nobody receives, everybody begins.
  auto some = call({0, 2}, summed(6));
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(some[static_cast<size_t>(rank)].begun() == 2);
    CHECK(some[static_cast<size_t>(rank)].received().empty());
    ranks[rank].done(2);
  }
  // Ranks that disagree receive nothing.
  auto none = call({0, 1, 2}, summed(7));
  for (auto& each : none) {
    CHECK(each.failure().kind == Kind::Mismatch && !each.has_begun() && each.received().empty());
  }
  // Of a broadcast one rank has all of the data.
  auto root = of(OpType::Broadcast);
  root.root = 1;
  std::vector<Call> whole(3);
  for (int rank = 0; rank < 3; ++rank) {
    ranks[rank].call(whole[static_cast<size_t>(rank)].operation(
        root, rank == 1 ? std::string(kMostData, 'w') : std::string()));
  }
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(whole[static_cast<size_t>(rank)].begun() == 4);
    CHECK(whole[static_cast<size_t>(rank)].received()[1] == std::string(kMostData, 'w'));
    ranks[rank].done(4);
  }
  // More than may travel ends the line to the rank that sends it.
  Call much;
  ranks[1].call(much.operation(summed(6), std::string(kMostData / 3 + 1, 'x')));
  CHECK(much.failure().kind == Kind::RankLost);
}

void who_waits_takes_in_what_comes() {
  constexpr int kSize = 3, kCallers = 2;
  constexpr uint64_t kCalls = 300;
  Ranks ranks(kSize);
  // By number: what each rank received.
  std::mutex mutex;
  std::map<uint64_t, std::vector<std::vector<std::string>>> received;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kSize * kCallers; ++caller) {
    callers.emplace_back([&, rank = caller % kSize, caller] {
      for (uint64_t i = 0; i < kCalls; ++i) {
        Call call;
        const auto data = std::to_string(caller) + " says " + std::to_string(i);
        const auto seq = ranks[rank].call(call.operation(summed(6), data));
        // Of two callers one may find the other at it.
        ranks[rank].help(seq, Clock::now() + kLong);
        CHECK(call.begun() == seq);
        ranks[rank].done(seq);
        const std::lock_guard lock(mutex);
        received[seq].push_back(call.received());
      }
    });
  }
  for (auto& caller : callers) {
    caller.join();
  }
  CHECK(received.size() == kCallers * kCalls);
  for (const auto& [seq, of] : received) {
    CHECK(of.size() == kSize && of[0].size() == kSize && of[0] == of[1] && of[0] == of[2]);
  }
}

void who_waits_no_longer_leaves_it_to_the_thread() {
  Ranks ranks(3);
  for (const int waits : {0, 1}) {
    std::vector<Call> calls(3);
    const auto call = [&](int rank) {
      return ranks[rank].call(calls[static_cast<size_t>(rank)].operation(summed(6), kLong));
    };
    const auto seq = call(waits);
    const auto& own = calls[static_cast<size_t>(waits)];
    const auto begun = Clock::now();
    CHECK(ranks[waits].help(seq, begun + 150ms));
    CHECK(Clock::now() - begun >= 150ms && !Call(own).has_begun());
    for (int rank = 0; rank < 3; ++rank) {
      if (rank != waits) {
        call(rank);
      }
    }
    for (int rank = 0; rank < 3; ++rank) {
      ranks[rank].done(calls[static_cast<size_t>(rank)].begun());
    }
  }
}

void who_waits_hears_that_it_is_late_or_over() {
  Ranks ranks(3);
  // Of two in which rank 2 does not take part one is late while somebody waits, and ends the group.
  Call late, other;
  ranks[0].call(other.operation(summed(6), kLong));
  ranks[1].call(late.operation(summed(6), 300ms));
  std::thread waits([&] { CHECK(!ranks[0].help(1, Clock::now() + kLong)); });
  CHECK(!ranks[1].help(1, Clock::now() + kLong));
  waits.join();
  for (auto* call : {&late, &other}) {
    CHECK(call->failure().kind == Kind::Timeout && call->failure().ranks == std::vector<int>{2});
  }
  // A group that another thread leaves.
  Ranks left(2);
  for (const int rank : {1, 0}) {
    Call waiting;
    left[rank].call(waiting.operation(summed(6), kLong));
    std::atomic<bool> is_waiting = false;
    std::thread leaves([&] {
      CHECK(eventually([&] { return is_waiting.load(); }));
      std::this_thread::sleep_for(100ms);
      left[rank].leave(0ms);
    });
    is_waiting = true;
    CHECK(!left[rank].help(1, Clock::now() + kLong));
    leaves.join();
    CHECK(waiting.failure().kind != Kind::Timeout);
    CHECK(!left[rank].help(1, Clock::now() + kLong));
  }
}

// One end of a message and what became of it.
class End {
 public:
  Agreement::Message message(bool sends, int peer, int64_t tag, int64_t count,
                             std::chrono::milliseconds timeout = kLong) {
    Agreement::Message message{sends,        peer,    tag, static_cast<uint64_t>(4 * count),
                               DType::Float, timeout, {},  {}};
    message.begin = [state = state_](int peer) {
      std::lock_guard lock(state->mutex);
      state->peer = peer;
      state->turn = ++turns;
      state->changed.notify_all();
    };
    message.receive = [state = state_, begin = message.begin](int peer, std::string_view data) {
      {
        std::lock_guard lock(state->mutex);
        state->data = data;
      }
      begin(peer);
    };
    message.fail = [state = state_](const Failure& failure) {
      std::lock_guard lock(state->mutex);
      state->failure = failure;
      state->changed.notify_all();
    };
    return message;
  }

  // Who has the other one.
  int peer() {
    std::unique_lock lock(state_->mutex);
    CHECK(state_->changed.wait_for(lock, kLong,
                                   [this] { return state_->peer >= 0 || state_->failure; }));
    if (state_->failure) {
      std::fprintf(stderr, "%s\n", state_->failure->text.c_str());
    }
    CHECK(!state_->failure);
    return state_->peer;
  }
  bool has_failed() {
    std::lock_guard lock(state_->mutex);
    return state_->failure.has_value();
  }
  // Whether it begins; it fails where it does not.
  bool begins() {
    std::unique_lock lock(state_->mutex);
    CHECK(state_->changed.wait_for(lock, kLong,
                                   [this] { return state_->peer >= 0 || state_->failure; }));
    return state_->peer >= 0;
  }
  Failure failure() {
    std::unique_lock lock(state_->mutex);
    CHECK(state_->changed.wait_for(lock, kLong, [this] { return state_->failure.has_value(); }));
    CHECK(state_->peer < 0);
    return *state_->failure;
  }
  bool waits() {
    std::lock_guard lock(state_->mutex);
    return state_->peer < 0 && !state_->failure;
  }
  // What came, or went, with the word; of what did not, nothing.
  std::optional<std::string> data() {
    peer();
    std::lock_guard lock(state_->mutex);
    return state_->data;
  }
  // When it began, among all.
  int turn() {
    peer();
    std::lock_guard lock(state_->mutex);
    return state_->turn;
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    int peer = -1;
    int turn = 0;
    std::optional<std::string> data;
    std::optional<Failure> failure;
  };
  static inline std::atomic<int> turns{0};
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

uint64_t post_send(Ranks& ranks, int from, int to, End& end, int64_t tag = 0, int64_t count = 5,
                   std::chrono::milliseconds timeout = kLong) {
  return ranks[from].post(end.message(true, to, tag, count, timeout));
}

// With its data, which is `of` again and again.
uint64_t post_little(Ranks& ranks, int from, int to, End& end, char of, int64_t tag = 0,
                     int64_t count = 5) {
  auto message = end.message(true, to, tag, count);
  message.data = std::string(static_cast<size_t>(4 * count), of);
  return ranks[from].post(std::move(message));
}

uint64_t post_receive(Ranks& ranks, int to, int from, End& end, int64_t tag = 0, int64_t count = 5,
                      std::chrono::milliseconds timeout = kLong) {
  return ranks[to].post(end.message(false, from, tag, count, timeout));
}

// Between any two ranks, rank 0 or not, whoever comes first.
const std::vector<std::pair<int, int>> kPairs{{0, 1}, {1, 0}, {1, 2}, {2, 1}};

void both_ends_of_a_message_begin() {
  Ranks ranks(3);
  for (const auto& [from, to] : kPairs) {
    for (const bool any : {false, true}) {
      for (const bool sent_first : {false, true}) {
        End sent, received;
        const auto post = [&](bool sends) {
          sends ? post_send(ranks, from, to, sent)
                : post_receive(ranks, to, any ? -1 : from, received);
        };
        post(sent_first);
        std::this_thread::sleep_for(10ms);
        CHECK(sent.waits() && received.waits());
        post(!sent_first);
        CHECK(sent.peer() == to && received.peer() == from);
      }
    }
  }
  // They are no collectives.
  CHECK(ranks[1].count() == 0);
}

void messages_meet_in_the_order_of_their_calls() {
  Ranks ranks(3);
  constexpr int kMessages = 50;
  for (const auto& [from, to] : kPairs) {
    std::vector<End> sent(kMessages), received(kMessages);
    End other_tag, other_rank;
    post_receive(ranks, to, from, other_tag, 4);
    post_receive(ranks, to, 3 - from - to, other_rank, 3);
    std::thread sender([&, from = from, to = to] {
      for (int i = 0; i < kMessages; ++i) {
        auto& end = sent[static_cast<size_t>(i)];
        i % 2 == 0 ? post_send(ranks, from, to, end, 3, i)
                   : post_little(ranks, from, to, end, 'a', 3, i);
      }
    });
    for (int i = 0; i < kMessages; ++i) {
      post_receive(ranks, to, i % 3 == 0 ? -1 : from, received[static_cast<size_t>(i)], 3, i);
    }
    sender.join();
    // Their sizes tell that they are the right ones.
    for (auto* ends : {&sent, &received}) {
      for (size_t i = 0; i < kMessages; ++i) {
        CHECK((*ends)[i].peer() == (ends == &sent ? to : from));
        CHECK(i < 2 || (*ends)[i - 2].turn() < (*ends)[i].turn());
        CHECK((*ends)[i].data().has_value() == (i % 2 == 1));
      }
    }
    CHECK(other_tag.waits() && other_rank.waits());
    End last, rest;
    post_send(ranks, from, to, last, 4);
    post_send(ranks, 3 - from - to, to, rest, 3);
    CHECK(other_tag.peer() == from && other_rank.peer() == 3 - from - to);
  }
}

void little_messages_travel_with_what_is_said_of_them() {
  Ranks ranks(3);
  for (const auto& [from, to] : kPairs) {
    for (const bool any : {false, true}) {
      for (const bool sent_first : {false, true}) {
        End sent, received;
        const auto post = [&, from = from, to = to](bool sends) {
          sends ? post_little(ranks, from, to, sent, 'x')
                : post_receive(ranks, to, any ? -1 : from, received);
        };
        post(sent_first);
        std::this_thread::sleep_for(5ms);
        CHECK(sent.waits() && received.waits());
        post(!sent_first);
        CHECK(sent.peer() == to && sent.data() == std::string());
        CHECK(received.peer() == from && received.data() == std::string(20, 'x'));
      }
    }
    End sent, received;
    post_little(ranks, from, to, sent, 'x', 0, 5);
    post_receive(ranks, to, from, received, 0, 6);
    CHECK(sent.failure().kind == Kind::Mismatch && received.failure().kind == Kind::Mismatch);
  }
  // Rank 0 holds so much data of a rank.
  constexpr size_t kSome = 7, kHeld = 4;
  constexpr auto kCount = static_cast<int64_t>(kLittleAmongWords / 4);
  std::vector<End> sent(kSome), received(kSome);
  for (auto& end : sent) {
    post_little(ranks, 1, 2, end, 'y', 0, kCount);
  }
  for (auto& end : received) {
    post_receive(ranks, 2, 1, end, 0, kCount);
  }
  for (size_t i = 0; i < kSome; ++i) {
    CHECK(received[i].data().has_value() == (i < kHeld));
    CHECK(sent[i].data().has_value() == (i < kHeld));
  }
  End next, taken;  // there is room again
  post_little(ranks, 1, 2, next, 'z', 0, kCount);
  post_receive(ranks, 2, 1, taken, 0, kCount);
  CHECK(taken.data() == std::string(kLittleAmongWords, 'z'));
}

// Whoever is done may end: it waits for a thread that is at the agreement's work.
void what_is_done_is_said_at_once() {
  Ranks ranks(2, /*apart=*/true);
  std::vector<Call> calls(2);
  for (int rank = 0; rank < 2; ++rank) {
    auto operation = calls[static_cast<size_t>(rank)].operation(summed(6), kLong);
    operation.is_long = true;
    ranks[rank].call(std::move(operation));
  }
  CHECK(calls[0].begun() == 1 && calls[1].begun() == 1);
  std::promise<void> at_work, over;
  Agreement::Message message{
      .sends = false,
      .peer = 0,
      .tag = 0,
      .bytes = kLittleMessage + 1,
      .dtype = DType::Bytes,
      .timeout = kLong,
      .begin =
          [&](int) {
            at_work.set_value();
            CHECK(over.get_future().wait_for(kLong) == std::future_status::ready);
          },
      .fail = [](const Failure&) { CHECK(false); }};
  ranks[1].post(message);
  message.sends = true;
  message.peer = 1;
  message.begin = [](int) {};
  ranks[0].post(message);
  CHECK(at_work.get_future().wait_for(kLong) == std::future_status::ready);
  std::atomic<bool> is_done = false, is_said = false;
  std::thread ends([&] {
    is_done = true;
    ranks[1].done(1);
    is_said = true;
  });
  CHECK(eventually([&] { return is_done.load(); }));
  std::this_thread::sleep_for(100ms);
  CHECK(!is_said);
  over.set_value();
  ends.join();
  ranks[0].done(1);
}

void so_many_are_told_by_one() {
  Ranks hosts({"a", "b", "a", "c"}), alone(3);
  CHECK(hosts[3].led_hosts().size() == 3 && hosts[3].told_by_one() == 2);
  CHECK(alone[1].led_hosts().empty() && alone[1].told_by_one() == 3);
}

void so_much_goes_with_words() {
  Ranks ranks({"a", "b", "a", "c", "b"});
  for (const auto& [rank, peer, most] :
       std::vector<std::tuple<int, int, size_t>>{{0, 1, kLittleAmongWords},
                                                 {1, 0, kLittleAmongWords},
                                                 {1, 3, kLittleAmongWords},
                                                 {0, 2, kLittleAmongWords},
                                                 {2, 0, kLittleAmongWords},
                                                 {2, 3, kLittleMessage},
                                                 {3, 2, kLittleMessage},
                                                 {2, 4, kLittleMessage},
                                                 {0, 4, kLittleMessage},
                                                 {4, 0, kLittleMessage},
                                                 {4, 1, kLittleOnDetour},
                                                 {1, -1, kLittleOnDetour},
                                                 {2, -1, kLittleAmongWords}}) {
    CHECK(ranks[rank].most_with_words(peer) == most);
  }
  // Without leaders all calls go to rank 0.
  std::vector<std::string> many;
  for (int host = 0; host < 17; ++host) {
    many.insert(many.end(), 2, std::to_string(host));
  }
  Ranks without(many);
  CHECK(without[3].led_hosts().empty() && without[3].most_with_words(0) == kLittleAmongWords);
  CHECK(without[0].most_with_words(3) == kLittleAmongWords);
}

// More than have lines of their own between hosts: rank 0 brings little messages.
void many_ranks_have_messages_and_collectives() {
  constexpr int kMany = 66;
  std::vector<std::string> machines;
  for (int rank = 0; rank < kMany; ++rank) {
    machines.push_back("machine " + std::to_string(rank % 3));
  }
  Ranks ranks(machines);
  for (const auto& [from, to] : std::vector<std::pair<int, int>>{{1, 65}, {64, 2}, {65, 0}}) {
    constexpr auto kFew = static_cast<int64_t>(kLittleOnDetour / 4);
    CHECK(ranks[from].most_with_words(to) == (to == 0 ? kLittleMessage : kLittleOnDetour));
    End little, taken, large, begun;
    post_little(ranks, from, to, little, 'm', 0, kFew);
    post_receive(ranks, to, from, taken, 0, kFew);
    CHECK(taken.data() == std::string(kLittleOnDetour, 'm') && little.peer() == to);
    post_little(ranks, from, to, large, 'l', 0, kFew + 1);
    post_receive(ranks, to, -1, begun, 0, kFew + 1);
    CHECK(begun.peer() == from && begun.data().has_value() == (to == 0) && large.peer() == to);
  }
  std::vector<Call> calls(kMany);
  for (int rank = 0; rank < kMany; ++rank) {
    auto data = std::to_string(rank);
    ranks[rank].call(calls[static_cast<size_t>(rank)].operation(summed(6), std::move(data)));
  }
  for (auto& call : calls) {
    CHECK(call.begun() == 1);
    const auto received = call.received();
    CHECK(received.size() == kMany);
    for (size_t rank = 0; rank < received.size(); ++rank) {
      CHECK(received[rank] == std::to_string(rank));
    }
  }
}

void who_waits_for_a_message_takes_in_what_comes() {
  Ranks ranks(3);
  for (const auto& [from, to] : kPairs) {
    End sent, received;
    const auto number = post_receive(ranks, to, from, received);
    CHECK(ranks[to].help_message(number, Clock::now() + 20ms));  // it does not come
    std::thread sender([&, from = from, to = to] {
      std::this_thread::sleep_for(20ms);
      const auto number = post_little(ranks, from, to, sent, 'z');
      CHECK(!ranks[from].help_message(number, Clock::now() + kLong));
      CHECK(!sent.waits());
    });
    CHECK(!ranks[to].help_message(number, Clock::now() + kLong));
    CHECK(!received.waits() && received.data() == std::string(20, 'z'));
    sender.join();
  }
}

void from_anybody_the_first_to_send_is_taken() {
  Ranks ranks(3);
  End first, second, third, any, named, late;
  post_send(ranks, 1, 0, first);
  post_send(ranks, 1, 0, second);
  post_receive(ranks, 0, 2, named);
  post_receive(ranks, 0, -1, any);
  CHECK(any.peer() == 1 && first.peer() == 0);
  CHECK(named.waits() && second.waits());
  post_receive(ranks, 0, -1, late);
  CHECK(late.peer() == 1 && second.peer() == 0);
  post_send(ranks, 2, 0, third);
  CHECK(named.peer() == 2);
}

void messages_that_do_not_fit_are_denied_at_both_ends() {
  Ranks ranks(3);
  for (const auto& [from, to] : kPairs) {
    for (const bool any : {false, true}) {
      End sent, received, next, taken;
      const auto number = post_send(ranks, from, to, sent, 7, 6);
      post_receive(ranks, to, any ? -1 : from, received, 7, 5);
      for (auto* end : {&sent, &received}) {
        const auto failure = end->failure();
        CHECK(failure.kind == Kind::Mismatch && (failure.ranks == std::vector<int>{from, to}));
        CHECK(failure.op == (end == &sent ? "send" : "recv"));
        CHECK(end != &sent || failure.seq == number);
        CHECK_HAS(
            failure.text,
            failure.op + ": what is sent must be what is received, got 6 x float32 from rank " +
                std::to_string(from) + ", 5 x float32 expected by rank " + std::to_string(to) +
                ", tag 7 (rank " + std::to_string(end == &sent ? from : to) + "/3, group 'test')");
      }
      // As if it had not been.
      post_receive(ranks, to, any ? -1 : from, taken, 7, 4);
      post_send(ranks, from, to, next, 7, 4);
      CHECK(next.peer() == to && taken.peer() == from);
      CHECK(!ranks[from].failure({}, 0, 0ms));
    }
  }
  End sent, received;
  auto message = sent.message(true, 0, 0, 5);
  message.dtype = DType::Int32;
  ranks[1].post(std::move(message));
  post_receive(ranks, 0, 1, received);
  CHECK_HAS(received.failure().text, "5 x int32 from rank 1, 5 x float32 expected by rank 0");
  CHECK(sent.failure().kind == Kind::Mismatch);
}

void messages_and_collectives_do_not_wait_for_each_other() {
  Ranks ranks(3);
  End received, sent;
  std::vector<Call> calls(3);
  post_receive(ranks, 2, 1, received);
  for (int rank = 0; rank < 3; ++rank) {
    ranks[rank].call(calls[static_cast<size_t>(rank)].operation(summed(6), kLong));
  }
  for (int rank = 0; rank < 3; ++rank) {
    ranks[rank].done(calls[static_cast<size_t>(rank)].begun());
  }
  CHECK(received.waits());
  Call waits;
  ranks[1].call(waits.operation(summed(6), kLong));
  post_send(ranks, 1, 2, sent);
  CHECK(received.peer() == 1 && sent.peer() == 2);
  CHECK(!waits.has_begun() && !waits.has_failed());
}

void a_message_that_nobody_answers_is_given_up() {
  for (const bool apart : {false, true}) {
    Ranks ranks(3, apart);
    for (const auto& [from, to] : kPairs) {
      End from_one, from_somebody, to_one;
      post_receive(ranks, to, from, from_one, 3, 5, 100ms);
      post_receive(ranks, to, -1, from_somebody, 4, 5, 100ms);
      post_send(ranks, from, to, to_one, 5, 5, 100ms);
      const auto received = from_one.failure(), from_any = from_somebody.failure(),
                 sent = to_one.failure();
      const auto who = [&](int rank) {
        return "must be done within 0.1 s, got no answer from rank " + std::to_string(rank) +
               " (pid " + std::to_string(getpid()) + ", " + (apart && rank != 0 ? "alive)" : "");
      };
      CHECK(received.kind == Kind::Timeout && received.ranks == std::vector<int>{from});
      CHECK_HAS(received.text, "recv: the message with tag 3 " + who(from));
      CHECK(sent.ranks == std::vector<int>{to});
      CHECK_HAS(sent.text, "send: the message with tag 5 " + who(to));
      CHECK(from_any.ranks.empty());
      CHECK_HAS(from_any.text, "got no answer from any rank");
      // Nobody meets them any more, and all else goes on.
      for (const int64_t tag : {3, 4, 5}) {
        End next, taken;
        if (tag == 5) {
          post_receive(ranks, to, from, taken, tag, 8);
          std::this_thread::sleep_for(10ms);
          CHECK(taken.waits());
          post_send(ranks, from, to, next, tag, 8);
        } else {
          post_send(ranks, from, to, next, tag, 8);
          std::this_thread::sleep_for(10ms);
          CHECK(next.waits());
          post_receive(ranks, to, tag == 4 ? -1 : from, taken, tag, 8);
        }
        CHECK(next.peer() == to && taken.peer() == from);
      }
    }
  }
}

void messages_of_ranks_that_left_are_denied() {
  Ranks ranks(4);
  End before, from_left, after_left, to_left, any;
  const auto first = post_send(ranks, 1, 2, before);
  const auto second = post_receive(ranks, 2, 1, from_left, 1);
  post_receive(ranks, 0, -1, any, 2);
  // Rank 0 has heard of both.
  CHECK(ranks[1].awaited_by_message(first, kLong).first == std::vector<int>{2});
  CHECK(ranks[2].awaited_by_message(second, kLong).first == std::vector<int>{1});
  ranks[1].leave(0ms);
  CHECK(before.failure().kind == Kind::Closed);
  // Rank 0 has heard of that, or it may still match what follows with the message of before.
  CHECK(from_left.failure().kind == Kind::RankLost);
  post_receive(ranks, 2, 1, after_left);
  post_send(ranks, 2, 1, to_left, 6);
  for (auto* end : {&from_left, &after_left, &to_left}) {
    const auto failure = end->failure();
    CHECK(failure.kind == Kind::RankLost && failure.ranks == std::vector<int>{1});
    CHECK_HAS(failure.text, "every rank must live until the message with tag " +
                                std::string(end == &from_left    ? "1"
                                            : end == &after_left ? "0"
                                                                 : "6") +
                                " is done, got rank 1 (pid " + std::to_string(getpid()) +
                                ", left the group)");
  }
  // The others go on, until nobody is there who could send.
  End sent, received;
  post_send(ranks, 0, 2, sent);
  post_receive(ranks, 2, 0, received);
  CHECK(sent.peer() == 2 && received.peer() == 0);
  ranks[3].leave(0ms);
  std::this_thread::sleep_for(50ms);
  CHECK(any.waits());
  ranks[2].leave(0ms);
  CHECK(any.failure().kind == Kind::RankLost);
  CHECK((any.failure().ranks == std::vector<int>{1, 2, 3}));
}

void who_leaves_waits_for_its_messages() {
  for (const auto& [leaver, apart] : {std::pair(1, false), {0, false}, {1, true}, {0, true}}) {
    Ranks ranks(3, apart);
    End sent, little, received, to, to_little, from;
    post_send(ranks, leaver, 2, sent);
    post_little(ranks, leaver, 2, little, 'x', 1);
    post_receive(ranks, leaver, 2, received);
    std::thread leaves([&, leaver = leaver] { ranks[leaver].leave(kLong); });
    std::this_thread::sleep_for(50ms);
    post_receive(ranks, 2, leaver, to);
    post_receive(ranks, 2, leaver, to_little, 1);
    post_send(ranks, 2, leaver, from);
    for (auto* end : {&sent, &little, &received}) {
      CHECK(end->peer() == 2);
    }
    for (auto* end : {&to, &to_little, &from}) {
      CHECK(end->peer() == leaver);
    }
    leaves.join();
  }
}

void both_ends_hear_the_same_of_a_message_of_who_leaves() {
  int begun = 0, given_up = 0;
  for (int i = 0; i < 200 || ((begun == 0 || given_up == 0) && i < 5000); ++i) {
    Ranks ranks(3, /*apart=*/i / 6 % 2 != 0);
    const int leaver = i % 2, kind = i / 2 % 3, source = i / 12 % 2 == 0 ? leaver : -1;
    const bool is_little = i / 24 % 2 == 0;  // of what the other one sends
    End own, others;
    if (kind == 0) {
      post_send(ranks, leaver, 2, own);
    } else if (kind == 1) {
      post_little(ranks, leaver, 2, own, 'x');
    } else {
      post_receive(ranks, leaver, 2, own);
    }
    std::thread leaves([&] { ranks[leaver].leave(1ms); });
    std::this_thread::sleep_for(std::chrono::microseconds(i % 40 * 50));
    if (kind == 2 && is_little) {
      post_little(ranks, 2, leaver, others, 'y');
    } else if (kind == 2) {
      post_send(ranks, 2, leaver, others);
    } else {
      post_receive(ranks, 2, source, others);
    }
    leaves.join();
    if (kind != 2 && source < 0 && own.has_failed()) {
      continue;  // somebody else may send
    }
    const bool begins = own.begins();
    CHECK(others.begins() == begins);
    if (!begins) {
      const auto failure = own.failure();
      CHECK(failure.kind == Kind::Closed && failure.ranks.empty());
      CHECK_HAS(failure.text, ": the group must be alive, got a destroyed one (rank");
      CHECK(others.failure().kind == Kind::RankLost);
    }
    ++(begins ? begun : given_up);
  }
  CHECK(begun > 0 && given_up > 0);
}

void the_end_of_a_group_is_that_of_its_messages() {
  {
    Ranks ranks(3);
    End sent, received, later;
    post_send(ranks, 1, 0, sent);
    post_receive(ranks, 2, -1, received);
    ranks[0].abort();
    for (auto* end : {&sent, &received}) {
      CHECK(end->failure().kind == Kind::Closed);
      CHECK_HAS(end->failure().text, "got an abort by rank 0");
    }
    post_send(ranks, 1, 2, later);
    CHECK(later.failure().kind == Kind::Closed);
  }
  Ranks ranks(2);
  End received, later;
  post_receive(ranks, 1, 0, received);
  ranks[1].leave(0ms);
  post_receive(ranks, 1, 0, later);
  for (auto* end : {&received, &later}) {
    CHECK(end->failure().kind == Kind::Closed);
    CHECK_HAS(end->failure().text, "recv: the group must be alive, got a destroyed one");
  }
}

void nothing_begins_before_all_have_called() {
  Ranks ranks(3);
  std::vector<Call> calls(3);
  ranks[0].call(calls[0].operation(summed(6), kLong));
  ranks[2].call(calls[2].operation(summed(6), kLong));
  std::this_thread::sleep_for(100ms);
  CHECK(!calls[0].has_begun() && !calls[2].has_begun());
  ranks[1].call(calls[1].operation(summed(6), kLong));
  for (auto& call : calls) {
    CHECK(call.begun() == 1);
  }
}

void ranks_that_disagree_all_hear_of_it() {
  Ranks ranks(3);
  const auto disagree = [&](const Fingerprint& odd, const Fingerprint& rest,
                            std::vector<std::string> parts) {
    std::vector<Call> calls(3);
    for (int rank = 0; rank < 3; ++rank) {
      ranks[rank].call(calls[static_cast<size_t>(rank)].operation(rank == 1 ? odd : rest, kLong));
    }
    for (auto& call : calls) {
      const auto failure = call.failure();
      CHECK(failure.kind == Kind::Mismatch && !call.has_begun());
      for (const auto& part : parts) {
        CHECK_HAS(failure.text, part);
      }
      CHECK_HAS(failure.text, ", group 'test')");
    }
    // It goes on.
    std::vector<Call> next(3);
    for (int rank = 0; rank < 3; ++rank) {
      ranks[rank].call(next[static_cast<size_t>(rank)].operation(summed(1), kLong));
    }
    for (int rank = 0; rank < 3; ++rank) {
      ranks[rank].done(next[static_cast<size_t>(rank)].begun());
    }
    return calls[0].failure().ranks;
  };
  const std::vector<int> one{1};
  CHECK(disagree(summed(5), summed(6),
                 {"all_reduce(6 x float32, sum) on ranks 0 and 2",
                  "all_reduce(5 x float32, sum) on rank 1"}) == one);
  CHECK(disagree(summed(6, ReduceOp::Max), summed(6),
                 {"max) on rank 1", "sum) on ranks 0 and 2"}) == one);
  CHECK(disagree(of(OpType::Barrier), summed(6), {"barrier() on rank 1"}) == one);
  CHECK(disagree(of(OpType::Broadcast).rooted_at(1), of(OpType::Broadcast).rooted_at(0),
                 {"root 1) on rank 1", "root 0) on ranks 0 and 2"}) == one);
  CHECK(disagree(of(OpType::AllReduce).of_members({3, 5}), of(OpType::AllReduce).of_members({5, 3}),
                 {"8 x int64 in 2 tensors of sizes [3, 5]", "tensors of sizes [5, 3]"}) == one);
  CHECK(disagree(of(OpType::AllGather).gathered(2, {2, 2, 2}),
                 of(OpType::AllGather).gathered(3, {3, 3, 3}),
                 {"all_gather(3 x int64) on ranks 0 and 2", "all_gather(2 x int64) on rank 1"}) ==
        one);
  // Between two ranks.
  CHECK((disagree(of(OpType::AllToAll).exchanged({1, 2, 3}, {2, 2, 2}),
                  of(OpType::AllToAll).exchanged({2, 2, 2}, {2, 1, 2}),
                  {"got 3 x int64 from rank 1 for rank 2, which expects 1"}) ==
         std::vector<int>{1, 2}));
}

void ranks_that_send_different_numbers_of_tensors_end_the_group() {
  Ranks ranks(3);
  std::vector<Call> calls(3);
  std::vector<Call> next(3);
  for (int rank = 0; rank < 3; ++rank) {
    const auto r = static_cast<size_t>(rank);
    auto called = of(OpType::AllReduce)
                      .of_members(rank == 1 ? Fingerprint::Sizes{4} : Fingerprint::Sizes{4, 4});
    ranks[rank].call(calls[r].operation(called, kLong));
  }
  for (auto& call : calls) {
    const auto failure = call.failure();
    CHECK(failure.kind == Kind::Mismatch && failure.ranks == std::vector<int>{1});
    CHECK(!call.has_begun());
    CHECK_HAS(failure.text, "8 x int64 in 2 tensors of sizes [4, 4]) on ranks 0 and 2");
    CHECK_HAS(failure.text, "and the group ends");
  }
  for (int rank = 0; rank < 3; ++rank) {
    ranks[rank].call(next[static_cast<size_t>(rank)].operation(summed(1), kLong));
  }
  for (auto& call : next) {
    CHECK(call.failure().kind == Kind::Mismatch && !call.has_begun());
    CHECK_HAS(call.failure().text, "the group is broken since ");
  }
}

void uneven_parts_fit_where_their_sizes_do() {
  Ranks ranks(3);
  const std::vector<int64_t> sizes{4, 0, 7};
  const auto all_begin = [&](const std::function<Fingerprint(int)>& called) {
    std::vector<Call> calls(3);
    for (int rank = 0; rank < 3; ++rank) {
      ranks[rank].call(calls[static_cast<size_t>(rank)].operation(called(rank), kLong));
    }
    for (int rank = 0; rank < 3; ++rank) {
      ranks[rank].done(calls[static_cast<size_t>(rank)].begun());
    }
  };
  all_begin(
      [&](int r) { return of(OpType::AllGather).gathered(sizes[static_cast<size_t>(r)], sizes); });
  all_begin([&](int r) {
    return of(OpType::ReduceScatter).scattered(sizes, sizes[static_cast<size_t>(r)]);
  });
  // Only the root knows that the parts differ.
  all_begin([&](int r) {
    return of(OpType::Gather)
        .gathered_at(2, sizes[static_cast<size_t>(r)], r == 2 ? sizes : std::vector<int64_t>(), 3);
  });
  all_begin([&](int r) {
    return of(OpType::Scatter)
        .scattered_from(0, sizes[static_cast<size_t>(r)], r == 0 ? sizes : std::vector<int64_t>(),
                        3);
  });
}

// The failures of ranks that call where `missing` does not. `timeout`: of the last one.
std::vector<Failure> wait_for(Ranks& ranks, int size, int missing,
                              std::chrono::milliseconds timeout = kLong) {
  std::vector<Call> calls(static_cast<size_t>(size));
  std::vector<Failure> failures;
  const int last = missing == size - 1 ? size - 2 : size - 1;
  for (int rank = 0; rank < size; ++rank) {
    if (rank != missing) {
      const bool is_short = rank == last && timeout < kLong;
      CHECK(!is_short || only_lacks(ranks[rank], 1, {missing, rank}));
      ranks[rank].call(
          calls[static_cast<size_t>(rank)].operation(summed(6), is_short ? timeout : kLong));
    }
  }
  for (int rank = 0; rank < size; ++rank) {
    if (rank != missing) {
      failures.push_back(calls[static_cast<size_t>(rank)].failure());
    }
  }
  return failures;
}

void who_does_not_come_is_named() {
  for (const bool apart : {false, true}) {
    for (const int missing : {0, 1}) {
      Ranks ranks(3, apart);
      for (const auto& failure : wait_for(ranks, 3, missing, 200ms)) {
        CHECK(failure.kind == Kind::Timeout && failure.ranks == std::vector<int>{missing});
        CHECK_HAS(failure.text,
                  "the collective 1 must be done within 0.2 s, got no answer from rank " +
                      std::to_string(missing) + " (pid " + std::to_string(getpid()));
        CHECK_HAS(failure.text, "before its first collective");
        if (apart && missing != 0) {
          CHECK_HAS(failure.text, ", alive)");
        }
      }
      // Nothing more is possible, on any rank.
      for (int rank = 0; rank < 3; ++rank) {
        Call call;
        ranks[rank].call(call.operation(summed(6), kLong));
        CHECK(call.failure().kind == Kind::Timeout);
      }
    }
  }
}

void who_leaves_is_named() {
  for (const int gone : {0, 2}) {
    Ranks ranks(3);
    std::vector<Call> first(3);
    for (int rank = 0; rank < 3; ++rank) {
      ranks[rank].call(first[static_cast<size_t>(rank)].operation(summed(6), kLong));
    }
    for (auto& call : first) {
      CHECK(call.begun() == 1);
    }
    ranks[gone].done(1);
    ranks.drop(gone);
    for (const auto& failure : wait_for(ranks, 3, gone)) {
      CHECK(failure.kind == Kind::RankLost && failure.ranks == std::vector<int>{gone});
      CHECK_HAS(failure.text, "must live until the collective 2 is done, got rank " +
                                  std::to_string(gone) + " (pid " + std::to_string(getpid()) +
                                  ", left the group)");
    }
    // It has sent all of its own: what had begun may come to its end.
    std::this_thread::sleep_for(1500ms);
    CHECK(!first[1].has_failed());
    ranks[1].done(1);
  }
}

// Who ends without a word, on another machine.
void who_is_gone_is_known() {
  Store store;
  std::thread other([&] { meet(store.view(), {1, 2, "test"}, kLong, "machine 1"); });
  const auto root = Agreement::join(store.view(), {0, 2, "test"}, kLong, "machine 0");
  other.join();
  const auto late = Clock::now() + kLong;
  while (!root->gone(1) && Clock::now() < late) {
    std::this_thread::sleep_for(1ms);
  }
  CHECK(root->gone(1) == getpid());
  CHECK(!root->gone(0));
}

void who_has_left_is_not_gone() {
  for (const bool apart : {false, true}) {
    Ranks ranks(2, apart);
    ranks.drop(1);
    for (const auto& failure : wait_for(ranks, 2, 1)) {
      CHECK_HAS(failure.text, "left the group");
    }
    CHECK(!ranks[0].gone(1));
  }
}

void what_a_rank_called_before_it_left_counts_for_nothing() {
  Ranks ranks(3);
  Call early;
  ranks[1].call(early.operation(summed(6), kLong));
  ranks[1].leave(0ms);
  CHECK(early.failure().kind == Kind::Closed);
  for (const auto& failure : wait_for(ranks, 3, 1)) {
    CHECK(failure.kind == Kind::RankLost && failure.ranks == std::vector<int>{1});
  }
}

void leaving_ends_what_is_in_flight() {
  Ranks ranks(2);
  Call waiting, after;
  ranks[1].call(waiting.operation(summed(6), kLong));
  const auto begun = Clock::now();
  ranks[1].leave(200ms);
  CHECK(Clock::now() - begun >= 200ms);
  ranks[1].leave(kLong);
  CHECK(!ranks[1].has_abandoned());
  CHECK(waiting.failure().kind == Kind::Closed);
  CHECK_HAS(waiting.failure().text, "got a destroyed one (rank 1/2, group 'test')");
  ranks[1].call(after.operation(summed(6), kLong));
  CHECK(after.failure().kind == Kind::Closed);
}

void an_abort_is_everybodys() {
  Ranks ranks(3);
  std::vector<Call> calls(3);
  for (int rank = 0; rank < 3; ++rank) {
    ranks[rank].call(calls[static_cast<size_t>(rank)].operation(summed(6), kLong));
  }
  for (auto& call : calls) {
    call.begun();
  }
  ranks[2].abort();
  for (auto& call : calls) {
    CHECK(call.failure().kind == Kind::Closed);
    CHECK_HAS(call.failure().text, "got an abort by rank 2");
  }
}

void data_that_does_not_arrive_fails_everywhere() {
  for (const bool apart : {false, true}) {
    Ranks ranks(3, apart);
    std::vector<Call> calls(3);
    for (int rank = 0; rank < 3; ++rank) {
      ranks[rank].call(calls[static_cast<size_t>(rank)].operation(summed(6), kLong));
    }
    for (auto& call : calls) {
      call.begun();
    }
    ranks[0].done(1);
    ranks[1].broke(1, "no route");
    for (const size_t rank : {1, 2}) {
      CHECK(calls[rank].failure().kind == Kind::Timeout);
      CHECK_HAS(calls[rank].failure().text, "the data of collective 1 must arrive, got no route");
    }
    CHECK(!calls[0].has_failed());
  }
}

void strangers_do_no_harm(bool by_name) {
  constexpr int kSize = 2;
  Store store;
  std::unique_ptr<Agreement> ranks[kSize];
  std::thread first(
      [&] { ranks[0] = Agreement::join(store.view(), {0, kSize, "test"}, kLong, "a"); });
  const auto keys = store.view();
  while (!keys.has("lines")) {
    std::this_thread::sleep_for(1ms);
  }
  std::istringstream where(store.at("lines"));
  std::string token;
  int port = 0;
  where >> token >> port;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const auto named = address_of_name(store.at("lines in a"));
  const auto say = [&](const std::string& text) {
    const int fd = socket(by_name ? AF_UNIX : AF_INET, SOCK_STREAM, 0);
    CHECK((by_name
               ? connect(fd, named->get(), named->length)
               : connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address))) == 0);
    // As much as is taken.
    CHECK(send(fd, text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT) >= 0);
    return fd;
  };
  const auto number = [](auto value) {
    return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  const std::vector<int> strangers{
      say(""),
      say("GET / HTTP/1.1\r\n\r\n"),
      say(std::string(1 << 16, '\xff')),
      // A hello with a token of the right length.
      say(number(uint32_t{40}) + number(uint32_t{1}) + number(int64_t{32}) + std::string(32, '0')),
      // And a death socket with one.
      say(number(uint32_t{48}) + number(uint32_t{3}) + number(int64_t{32}) + std::string(32, '0') +
          number(int64_t{1})),
      // One that is followed by more than anybody has to say.
      say(number(uint32_t{8}) + number(uint32_t{1}) + std::string(1 << 18, '0')),
      // One that ends too soon, and one whose text is longer than it.
      say(number(uint32_t{4}) + number(uint32_t{1}) + "abcd"),
      say(number(uint32_t{8}) + number(uint32_t{1}) + number(int64_t{-1})),
  };
  std::thread second(
      [&] { ranks[1] = Agreement::join(store.view(), {1, kSize, "test"}, kLong, "a"); });
  first.join();
  second.join();
  std::vector<Call> calls(kSize);
  for (size_t rank = 0; rank < kSize; ++rank) {
    ranks[rank]->call(calls[rank].operation(summed(6), kLong));
  }
  for (auto& call : calls) {
    CHECK(call.begun() == 1);
  }
  for (const int fd : strangers) {
    close(fd);
  }
}

void strangers_do_no_harm() {
  for (const bool by_name : {false, true}) {
    strangers_do_no_harm(by_name);
  }
}

void joining_ends_at_the_deadline() {
  for (const int rank : {0, 1}) {
    Store store;
    const auto begun = Clock::now();
    try {
      Agreement::join(store.view(), {rank, 3, "test"}, 200ms);
      CHECK(false);
    } catch (const std::runtime_error& error) {
      CHECK_HAS(error.what(), rank == 0 ? "ranks 1, 2 did not connect" : "rank 0 did not say");
    }
    CHECK(Clock::now() - begun < kLong);
  }
  // Where nobody listens.
  Store store;
  store.view().set("lines", "token 1 127.0.0.1 nonsense");
  try {
    Agreement::join(store.view(), {1, 2, "test"}, kLong);
    CHECK(false);
  } catch (const std::runtime_error& error) {
    CHECK_HAS(error.what(), "127.0.0.1 (Connection refused), nonsense (not an address)");
  }
}

const std::vector<Test> kTests = {
    TEST(begins_what_all_have_called),
    TEST(both_ends_of_a_message_begin),
    TEST(messages_meet_in_the_order_of_their_calls),
    TEST(little_messages_travel_with_what_is_said_of_them),
    TEST(what_is_done_is_said_at_once),
    TEST(so_many_are_told_by_one),
    TEST(so_much_goes_with_words),
    TEST(many_ranks_have_messages_and_collectives),
    TEST(who_waits_for_a_message_takes_in_what_comes),
    TEST(from_anybody_the_first_to_send_is_taken),
    TEST(messages_that_do_not_fit_are_denied_at_both_ends),
    TEST(messages_and_collectives_do_not_wait_for_each_other),
    TEST(a_message_that_nobody_answers_is_given_up),
    TEST(messages_of_ranks_that_left_are_denied),
    TEST(who_leaves_waits_for_its_messages),
    TEST(both_ends_hear_the_same_of_a_message_of_who_leaves),
    TEST(the_end_of_a_group_is_that_of_its_messages),
    TEST(nothing_begins_before_all_have_called),
    TEST(ranks_that_send_different_numbers_of_tensors_end_the_group),
    TEST(little_data_travels_with_the_calls),
    TEST(who_waits_takes_in_what_comes),
    TEST(who_waits_no_longer_leaves_it_to_the_thread),
    TEST(who_waits_hears_that_it_is_late_or_over),
    TEST(ranks_that_disagree_all_hear_of_it),
    TEST(uneven_parts_fit_where_their_sizes_do),
    TEST(who_does_not_come_is_named),
    TEST(who_leaves_is_named),
    TEST(who_is_gone_is_known),
    TEST(who_has_left_is_not_gone),
    TEST(what_a_rank_called_before_it_left_counts_for_nothing),
    TEST(leaving_ends_what_is_in_flight),
    TEST(an_abort_is_everybodys),
    TEST(data_that_does_not_arrive_fails_everywhere),
    TEST(strangers_do_no_harm),
    TEST(joining_ends_at_the_deadline),
};

}  // namespace

int main(int count, char** names) {
  return run_tests(kTests, count, names);
}
