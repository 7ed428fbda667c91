// The management library, which torch opens by its name for expandable segments: it is there, and
// knows no device.

#include "runtime/fail.h"

#define SIMULATED_NVML_API extern "C" __attribute__((visibility("default")))

namespace {
constexpr int kSuccess = 0;
}

SIMULATED_NVML_API int nvmlInit_v2() {
  return kSuccess;
}

SIMULATED_NVML_API int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  *device = nullptr;
  return kSuccess;
}

// Of the processes on a device, for the error of one without memory.
SIMULATED_NVML_API int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return kSuccess;
}

SIMULATED_NVML_API int nvmlDeviceGetNvLinkRemoteDeviceType() {
  simulated_cuda::not_simulated("nvmlDeviceGetNvLinkRemoteDeviceType");
}

SIMULATED_NVML_API int nvmlDeviceGetNvLinkRemotePciInfo_v2() {
  simulated_cuda::not_simulated("nvmlDeviceGetNvLinkRemotePciInfo_v2");
}

SIMULATED_NVML_API int nvmlSystemGetCudaDriverVersion_v2() {
  simulated_cuda::not_simulated("nvmlSystemGetCudaDriverVersion_v2");
}
