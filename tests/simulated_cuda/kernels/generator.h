#pragma once

#include <ATen/core/Generator.h>

#include <mutex>

namespace simulated_cuda {

// A generator of the CPU in place of a device's. Not the one that torch.cuda.manual_seed seeds.
at::Generator generator_of(int device);

// Kernels that draw numbers take turns.
std::unique_lock<std::mutex> lock_generators();

}  // namespace simulated_cuda
