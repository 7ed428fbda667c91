#pragma once

// For headers that declare what binds them: with all of pybind11 each file that includes them would
// take 3 s longer to compile.

namespace pybind11 __attribute__((visibility("hidden"))) {
  class module_;
}
