#pragma once

// What bootstrap.cpp needs of liveness.cpp: memberships made of descriptors that do not
// outlive a fork.
//
// Each rank holds the only write end of a pipe, and every peer a read end of it. When the rank's
// process ends, however it ends, the kernel closes the write end, and the peers' polls say so.
//
// The kernel does so last, after it has freed the process' memory. Before that it goes through the
// locks that each thread has left on record as being its own (set_robust_list(2)), marks them and
// wakes one that waits for each: every rank's watcher holds such a lock, a Pulse in the shared
// memory, which is only ever waited for to hear of that.

#include <atomic>
#include <vector>

#include "backends/shm/bootstrap.h"

namespace c10d_ext::shm {

struct alignas(64) Pulse {
  void* next = nullptr;  // the kernel's list of the owner's locks
  // 0: nobody's yet, or no more; otherwise the thread that owns it, as one that is waited for,
  // marked once that is dead.
  std::atomic<uint32_t> owner{0};
};

// The memory of a group that uses `bytes` of it, with a Pulse per rank at the end.
size_t with_pulses(size_t bytes, int size);

// `mapping` is of that size. `own` is the write end of this rank's pipe, `ends[p]` the read end of
// rank p's (this rank's is not used).
std::unique_ptr<Membership> make_membership(std::shared_ptr<Mapping> mapping, int rank,
                                            std::vector<Peer> peers, FdOwner own,
                                            std::vector<FdOwner> ends);

}  // namespace c10d_ext::shm
