#if defined(__x86_64__)

#include <immintrin.h>

#include <type_traits>

#include "kernels/isa.h"

// Everything below, and nothing above, is compiled for this instruction set: an inline function of
// a header must not be, since the linker may keep this copy of it for the whole program.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif

#define C10D_EXT_ISA avx2
#define C10D_EXT_VECTOR_BYTES 32
#include "kernels/impl.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
