#pragma once

// The algorithms that move a collective's data, a file each; select.cpp chooses among them.
//
// All of them begin when every rank has entered the collective and all headers agree, and all are
// built on stages: a rank publishes how far it has come, and waits until others have come as far
// as it needs. Except for eager, the data goes through the ranks' `bulk` memory in chunks that stay
// in the cache, a few of them in flight: main memory sees each byte read once and written once.

#include <algorithm>
#include <cstddef>

#include "backends/shm/collective.h"

namespace c10d_ext::shm {

// Measured on two cores with 512 KiB of L2 each: from 64 to 256 KiB all is the same within noise,
// below the synchronisation shows, above the caches overflow.
constexpr size_t kChunk = size_t{128} << 10;
constexpr size_t kMinChunk = size_t{16} << 10;
// Outputs of this size in all are not read back from a cache.
constexpr size_t kStreaming = size_t{8} << 20;

constexpr size_t chunks(size_t bytes, size_t chunk) {
  return (bytes + chunk - 1) / chunk;
}

// Every rank lays its data beside its announcement, and every rank reads from everyone: the
// collective takes one meeting of all ranks.
namespace eager {

// Whether there is room beside the announcement.
bool fits(const Collective& c);
// Before the announcement: writes what the others read.
void write(const Collective& c);
// After it: nothing is left to do for others.
void read(const Collective& c);

}  // namespace eager

// all_reduce and reduce: rank q reduces the q-th part of each chunk for everyone.
Task run_two_shot(const Collective& c);

// Two ranks that both give and take: each writes its next piece where it has read the other's.
Task run_swap(const Collective& c);

// Everything else that moves parts between ranks, and reduce_scatter.
Task run_pipelined(const Collective& c);

}  // namespace c10d_ext::shm
