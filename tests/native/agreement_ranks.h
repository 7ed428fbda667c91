#pragma once

// Ranks that agree, as threads of one process; the "data" of a collective is there when a test says
// so.

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backends/checked/agreement.h"
#include "backends/checked/contribution.h"
#include "backends/checked/roster.h"
#include "program.h"

namespace c10d_ext {

class Store {
 public:
  KeyValueStore view() {
    KeyValueStore values;
    values.set = [this](const std::string& key, const std::string& value) {
      std::lock_guard lock(mutex_);
      values_[key] = value;
    };
    values.get = [this](const std::string& key, std::chrono::milliseconds) { return at(key); };
    values.has = [this](const std::string& key) {
      std::lock_guard lock(mutex_);
      return values_.count(key) != 0;
    };
    return values;
  }
  std::string at(const std::string& key) {
    std::lock_guard lock(mutex_);
    return values_.at(key);
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::string> values_;
};

// A call and what became of it, which its group may tell later.
class Call {
 public:
  Agreement::Operation operation(Fingerprint called, std::chrono::milliseconds timeout) {
    Agreement::Operation operation;
    operation.op = std::string(name_of(called.op_type));
    operation.called = std::move(called);
    operation.timeout = timeout;
    operation.begin = [state = state_](uint64_t seq) {
      std::lock_guard lock(state->mutex);
      state->begun = seq;
      state->changed.notify_all();
    };
    operation.fail = [state = state_](const Failure& failure) {
      std::lock_guard lock(state->mutex);
      state->failure = failure;
      state->changed.notify_all();
    };
    return operation;
  }
  // With data of this rank, which travels with the call.
  Agreement::Operation operation(Fingerprint called, std::string data) {
    return operation(std::move(called), Contribution(std::move(data)));
  }
  Agreement::Operation operation(Fingerprint called, Contribution data) {
    Agreement::Operation operation = this->operation(std::move(called), kLong);
    operation.data = std::move(data);
    operation.receive = [state = state_](uint64_t seq, const std::vector<SharedBytes>& received) {
      std::lock_guard lock(state->mutex);
      state->begun = seq;
      state->received.assign(received.begin(), received.end());
      state->changed.notify_all();
    };
    return operation;
  }

  // The number under which it began.
  uint64_t begun() {
    std::unique_lock lock(state_->mutex);
    CHECK(state_->changed.wait_for(lock, kLong,
                                   [this] { return state_->begun != 0 || state_->failure; }));
    if (state_->failure) {
      std::fprintf(stderr, "%s\n", state_->failure->text.c_str());
    }
    CHECK(!state_->failure);
    return state_->begun;
  }
  Failure failure() {
    std::unique_lock lock(state_->mutex);
    CHECK(state_->changed.wait_for(lock, kLong, [this] { return state_->failure.has_value(); }));
    return *state_->failure;
  }
  bool has_begun() {
    std::lock_guard lock(state_->mutex);
    return state_->begun != 0;
  }
  bool has_failed() {
    std::lock_guard lock(state_->mutex);
    return state_->failure.has_value();
  }
  // The data of all ranks, where it came with the calls.
  std::vector<std::string> received() {
    std::lock_guard lock(state_->mutex);
    return state_->received;
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t begun = 0;
    std::vector<std::string> received;
    std::optional<Failure> failure;
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

// `size` ranks, all at hand.
class Ranks {
 public:
  // Each on the machine of its name; without names all on this one.
  explicit Ranks(std::vector<std::string> machines) : ranks_(machines.size()) {
    std::vector<std::thread> threads;
    const auto size = static_cast<int>(machines.size());
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        const auto r = static_cast<size_t>(rank);
        ranks_[r] = Agreement::join(store_.view(), {rank, size, "test"}, kLong, machines[r]);
      });
    }
    for (auto& thread : threads) {
      thread.join();
    }
  }
  // `apart`: on machines of their own.
  explicit Ranks(int size, bool apart = false) : Ranks(names(size, apart)) {}

  Agreement& operator[](int rank) {
    return *ranks_[static_cast<size_t>(rank)];
  }
  void drop(int rank) {
    ranks_[static_cast<size_t>(rank)].reset();
  }

 private:
  static std::vector<std::string> names(int size, bool apart) {
    std::vector<std::string> machines(static_cast<size_t>(size));
    for (size_t rank = 0; apart && rank < machines.size(); ++rank) {
      machines[rank] = "machine " + std::to_string(rank);
    }
    return machines;
  }

  Store store_;
  std::vector<std::unique_ptr<Agreement>> ranks_;
};

// Waits until rank 0 knows that none but these are yet to call collective `seq`, as one of them
// is told.
inline bool only_lacks(Agreement& rank, uint64_t seq, const std::vector<int>& ranks) {
  return eventually([&] { return rank.awaited(seq, kLong).first == ranks; });
}

// As one of the ranks on the machines of those names knows them.
inline Roster roster_of(int rank, const std::vector<std::string>& machines) {
  std::vector<Member> members;
  for (const auto& machine : machines) {
    members.push_back({this_process(), machine, machine, machine});
  }
  return {{rank, static_cast<int>(machines.size()), "test"}, std::move(members)};
}

// That it throws, of what another rank has said.
template <class F>
void refused(const F& what) {
  try {
    what();
  } catch (const std::runtime_error&) {
    return;
  }
  CHECK(!"it was taken");
}

// The same data of each rank for all, as it comes with the word to go.
inline Payload& put_all(Payload& words, const std::vector<std::string>& data) {
  std::vector<Contribution> all;
  for (const auto& one : data) {
    all.emplace_back(one);
  }
  return put_all_of(words, all, 0);
}

inline Fingerprint summed(int64_t count, ReduceOp op = ReduceOp::Sum) {
  Fingerprint called;
  called.op_type = OpType::AllReduce;
  called.unit = "float32";
  called.count = count;
  return std::move(called).reduced_by(op);
}

}  // namespace c10d_ext
