#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

// How calls fail: as the real runtime where it would, by an exception with a name where it would
// not.
namespace simulated_cuda {

// A call, or an argument of one, that is not simulated.
[[noreturn]] inline void not_simulated(const std::string& what) {
  throw std::runtime_error("simulated CUDA: " + what + " is not simulated");
}

// Notes the error for cudaGetLastError and returns it.
cudaError_t failed(cudaError_t error);

// An error of work that was in flight: every later call of this process gets it, as on a device.
void fail_for_good(cudaError_t error, const std::string& why);
cudaError_t standing_error();

}  // namespace simulated_cuda

// What a function of the runtime exports.
#define SIMULATED_CUDA_API extern "C" __attribute__((visibility("default")))
