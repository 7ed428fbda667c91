// Codecs, between memory and what is computed with: a part of kernels_impl.h.
//
// unpack() turns a Memory, bytes as they lie there, into kParts values of type V, and pack() turns
// them back. Scalar is what one element of V is, for factors.

namespace c10d_ext::kernels::C10D_EXT_ISA {
namespace {

template <class T>
struct Integers {
  using Scalar = T;
  using V = Vector<T>;
  static constexpr int kParts = 1;
  using Memory = V;

  C10D_EXT_INLINE static void unpack(Memory memory, V* values) {
    *values = memory;
  }
  C10D_EXT_INLINE static Memory pack(const V* values, const Reduction&) {
    return *values;
  }
  // Modulo 2^64 is modulo 2^bits of T too.
  static T factor(const Factor& factor) {
    const double value = factor.real;
    if (value >= 0x1p63) {
      return static_cast<T>(value < 0x1p64 ? static_cast<uint64_t>(value) : UINT64_MAX);
    }
    return static_cast<T>(value >= -0x1p63 ? static_cast<int64_t>(value) : INT64_MIN);
  }
};

struct Bools {
  using V = Vector<uint8_t>;
  static constexpr int kParts = 1;
  using Memory = V;

  C10D_EXT_INLINE static void unpack(Memory memory, V* values) {
    *values = reinterpret_cast<V>(memory != 0) & 1;
  }
  C10D_EXT_INLINE static Memory pack(const V* values, const Reduction&) {
    return *values;
  }
};

template <class T>
struct RealFactor {
  using Scalar = T;
  static T factor(const Factor& factor) {
    return static_cast<T>(factor.real);
  }
};

template <class T>
struct Floats : RealFactor<T> {
  using V = Vector<T>;
  static constexpr int kParts = 1;
  using Memory = V;

  C10D_EXT_INLINE static void unpack(Memory memory, V* values) {
    *values = memory;
  }
  C10D_EXT_INLINE static Memory pack(const V* values, const Reduction&) {
    return canonical(*values);
  }
};

struct BFloat16s : RealFactor<float> {
  using V = F32;
  static constexpr int kParts = 2;
  using Memory = U32;

  C10D_EXT_INLINE static void unpack(Memory memory, V* values) {
    values[0] = reinterpret_cast<F32>(memory << 16);
    values[1] = reinterpret_cast<F32>(memory & 0xffff0000u);
  }
  C10D_EXT_INLINE static Memory pack(const V* values, const Reduction&) {
    return round(values[0]) >> 16 | (round(values[1]) & 0xffff0000u);
  }

 private:
  C10D_EXT_INLINE static U32 round(F32 value) {
    const U32 bits = reinterpret_cast<U32>(canonical(value));
    return bits + 0x7fff + (bits >> 16 & 1);
  }
};

enum class Specials {
  Infinities,  // as IEEE 754: the largest exponent is infinity and NaNs
  OnlyNaN,     // all ones is NaN, there is no infinity
  Unsigned,    // the code of -0 is NaN, there is neither infinity nor -0
};

// Numbers of fewer bits than a float, `32 / width` of them in each 32-bit lane: parts[p] has those
// at bit `p * width`. The conversions are those of torch, in vectors; a float that is subnormal in
// the small format is rounded by adding a number that shifts its last bit to the float's last.
template <int width, int exponent_bits, int bias, Specials specials>
struct SmallFloats : RealFactor<float> {
  using V = F32;
  static constexpr int kParts = 32 / width;
  using Memory = U32;

  // Not inlined: they are long, and the same for all operations.
  [[gnu::noinline]] static void unpack(Memory memory, V* values) {
    C10D_EXT_UNROLL
    for (int p = 0; p < kParts; ++p) {
      values[p] = decode(memory << (32 - width * (p + 1)));
    }
  }
  [[gnu::noinline]] static Memory pack(const V* values, const Reduction& r) {
    U32 codes = encode(values[0], r);
    C10D_EXT_UNROLL
    for (int p = 1; p < kParts; ++p) {
      codes |= encode(values[p], r) << (width * p);
    }
    return codes;
  }

 private:
  static constexpr int kMantissaBits = width - 1 - exponent_bits;
  static constexpr int kDropped = 23 - kMantissaBits;
  static constexpr int kMaxExponent = (1 << exponent_bits) - 1;
  static constexpr uint32_t kSign = 0x80000000u;

  // The bits of the float 2^exponent.
  static constexpr int32_t power(int exponent) {
    return (127 + exponent) << 23;
  }

  C10D_EXT_INLINE static F32 as_float(U32 bits) {
    return reinterpret_cast<F32>(bits);
  }
  C10D_EXT_INLINE static U32 as_bits(F32 value) {
    return reinterpret_cast<U32>(value);
  }

  // The code is in the top bits; whatever is below it is ignored.
  C10D_EXT_INLINE static F32 decode(U32 code) {
    constexpr uint32_t kCode = ((1u << (width - 1)) - 1) << (32 - width);
    const U32 sign = code & kSign;
    const U32 magnitude = (code & kCode) >> (8 - exponent_bits);
    const I32 order = reinterpret_cast<I32>(magnitude);
    const U32 normal = magnitude + static_cast<uint32_t>(power(-bias));
    const U32 least = U32{} + static_cast<uint32_t>(power(1 - bias));
    const U32 subnormal = as_bits(as_float(magnitude + least) - as_float(least));
    U32 bits = order < (1 << 23) ? subnormal : normal;
    if constexpr (specials == Specials::Infinities) {
      constexpr uint32_t kToMax = static_cast<uint32_t>(128 + bias - kMaxExponent) << 23;
      bits += reinterpret_cast<U32>(order >= (kMaxExponent << 23)) & kToMax;
    } else if constexpr (specials == Specials::OnlyNaN) {
      constexpr int32_t kNaN = ((1 << (width - 1)) - 1) << kDropped;
      bits |= reinterpret_cast<U32>(order == kNaN) & 0x7fc00000u;
    } else {
      bits |= reinterpret_cast<U32>((code & (kSign | kCode)) == kSign) & 0x7fc00000u;
    }
    return as_float(bits | sign);
  }

  // The code is in the low bits.
  C10D_EXT_INLINE static U32 encode(F32 value, const Reduction& r) {
    constexpr uint32_t kShift = static_cast<uint32_t>(power(1 - bias + kDropped));
    // The first number that becomes infinity or NaN, or the largest one: numbers beyond are taken
    // for it.
    const int32_t limit = specials == Specials::Infinities ? power(kMaxExponent - bias)
                          : specials == Specials::Unsigned ? power(kMaxExponent + 1 - bias)
                          : r.saturate                     ? power(8) + (6 << 20)
                                                           : power(8) + (7 << 20);
    const U32 sign = as_bits(value) & kSign;
    I32 order = reinterpret_cast<I32>(as_bits(value) ^ sign);
    order = order < limit ? order : I32{} + limit;
    const U32 magnitude = reinterpret_cast<U32>(order);
    const U32 subnormal = as_bits(as_float(magnitude) + as_float(U32{} + kShift)) - kShift;
    const U32 odd = magnitude >> kDropped & 1;
    const U32 rounding = odd + ((1u << (kDropped - 1)) - 1) - static_cast<uint32_t>(power(-bias));
    const U32 normal = (magnitude + rounding) >> kDropped;
    U32 code = order < power(1 - bias) ? subnormal : normal;
    if constexpr (specials == Specials::Unsigned) {
      return code | (reinterpret_cast<U32>(code != 0) & (sign >> (32 - width)));
    } else {
      constexpr uint32_t kNaN = width == 8 ? 0x7f : 0x7e00;
      code |= sign >> (32 - width);
      return value == value ? code : U32{} + kNaN;
    }
  }
};

using Float8_e4m3fns = SmallFloats<8, 4, 7, Specials::OnlyNaN>;
using Float8_e4m3fnuzs = SmallFloats<8, 4, 8, Specials::Unsigned>;
using Float8_e5m2s = SmallFloats<8, 5, 15, Specials::Infinities>;
using Float8_e5m2fnuzs = SmallFloats<8, 5, 16, Specials::Unsigned>;
using HalfPairs = SmallFloats<16, 5, 15, Specials::Infinities>;

#if defined(__x86_64__) && C10D_EXT_VECTOR_BYTES >= 32
struct Halves : RealFactor<float> {
  using V = F32;
  static constexpr int kParts = 1;

#if C10D_EXT_VECTOR_BYTES == 32
  using Memory = __m128i;

  C10D_EXT_INLINE static void unpack(Memory memory, V* values) {
    *values = _mm256_cvtph_ps(memory);
  }
  C10D_EXT_INLINE static Memory pack(const V* values, const Reduction&) {
    return _mm256_cvtps_ph(canonical(*values), _MM_FROUND_TO_NEAREST_INT);
  }
#else
  using Memory = __m256i;

  // The variants without a mask make g++ 12 warn of something uninitialized in its own header.
  C10D_EXT_INLINE static void unpack(Memory memory, V* values) {
    *values = _mm512_maskz_cvtph_ps(0xffff, memory);
  }
  C10D_EXT_INLINE static Memory pack(const V* values, const Reduction&) {
    return _mm512_maskz_cvtps_ph(0xffff, canonical(*values), _MM_FROUND_TO_NEAREST_INT);
  }
#endif
};
#elif defined(__aarch64__)
struct Halves : RealFactor<float> {
  using V = F32;
  static constexpr int kParts = 1;
  using Memory = uint16x4_t;

  C10D_EXT_INLINE static void unpack(Memory memory, V* values) {
    *values = reinterpret_cast<F32>(vcvt_f32_f16(vreinterpret_f16_u16(memory)));
  }
  C10D_EXT_INLINE static Memory pack(const V* values, const Reduction&) {
    const auto value = reinterpret_cast<float32x4_t>(canonical(*values));
    return vreinterpret_u16_f16(vcvt_f16_f32(value));
  }
};
#else
using Halves = HalfPairs;
#endif

template <class T>
struct Complexes {
  using Scalar = Complex<T>;
  using V = Complex<T>;
  static constexpr int kParts = 1;
  using Memory = V;

  C10D_EXT_INLINE static void unpack(Memory memory, V* values) {
    *values = memory;
  }
  C10D_EXT_INLINE static Memory pack(const V* values, const Reduction&) {
    return V{canonical(values->real), canonical(values->imaginary)};
  }
  static Scalar factor(const Factor& factor) {
    return {static_cast<T>(factor.real), static_cast<T>(factor.imaginary)};
  }
};

struct ComplexHalves {
  using Scalar = Complex<float>;
  using V = Complex<F32>;
  static constexpr int kParts = 1;
  using Memory = HalfPairs::Memory;

  C10D_EXT_INLINE static void unpack(Memory memory, V* values) {
    F32 parts[2];
    HalfPairs::unpack(memory, parts);
    *values = {parts[0], parts[1]};
  }
  C10D_EXT_INLINE static Memory pack(const V* values, const Reduction& r) {
    const F32 parts[2] = {values->real, values->imaginary};
    return HalfPairs::pack(parts, r);
  }
  static Scalar factor(const Factor& factor) {
    return Complexes<float>::factor(factor);
  }
};

}  // namespace
}  // namespace c10d_ext::kernels::C10D_EXT_ISA
