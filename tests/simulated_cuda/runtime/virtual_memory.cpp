#include "runtime/virtual_memory.h"

#include <cuda.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "runtime/fail.h"
#include "runtime/memory.h"

// The driver's virtual memory, for torch's expandable segments: addresses are reserved, memory is
// made, and the one mapped at the other. What is not mapped cannot be touched.
namespace simulated_cuda {

namespace {

constexpr size_t kGranularity = size_t{2} << 20;

struct Made {
  int device;
  size_t bytes;
  int file;
  int users;  // its handle, and where it is mapped
};

struct VirtualMemory {
  std::mutex mutex;
  std::map<CUmemGenericAllocationHandle, Made> made;
  std::map<char*, std::pair<size_t, CUmemGenericAllocationHandle>> mapped;
  CUmemGenericAllocationHandle count = 0;
};

VirtualMemory& all() {
  static auto* instance = new VirtualMemory;
  return *instance;
}

// Called with the lock.
void drop(CUmemGenericAllocationHandle handle) {
  const auto found = all().made.find(handle);
  if (--found->second.users == 0) {
    close(found->second.file);
    discharge(found->second.device, found->second.bytes);
    all().made.erase(found);
  }
}

void* reserve(void* at, size_t bytes, int flags) {
  return mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
}

CUresult device_get(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

// Without remote direct memory access, fabric handles, multicast.
CUresult device_attribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult granularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = kGranularity;
  return CUDA_SUCCESS;
}

CUresult address_reserve(CUdeviceptr* made, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  // Begins at a multiple of the granularity.
  char* at = static_cast<char*>(reserve(nullptr, bytes + kGranularity, 0));
  if (at == MAP_FAILED) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  const size_t over = reinterpret_cast<uintptr_t>(at) % kGranularity;
  const size_t before = over == 0 ? 0 : kGranularity - over;
  if (before != 0) {
    munmap(at, before);
  }
  if (before != kGranularity) {
    munmap(at + before + bytes, kGranularity - before);
  }
  *made = reinterpret_cast<CUdeviceptr>(at + before);
  return CUDA_SUCCESS;
}

CUresult address_free(CUdeviceptr at, size_t bytes) {
  munmap(reinterpret_cast<void*>(at), bytes);
  return CUDA_SUCCESS;
}

CUresult create(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* as,
                unsigned long long) {
  if (!charge(as->location.id, bytes)) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  const int file = new_file(bytes);
  if (file < 0) {
    discharge(as->location.id, bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  std::lock_guard<std::mutex> lock(all().mutex);
  *handle = ++all().count;
  all().made[*handle] = {as->location.id, bytes, file, 1};
  return CUDA_SUCCESS;
}

CUresult release(CUmemGenericAllocationHandle handle) {
  std::lock_guard<std::mutex> lock(all().mutex);
  if (all().made.count(handle) == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  drop(handle);
  return CUDA_SUCCESS;
}

CUresult map(CUdeviceptr where, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
             unsigned long long) {
  std::lock_guard<std::mutex> lock(all().mutex);
  const auto found = all().made.find(handle);
  if (found == all().made.end() || offset + bytes > found->second.bytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  char* at = reinterpret_cast<char*>(where);
  // Readable only after cuMemSetAccess.
  if (mmap(at, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second.file,
           static_cast<off_t>(offset)) == MAP_FAILED) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  ++found->second.users;
  all().mapped[at] = {bytes, handle};
  add_block(at, found->second.device, bytes);
  return CUDA_SUCCESS;
}

CUresult set_access(CUdeviceptr at, size_t bytes, const CUmemAccessDesc*, size_t) {
  return mprotect(reinterpret_cast<void*>(at), bytes, PROT_READ | PROT_WRITE) == 0
             ? CUDA_SUCCESS
             : CUDA_ERROR_INVALID_VALUE;
}

CUresult unmap(CUdeviceptr where, size_t bytes) {
  std::lock_guard<std::mutex> lock(all().mutex);
  char* at = reinterpret_cast<char*>(where);
  auto it = all().mapped.lower_bound(at);
  while (it != all().mapped.end() && it->first < at + bytes) {
    const auto [length, handle] = it->second;
    remove_block(it->first);
    reserve(it->first, length, MAP_FIXED);
    drop(handle);
    it = all().mapped.erase(it);
  }
  return CUDA_SUCCESS;
}

CUresult error_string(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error of the simulated driver";
  return CUDA_SUCCESS;
}

// A function for each name, so that the exception says which.
template <int>
struct NotSimulated {
  static inline std::string name;
  static CUresult call() {
    not_simulated(name);
  }
};

template <int n>
void* not_there(const char* name) {
  NotSimulated<n>::name = name;
  return reinterpret_cast<void*>(&NotSimulated<n>::call);
}

template <class F>
void* address(F* function) {
  return reinterpret_cast<void*>(function);
}

}  // namespace

void* driver_function(const char* name) {
  static const auto& functions = *new std::map<std::string, void*>{
      {"cuDeviceGet", address(&device_get)},
      {"cuDeviceGetAttribute", address(&device_attribute)},
      {"cuMemGetAllocationGranularity", address(&granularity)},
      {"cuMemAddressReserve", address(&address_reserve)},
      {"cuMemAddressFree", address(&address_free)},
      {"cuMemCreate", address(&create)},
      {"cuMemRelease", address(&release)},
      {"cuMemMap", address(&map)},
      {"cuMemSetAccess", address(&set_access)},
      {"cuMemUnmap", address(&unmap)},
      {"cuGetErrorString", address(&error_string)},
      {"cuMemGetAddressRange", not_there<0>("cuMemGetAddressRange")},
      {"cuMemExportToShareableHandle", not_there<1>("cuMemExportToShareableHandle")},
      {"cuMemImportFromShareableHandle", not_there<2>("cuMemImportFromShareableHandle")},
      {"cuMemRetainAllocationHandle", not_there<3>("cuMemRetainAllocationHandle")},
      {"cuMemGetAllocationPropertiesFromHandle",
       not_there<4>("cuMemGetAllocationPropertiesFromHandle")},
      {"cuMemsetD32Async", not_there<5>("cuMemsetD32Async")},
      {"cuStreamWriteValue32", not_there<6>("cuStreamWriteValue32")},
  };
  const auto found = functions.find(name);
  return found == functions.end() ? nullptr : found->second;
}

}  // namespace simulated_cuda
