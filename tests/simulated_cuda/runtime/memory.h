#pragma once

#include <cstddef>

// Memory: of a device, in a memfd each, so that other processes can map it; and pinned on the host.
namespace simulated_cuda {

enum class Kind { Pageable, Pinned, Device };

// What kind of memory an address is in, and on which device.
struct Place {
  Kind kind = Kind::Pageable;
  int device = -1;
};
Place place_of(const void* address);

// Bytes of each device.
size_t device_memory();

}  // namespace simulated_cuda
