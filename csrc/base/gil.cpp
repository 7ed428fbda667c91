#include "base/gil.h"

#include <pybind11/pybind11.h>

namespace c10d_ext {

GilReleased::GilReleased() {
  if (Py_IsInitialized() && PyGILState_Check()) {
    state_ = PyEval_SaveThread();
  }
}

GilReleased::~GilReleased() {
  if (state_ != nullptr) {
    PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
  }
}

bool python_is_up() {
#if PY_VERSION_HEX >= 0x030d0000
  const bool going_down = Py_IsFinalizing();
#else
  const bool going_down = _Py_IsFinalizing();
#endif
  return Py_IsInitialized() && !going_down;
}

void check_signals() {
  if (!python_is_up()) {
    return;
  }
  pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw pybind11::error_already_set();
  }
}

}  // namespace c10d_ext
