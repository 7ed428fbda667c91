#pragma once

#include "base/python_module.h"

namespace c10d_ext {

// start_tally() and tally(): what the collectives of this process have moved, by backend.
void bind_tally(pybind11::module_& m);

}  // namespace c10d_ext
