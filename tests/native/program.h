#pragma once

// What the test programs of this directory have in common.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                                     \
    }                                                                                    \
  } while (false)

#define CHECK_HAS(text, part)                                                              \
  do {                                                                                     \
    const std::string whole = text, piece = part;                                          \
    if (whole.find(piece) == std::string::npos) {                                          \
      std::fprintf(stderr, "%s:%d: '%s' has no '%s'\n", __FILE__, __LINE__, whole.c_str(), \
                   piece.c_str());                                                         \
      std::_Exit(1);                                                                       \
    }                                                                                      \
  } while (false)

constexpr std::chrono::seconds kLong{30};  // for what should take milliseconds, on a busy machine

template <class F>
bool eventually(F&& condition, std::chrono::milliseconds deadline = kLong) {
  const auto end = std::chrono::steady_clock::now() + deadline;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

// A process, which ends with what `body` does.
inline pid_t start(const std::function<void()>& body) {
  std::fflush(nullptr);
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    alarm(120);  // nobody outlives a test that failed
    try {
      body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "uncaught: %s\n", error.what());
      std::_Exit(1);
    }
    std::exit(0);  // destructors, and the leak check, run
  }
  return pid;
}

// The exit status as of waitpid(); kills the process that is not done in time.
inline int finish(pid_t pid) {
  int status = 0;
  const auto has_ended = [&] { return waitpid(pid, &status, WNOHANG) == pid; };
  const bool ended = eventually(has_ended, std::chrono::seconds(60));
  if (!ended) {
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
  }
  CHECK(ended);
  return status;
}

struct Test {
  const char* name;
  void (*run)();
};
#define TEST(name) {#name, name}

// Runs every test, or those named on the command line.
inline int run_tests(const std::vector<Test>& tests, int count, char** names) {
  int ran = 0;
  for (const auto& test : tests) {
    const auto asked_for = [&](const char* name) { return std::strcmp(name, test.name) == 0; };
    if (count > 1 && std::none_of(names + 1, names + count, asked_for)) {
      continue;
    }
    std::printf("%s\n", test.name);
    std::fflush(stdout);
    test.run();
    ++ran;
  }
  std::printf("%d tests passed\n", ran);
  return ran > 0 ? 0 : 1;
}
