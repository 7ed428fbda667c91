#include "runtime/device.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "runtime/fail.h"
#include "runtime/memory.h"
#include "runtime/virtual_memory.h"

namespace simulated_cuda {

namespace {

constexpr int kVersion = 13000;
constexpr int kProcessors = 8;
constexpr int kThreads = 1024;

const std::vector<int>& visible() {
  static const auto* instance = [] {
    const char* text = std::getenv("SIMULATED_CUDA_DEVICES");
    const int count = text == nullptr ? 4 : std::stoi(text);
    if (count < 0 || count > kMostDevices) {
      not_simulated("SIMULATED_CUDA_DEVICES=" + std::to_string(count));
    }
    auto* devices = new std::vector<int>;
    const char* chosen = std::getenv("CUDA_VISIBLE_DEVICES");
    if (chosen == nullptr) {
      for (int i = 0; i < count; ++i) {
        devices->push_back(i);
      }
      return devices;
    }
    std::istringstream list(chosen);
    for (std::string each; std::getline(list, each, ',');) {
      char* end = nullptr;
      const long index = std::strtol(each.c_str(), &end, 10);
      if (each.empty() || *end != '\0' || index < 0 || index >= count) {
        break;  // as the driver does: the devices before it
      }
      devices->push_back(static_cast<int>(index));
    }
    return devices;
  }();
  return *instance;
}

// The kernels are registered over torch's own, once those are there.
void load_kernels() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD) == nullptr) {
      return;  // a program without torch
    }
    Dl_info info;
    dladdr(reinterpret_cast<void*>(&count_devices), &info);
    std::string file = info.dli_fname;
    file = file.substr(0, file.rfind('/') + 1) + "libsimulated_kernels.so";
    if (dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL) == nullptr) {
      throw std::runtime_error(std::string("simulated CUDA: no kernels: ") + dlerror());
    }
  });
}

}  // namespace

int count_devices() {
  return static_cast<int>(visible().size());
}

int physical_device(int index) {
  return visible().at(index);
}

int& current_device() {
  static thread_local int device = 0;
  return device;
}

}  // namespace simulated_cuda

using namespace simulated_cuda;

// For libnccl.
SIMULATED_CUDA_API int simulated_cuda_physical_device() {
  return physical_device(current_device());
}

SIMULATED_CUDA_API cudaError_t cudaGetDeviceCount(int* count) {
  load_kernels();
  *count = count_devices();
  return *count == 0 ? failed(cudaErrorNoDevice) : cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= count_devices()) {
    return failed(cudaErrorInvalidDevice);
  }
  current_device() = device;
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaDriverGetVersion(int* version) {
  *version = kVersion;
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = kVersion;
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int device) {
  if (device < 0 || device >= count_devices()) {
    return failed(cudaErrorInvalidDevice);
  }
  std::memset(out, 0, sizeof *out);
  std::snprintf(out->name, sizeof out->name, "Simulated CUDA device");
  std::snprintf(out->uuid.bytes, sizeof out->uuid.bytes, "simulated %d", physical_device(device));
  out->totalGlobalMem = device_memory();
  out->sharedMemPerBlock = 48 << 10;
  out->sharedMemPerBlockOptin = 227 << 10;
  out->sharedMemPerMultiprocessor = 228 << 10;
  out->regsPerBlock = out->regsPerMultiprocessor = 65536;
  out->warpSize = 32;
  out->maxThreadsPerBlock = kThreads;
  out->maxThreadsPerMultiProcessor = 2 * kThreads;
  out->maxThreadsDim[0] = out->maxThreadsDim[1] = kThreads;
  out->maxThreadsDim[2] = 64;
  out->maxGridSize[0] = 0x7fffffff;
  out->maxGridSize[1] = out->maxGridSize[2] = 65535;
  out->major = 9;
  out->multiProcessorCount = kProcessors;
  out->concurrentKernels = 1;
  out->unifiedAddressing = 1;
  out->streamPrioritiesSupported = 1;
  out->canMapHostMemory = 1;
  out->l2CacheSize = 1 << 20;
  out->pciBusID = physical_device(device) + 1;
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  std::snprintf(text, size, "0000:%02x:00.0", physical_device(device) + 1);
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = kProcessors;
      return cudaSuccess;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = kThreads;
      return cudaSuccess;
    case cudaDevAttrWarpSize:
      *value = 32;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
    case cudaDevAttrMemoryPoolsSupported:
      *value = 0;
      return cudaSuccess;
    default:
      not_simulated("the device attribute " + std::to_string(attribute));
  }
}

SIMULATED_CUDA_API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer;
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaProfilerStart() {
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaProfilerStop() {
  return cudaSuccess;
}

// torch does without the driver's functions that are not in virtual_memory.cpp.
SIMULATED_CUDA_API cudaError_t
cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                 cudaDriverEntryPointQueryResult* status) {
  *function = driver_function(name);
  if (status != nullptr) {
    *status =
        *function == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  }
  return cudaSuccess;
}
