#pragma once

// Collectives of mpi, as messages of the library.

#include <ATen/core/Tensor.h>

#include <memory>

#include "backends/mpi/communicators.h"
#include "backends/process_group/inner_backend.h"

namespace c10d_ext::mpi {

using CommsPtr = std::shared_ptr<const Communicators>;

// Each starts and returns; `work` is ended once it is over, or has failed.
using Begin = void(const CommsPtr& comms, const WorkPtr& work, const InnerCollective& what);
extern const InnerTable<Begin> kCollectives;

// Of a sparse tensor, which becomes the sum.
void all_reduce_sparse(const CommsPtr& comms, const WorkPtr& work, const at::Tensor& tensor);

}  // namespace c10d_ext::mpi
