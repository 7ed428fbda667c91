// The kernels with C names, for tests/test_kernels.py to load with ctypes.

#include <cstddef>
#include <string_view>

#include "kernels/isa.h"
#include "kernels/kernels.h"

using namespace c10d_ext;
using namespace c10d_ext::kernels;

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void kernels_reduce(int dtype, int op, void* out, void* also, const void* const* sources,
                           int n, size_t count, const Factor* factors, int streaming) {
  reduce(static_cast<DType>(dtype), static_cast<ReduceOp>(op), out, also, sources, n, count,
         factors, streaming);
}

EXPORT int kernels_has_meaning(int op, int dtype) {
  return has_meaning(static_cast<ReduceOp>(op), static_cast<DType>(dtype));
}

EXPORT size_t kernels_size_of(int dtype) {
  return size_of(static_cast<DType>(dtype));
}

// Null past the last one. The names are null-terminated: they are string literals.
EXPORT const char* kernels_dtype_name(int dtype) {
  return dtype <= static_cast<int>(DType::Bytes) ? name_of(static_cast<DType>(dtype)).data()
                                                 : nullptr;
}

EXPORT const char* kernels_reduce_op_name(int op) {
  return op <= static_cast<int>(ReduceOp::None) ? name_of(static_cast<ReduceOp>(op)).data()
                                                : nullptr;
}

EXPORT const char* kernels_instruction_set(int index) {
  const auto sets = instruction_sets();
  return index < static_cast<int>(sets.size()) ? sets[index]->name.data() : nullptr;
}

EXPORT void kernels_use(int index) {
  use(*instruction_sets()[index]);
}

EXPORT void kernels_set_float8_e4m3fn_saturates(int saturates) {
  set_float8_e4m3fn_saturates(saturates);
}
