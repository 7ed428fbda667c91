// Preloaded: once `starve` is set, threads other than the first get no further for a while, as on a
// machine with more threads than cores, after they have woken whoever waits for them, after they
// have been woken, and after they have asked whether Python still runs (torch does before it takes
// the GIL).

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <chrono>

namespace {

template <class Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

volatile int starve = 0;

static void get_no_further() {
  if (starve == 0 || gettid() == getpid()) {
    return;
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(150);
  while (std::chrono::steady_clock::now() < end) {
  }
}

int Py_IsInitialized() {
  static const auto real = next<int (*)()>("Py_IsInitialized");
  const int initialized = real();
  get_no_further();
  return initialized;
}

// std::condition_variable::notify_all
void _ZNSt18condition_variable10notify_allEv(void* self) {
  static const auto real = next<void (*)(void*)>("_ZNSt18condition_variable10notify_allEv");
  real(self);
  get_no_further();
}

// Not before Python ends, where that does not take half a second; once.
static void get_no_further_before_the_end() {
  static thread_local bool is_late = false;
  if (starve == 0 || gettid() == getpid() || is_late) {
    return;
  }
  is_late = true;
  static const auto ends = [] {
    void* found = dlsym(RTLD_DEFAULT, "Py_IsFinalizing");  // since 3.13
    found = found != nullptr ? found : dlsym(RTLD_DEFAULT, "_Py_IsFinalizing");
    return reinterpret_cast<int (*)()>(found);
  }();
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(500);
  while (ends() == 0 && std::chrono::steady_clock::now() < end) {
  }
}

// std::condition_variable::wait
void _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE(void* self, void* lock) {
  static const auto real =
      next<void (*)(void*, void*)>("_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE");
  real(self, lock);
  get_no_further_before_the_end();
}

// std::condition_variable::wait_until
int pthread_cond_clockwait(pthread_cond_t* self, pthread_mutex_t* mutex, clockid_t clock,
                           const timespec* until) {
  static const auto real = next<decltype(&pthread_cond_clockwait)>("pthread_cond_clockwait");
  const int result = real(self, mutex, clock, until);
  get_no_further_before_the_end();
  return result;
}
}
