#include <cuda_runtime_api.h>
#include <cxxabi.h>

#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "runtime/fail.h"
#include "runtime/stream.h"

// Kernels that torch launches itself, found by the names they are registered with. Those behind
// aten's ops never come here (kernels/); what does, and is not known, fails by its name.
namespace simulated_cuda {

namespace {

struct Kernels {
  std::mutex mutex;
  std::map<const void*, std::string> names;
};

Kernels& kernels() {
  static Kernels* instance = new Kernels;
  return *instance;
}

std::string readable(const std::string& mangled) {
  int status = 0;
  char* text = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
  std::string name = status == 0 ? text : mangled;
  std::free(text);
  return name;
}

std::string name_of(const void* function) {
  std::lock_guard<std::mutex> lock(kernels().mutex);
  const auto found = kernels().names.find(function);
  return found == kernels().names.end() ? "a kernel without a name" : readable(found->second);
}

// torch.cuda._sleep: a device of 1 GHz.
void sleep_for(int64_t cycles) {
  std::this_thread::sleep_for(std::chrono::nanoseconds(cycles));
}

}  // namespace

}  // namespace simulated_cuda

using namespace simulated_cuda;

SIMULATED_CUDA_API void** __cudaRegisterFatBinary(void*) {
  static void* nothing = nullptr;
  return &nothing;
}

SIMULATED_CUDA_API void __cudaRegisterFatBinaryEnd(void**) {}
SIMULATED_CUDA_API void __cudaUnregisterFatBinary(void**) {}

SIMULATED_CUDA_API char __cudaInitModule(void**) {
  return 1;
}

SIMULATED_CUDA_API void __cudaRegisterFunction(void**, const char* host, char*, const char* name,
                                               int, uint3*, uint3*, dim3*, dim3*, int*) {
  std::lock_guard<std::mutex> lock(kernels().mutex);
  kernels().names[host] = name;
}

SIMULATED_CUDA_API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int,
                                          int) {}

namespace {
struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local Configuration configuration;
}  // namespace

SIMULATED_CUDA_API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                                        cudaStream_t stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}

SIMULATED_CUDA_API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared,
                                                          void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *static_cast<cudaStream_t*>(stream) = configuration.stream;
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments,
                                                size_t, cudaStream_t on) {
  const std::string name = name_of(function);
  if (name.find("spin_kernel") != std::string::npos) {
    const int64_t cycles = *static_cast<int64_t*>(arguments[0]);
    return enqueue(Stream::of(on), [cycles] { sleep_for(cycles); });
  }
  not_simulated("the kernel " + name);
}

SIMULATED_CUDA_API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block,
                                                  void** arguments, size_t shared,
                                                  cudaStream_t on) {
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, arguments, shared,
                          on);
}

SIMULATED_CUDA_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  *out = {};
  out->maxThreadsPerBlock = 1024;
  out->binaryVersion = out->ptxVersion = 90;
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
