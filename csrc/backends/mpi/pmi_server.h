#pragma once

// The process manager's side of PMI-1 for the library in this process, out of a store that all
// ranks have: ranks that torchrun has started get an MPI_COMM_WORLD without mpiexec. No torch in
// here.
//
// Protocol: "PMI: A Scalable Parallel Process-Management Interface" (Balaji et al., 2010), its
// first version as MPICH's src/pmi/simple speaks it: lines of key=value pairs over a descriptor.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "control/store.h"

namespace c10d_ext::mpi {

// What counts in the store: adds to the number under `key` and returns it.
using Count = std::function<int64_t(const std::string& key, int64_t by)>;

class PmiServer {
 public:
  // Serves this process, which is `rank` of `size`, by a thread that lives as long as the process
  // or until the library has said that it is done.
  static PmiServer start(KeyValueStore store, Count count, int rank, int size);

  // The library's end: PMI_FD.
  int descriptor() const {
    return descriptor_;
  }

 private:
  explicit PmiServer(int descriptor) : descriptor_(descriptor) {}
  int descriptor_;
};

// The value of PMI_process_mapping for ranks of these hosts, in the order of ranks: the library
// shares memory between ranks of one host.
std::string process_mapping(const std::vector<std::string>& hosts);

}  // namespace c10d_ext::mpi
