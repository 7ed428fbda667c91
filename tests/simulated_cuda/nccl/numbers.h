#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "nccl/abi.h"

// Reductions of every dtype, element by element in rank order; half types by way of float32.
namespace simulated_nccl {

size_t size_of(ncclDataType_t dtype);

struct Reducer {
  ncclRedOp_t op = ncclSum;
  double factor = 1;  // of a PreMulSum
  int ranks = 1;

  // `rows` are the ranks' values, in rank order, PreMulSum's already multiplied.
  void reduce(const std::vector<const void*>& rows, void* out, size_t count,
              ncclDataType_t dtype) const;
};

// This rank's values times its factor.
void multiply(void* values, size_t count, ncclDataType_t dtype, double factor);

}  // namespace simulated_nccl
