#include "kernels/generator.h"

#include <ATen/CPUGeneratorImpl.h>

#include <map>

namespace simulated_cuda {

at::Generator generator_of(int device) {
  static std::mutex mutex;
  static auto& made = *new std::map<int, at::Generator>;
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = made.find(device);
  return found != made.end()
             ? found->second
             : made.emplace(device, at::detail::createCPUGenerator(1 + device)).first->second;
}

std::unique_lock<std::mutex> lock_generators() {
  static auto& mutex = *new std::mutex;
  return std::unique_lock<std::mutex>(mutex);
}

}  // namespace simulated_cuda
