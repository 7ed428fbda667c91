#include "kernels/kernels.h"

#include <array>
#include <atomic>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include "kernels/isa.h"

namespace c10d_ext::kernels {
namespace {

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

}  // namespace c10d_ext::kernels
