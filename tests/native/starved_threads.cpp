// Preloaded: once `starve` is set, threads other than the first get no further for a while, as on a
// machine with more threads than cores, after they have woken whoever waits for them, and after
// they have asked whether Python still runs (torch does before it takes the GIL).

#include <dlfcn.h>
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
}
