#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "backends/adapter/adapter.h"
#include "backends/request.h"
#include "work/pending.h"

// Collectives over a backend of others: what it cannot do is made of what it can.
namespace c10d_ext::lowering {

// Reads the sources and begins at once. Needs all_to_all_single for what nothing else gives: a
// backend that has that alone has every collective.
Started start(const Adapter& adapter, const HeldRequest& request);

// One rank alone: its own values, times the factor.
void run_alone(const CollectiveRequest& request);

// A dense tensor to receive `out`'s data in, and the copy into `out` where they differ.
std::pair<at::Tensor, Finish> landing(const at::Tensor& out);

}  // namespace c10d_ext::lowering
