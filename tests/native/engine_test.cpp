// The shared-memory engine with threads for ranks: every collective against plain loops, under
// whatever sanitizer this is built with. Prints what failed and exits with 1, or "ok".

#include <sched.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <latch>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "backends/shm/contention.h"
#include "base/progress_handoff.h"
#include "engine_checks.h"

namespace {

// A rank that cannot begin ends the group.
void check_failed_begin(int size) {
  with_ranks(size, [&](Engine& e) {
    struct Failing final : Operation {
      Failing() : Operation(Request(), kPatience) {}
      void on_begin() override {
        throw std::runtime_error("no memory");
      }
    };
    std::shared_ptr<Operation> op;
    if (e.rank() == 0) {
      op = std::make_shared<Failing>();
      e.submit(op);
    } else {
      op = start(e, request(OpType::Barrier));
    }
    expect(e.wait(*op, std::nullopt, nullptr), "failed begin: not done");
    const std::string said = e.rank() == 0 ? "no memory" : "an abort by rank 0";
    expect(op->failure() && op->failure()->kind == ErrorKind::Closed &&
               op->failure()->text.find(said) != std::string::npos,
           "failed begin: " + (op->failure() ? op->failure()->text : "no failure"));
  });
}

// Many collectives in flight, nobody waits before the end; ranks dawdle at random.
void check_flight(int size, bool progress_thread) {
  Settings settings;
  settings.progress_thread = progress_thread;
  with_ranks(
      size,
      [&](Engine& e) {
        std::mt19937 random(static_cast<unsigned>(e.rank()));
        constexpr size_t kFlights = 200;
        std::vector<Ints> data;
        for (size_t i = 0; i < kFlights; ++i) {
          data.push_back(values(e.rank(), 1 + i * i, static_cast<int>(i)));
        }
        std::vector<std::shared_ptr<Operation>> ops;
        for (size_t i = 0; i < kFlights; ++i) {
          Request r = request(OpType::AllReduce);
          r.reduce_op = ReduceOp::Sum;
          r.sources = {buffer(data[i])};
          r.targets = {buffer(data[i])};
          ops.push_back(start(e, std::move(r)));
          if (random() % 16 == 0) {
            std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
          }
        }
        // Backwards: waiting for the last is waiting for all.
        for (size_t i = kFlights; i-- > 0;) {
          finish(e, *ops[i], "flight");
          uint32_t sum = 0;
          for (int p = 0; p < e.size(); ++p) {
            sum += static_cast<uint32_t>(value(p, i * i, static_cast<int>(i)));
          }
          expect(data[i].back() == static_cast<int32_t>(sum), "flight " + std::to_string(i));
        }
      },
      settings);
}

// Several threads of each rank use one group: calls are serialised, data never mixed up.
void check_threads(int size) {
  with_ranks(size, [&](Engine& e) {
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&e, t] {
        for (int i = 0; i < 100; ++i) {
          Ints out(33), in = values(0, 33, t * 1000 + i);
          Request s = request(OpType::Send), r = request(OpType::Recv);
          s.peer = (e.rank() + 1) % e.size();
          r.peer = (e.rank() + e.size() - 1) % e.size();
          s.tag = r.tag = t;
          s.sources = {buffer(in)};
          r.targets = {buffer(out)};
          auto send = start(e, std::move(s)), receive = start(e, std::move(r));
          finish(e, *receive, "recv on a thread");
          finish(e, *send, "send on a thread");
          expect(out == in, "message of a thread");
          Request a = request(OpType::AllReduce);
          Ints one(1, 1);
          a.reduce_op = ReduceOp::Sum;
          a.sources = a.targets = {buffer(one)};
          auto op = start(e, std::move(a));
          finish(e, *op, "all_reduce on a thread");
          expect(one[0] == e.size(), "all_reduce of threads");
        }
      });
    }
    for (auto& t : threads) {
      t.join();
    }
  });
}

// A barrier whose callback blocks until another one is done, as those of users may.
class Blocking final : public Operation {
 public:
  Blocking(Engine& engine, int depth)
      : Operation(::request(OpType::Barrier), kPatience), engine_(engine), depth_(depth) {}

  void on_done(const Failure* failure) override {
    expect(failure == nullptr, "blocking: " + (failure ? failure->text : ""));
    const ProgressHandoff aside;
    if (depth_ != 0) {
      std::this_thread::sleep_for(milliseconds(engine_.rank()));
      auto next = std::make_shared<Blocking>(engine_, depth_ - 1);
      engine_.submit(next);
      next->wait_idly();
    }
    std::lock_guard lock(mutex_);
    over_ = true;
    changed_.notify_all();
  }
  void wait_idly() {
    std::unique_lock lock(mutex_);
    expect(changed_.wait_for(lock, kPatience, [&] { return over_; }), "blocking: stuck");
  }

 private:
  Engine& engine_;
  const int depth_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
};

void check_callbacks(int size) {
  with_ranks(size, [&](Engine& e) {
    for (int turn = 0; turn < 10; ++turn) {
      std::this_thread::sleep_for(milliseconds((e.rank() + turn) % e.size()));
      auto first = std::make_shared<Blocking>(e, 3);
      e.submit(first);
      if (turn % 2 != 0) {
        finish(e, *first, "waited for, with a callback that blocks");
      }
      first->wait_idly();
    }
  });
}

// An all_reduce that is read from, and written to, what the one before it leaves. `memory` has no
// lock of its own.
class Linked final : public Operation {
 public:
  Linked(Ints& memory) : Operation(::request(OpType::AllReduce), kPatience), memory_(memory) {
    copy_.resize(memory.size());
    request.reduce_op = ReduceOp::Max;
    request.sources = {buffer(copy_)};
    request.targets = {buffer(copy_)};
  }
  void on_begin() override {
    copy_ = memory_;
    begun_ = copy_[0];
  }
  void on_arrived() override {
    expect(memory_[0] == begun_, "in flight: begun before the one before it had arrived");
    for (size_t i = 0; i < memory_.size(); ++i) {
      memory_[i] = copy_[i] + 1;
    }
  }

 private:
  Ints& memory_;
  Ints copy_;
  int32_t begun_ = 0;
};

void check_order(int size) {
  constexpr int kTurns = 100;
  with_ranks(size, [&](Engine& e) {
    for (const size_t count : {size_t{1}, size_t{100000}}) {
      Ints memory(count, e.rank());
      std::vector<std::shared_ptr<Operation>> flights;
      for (int turn = 0; turn < kTurns; ++turn) {
        flights.push_back(std::make_shared<Linked>(memory));
        e.submit(flights.back());
      }
      // Several threads drive the engine, and none of them all of it.
      std::vector<std::thread> threads;
      for (int t = 0; t < 2; ++t) {
        threads.emplace_back([&, t] {
          for (size_t i = t; i < flights.size(); i += 3) {
            finish(e, *flights[i], "in flight on one memory");
          }
        });
      }
      for (auto& t : threads) {
        t.join();
      }
      finish(e, *flights.back(), "the last in flight on one memory");
      const Ints expected(count, size - 1 + kTurns);
      expect(memory == expected, "in flight on one memory: wrong values");
    }
  });
}

void check_mismatch(int size) {
  with_ranks(size, [&](Engine& e) {
    const bool odd = e.rank() == e.size() - 1;
    for (int what = 0; what < 7; ++what) {
      Ints data = values(e.rank(), odd && what == 0 ? 20001 : 20000, 0), out(data);
      const Ints before = out;
      Request r = request(odd && what == 1 ? OpType::Reduce : OpType::AllReduce);
      r.reduce_op = odd && what == 2 ? ReduceOp::Max : ReduceOp::Sum;
      r.dtype = odd && what == 3 ? DType::Float : DType::Int32;
      if (what == 4) {
        r = request(OpType::Broadcast);
        r.root = odd ? 0 : 1;
      }
      if (what == 5) {
        r = request(odd ? OpType::Barrier : OpType::Broadcast);
        r.root = odd ? -1 : 0;
      }
      r.sources = {buffer(data)};
      r.targets = {buffer(out)};
      if (r.type == OpType::Reduce) {
        r.root = 0;
        r.targets.clear();
      }
      if (r.type == OpType::Barrier) {
        r.sources.clear();
        r.targets.clear();
      }
      if (what == 6) {
        r = request(OpType::AllToAll);
        for (int p = 0; p < e.size(); ++p) {
          r.sources.push_back({{reinterpret_cast<std::byte*>(data.data()), odd ? 4u : 8u}});
          r.targets.push_back({{reinterpret_cast<std::byte*>(out.data()), 8}});
        }
      }
      auto op = start(e, std::move(r));
      expect(e.wait(*op, std::nullopt, nullptr), "mismatch: not done");
      const Failure* f = op->failure();
      expect(f && f->kind == ErrorKind::Mismatch,
             "mismatch " + std::to_string(what) + ": " + (f ? f->text : "no failure"));
      expect(out == before, "mismatch: written to");
      check_all_reduce(e, 5, true, what);
    }
    // A message of another size fails on both ends.
    Ints data(8);
    Request r = request(e.rank() == 0 ? OpType::Send : OpType::Recv);
    r.peer = 1 - e.rank();
    if (e.rank() == 0) {
      r.sources = {{{reinterpret_cast<std::byte*>(data.data()), 12}}};
    } else {
      r.targets = {{{reinterpret_cast<std::byte*>(data.data()), 16}}};
    }
    if (e.rank() < 2) {
      auto op = start(e, std::move(r));
      expect(e.wait(*op, std::nullopt, nullptr), "refused message: not done");
      expect(op->failure() && op->failure()->kind == ErrorKind::Mismatch, "refused message");
    }
    auto barrier = start(e, request(OpType::Barrier));
    finish(e, *barrier, "barrier after a refused message");
    check_messages(e, 100, false);
  });
}

void check_faults(int size) {
  // A rank that stays away is named at the timeout, on every rank that came.
  std::latch come(size - 2);
  std::latch told(size - 1);
  with_ranks(size, [&](Engine& e) {
    if (e.rank() == 0) {
      told.wait();
      auto late = start(e, request(OpType::Barrier));
      expect(e.wait(*late, std::nullopt, nullptr) && late->failure(), "a broken group refuses");
      return;
    }
    std::shared_ptr<Operation> op;
    if (e.rank() < size - 1) {
      op = start(e, request(OpType::Barrier));
      come.count_down();
    } else {
      come.wait();
      op = start(e, request(OpType::Barrier), milliseconds(1000));
    }
    expect(e.wait(*op, std::nullopt, nullptr), "timeout: not done");
    const Failure* f = op->failure();
    expect(f && f->kind == ErrorKind::Timeout && f->ranks == std::vector<int>{0},
           "timeout: " + (f ? f->text : "no failure"));
    told.count_down();
  });
  // A lost rank ends a wait, with its name.
  with_ranks(size, [&](Engine& e) {
    if (e.rank() == 0) {
      return;
    }
    Ints data(100000);
    Request r = request(OpType::AllReduce);
    r.reduce_op = ReduceOp::Sum;
    r.sources = r.targets = {buffer(data)};
    auto op = start(e, std::move(r));
    std::thread watcher([&] {
      std::this_thread::sleep_for(milliseconds(50));
      e.peer_lost(0);
    });
    expect(e.wait(*op, std::nullopt, nullptr), "lost: not done");
    const Failure* f = op->failure();
    expect(f && f->kind == ErrorKind::RankLost && f->ranks == std::vector<int>{0},
           "lost: " + (f ? f->text : "no failure"));
    watcher.join();
  });
  // An abort on one rank ends the waits of all.
  with_ranks(size, [&](Engine& e) {
    if (e.rank() == 0) {
      std::this_thread::sleep_for(milliseconds(50));
      e.abort("the test aborts");
    }
    auto op = start(e, request(OpType::Barrier));
    expect(e.wait(*op, std::nullopt, nullptr), "abort: not done");
    expect(op->failure() && op->failure()->kind == ErrorKind::Closed, "abort");
  });
  // A wait with a timeout of its own gives up alone; the collective goes on.
  std::latch gave_up(size - 1);
  with_ranks(size, [&](Engine& e) {
    if (e.rank() == 0) {
      gave_up.wait();
    }
    auto op = start(e, request(OpType::Barrier));
    if (e.rank() != 0) {
      expect(!e.wait(*op, milliseconds(20), nullptr), "wait with a timeout");
      gave_up.count_down();
    }
    finish(e, *op, "barrier after a timeout");
  });
  // What interrupts a wait does not interrupt the collective.
  std::latch stopped(size - 1);
  with_ranks(size, [&](Engine& e) {
    if (e.rank() == 0) {
      stopped.wait();
    }
    auto op = start(e, request(OpType::Barrier));
    if (e.rank() != 0) {
      bool interrupted = false;
      try {
        e.wait(*op, std::nullopt, [] { throw std::runtime_error("interrupt"); });
      } catch (const std::runtime_error&) {
        interrupted = true;
      }
      expect(interrupted, "interrupt");
      stopped.count_down();
    }
    finish(e, *op, "barrier after an interrupt");
  });
}

// Fed with times of its own.
void check_contention() {
  using std::chrono::microseconds;
  ContentionDetector contention;
  auto now = ContentionDetector::Clock::now();
  const auto gives_way_for = [&](microseconds time) {
    contention.yielded(now, now + time);
    now += time;
  };
  // How long ranks sleep, and then give way again.
  const auto lasts = [&] {
    const auto begin = now;
    while (contention.is_contended(now) && now - begin < std::chrono::seconds(10)) {
      now += milliseconds(1);
    }
    return now - begin;
  };
  expect(!contention.is_contended(now), "contention before any yield");
  gives_way_for(microseconds(900));
  expect(!contention.is_contended(now), "contention after a short yield");
  milliseconds expected = ContentionDetector::kFirstPause;
  for (int turn = 0; turn < 10; ++turn) {
    gives_way_for(microseconds(3000));
    expect(lasts() == expected, "lasting contention is looked for at wrong times");
    expected = std::min(2 * expected, ContentionDetector::kLongestPause);
  }
  now += 2 * ContentionDetector::kLongestPause;
  gives_way_for(microseconds(3000));
  expect(lasts() == ContentionDetector::kFirstPause, "new contention counts as the old one");
}

// Other programs on every core: ranks whose waits sleep get the right values, in time.
void check_beside_others() {
  std::atomic<bool> over{false};
  std::vector<std::thread> others;
  for (unsigned i = 0; i < 2 * std::max(1u, std::thread::hardware_concurrency()); ++i) {
    others.emplace_back([&] {
      while (!over.load(std::memory_order_relaxed)) {
      }
    });
  }
  with_ranks(3, [&](Engine& e) {
    for (int i = 0; i < 100; ++i) {
      check_all_reduce(e, i % 10 == 0 ? 100000 : 10, true, i);
    }
  });
  over = true;
  for (auto& other : others) {
    other.join();
  }
}

}  // namespace

// Ranks that fill the machine and all start on one core end up on several, and may still run
// wherever they might before.
void check_cpu_placement() {
  cpu_set_t allowed;
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0 || cores < 2 || cores > 8) {
    return;
  }
  const int first = sched_getcpu();
  std::atomic<bool> elsewhere{false};
  const auto body = [&](Engine& e) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    sched_setaffinity(0, sizeof(one), &one);
    finish(e, *start(e, request(OpType::Barrier)), "barrier on one core");
    sched_setaffinity(0, sizeof(allowed), &allowed);
    for (int i = 0; i < 1000; ++i) {
      check_all_reduce(e, 10, true, i);
      elsewhere = elsewhere || sched_getcpu() != first;
    }
    cpu_set_t after;
    expect(sched_getaffinity(0, sizeof(after), &after) == 0 && CPU_EQUAL(&after, &allowed),
           "a rank may run on other cores than before");
  };
  // Where others load the machine, the system may keep them together for a while.
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  do {
    with_ranks(2 * cores, body);
  } while (!elsewhere && std::chrono::steady_clock::now() < end);
  expect(elsewhere, "all ranks stayed on one core");
}

int main() {
  for (int size : {1, 2, 3, 4}) {
    with_ranks(size, [](Engine& e) { check_everything(e); });
    check_flight(size, true);
    check_flight(size, false);
    check_threads(size);
    check_callbacks(size);
    check_order(size);
  }
  check_cpu_placement();
  check_contention();
  check_beside_others();
  check_mismatch(2);
  check_mismatch(3);
  check_failed_begin(3);
  check_faults(2);
  check_faults(3);
  if (failures == 0) {
    std::puts("ok");
  }
  return failures == 0 ? 0 : 1;
}
