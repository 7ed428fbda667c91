// The kernels, included once for each instruction set by kernels_<name>.cpp, which defines
//   C10D_EXT_ISA           its namespace and name
//   C10D_EXT_VECTOR_BYTES  the width of its registers
// Vectors are GCC's vector extensions, so that one text serves all instruction sets and each of
// them does the same arithmetic. Nothing in here calls an inline function of a header.

#if defined(__clang__)
#define C10D_EXT_UNROLL _Pragma("unroll")
#pragma clang fp contract(off)
#else
#define C10D_EXT_UNROLL _Pragma("GCC unroll 16")
// A fused multiply-add would give other bits than the instruction sets without it. What the
// vectorizer of straight-line code takes for a product of complex numbers it fuses all the same.
#pragma GCC optimize("fp-contract=off", "no-tree-slp-vectorize")
#endif
#define C10D_EXT_INLINE [[gnu::always_inline]] inline
#define C10D_EXT_STRING_(x) #x
#define C10D_EXT_STRING(x) C10D_EXT_STRING_(x)

namespace c10d_ext::shm::C10D_EXT_ISA {
namespace {

constexpr size_t kVectorBytes = C10D_EXT_VECTOR_BYTES;

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using Vector = typename VectorOf<T>::type;

using F32 = Vector<float>;
using U32 = Vector<uint32_t>;
using I32 = Vector<int32_t>;

template <class T>
C10D_EXT_INLINE T read(const char* from) {
  T value;
  __builtin_memcpy(&value, from, sizeof(T));
  return value;
}

template <class T>
C10D_EXT_INLINE void write(char* to, const T& value) {
  __builtin_memcpy(to, &value, sizeof(T));
}

// A store around the caches: whole lines go to memory without being read first and without pushing
// anything out. `to` is aligned to T's size.
template <class T>
C10D_EXT_INLINE void write_around(char* to, const T& value) {
#if defined(__x86_64__)
  if constexpr (!std::is_class_v<T> && sizeof(T) == 16) {
    return _mm_stream_si128(reinterpret_cast<__m128i*>(to), reinterpret_cast<__m128i>(value));
  }
#if C10D_EXT_VECTOR_BYTES >= 32
  if constexpr (!std::is_class_v<T> && sizeof(T) == 32) {
    return _mm256_stream_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(value));
  }
#endif
#if C10D_EXT_VECTOR_BYTES >= 64
  if constexpr (!std::is_class_v<T> && sizeof(T) == 64) {
    return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), reinterpret_cast<__m512i>(value));
  }
#endif
#endif
  write(to, value);
}

// Such stores are not ordered with the ones that will tell others of this data.
C10D_EXT_INLINE void fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

constexpr size_t kLine = 64;

// The bytes before the first cache line that begins at or after `at`.
C10D_EXT_INLINE size_t before_line(const char* at) {
  return -reinterpret_cast<uintptr_t>(at) % kLine;
}

// Which NaN comes out of arithmetic depends on the order of the operands, which the compiler may
// choose: every result that is a NaN becomes this one.
template <class V>
C10D_EXT_INLINE V canonical(V value) {
  return value == value ? value : V{} + __builtin_nanf("");
}

template <class V>
struct Complex {
  V real;
  V imaginary;
};

template <class V>
C10D_EXT_INLINE Complex<V> operator+(Complex<V> a, Complex<V> b) {
  return {a.real + b.real, a.imaginary + b.imaginary};
}

template <class V, class W>
C10D_EXT_INLINE Complex<V> operator*(Complex<V> a, Complex<W> b) {
  return {a.real * b.real - a.imaginary * b.imaginary, a.real * b.imaginary + a.imaginary * b.real};
}

// ---- Codecs: between memory and what is computed with ------------------------------------------
//
// unpack() turns a Memory, bytes as they lie there, into kParts values of type V, and pack() turns
// them back. Scalar is what one element of V is, for factors.

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

// ---- Operations ---------------------------------------------------------------------------------

template <class Codec>
struct Operation {
  using V = typename Codec::V;
  // A copy, which no store through a char* can change: it stays in registers.
  const Reduction r;

  C10D_EXT_INLINE V first(V x) const {
    return x;
  }
  C10D_EXT_INLINE V last(V total) const {
    return total;
  }
};

template <class Codec>
struct Sum : Operation<Codec> {
  using V = typename Codec::V;
  C10D_EXT_INLINE V next(V total, V x, int) const {
    return total + x;
  }
};

template <class Codec>
struct Avg : Sum<Codec> {
  using V = typename Codec::V;
  C10D_EXT_INLINE V last(V total) const {
    return total / static_cast<typename Codec::Scalar>(this->r.n);
  }
};

template <class Codec>
struct PremulSum : Operation<Codec> {
  using V = typename Codec::V;
  C10D_EXT_INLINE V first(V x) const {
    return x * Codec::factor(this->r.factors[0]);
  }
  C10D_EXT_INLINE V next(V total, V x, int rank) const {
    return total + x * Codec::factor(this->r.factors[rank]);
  }
};

template <class Codec>
struct Product : Operation<Codec> {
  using V = typename Codec::V;
  C10D_EXT_INLINE V next(V total, V x, int) const {
    return total * x;
  }
};

// Where either is a NaN neither `<` holds, so x is taken: right when x is the NaN.
template <class Codec>
struct Min : Operation<Codec> {
  using V = typename Codec::V;
  C10D_EXT_INLINE V next(V total, V x, int) const {
    const V least = total < x ? total : x;
    return total == total ? least : total;
  }
};

template <class Codec>
struct Max : Operation<Codec> {
  using V = typename Codec::V;
  C10D_EXT_INLINE V next(V total, V x, int) const {
    const V greatest = total > x ? total : x;
    return total == total ? greatest : total;
  }
};

template <class Codec>
struct Band : Operation<Codec> {
  using V = typename Codec::V;
  C10D_EXT_INLINE V next(V total, V x, int) const {
    return total & x;
  }
};

template <class Codec>
struct Bor : Operation<Codec> {
  using V = typename Codec::V;
  C10D_EXT_INLINE V next(V total, V x, int) const {
    return total | x;
  }
};

template <class Codec>
struct Bxor : Operation<Codec> {
  using V = typename Codec::V;
  C10D_EXT_INLINE V next(V total, V x, int) const {
    return total ^ x;
  }
};

// ---- Loops --------------------------------------------------------------------------------------

// Reduces `steps` Memories' worth of bytes of `n` sources at `at`, or, when `partial`, the last
// `bytes`, which are fewer than one. Everything is read before anything is written, as `out` may be
// a source.
template <int steps, bool partial, class Codec, template <class> class Op>
C10D_EXT_INLINE void reduce_at(const Op<Codec>& op, const char* const* sources, int n, size_t at,
                               bool around, size_t bytes = 0) {
  using V = typename Codec::V;
  using Memory = typename Codec::Memory;
  constexpr int kParts = Codec::kParts;
  constexpr int kValues = steps * kParts;
  const Reduction& r = op.r;

  const auto load = [&](int rank, V* values) {
    const char* from = sources[rank] + at;
    if constexpr (partial) {
      Memory memory{};
      __builtin_memcpy(&memory, from, bytes);
      Codec::unpack(memory, values);
    } else {
      C10D_EXT_UNROLL
      for (int s = 0; s < steps; ++s) {
        Codec::unpack(read<Memory>(from + s * sizeof(Memory)), values + s * kParts);
      }
    }
  };

  V total[kValues];
  load(0, total);
  C10D_EXT_UNROLL
  for (int v = 0; v < kValues; ++v) {
    total[v] = op.first(total[v]);
  }
  for (int rank = 1; rank < n; ++rank) {
    V x[kValues];
    load(rank, x);
    C10D_EXT_UNROLL
    for (int v = 0; v < kValues; ++v) {
      total[v] = op.next(total[v], x[v], rank);
    }
  }
  C10D_EXT_UNROLL
  for (int v = 0; v < kValues; ++v) {
    total[v] = op.last(total[v]);
  }
  C10D_EXT_UNROLL
  for (int s = 0; s < steps; ++s) {
    const Memory memory = Codec::pack(total + s * kParts, r);
    const size_t here = at + s * sizeof(Memory);
    const size_t size = partial ? bytes : sizeof(Memory);
    if (r.also) {
      __builtin_memcpy(r.also + here, &memory, size);
    }
    if (around) {
      write_around(r.out + here, memory);
    } else {
      __builtin_memcpy(r.out + here, &memory, size);
    }
  }
}

// [at, end), which is not much. Not inlined: it is called twice.
template <class Codec, template <class> class Op>
[[gnu::noinline]] void reduce_few(const Reduction& r, size_t at, size_t end) {
  constexpr size_t kBytes = sizeof(typename Codec::Memory);
  const Op<Codec> op{{r}};
  for (; at < end; at += kBytes) {
    const size_t rest = end - at;
    reduce_at<1, true, Codec, Op>(op, r.sources, r.n, at, false, rest < kBytes ? rest : kBytes);
  }
}

template <class Codec, template <class> class Op>
void run(const Reduction& r) {
  constexpr int kSteps = Codec::kParts < 4 ? 4 / Codec::kParts : 1;
  constexpr size_t kBlock = kSteps * sizeof(typename Codec::Memory);
  const Op<Codec> op{{r}};
  const bool around = r.streaming && r.bytes >= kLine;
  size_t at = 0;
  if (around) {
    at = before_line(r.out);
    reduce_few<Codec, Op>(r, 0, at);
  }
  if (op.r.n == 2 && op.r.also == nullptr && !around) {
    // The case that counts: as few instructions as it takes, so that as many lines of the cache
    // as the core can wait for are under way.
    const char* const sources[] = {r.sources[0], r.sources[1]};
    for (; op.r.bytes - at >= kBlock; at += kBlock) {
      reduce_at<kSteps, false, Codec, Op>(op, sources, 2, at, false);
    }
  } else {
    for (; op.r.bytes - at >= kBlock; at += kBlock) {
      reduce_at<kSteps, false, Codec, Op>(op, op.r.sources, op.r.n, at, around);
    }
  }
  reduce_few<Codec, Op>(r, at, r.bytes);
  if (around) {
    fence();
  }
}

// ---- Which of them ------------------------------------------------------------------------------

[[noreturn]] void no_such_reduction() {
  __builtin_trap();  // reduce() has asked has_meaning()
}

// Sums, products and bits are the same for signed and unsigned numbers.
template <class T>
void reduce_integers(const Reduction& r) {
  using Unsigned = Integers<std::make_unsigned_t<T>>;
  using Words = Integers<uint64_t>;
  switch (r.op) {
    case ReduceOp::Sum:
      return run<Unsigned, Sum>(r);
    case ReduceOp::Product:
      return run<Unsigned, Product>(r);
    case ReduceOp::Min:
      return run<Integers<T>, Min>(r);
    case ReduceOp::Max:
      return run<Integers<T>, Max>(r);
    case ReduceOp::Band:
      return run<Words, Band>(r);
    case ReduceOp::Bor:
      return run<Words, Bor>(r);
    case ReduceOp::Bxor:
      return run<Words, Bxor>(r);
    case ReduceOp::PremulSum:
      return run<Unsigned, PremulSum>(r);
    default:
      no_such_reduction();
  }
}

void reduce_bools(const Reduction& r) {
  switch (r.op) {
    case ReduceOp::Sum:
    case ReduceOp::Max:
    case ReduceOp::Bor:
      return run<Bools, Bor>(r);
    case ReduceOp::Product:
    case ReduceOp::Min:
    case ReduceOp::Band:
      return run<Bools, Band>(r);
    case ReduceOp::Bxor:
      return run<Bools, Bxor>(r);
    default:
      no_such_reduction();
  }
}

template <class Codec>
void reduce_floats(const Reduction& r) {
  switch (r.op) {
    case ReduceOp::Sum:
      return run<Codec, Sum>(r);
    case ReduceOp::Avg:
      return run<Codec, Avg>(r);
    case ReduceOp::Product:
      return run<Codec, Product>(r);
    case ReduceOp::Min:
      return run<Codec, Min>(r);
    case ReduceOp::Max:
      return run<Codec, Max>(r);
    case ReduceOp::PremulSum:
      return run<Codec, PremulSum>(r);
    default:
      no_such_reduction();
  }
}

template <class Codec, class Parts>
void reduce_complex(const Reduction& r) {
  switch (r.op) {
    case ReduceOp::Sum:
      return run<Parts, Sum>(r);
    case ReduceOp::Avg:
      return run<Parts, Avg>(r);
    case ReduceOp::Product:
      return run<Codec, Product>(r);
    case ReduceOp::PremulSum:
      return run<Codec, PremulSum>(r);
    default:
      no_such_reduction();
  }
}

void reduce(const Reduction& r) {
  switch (r.dtype) {
    case DType::Bool:
      return reduce_bools(r);
    case DType::UInt8:
      return reduce_integers<uint8_t>(r);
    case DType::Int8:
      return reduce_integers<int8_t>(r);
    case DType::Int16:
      return reduce_integers<int16_t>(r);
    case DType::UInt16:
      return reduce_integers<uint16_t>(r);
    case DType::Int32:
      return reduce_integers<int32_t>(r);
    case DType::UInt32:
      return reduce_integers<uint32_t>(r);
    case DType::Int64:
      return reduce_integers<int64_t>(r);
    case DType::UInt64:
      return reduce_integers<uint64_t>(r);
    case DType::Half:
      return reduce_floats<Halves>(r);
    case DType::BFloat16:
      return reduce_floats<BFloat16s>(r);
    case DType::Float:
      return reduce_floats<Floats<float>>(r);
    case DType::Double:
      return reduce_floats<Floats<double>>(r);
    case DType::ComplexHalf:
      return reduce_complex<ComplexHalves, Halves>(r);
    case DType::ComplexFloat:
      return reduce_complex<Complexes<float>, Floats<float>>(r);
    case DType::ComplexDouble:
      return reduce_complex<Complexes<double>, Floats<double>>(r);
    case DType::Float8_e4m3fn:
      return reduce_floats<Float8_e4m3fns>(r);
    case DType::Float8_e4m3fnuz:
      return reduce_floats<Float8_e4m3fnuzs>(r);
    case DType::Float8_e5m2:
      return reduce_floats<Float8_e5m2s>(r);
    case DType::Float8_e5m2fnuz:
      return reduce_floats<Float8_e5m2fnuzs>(r);
    case DType::Bytes:
      no_such_reduction();
  }
}

// ---- Copies -------------------------------------------------------------------------------------

template <bool around>
void copy(char* to, const char* from, size_t bytes) {
#if defined(__x86_64__)
  // glibc's memcpy of this size is `rep movsb`, which on AMD's Zen 3 drops to a fifth of the speed
  // where the addresses differ modulo 32.
  constexpr size_t kLarge = 4096;
  if (bytes >= kLarge) {
    using Block = Vector<char>[4 * kLine / kVectorBytes];
    size_t at = before_line(to);
    __builtin_memcpy(to, from, at);
    for (; bytes - at >= sizeof(Block); at += sizeof(Block)) {
      Block block;
      C10D_EXT_UNROLL
      for (size_t v = 0; v < sizeof(Block) / kVectorBytes; ++v) {
        block[v] = read<Vector<char>>(from + at + v * kVectorBytes);
      }
      C10D_EXT_UNROLL
      for (size_t v = 0; v < sizeof(Block) / kVectorBytes; ++v) {
        char* const place = to + at + v * kVectorBytes;
        around ? write_around(place, block[v]) : write(place, block[v]);
      }
    }
    __builtin_memcpy(to + at, from + at, bytes - at);
    if (around) {
      fence();
    }
    return;
  }
#endif
  __builtin_memcpy(to, from, bytes);
}

}  // namespace

extern const InstructionSet instruction_set{C10D_EXT_STRING(C10D_EXT_ISA), reduce, copy<false>,
                                            copy<true>};

}  // namespace c10d_ext::shm::C10D_EXT_ISA
