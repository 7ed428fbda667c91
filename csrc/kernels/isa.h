#pragma once

// One set of kernels per instruction set; kernels.cpp picks one when the program runs.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "kernels/kernels.h"

namespace c10d_ext::kernels {

// reduce()'s arguments, with the size in bytes.
struct Reduction {
  DType dtype;
  ReduceOp op;
  char* out;
  char* also;
  const char* const* sources;
  int n;
  size_t bytes;
  const Factor* factors;
  // Whether e4m3fn makes its largest number, not NaN, of what is larger.
  bool saturate;
  // Write `out`, which is then aligned to the dtype's size, around the caches.
  bool streaming;
};

struct InstructionSet {
  std::string_view name;
  void (*reduce)(const Reduction&);
  void (*copy)(char* to, const char* from, size_t bytes);
  void (*copy_streaming)(char* to, const char* from, size_t bytes);
};

// What this machine has, the best first.
std::span<const InstructionSet* const> instruction_sets();

// For tests: from now on reduce() and copy() run on it.
void use(const InstructionSet& instruction_set);

namespace baseline {
extern const InstructionSet instruction_set;
}
#if defined(__x86_64__)
namespace avx2 {
extern const InstructionSet instruction_set;
}
namespace avx512 {
extern const InstructionSet instruction_set;
}
#endif

}  // namespace c10d_ext::kernels
