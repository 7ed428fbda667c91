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

// Takes bytes of a device, or gives them back. False: there are not that many.
bool charge(int device, size_t bytes);
void discharge(int device, size_t bytes);

// Device memory that somebody else has mapped and unmaps, and that is charged for.
void add_block(void* at, int device, size_t bytes);
void remove_block(void* at);

// A file of whole pages, -1 where there is none.
int new_file(size_t bytes);

}  // namespace simulated_cuda
