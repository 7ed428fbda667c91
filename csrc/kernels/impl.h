// The kernels, included once for each instruction set by <name>.cpp, which defines
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

#include "kernels/vectors.h"

// With the vectors:
#include "kernels/codecs.h"
#include "kernels/operations.h"

namespace c10d_ext::kernels::C10D_EXT_ISA {
namespace {

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

}  // namespace c10d_ext::kernels::C10D_EXT_ISA
