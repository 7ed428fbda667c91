#pragma once

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace c10d_ext {

// While one lives, threads that this one starts get no signals: those are for the threads of the
// program that uses us.
class SignalMask {
 public:
  SignalMask() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalMask() {
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  SignalMask(const SignalMask&) = delete;
  SignalMask& operator=(const SignalMask&) = delete;

 private:
  sigset_t before_;
};

// A thread that gets no signals. `name` has at most 15 characters.
template <class Run>
std::thread signal_masked_thread(const char* name, Run&& run) {
  const SignalMask quiet;
  std::thread thread(std::forward<Run>(run));
  pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace c10d_ext
