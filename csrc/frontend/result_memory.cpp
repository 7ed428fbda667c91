#include "frontend/result_memory.h"

#include <ATen/ops/empty.h>

#include "base/block_cache.h"
#include "base/kept_memory.h"
#include "base/memory.h"
#include "frontend/dispatch_state.h"

namespace c10d_ext {

namespace {

bool has_plain_memory(const at::Tensor& like) {
  return like.is_cpu() && like.layout() == c10::kStrided && !like.is_quantized() &&
         !is_traced(like);
}

}  // namespace

at::Tensor empty_result(c10::SymIntArrayRef sizes, const at::Tensor& like) {
  const auto concrete = c10::asIntArrayRefSlowOpt(sizes);
  // The setting first: one that makes no sense is told whatever the result is.
  if (most_kept() != 0 && concrete && is_kept(*concrete, like.scalar_type()) &&
      has_plain_memory(like)) {
    if (at::Tensor kept = kept_empty(*concrete, like.scalar_type()); kept.defined()) {
      return kept;
    }
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
