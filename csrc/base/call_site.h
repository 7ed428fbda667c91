#pragma once

#include <string>

#include "base/python_module.h"

namespace c10d_ext {

// Where in the program this thread is, "train/loop.py:12", for ranks to compare; see
// torch_c10d_ext/_call_site.py. Takes the GIL.
std::string call_site();

void bind_call_site(pybind11::module_& m);

}  // namespace c10d_ext
