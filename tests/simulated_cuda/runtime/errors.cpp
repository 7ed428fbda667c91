#include <atomic>
#include <cstdio>

#include "runtime/fail.h"

namespace simulated_cuda {

namespace {
thread_local cudaError_t last = cudaSuccess;
std::atomic<cudaError_t> standing{cudaSuccess};
}  // namespace

cudaError_t failed(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) {
    last = error;
  }
  return error;
}

void fail_for_good(cudaError_t error, const std::string& why) {
  std::fprintf(stderr, "simulated CUDA: %s\n", why.c_str());
  standing = error;
}

cudaError_t standing_error() {
  return standing;
}

}  // namespace simulated_cuda

using namespace simulated_cuda;

SIMULATED_CUDA_API cudaError_t cudaGetLastError() {
  const cudaError_t error = standing_error() != cudaSuccess ? standing_error() : last;
  last = cudaSuccess;
  return error;
}

SIMULATED_CUDA_API cudaError_t cudaPeekAtLastError() {
  return standing_error() != cudaSuccess ? standing_error() : last;
}

#define NAMED(error, text) \
  case error:              \
    return is_name ? #error : text

static const char* describe(cudaError_t error, bool is_name) {
  switch (error) {
    NAMED(cudaSuccess, "no error");
    NAMED(cudaErrorInvalidValue, "invalid argument");
    NAMED(cudaErrorMemoryAllocation, "out of memory");
    NAMED(cudaErrorInvalidDevice, "invalid device ordinal");
    NAMED(cudaErrorInvalidResourceHandle, "invalid resource handle");
    NAMED(cudaErrorNotReady, "device not ready");
    NAMED(cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled");
    NAMED(cudaErrorAssert, "device-side assert triggered");
    NAMED(cudaErrorLaunchFailure, "unspecified launch failure");
    NAMED(cudaErrorNotSupported, "operation not supported");
    NAMED(cudaErrorHostMemoryAlreadyRegistered,
          "part or all of the requested memory range is already mapped");
    NAMED(cudaErrorHostMemoryNotRegistered,
          "pointer does not correspond to a registered memory region");
    NAMED(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing");
    NAMED(cudaErrorStreamCaptureInvalidated,
          "operation failed due to a previous error during capture");
    NAMED(cudaErrorStreamCaptureMerge, "operation would result in a merge of separate captures");
    NAMED(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began");
    NAMED(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work");
    NAMED(cudaErrorStreamCaptureIsolation,
          "dependency created on uncaptured work in another stream");
    NAMED(cudaErrorStreamCaptureImplicit,
          "operation would make the legacy stream depend on a capturing blocking stream");
    NAMED(cudaErrorCapturedEvent,
          "operation not permitted on an event last recorded in a capturing stream");
    NAMED(cudaErrorStreamCaptureWrongThread,
          "attempt to terminate a thread-local capture sequence from another thread");
    default:
      return is_name ? "cudaErrorUnknown" : "unknown error";
  }
}

SIMULATED_CUDA_API const char* cudaGetErrorName(cudaError_t error) {
  return describe(error, true);
}

SIMULATED_CUDA_API const char* cudaGetErrorString(cudaError_t error) {
  return describe(error, false);
}
