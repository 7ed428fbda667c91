#if defined(__x86_64__)

#include <immintrin.h>

#include <type_traits>

#include "kernels/isa.h"

// Everything below, and nothing above, is compiled for this instruction set: an inline function of
// a header must not be, since the linker may keep this copy of it for the whole program.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,f16c")
#endif

#define C10D_EXT_ISA avx512
#define C10D_EXT_VECTOR_BYTES 64
#include "kernels/impl.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
