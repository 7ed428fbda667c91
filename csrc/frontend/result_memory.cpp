#include "frontend/result_memory.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <string_view>

#include "base/block_cache.h"
#include "base/memory.h"
#include "frontend/dispatch_state.h"

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

// Bytes kept idle at most, 0 where every result is at::empty's.
size_t limit() {
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

class ResultAllocator final : public c10::Allocator {
 public:
  // Also of what a result's storage becomes: resized, or written after it was cloned lazily.
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
ResultAllocator& allocator() {
  static auto* const it = [] {
    BlockCache::instance().set_limit(limit());
    return new ResultAllocator();
  }();
  return *it;
}

bool is_large(c10::IntArrayRef sizes, size_t itemsize) {
  size_t bytes = itemsize;
  bool overflows = false;
  for (const int64_t size : sizes) {
    overflows |= size < 0 || __builtin_mul_overflow(bytes, static_cast<size_t>(size), &bytes);
  }
  return !overflows && bytes >= kSmallest;
}

bool has_plain_memory(const at::Tensor& like) {
  const auto& context = at::globalContext();
  return like.is_cpu() && like.layout() == c10::kStrided && !like.is_quantized() &&
         !is_traced(like) && c10::GetCPUAllocator() == c10::GetDefaultCPUAllocator() &&
         !(context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory()) &&
         !FLAGS_caffe2_cpu_allocator_do_zero_fill && !FLAGS_caffe2_cpu_allocator_do_junk_fill;
}

}  // namespace

at::Tensor empty_result(c10::SymIntArrayRef sizes, const at::Tensor& like) {
  const auto concrete = c10::asIntArrayRefSlowOpt(sizes);
  if (limit() != 0 && concrete && is_large(*concrete, like.itemsize()) && has_plain_memory(like)) {
    return at::Tensor(at::detail::empty_generic(*concrete, &allocator(),
                                                c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                like.scalar_type(), std::nullopt));
  }
  at::Tensor fresh =
      at::empty_symint(sizes, like.options().memory_format(at::MemoryFormat::Contiguous));
  prefer_huge_pages(fresh);
  return fresh;
}

size_t idle_result_bytes() {
  return BlockCache::instance().idle_bytes();
}

void release_idle_results() {
  BlockCache::instance().release();
}

}  // namespace c10d_ext
