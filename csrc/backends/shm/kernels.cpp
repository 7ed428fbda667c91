#include "backends/shm/kernels.h"

#include <array>
#include <atomic>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include "backends/shm/kernels_isa.h"

namespace c10d_ext::shm {
namespace {

enum class Kind : uint8_t { Bool, Integer, Floating, Complex, Opaque };

struct DTypeInfo {
  std::string_view name;
  size_t size;
  Kind kind;
};

// In the order of the enumerators.
constexpr std::array kDTypes{
    DTypeInfo{"bool", 1, Kind::Bool},
    DTypeInfo{"uint8", 1, Kind::Integer},
    DTypeInfo{"int8", 1, Kind::Integer},
    DTypeInfo{"int16", 2, Kind::Integer},
    DTypeInfo{"uint16", 2, Kind::Integer},
    DTypeInfo{"int32", 4, Kind::Integer},
    DTypeInfo{"uint32", 4, Kind::Integer},
    DTypeInfo{"int64", 8, Kind::Integer},
    DTypeInfo{"uint64", 8, Kind::Integer},
    DTypeInfo{"float16", 2, Kind::Floating},
    DTypeInfo{"bfloat16", 2, Kind::Floating},
    DTypeInfo{"float32", 4, Kind::Floating},
    DTypeInfo{"float64", 8, Kind::Floating},
    DTypeInfo{"complex32", 4, Kind::Complex},
    DTypeInfo{"complex64", 8, Kind::Complex},
    DTypeInfo{"complex128", 16, Kind::Complex},
    DTypeInfo{"float8_e4m3fn", 1, Kind::Floating},
    DTypeInfo{"float8_e4m3fnuz", 1, Kind::Floating},
    DTypeInfo{"float8_e5m2", 1, Kind::Floating},
    DTypeInfo{"float8_e5m2fnuz", 1, Kind::Floating},
    DTypeInfo{"bytes", 1, Kind::Opaque},
};
static_assert(kDTypes.size() == static_cast<size_t>(DType::Bytes) + 1);

constexpr std::array<std::string_view, 10> kReduceOps{
    "sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum", "none"};
static_assert(kReduceOps.size() == static_cast<size_t>(ReduceOp::None) + 1);

const DTypeInfo& info(DType dtype) {
  return kDTypes[static_cast<size_t>(dtype)];
}

// Rounding to nearest, subnormals kept: what a thread may have switched off (flush to zero) must
// not make its results differ from those of other ranks and threads.
class DefaultFloatingPoint {
 public:
  DefaultFloatingPoint() : before_(get()) {
    if (before_ & kChanges) {
      set(before_ & ~kChanges);
    }
  }
  ~DefaultFloatingPoint() {
    if (before_ & kChanges) {
      set(before_);
    }
  }
  DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
  DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;

 private:
#if defined(__x86_64__)
  using Control = unsigned;
  static constexpr Control kChanges = _MM_FLUSH_ZERO_MASK | _MM_ROUND_MASK | 0x40;  // 0x40: DAZ
  static Control get() {
    return _mm_getcsr();
  }
  static void set(Control control) {
    _mm_setcsr(control);
  }
#elif defined(__aarch64__)
  using Control = uint64_t;
  static constexpr Control kChanges = 0x3 << 22 | 1 << 24 | 1 << 25;  // RMode, FZ, DN
  static Control get() {
    Control control;
    asm volatile("mrs %0, fpcr" : "=r"(control));
    return control;
  }
  static void set(Control control) {
    asm volatile("msr fpcr, %0" ::"r"(control));
  }
#else
  using Control = unsigned;
  static constexpr Control kChanges = 0;
  static Control get() {
    return 0;
  }
  static void set(Control) {}
#endif
  const Control before_;
};

#if defined(__x86_64__)
// Older compilers do not know this one in __builtin_cpu_supports().
bool has_f16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
#endif

struct Available {
  std::array<const InstructionSet*, 3> sets;
  size_t count = 0;

  Available() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && has_f16c();
    if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      sets[count++] = &avx512::instruction_set;
    }
    if (has_avx2) {
      sets[count++] = &avx2::instruction_set;
    }
#endif
    sets[count++] = &baseline::instruction_set;
  }
};

std::atomic<const InstructionSet*> used = nullptr;

const InstructionSet& current() {
  const InstructionSet* set = used.load(std::memory_order_relaxed);
  if (!set) {
    set = instruction_sets().front();
    used.store(set, std::memory_order_relaxed);
  }
  return *set;
}

std::atomic<bool> e4m3fn_saturates = true;

}  // namespace

size_t size_of(DType dtype) {
  return info(dtype).size;
}

std::string_view name_of(DType dtype) {
  return info(dtype).name;
}

std::string_view name_of(ReduceOp op) {
  return kReduceOps[static_cast<size_t>(op)];
}

bool has_meaning(ReduceOp op, DType dtype) {
  const Kind kind = info(dtype).kind;
  if (kind == Kind::Opaque) {
    return false;
  }
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Product:
      return true;
    case ReduceOp::Avg:
      return kind == Kind::Floating || kind == Kind::Complex;
    case ReduceOp::Min:
    case ReduceOp::Max:
      return kind != Kind::Complex;
    case ReduceOp::Band:
    case ReduceOp::Bor:
    case ReduceOp::Bxor:
      return kind == Kind::Integer || kind == Kind::Bool;
    case ReduceOp::PremulSum:
      return kind != Kind::Bool;
    case ReduceOp::None:
      return false;
  }
  return false;
}

void set_float8_e4m3fn_saturates(bool saturates) {
  e4m3fn_saturates.store(saturates, std::memory_order_relaxed);
}

void reduce(DType dtype, ReduceOp op, void* out, void* also, const void* const* sources, int n,
            size_t count, const Factor* factors, bool streaming) {
  if (!has_meaning(op, dtype)) {
    throw std::invalid_argument(std::string(name_of(op)) + " has no meaning for " +
                                std::string(name_of(dtype)));
  }
  const DefaultFloatingPoint guard;
  current().reduce({
      .dtype = dtype,
      .op = op,
      .out = static_cast<char*>(out),
      .also = static_cast<char*>(also),
      .sources = reinterpret_cast<const char* const*>(sources),
      .n = n,
      .bytes = count * size_of(dtype),
      .factors = factors,
      .saturate = e4m3fn_saturates.load(std::memory_order_relaxed),
      .streaming = streaming && reinterpret_cast<uintptr_t>(out) % size_of(dtype) == 0,
  });
}

void copy(void* to, const void* from, size_t bytes, bool streaming) {
  // Nothing may come without an address, which memcpy does not allow.
  if (bytes == 0) {
    return;
  }
  const InstructionSet& set = current();
  const auto function = streaming ? set.copy_streaming : set.copy;
  function(static_cast<char*>(to), static_cast<const char*>(from), bytes);
}

std::string_view instruction_set() {
  return current().name;
}

std::span<const InstructionSet* const> instruction_sets() {
  static const Available available;
  return {available.sets.data(), available.count};
}

void use(const InstructionSet& instruction_set) {
  used.store(&instruction_set, std::memory_order_relaxed);
}

}  // namespace c10d_ext::shm
