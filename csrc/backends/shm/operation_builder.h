#pragma once

// From requests to operations of the engine: which tensors travel as which parts, what is reduced,
// and what the ranks compare.

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <cstdint>

#include "backends/request.h"
#include "backends/shm/backend.h"
#include "base/group.h"
#include "base/reduction.h"
#include "base/types.h"

namespace c10d_ext {

// Made for each call. Below autograd.
class ShmBackend::OperationBuilder {
 public:
  // Both outlive this. `timeout`: of calls that have none of their own.
  OperationBuilder(const Group& place, const std::atomic<std::chrono::milliseconds>& timeout)
      : place_(place), timeout_(timeout) {}

  // `sources`: the request's, as they are read.
  OperationPtr of(const Call& call, const CollectiveRequest& request, at::TensorList sources) const;
  OperationPtr of(const Call& call, const Message& message) const;
  // One without tensors.
  OperationPtr barrier(const Call& call) const {
    return make(call, OpType::Barrier);
  }
  // For this thread's next call: one that has ended well, if nobody else has it.
  static void recycle(OperationPtr operation);

 private:
  static OperationPtr& spare();
  OperationPtr make(const Call& call, OpType type) const;
  OperationPtr make(const Call& call, OpType type, const Reduction& reduction,
                    c10::ScalarType dtype) const;
  OperationPtr all_reduce(const Call& call, at::TensorList sources, at::TensorList outs,
                          const Reduction& reduction) const;
  OperationPtr reduce_to(const Call& call, const at::Tensor& source, const at::Tensor& out,
                         const Reduction& reduction, int64_t root) const;
  OperationPtr broadcast_from(const Call& call, at::TensorList sources, at::TensorList outs,
                              int64_t root) const;
  OperationPtr move(const Call& call, const CollectiveRequest& request,
                    at::TensorList sources) const;
  OperationPtr all_reduce_sparse(const Call& call, const at::Tensor& tensor,
                                 const Reduction& reduction) const;

  const Group& place_;
  const std::atomic<std::chrono::milliseconds>& timeout_;
};

}  // namespace c10d_ext
