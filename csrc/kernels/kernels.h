#pragma once

// What is done to bytes in memory: they are copied and reduced. No torch in here: the
// same code runs under the sanitizers with threads for ranks.

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/types.h"

namespace c10d_ext::kernels {

// The number each rank's values are multiplied with before they are summed (premul_sum).
struct Factor {
  double real = 1;
  double imaginary = 0;
};

// out[i] = sources[0][i] op sources[1][i] op ... op sources[n-1][i], in that order, for `count`
// elements; the same bits whatever the instruction set, the position in memory and `count`.
//
//  * Half, bfloat16 and float8 (ComplexHalf by parts) accumulate in float32 and are rounded once,
//    to nearest even; out-of-range float8 results follow torch's casts.
//  * Integer sums and products wrap. Min and max keep NaNs: any NaN among the sources gives NaN.
//  * Avg divides the sum by n, in the accumulation type, before rounding.
//  * PremulSum multiplies source p by factors[p] in the accumulation type (int64/uint64
//  arithmetic for integers, whose factors are whole numbers).
//
// `also`, when not null, receives the same values as `out`. `out` may be one of the sources (the
// same address exactly); apart from that nothing overlaps. Nothing needs alignment beyond the
// dtype's own. When `streaming`, `out` (not `also`) is written around the caches, as copy() does.
void reduce(DType dtype, ReduceOp op, void* out, void* also, const void* const* sources, int n,
            size_t count, const Factor* factors, bool streaming = false);

// Whether a number beyond the range of float8_e4m3fn becomes its largest one (torch since 2.13, and
// the default) or NaN (before): who knows torch says how its casts are.
void set_float8_e4m3fn_saturates(bool saturates);

// memcpy that, when `streaming`, writes around the caches: for outputs too large to be read back
// from them. Ordered before any later store of this thread, as any copy is.
void copy(void* to, const void* from, size_t bytes, bool streaming);

// "avx512", "avx2" or "baseline": what reduce() and copy() run on here.
std::string_view instruction_set();

}  // namespace c10d_ext::kernels
