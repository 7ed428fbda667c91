#pragma once

#include "base/python_module.h"

namespace c10d_ext {

void bind_capabilities(pybind11::module_& m);

}  // namespace c10d_ext
