#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <type_traits>

#include "kernels/isa.h"

#define C10D_EXT_ISA baseline
#define C10D_EXT_VECTOR_BYTES 16
#include "kernels/impl.h"
