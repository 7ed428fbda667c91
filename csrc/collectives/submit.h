#pragma once

#include "backends/request.h"
#include "base/group.h"

namespace c10d_ext {

// Starts a collective on the backend of its tensors' device and attaches it to the storages that it
// writes (see work/pending.h), whatever the dtype, reduce op, stride and size: what a backend
// cannot do, or does wrongly, is made of what it can (backends/adapter/lowering.h).
//
// Meta tensors start nothing, so that one kernel serves real and fake tensors; neither does a
// collective without data. A group of one rank is answered here.
void submit(const Group& group, const CollectiveRequest& request);

}  // namespace c10d_ext
