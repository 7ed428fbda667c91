#include "backends/mpi/engine.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "base/signal_masked_thread.h"
#include "base/thread_pool.h"
#include "base/timeouts.h"

namespace c10d_ext::mpi {

namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;
using std::chrono::microseconds;

constexpr Milliseconds kLook{20};

// Never destroyed: its threads may outlive everything else.
ThreadPool& completions() {
  static auto* instance = new std::shared_ptr(ThreadPool::make("c10d_ext_mpiend"));
  return **instance;
}

// How often the engine asks: without a pause while there is news, then less and less.
class Pace {
 public:
  void note(bool news) {
    const auto now = Clock::now();
    if (news) {
      quiet_since_ = now;
      pause_ = microseconds(0);
    } else if (now - quiet_since_ > kEager) {
      pause_ = std::clamp(pause_ + pause_ / 4, kFirst, kLast);
    }
  }
  microseconds pause() const {
    return pause_;
  }

 private:
  static constexpr microseconds kEager{100};
  static constexpr microseconds kFirst{10};
  static constexpr microseconds kLast{500};
  Clock::time_point quiet_since_ = Clock::now();
  microseconds pause_{0};
};

// A question that takes longer has moved something.
constexpr microseconds kMoved{5};

// What a rank that is gone has sent is given so long to arrive, and so many questions.
constexpr Milliseconds kLastData{20};
constexpr int kLastLooks = 20;

template <class IsOver>
bool wait_for(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
              Milliseconds timeout, const Engine::Interrupt& interrupt, const IsOver& is_over) {
  const auto until = Clock::now() + bounded(timeout);
  while (!is_over()) {
    const auto now = Clock::now();
    if (now >= until) {
      return false;
    }
    changed.wait_until(lock, std::min(until, now + kLook));
    if (interrupt) {
      lock.unlock();
      interrupt();
      lock.lock();
    }
  }
  return true;
}

std::string within(Milliseconds timeout) {
  auto seconds = std::to_string(std::chrono::duration<double>(timeout).count());
  seconds.erase(seconds.find_last_not_of('0') + 1);
  if (seconds.back() == '.') {
    seconds.pop_back();
  }
  return "within " + seconds + " s";
}

}  // namespace

class Engine::State {
 public:
  void start(const std::shared_ptr<State>& self, const std::string& path, Milliseconds timeout,
             const Interrupt& interrupt) {
    std::unique_lock lock(mutex_);
    if (phase_ == Phase::New) {
      phase_ = Phase::Starting;
      pid_ = getpid();
      signal_masked_thread("c10d_ext_mpi", [self, path] { self->run(path); }).detach();
    }
    check_at_home();
    if (!wait_for(changed_, lock, timeout, interrupt,
                  [this] { return phase_ != Phase::Starting; })) {
      throw MpiError("MPI_Init_thread must return " + within(timeout) + ", got no end of it");
    }
    if (phase_ == Phase::Failed) {
      const std::string why = why_failed_;
      if (library_ == nullptr) {
        phase_ = Phase::New;  // another library may do
      }
      throw MpiError(why);
    }
    check_open();
  }

  Library& library() const {
    std::lock_guard lock(mutex_);
    check_at_home();
    check_open();
    return *library_;
  }

  void submit(Call call) {
    {
      std::lock_guard lock(mutex_);
      check_at_home();
      check_open();
      owners_.insert(call.owner);
      queue_.push_back(std::move(call));
    }
    news_.notify_one();
  }

  void abandon(uint64_t owner, uint64_t number, std::exception_ptr error) {
    {
      std::lock_guard lock(mutex_);
      if (phase_ != Phase::Open || getpid() != pid_ || owners_.count(owner) == 0) {
        return;
      }
      to_abandon_.push_back({owner, number, std::move(error)});
    }
    news_.notify_one();
  }

  bool has_calls_of(uint64_t owner) const {
    std::lock_guard lock(mutex_);
    return owners_.count(owner) != 0 || abandoned_.count(owner) != 0;
  }

  bool finalize(Milliseconds grace) {
    std::unique_lock lock(mutex_);
    if (phase_ != Phase::Open || getpid() != pid_) {
      return phase_ == Phase::Finalized;
    }
    phase_ = Phase::Closing;
    news_.notify_one();
    return wait_for(changed_, lock, grace, {}, [this] { return phase_ == Phase::Finalized; });
  }

 private:
  enum class Phase : uint8_t { New, Starting, Failed, Open, Closing, Finalized };

  struct Active {
    // Begins what is next, as long as nothing is under way.
    void go_on(Library& library) {
      while (requests.empty() && begun < call.steps.size()) {
        call.steps[begun++](library, requests);
      }
    }
    // Those to and from ranks that are gone last, for they are asked first.
    void put_lost_last() {
      std::stable_partition(requests.begin(), requests.end(), [this](const auto& request) {
        return !call.losses->has(request.peer);
      });
    }
    bool has_losses() const {
      return call.losses != nullptr && call.losses->since() <= Clock::now();
    }
    // Of the last request, which is not over.
    bool waits_in_vain() {
      return has_losses() && call.losses->has(requests.back().peer) && ++looks > kLastLooks &&
             Clock::now() >= call.losses->since() + kLastData;
    }

    Call call;
    std::vector<Request> requests = {};
    size_t begun = 0;
    int looks = 0;
  };
  struct Abandoned {
    uint64_t owner;
    uint64_t number;
    std::exception_ptr error;
  };

  void check_at_home() const {
    if (getpid() != pid_) {
      throw MpiError("MPI must be used in the process that has initialized it, got a fork of it");
    }
  }
  void check_open() const {
    if (phase_ != Phase::Open) {
      throw MpiError("MPI must be initialized and not finalized, got the end of the process");
    }
  }

  void run(const std::string& path) {
    // Naps of microseconds.
    prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
    std::unique_ptr<Library> library;
    std::string why;
    bool is_open = false;
    try {
      library = Library::open(path);
      library->init();
      is_open = true;
    } catch (const std::exception& error) {
      why = library != nullptr ? library->path() + " (" + library->version() + "): " + error.what()
                               : error.what();
    }
    {
      std::lock_guard lock(mutex_);
      library_ = std::move(library);
      why_failed_ = std::move(why);
      phase_ = is_open ? Phase::Open : Phase::Failed;
    }
    changed_.notify_all();
    if (is_open) {
      serve();
    }
  }

  void serve() {
    Pace pace;
    std::deque<Call> called;
    std::vector<Abandoned> given_up;
    for (;;) {
      bool news = false;
      {
        std::unique_lock lock(mutex_);
        const auto any = [this] {
          return !queue_.empty() || !to_abandon_.empty() || phase_ == Phase::Closing;
        };
        if (active_.empty()) {
          news_.wait(lock, any);
          news = true;
        } else if (pace.pause() > microseconds(0)) {
          news_.wait_for(lock, pace.pause(), any);
        }
        called.swap(queue_);
        given_up.swap(to_abandon_);
        if (called.empty() && given_up.empty() && phase_ == Phase::Closing) {
          break;
        }
      }
      for (auto& call : called) {
        news = true;
        begin(std::move(call));
      }
      called.clear();
      for (const auto& some : given_up) {
        give_up(some);
      }
      given_up.clear();
      if (active_.empty()) {
        continue;
      }
      const auto before = Clock::now();
      news = ask() || news || Clock::now() - before > kMoved;
      pace.note(news);
      if (pace.pause() == microseconds(0)) {
        std::this_thread::yield();
      }
    }
    close();
  }

  void begin(Call call) {
    Active now{std::move(call)};
    std::exception_ptr error;
    try {
      now.go_on(*library_);
    } catch (...) {
      error = std::current_exception();
    }
    if (error != nullptr || now.requests.empty()) {
      end(std::move(now), error);
    } else {
      active_.push_back(std::move(now));
    }
  }

  // Whether something is over.
  bool ask() {
    bool any = false;
    for (auto& now : active_) {
      const std::exception_ptr error = ask(now, any);
      if (error != nullptr || now.requests.empty()) {
        any = true;
        Active over = std::move(now);
        now.call.over = nullptr;
        end(std::move(over), error);
      }
    }
    if (any) {
      std::erase_if(active_, [](const Active& now) { return now.call.over == nullptr; });
    }
    return any;
  }

  std::exception_ptr ask(Active& now, bool& any) {
    if (now.has_losses()) {
      now.put_lost_last();
    }
    while (!now.requests.empty()) {
      try {
        if (!library_->test(now.requests.back())) {
          break;
        }
      } catch (...) {
        now.requests.pop_back();
        return std::current_exception();
      }
      now.requests.pop_back();
      any = true;
      try {
        now.go_on(*library_);
      } catch (...) {
        return std::current_exception();
      }
    }
    return now.requests.empty() || !now.waits_in_vain() ? nullptr : gone();
  }

  static std::exception_ptr gone() {
    return std::make_exception_ptr(MpiError("the other rank must live, got one that is gone"));
  }

  void end(Active now, const std::exception_ptr& error) {
    auto over = std::move(now.call.over);
    const uint64_t owner = now.call.owner;
    {
      std::lock_guard lock(mutex_);
      owners_.erase(owners_.find(owner));
      if (!now.requests.empty()) {
        abandoned_.insert(owner);
      }
    }
    if (!now.requests.empty()) {
      leak(std::move(now));
    }
    completions().run([over = std::move(over), error] { over(error); });
  }

  void give_up(const Abandoned& some) {
    for (auto& now : active_) {
      const bool is_meant = some.number == 0 || now.call.number == some.number;
      if (now.call.owner == some.owner && is_meant) {
        Active over = std::move(now);
        now.call.over = nullptr;
        end(std::move(over), some.error);
      }
    }
    std::erase_if(active_, [](const Active& now) { return now.call.over == nullptr; });
  }

  static void leak(Active now) {
    (void)new Active(std::move(now));
  }

  void close() {
    const bool may = active_.empty() && abandoned_.empty() && library_->is_ours();
    if (may) {
      try {
        library_->finalize();
      } catch (const MpiError&) {
        // The process ends.
      }
    }
    {
      std::lock_guard lock(mutex_);
      phase_ = may ? Phase::Finalized : phase_;
    }
    changed_.notify_all();
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // the phase
  std::condition_variable news_;     // for the engine's thread
  Phase phase_ = Phase::New;
  pid_t pid_ = 0;
  std::string why_failed_;
  std::unique_ptr<Library> library_;
  std::deque<Call> queue_;
  std::vector<Abandoned> to_abandon_;
  std::multiset<uint64_t> owners_;  // of calls under way
  std::set<uint64_t> abandoned_;    // of calls that MPI still has

  // Of the engine's thread alone.
  std::vector<Active> active_;
};

Engine::Engine() : state_(std::make_shared<State>()) {}

Engine& Engine::of_this_process() {
  static auto* instance = new Engine;
  return *instance;
}

void Engine::start(const std::string& path, Milliseconds timeout, const Interrupt& interrupt) {
  state_->start(state_, path, timeout, interrupt);
}

Library& Engine::library() const {
  return state_->library();
}

void Engine::away(const std::string& what, Milliseconds timeout, const Interrupt& interrupt,
                  std::function<void(Library& library)> act) {
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    bool over = false;
    std::exception_ptr error;
  };
  auto shared = std::make_shared<Shared>();
  Library& library = state_->library();
  signal_masked_thread("c10d_ext_mpi_go", [shared, act = std::move(act), &library] {
    std::exception_ptr error;
    try {
      act(library);
    } catch (...) {
      error = std::current_exception();
    }
    {
      std::lock_guard lock(shared->mutex);
      shared->over = true;
      shared->error = error;
    }
    shared->changed.notify_all();
  }).detach();
  std::unique_lock lock(shared->mutex);
  if (!wait_for(shared->changed, lock, timeout, interrupt, [&] { return shared->over; })) {
    throw MpiError(what + " must return " + within(timeout) + ", got no end of it");
  }
  if (shared->error) {
    std::rethrow_exception(shared->error);
  }
}

void Engine::submit(Call call) {
  state_->submit(std::move(call));
}

void Engine::abandon(uint64_t owner, uint64_t number, std::exception_ptr error) {
  state_->abandon(owner, number, std::move(error));
}

bool Engine::has_calls_of(uint64_t owner) const {
  return state_->has_calls_of(owner);
}

bool Engine::finalize(Milliseconds grace) {
  return state_->finalize(grace);
}

}  // namespace c10d_ext::mpi
