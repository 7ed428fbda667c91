#pragma once

#include <cstdint>

// What SIMULATED_NCCL_FAULT or simulated_cuda_nccl_fault() break on this rank, KIND:N:
//   error:N    call N and what comes after it fails: the communicator has an asynchronous error
//   absent:N   this rank never takes part in call N, nor in what comes after it
namespace simulated_nccl {

enum class Fault { None, Error, Absent };

// Of the process's call of this number.
Fault fault_of(uint64_t call);
uint64_t next_call();

}  // namespace simulated_nccl
