#include "nccl/numbers.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <type_traits>

namespace simulated_nccl {

namespace {

// A float with `E` bits of exponent and `M` of mantissa, rounded to the nearest even. `Finite`: of
// the all-ones exponent only the last value is NaN, and there is no infinity (e4m3fn).
template <class Bits, int E, int M, bool Finite>
struct Small {
  Bits bits;

  static constexpr int kBias = (1 << (E - 1)) - 1;
  static constexpr int kTop = (1 << E) - 1;

  operator float() const {
    const int exponent = (bits >> M) & kTop;
    const int mantissa = bits & ((1 << M) - 1);
    const float sign = (bits >> (E + M)) != 0 ? -1.0F : 1.0F;
    if (exponent == kTop && (!Finite || mantissa == (1 << M) - 1)) {
      return mantissa == 0 ? sign * std::numeric_limits<float>::infinity()
                           : std::numeric_limits<float>::quiet_NaN();
    }
    const int power = (exponent == 0 ? 1 : exponent) - kBias - M;
    return sign * std::ldexp(static_cast<float>(mantissa + (exponent == 0 ? 0 : 1 << M)), power);
  }

  static Small of(float value) {
    const Bits sign = static_cast<Bits>((std::signbit(value) ? 1U : 0U) << (E + M));
    const Bits nan = static_cast<Bits>((kTop << M) | ((1 << M) - 1));
    const Bits infinity = Finite ? nan : static_cast<Bits>(kTop << M);
    if (std::isnan(value)) {
      return {static_cast<Bits>(sign | nan)};
    }
    if (std::isinf(value)) {
      return {static_cast<Bits>(sign | infinity)};
    }
    if (value == 0) {
      return {sign};
    }
    int power = std::max(std::ilogb(value), 1 - kBias) - M;
    // Doubles hold every float, so that the only rounding is this one.
    double scaled = std::nearbyint(std::ldexp(std::fabs(static_cast<double>(value)), -power));
    if (scaled >= std::ldexp(1.0, M + 1)) {
      scaled /= 2;
      ++power;
    }
    const auto mantissa = static_cast<unsigned>(scaled);
    const bool is_normal = mantissa >= (1U << M);
    const int exponent = is_normal ? power + M + kBias : 0;
    const unsigned magnitude =
        (static_cast<unsigned>(exponent) << M) | (mantissa & ((1U << M) - 1));
    return {static_cast<Bits>(sign | std::min<unsigned>(magnitude, infinity))};
  }
};

using Half = Small<uint16_t, 5, 10, false>;
using Bfloat16 = Small<uint16_t, 8, 7, false>;
using E4m3 = Small<uint8_t, 4, 3, true>;
using E5m2 = Small<uint8_t, 5, 2, false>;

template <class T>
struct Accumulator {
  using type = std::conditional_t<std::is_arithmetic_v<T>, T, float>;
};

template <class T>
T narrowed(typename Accumulator<T>::type value) {
  if constexpr (std::is_arithmetic_v<T>) {
    return value;
  } else {
    return T::of(value);
  }
}

// Integers wrap around.
template <class A>
A plus(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    using U = std::make_unsigned_t<A>;
    return static_cast<A>(static_cast<U>(a) + static_cast<U>(b));
  } else {
    return a + b;
  }
}
template <class A>
A times(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    return static_cast<A>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  } else {
    return a * b;
  }
}

// As the device's min and max: of a number and a NaN the number.
template <class A>
A least(A a, A b) {
  if constexpr (std::is_floating_point_v<A>) {
    return std::fmin(a, b);
  } else {
    return std::min(a, b);
  }
}
template <class A>
A greatest(A a, A b) {
  if constexpr (std::is_floating_point_v<A>) {
    return std::fmax(a, b);
  } else {
    return std::max(a, b);
  }
}

template <class T>
void reduce_as(const Reducer& how, const std::vector<const void*>& rows, void* out, size_t count) {
  using A = typename Accumulator<T>::type;
  auto* results = static_cast<T*>(out);
  for (size_t i = 0; i < count; ++i) {
    A sum = static_cast<const T*>(rows[0])[i];
    for (size_t row = 1; row < rows.size(); ++row) {
      const A value = static_cast<const T*>(rows[row])[i];
      switch (how.op) {
        case ncclProd:
          sum = times(sum, value);
          break;
        case ncclMax:
          sum = greatest(sum, value);
          break;
        case ncclMin:
          sum = least(sum, value);
          break;
        default:
          sum = plus(sum, value);
      }
    }
    if (how.op == ncclAvg) {
      sum = static_cast<A>(sum / static_cast<A>(how.ranks));
    }
    results[i] = narrowed<T>(sum);
  }
}

template <class T>
void multiply_as(void* values, size_t count, double factor) {
  using A = typename Accumulator<T>::type;
  auto* at = static_cast<T*>(values);
  for (size_t i = 0; i < count; ++i) {
    at[i] = narrowed<T>(times(static_cast<A>(at[i]), static_cast<A>(factor)));
  }
}

template <class F>
void with_type(ncclDataType_t dtype, F&& f) {
  switch (dtype) {
    case ncclInt8:
      return f(int8_t());
    case ncclUint8:
      return f(uint8_t());
    case ncclInt32:
      return f(int32_t());
    case ncclUint32:
      return f(uint32_t());
    case ncclInt64:
      return f(int64_t());
    case ncclUint64:
      return f(uint64_t());
    case ncclFloat16:
      return f(Half());
    case ncclFloat32:
      return f(float());
    case ncclFloat64:
      return f(double());
    case ncclBfloat16:
      return f(Bfloat16());
    case ncclFloat8e4m3:
      return f(E4m3());
    case ncclFloat8e5m2:
      return f(E5m2());
  }
  throw std::runtime_error("simulated nccl: a dtype that nccl does not have");
}

}  // namespace

size_t size_of(ncclDataType_t dtype) {
  size_t size = 0;
  with_type(dtype, [&](auto t) { size = sizeof t; });
  return size;
}

void Reducer::reduce(const std::vector<const void*>& rows, void* out, size_t count,
                     ncclDataType_t dtype) const {
  with_type(dtype, [&](auto t) { reduce_as<decltype(t)>(*this, rows, out, count); });
}

void multiply(void* values, size_t count, ncclDataType_t dtype, double factor) {
  with_type(dtype, [&](auto t) { multiply_as<decltype(t)>(values, count, factor); });
}

}  // namespace simulated_nccl
