#pragma once

#include <pybind11/pybind11.h>

namespace c10d_ext {

// Runs `f` without the GIL. For whatever blocks: the threads that it waits for may need it, and
// not every caller has let go of it (AOTInductor's runner has not).
template <class F>
void without_gil(F&& f) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    pybind11::gil_scoped_release release;
    f();
  } else {
    f();
  }
}

}  // namespace c10d_ext
