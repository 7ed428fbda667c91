// Threads for tasks that may block. Run without arguments it runs every test; with arguments, those
// named.

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <set>
#include <thread>
#include <vector>

#include "base/thread_pool.h"
#include "program.h"

using namespace c10d_ext;

namespace {

// A task that runs until it is told to end.
struct Task {
  std::atomic<bool> runs{false}, ends{false}, is_over{false};
  std::atomic<pid_t> on{0};

  std::function<void()> body() {
    return [this] {
      on = gettid();
      runs = true;
      CHECK(eventually([&] { return ends.load(); }));
      is_over = true;
    };
  }
};

void all_run_at_once(ThreadPool& pool, std::vector<Task>& tasks) {
  for (auto& task : tasks) {
    pool.run(task.body());
  }
  for (auto& task : tasks) {
    CHECK(eventually([&] { return task.runs.load(); }));
  }
  for (auto& task : tasks) {
    task.ends = true;
  }
  for (auto& task : tasks) {
    CHECK(eventually([&] { return task.is_over.load(); }));
  }
}

void as_many_threads_as_tasks_at_a_time() {
  const auto pool = ThreadPool::make("pool");
  std::vector<Task> one(1), more(5);
  all_run_at_once(*pool, one);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // its thread is free again, mostly
  all_run_at_once(*pool, more);
}

void threads_are_kept_for_the_next_tasks() {
  const auto pool = ThreadPool::make("pool");
  constexpr size_t kTasks = 200;
  std::set<pid_t> threads;
  for (size_t i = 0; i < kTasks; ++i) {
    Task task;
    task.ends = true;
    pool->run(task.body());
    CHECK(eventually([&] { return task.is_over.load(); }));
    threads.insert(task.on);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK(threads.size() < kTasks);
}

void signals_are_for_other_threads() {
  const auto pool = ThreadPool::make("pool");
  std::atomic<bool> is_masked{false}, is_over{false};
  pool->run([&] {
    sigset_t now;
    pthread_sigmask(SIG_SETMASK, nullptr, &now);
    is_masked = sigismember(&now, SIGINT) == 1 && sigismember(&now, SIGTERM) == 1;
    is_over = true;
  });
  CHECK(eventually([&] { return is_over.load(); }));
  CHECK(is_masked);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which need memory, too
// A thread's stack needs memory that this process may not have.
void without_a_thread_who_asks_does_it() {
  const auto pool = ThreadPool::make("pool");
  const rlimit none{0, RLIM_INFINITY};
  rlimit before{};
  Task task, next;
  task.ends = next.ends = true;
  CHECK(getrlimit(RLIMIT_AS, &before) == 0);
  CHECK(setrlimit(RLIMIT_AS, &none) == 0);
  const bool has_begun = pool->try_run(task.body());
  const bool was_untouched = !task.runs;
  pool->run(task.body());
  CHECK(setrlimit(RLIMIT_AS, &before) == 0);
  CHECK(!has_begun && was_untouched);
  CHECK(task.is_over && task.on == gettid());
  CHECK(pool->try_run(next.body()));
  CHECK(eventually([&] { return next.is_over.load(); }));
  CHECK(next.on != gettid());
}
#endif

const std::vector<Test> kTests = {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    // The first: stacks of threads that have ended are used again.
    TEST(without_a_thread_who_asks_does_it),
#endif
    TEST(as_many_threads_as_tasks_at_a_time),
    TEST(threads_are_kept_for_the_next_tasks),
    TEST(signals_are_for_other_threads),
};

}  // namespace

int main(int count, char** names) {
  return run_tests(kTests, count, names);
}
