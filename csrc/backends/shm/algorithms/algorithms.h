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

// Every rank writes its data next to its header before it publishes the header, and then reads from
// all ranks: one synchronization.
namespace eager {

// Whether the input fits next to the header.
bool fits(const Collective& c);
// Before the header is published: writes what the other ranks read.
void write(const Collective& c);
// Once all ranks have entered.
void read(const Collective& c);

}  // namespace eager

// all_reduce and reduce: rank q reduces the q-th part of each chunk for everyone.
Task run_two_shot(const Collective& c);

// Two ranks that both send and receive: each writes its next piece where it has read the peer's.
Task run_swap(const Collective& c);

// All collectives that move parts between ranks, and reduce_scatter: senders write chunks ahead of
// the receivers.
Task run_pipelined(const Collective& c);

}  // namespace c10d_ext::shm
