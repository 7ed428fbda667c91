#include "frontend/older_vmap.h"

#include <ATen/LegacyBatchedTensorImpl.h>
#include <ATen/LegacyVmapTransforms.h>

#include <algorithm>

namespace c10d_ext {

std::tuple<int64_t, std::vector<at::Tensor>, std::vector<std::optional<int64_t>>> peel_batch(
    std::vector<at::Tensor> tensors) {
  int64_t level = 0;
  for (const auto& t : tensors) {
    if (const auto* batched = at::maybeGetBatchedImpl(t)) {
      level = std::max(level, batched->bdims().back().level());
    }
  }
  std::vector<std::optional<int64_t>> dims;
  for (auto& t : tensors) {
    const auto* batched = at::maybeGetBatchedImpl(t);
    if (batched == nullptr || batched->bdims().back().level() != level) {
      dims.emplace_back();
      continue;
    }
    // Levels ascend. The dimension counts those of `value` that are left.
    at::BatchDims rest(batched->bdims().begin(), batched->bdims().end() - 1);
    const int64_t place = batched->bdims().back().dim();
    dims.emplace_back(place - std::count_if(rest.begin(), rest.end(),
                                            [&](const auto& each) { return each.dim() < place; }));
    const at::Tensor value = batched->value();
    t = rest.empty() ? value : at::makeBatched(value, std::move(rest));
  }
  return {level, std::move(tensors), std::move(dims)};
}

at::Tensor add_batch(const at::Tensor& t, int64_t level, std::optional<int64_t> dim) {
  return dim ? at::addBatchDim(t, level, *dim) : t;
}

at::Tensor batch_first(const at::Tensor& tangent) {
  if (!at::isBatchedTensor(tangent)) {
    return tangent;
  }
  const auto view = at::MultiBatchVmapTransform::logicalToPhysical(tangent);
  return view.getPhysicalToLogicalMap().apply(view.tensor().contiguous());
}

}  // namespace c10d_ext
