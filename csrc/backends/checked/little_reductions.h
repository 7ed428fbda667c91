#pragma once

// All_reduces and reduce_scatters of little data, as they travel with the calls, without the
// tensors that lowering makes on the way: these are a tenth of what one takes.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>

#include "backends/checked/contribution.h"
#include "backends/checked/piggyback.h"
#include "backends/request.h"
#include "base/group.h"

namespace c10d_ext {

// Throws where the data that came is not of the size that this rank expects.
void check_size(bool fits);
size_t bytes_of_all(at::TensorList tensors);

// Of so many bytes of all ranks together an exchange is told to each rank as a whole, which takes
// less than to cut it for each.
inline constexpr size_t kMostUncut = 4096;

// How leaders reduce a request's values, an average as a sum; none where there are no leaders, or
// they do not.
std::optional<ReducedBy> reduced_by_leaders(const HeldRequest& request, const Little& little);

// None where lowering is to make it.
std::optional<Piggyback> piggyback_of_reduction(const HeldRequest& request, const Group& group,
                                                const Little& little);

}  // namespace c10d_ext
