#include <cuda.h>

#include "runtime/fail.h"

// The little that torch asks of the driver itself. Every device has a context from the start.

SIMULATED_CUDA_API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

SIMULATED_CUDA_API CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "an error of the simulated driver";
  return CUDA_SUCCESS;
}
