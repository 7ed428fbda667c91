#pragma once

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace c10d_ext {

// A thread that gets no signals: those are for the threads of the program that uses us. `name` has
// at most 15 characters.
template <class Run>
std::thread quiet_thread(const char* name, Run&& run) {
  struct Quiet {
    sigset_t before;
    Quiet() {
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    ~Quiet() {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
  };
  const Quiet quiet;
  std::thread thread(std::forward<Run>(run));
  pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace c10d_ext
