#pragma once

#include <cstdint>

namespace c10d {
enum class OpType : std::uint8_t;
}

namespace c10d_ext {

// What can be asked of a collective that is over.
struct WorkInfo {
  c10d::OpType type{};
  int64_t number = -1;
  float milliseconds = 0;
};

}  // namespace c10d_ext
