#include "base/kept_memory.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <string_view>

#include "base/block_cache.h"

// torch's ways to show that uninitialized memory is read.
C10_DECLARE_bool(caffe2_cpu_allocator_do_zero_fill);
C10_DECLARE_bool(caffe2_cpu_allocator_do_junk_fill);

namespace c10d_ext {

namespace {

// Smaller ones are the heap's, which reuses its memory by itself.
constexpr size_t kSmallest = size_t{1} << 20;

size_t physical_memory() {
  const auto pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
  size_t bytes = pages > 0 && page > 0 ? static_cast<size_t>(pages) * static_cast<size_t>(page)
                                       : std::numeric_limits<size_t>::max();
  // What a container may have of it; "max" is no number.
  for (const char* path :
       {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    size_t limit = 0;
    if (std::ifstream(path) >> limit && limit > 0) {
      bytes = std::min(bytes, limit);
    }
  }
  return bytes;
}

class KeptMemory final : public c10::Allocator {
 public:
  // Also of what a tensor's storage becomes: resized, or written after it was cloned lazily.
  c10::DataPtr allocate(size_t bytes) override {
    void* const data = bytes < kSmallest ? nullptr : BlockCache::instance().take(bytes);
    if (data == nullptr) {
      return c10::GetDefaultCPUAllocator()->allocate(bytes);
    }
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, data, &give, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static void give(void* data) {
    c10::profiledCPUMemoryReporter().Delete(data);
    BlockCache::instance().give(data);
  }
};

// Never destroyed: storages outlive what the library owns.
KeptMemory& allocator() {
  static auto* const it = [] {
    BlockCache::instance().set_limit(most_kept());
    return new KeptMemory();
  }();
  return *it;
}

bool shows_what_is_read() {
  const auto& context = at::globalContext();
  return c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator() ||
         (context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory()) ||
         FLAGS_caffe2_cpu_allocator_do_zero_fill || FLAGS_caffe2_cpu_allocator_do_junk_fill;
}

}  // namespace

size_t most_kept() {
  static const size_t bytes = [] {
    constexpr const char* kName = "TORCH_C10D_EXT_RESULT_CACHE";
    constexpr auto kMost = static_cast<size_t>(std::numeric_limits<int64_t>::max());
    const char* setting = std::getenv(kName);
    const std::string_view text = setting != nullptr ? setting : "";
    if (text.empty()) {
      return std::min(size_t{1} << 30, physical_memory() / 16);
    }
    size_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    TORCH_CHECK_VALUE(error == std::errc() && end == text.data() + text.size() && value <= kMost,
                      kName, ": must be a whole number from 0 to ", kMost, ", got '", text, "'");
    return value;
  }();
  return bytes;
}

bool is_kept(c10::IntArrayRef sizes, c10::ScalarType dtype) {
  size_t bytes = c10::elementSize(dtype);
  bool overflows = false;
  for (const int64_t size : sizes) {
    overflows |= size < 0 || __builtin_mul_overflow(bytes, static_cast<size_t>(size), &bytes);
  }
  return most_kept() != 0 && !overflows && bytes >= kSmallest;
}

at::Tensor kept_empty(c10::IntArrayRef sizes, c10::ScalarType dtype) {
  if (!is_kept(sizes, dtype) || shows_what_is_read()) {
    return {};
  }
  return at::detail::empty_generic(sizes, &allocator(), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                   dtype, std::nullopt);
}

at::Tensor scratch(c10::IntArrayRef sizes, const at::TensorOptions& options) {
  at::Tensor kept = kept_empty(sizes, c10::typeMetaToScalarType(options.dtype()));
  return kept.defined() ? kept : at::empty(sizes, options);
}

}  // namespace c10d_ext
