#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

namespace c10d_ext {

// Runs `f` without the GIL. For whatever blocks: the threads that it waits for may need it, and
// not every caller has released it (AOTInductor's runner has not).
template <class F>
void without_gil(F&& f) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    pybind11::gil_scoped_release release;
    f();
  } else {
    f();
  }
}

// Whether the GIL can be taken: not before Python starts, nor once it ends.
inline bool python_is_up() {
#if PY_VERSION_HEX >= 0x030d0000
  const bool going_down = Py_IsFinalizing();
#else
  const bool going_down = _Py_IsFinalizing();
#endif
  return Py_IsInitialized() && !going_down;
}

// For waits: lets Ctrl-C through.
inline void check_signals() {
  if (!python_is_up()) {
    return;
  }
  pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw pybind11::error_already_set();
  }
}

// Whether it is Ctrl-C, or what else is no error of the call that it ends.
inline bool is_interrupt(const pybind11::error_already_set& error) {
  pybind11::gil_scoped_acquire gil;
  return !error.matches(PyExc_Exception);
}

// Waits for `is_over`, which `lock` guards, and lets Ctrl-C through; false: not by `until`.
template <class IsOver>
bool wait_interruptibly(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                        std::chrono::steady_clock::time_point until, const IsOver& is_over) {
  constexpr std::chrono::milliseconds kLook{50};
  while (!is_over()) {
    const auto now = std::chrono::steady_clock::now();
    if (now >= until) {
      return false;
    }
    changed.wait_until(lock, std::min(until, now + kLook));
    lock.unlock();
    check_signals();
    lock.lock();
  }
  return true;
}

}  // namespace c10d_ext
