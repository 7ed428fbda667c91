#include "runtime/memory.h"

#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/capture.h"
#include "runtime/device.h"
#include "runtime/fail.h"
#include "runtime/stream.h"

namespace simulated_cuda {

namespace {

struct Block {
  Kind kind;
  int device;
  size_t bytes;
  int file;  // -1 for memory that was there before
  bool is_mapped_from_peer = false;
};

struct Memory {
  std::mutex mutex;
  std::map<const char*, Block> blocks;
  std::array<size_t, kMostDevices> used{};
};

Memory& memory() {
  static Memory* instance = new Memory;
  return *instance;
}

size_t whole_pages(size_t bytes) {
  const size_t page = 4096;
  return std::max<size_t>(1, (bytes + page - 1) / page) * page;
}

void* allocate(Kind kind, size_t asked) {
  const size_t bytes = whole_pages(asked);
  const int device = current_device();
  std::lock_guard<std::mutex> lock(memory().mutex);
  if (kind == Kind::Device && memory().used[device] + bytes > device_memory()) {
    return nullptr;
  }
  const int file = new_file(bytes);
  if (file < 0) {
    return nullptr;
  }
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (at == MAP_FAILED) {
    close(file);
    return nullptr;
  }
  memory().blocks[static_cast<char*>(at)] = {kind, device, bytes, file};
  if (kind == Kind::Device) {
    memory().used[device] += bytes;
  }
  return at;
}

cudaError_t release(void* at) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  const auto found = memory().blocks.find(static_cast<char*>(at));
  if (found == memory().blocks.end()) {
    return cudaErrorInvalidValue;
  }
  const Block& block = found->second;
  if (block.kind == Kind::Device && !block.is_mapped_from_peer) {
    memory().used[block.device] -= block.bytes;
  }
  if (block.file >= 0) {
    munmap(at, block.bytes);
    close(block.file);
  }
  memory().blocks.erase(found);
  return cudaSuccess;
}

struct Handle {
  pid_t process;
  int file;
  size_t bytes;
};
static_assert(sizeof(Handle) <= sizeof(cudaIpcMemHandle_t));

// A copy whose ends do not change: the source of a copy from pageable memory is read at the call.
cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t on) {
  if (bytes == 0) {
    return cudaSuccess;
  }
  auto& stream = Stream::of(on);
  if (place_of(from).kind == Kind::Pageable) {
    auto staged = std::make_shared<std::vector<char>>(static_cast<const char*>(from),
                                                      static_cast<const char*>(from) + bytes);
    return enqueue(stream, [=] { std::memcpy(to, staged->data(), bytes); });
  }
  const auto error = enqueue(stream, [=] { std::memmove(to, from, bytes); });
  if (error == cudaSuccess && place_of(to).kind == Kind::Pageable) {
    return cudaStreamSynchronize(on);
  }
  return error;
}

}  // namespace

size_t device_memory() {
  return size_t{8} << 30;
}

int new_file(size_t bytes) {
  const int file = memfd_create("simulated CUDA", MFD_CLOEXEC);
  if (file >= 0 && ftruncate(file, static_cast<off_t>(bytes)) != 0) {
    close(file);
    return -1;
  }
  return file;
}

bool charge(int device, size_t bytes) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  auto& used = memory().used.at(device);
  if (used + bytes > device_memory()) {
    return false;
  }
  used += bytes;
  return true;
}

void discharge(int device, size_t bytes) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().used.at(device) -= bytes;
}

void add_block(void* at, int device, size_t bytes) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().blocks[static_cast<char*>(at)] = {Kind::Device, device, bytes, -1};
}

void remove_block(void* at) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().blocks.erase(static_cast<char*>(at));
}

Place place_of(const void* address) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  const auto* at = static_cast<const char*>(address);
  auto after = memory().blocks.upper_bound(at);
  if (after == memory().blocks.begin()) {
    return {};
  }
  const auto& [begin, block] = *--after;
  return at < begin + block.bytes ? Place{block.kind, block.device} : Place{};
}

}  // namespace simulated_cuda

using namespace simulated_cuda;

SIMULATED_CUDA_API cudaError_t cudaMalloc(void** made, size_t bytes) {
  if (const auto error = refuse_in_capture(nullptr); error != cudaSuccess) {
    return failed(error);
  }
  *made = allocate(Kind::Device, bytes);
  return *made == nullptr ? failed(cudaErrorMemoryAllocation) : cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaFree(void* at) {
  if (at == nullptr) {
    return cudaSuccess;
  }
  if (const auto error = refuse_in_capture(nullptr); error != cudaSuccess) {
    return failed(error);
  }
  drain(place_of(at).device);
  return failed(release(at));
}

SIMULATED_CUDA_API cudaError_t cudaHostAlloc(void** made, size_t bytes, unsigned) {
  if (const auto error = refuse_in_capture(nullptr); error != cudaSuccess) {
    return failed(error);
  }
  *made = allocate(Kind::Pinned, bytes);
  return *made == nullptr ? failed(cudaErrorMemoryAllocation) : cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaFreeHost(void* at) {
  return at == nullptr ? cudaSuccess : failed(release(at));
}

SIMULATED_CUDA_API cudaError_t cudaHostRegister(void* at, size_t bytes, unsigned) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  const Block block{Kind::Pinned, current_device(), bytes, -1};
  const bool fresh = memory().blocks.emplace(static_cast<char*>(at), block).second;
  return fresh ? cudaSuccess : failed(cudaErrorHostMemoryAlreadyRegistered);
}

SIMULATED_CUDA_API cudaError_t cudaHostUnregister(void* at) {
  return release(at) == cudaSuccess ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
}

SIMULATED_CUDA_API cudaError_t cudaMemGetInfo(size_t* unused, size_t* total) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  *total = device_memory();
  *unused = *total - memory().used[current_device()];
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out,
                                                        const void* at) {
  const Place place = place_of(at);
  *out = {};
  out->device = std::max(place.device, 0);
  if (place.kind == Kind::Pageable) {
    out->type = cudaMemoryTypeUnregistered;
    out->hostPointer = const_cast<void*>(at);
    return cudaSuccess;
  }
  out->type = place.kind == Kind::Device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  out->devicePointer = const_cast<void*>(at);
  out->hostPointer = place.kind == Kind::Device ? nullptr : const_cast<void*>(at);
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes,
                                               cudaMemcpyKind, cudaStream_t on) {
  return copy(to, from, bytes, on);
}

SIMULATED_CUDA_API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int,
                                                   size_t bytes, cudaStream_t on) {
  return copy(to, from, bytes, on);
}

SIMULATED_CUDA_API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes,
                                          cudaMemcpyKind) {
  const auto error = copy(to, from, bytes, nullptr);
  return error == cudaSuccess ? cudaStreamSynchronize(nullptr) : error;
}

SIMULATED_CUDA_API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from,
                                                 size_t from_pitch, size_t width, size_t height,
                                                 cudaMemcpyKind, cudaStream_t on) {
  for (size_t row = 0; row < height; ++row) {
    const auto error = copy(static_cast<char*>(to) + row * to_pitch,
                            static_cast<const char*>(from) + row * from_pitch, width, on);
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t on) {
  return enqueue(Stream::of(on), [=] { std::memset(at, value, bytes); });
}

SIMULATED_CUDA_API cudaError_t cudaMemset(void* at, int value, size_t bytes) {
  return cudaMemsetAsync(at, value, bytes, nullptr);
}

SIMULATED_CUDA_API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* out, void* at) {
  std::lock_guard<std::mutex> lock(memory().mutex);
  const auto found = memory().blocks.find(static_cast<char*>(at));
  if (found == memory().blocks.end() || found->second.kind != Kind::Device) {
    return failed(cudaErrorInvalidValue);
  }
  const Handle handle{getpid(), found->second.file, found->second.bytes};
  std::memset(out, 0, sizeof *out);
  std::memcpy(out, &handle, sizeof handle);
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaIpcOpenMemHandle(void** out, cudaIpcMemHandle_t given,
                                                    unsigned) {
  Handle handle;
  std::memcpy(&handle, &given, sizeof handle);
  const std::string path =
      "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.file);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0 || handle.process == getpid()) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  void* at = mmap(nullptr, handle.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (at == MAP_FAILED) {
    close(file);
    return failed(cudaErrorMemoryAllocation);
  }
  std::lock_guard<std::mutex> lock(memory().mutex);
  memory().blocks[static_cast<char*>(at)] = {Kind::Device, current_device(), handle.bytes, file,
                                             true};
  *out = at;
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaIpcCloseMemHandle(void* at) {
  drain(current_device());
  return failed(release(at));
}
