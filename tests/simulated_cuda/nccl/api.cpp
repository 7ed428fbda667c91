#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "nccl/abi.h"
#include "nccl/comm.h"

// nccl's functions. What is not here is a stub that throws its name.

SIMULATED_NCCL_API int simulated_cuda_physical_device();

using simulated_nccl::size_of;
using Kind = Task::Kind;

namespace {

struct Call {
  Comm* comm;
  cudaStream_t stream;
  Task task;
};

// The calls between ncclGroupStart and ncclGroupEnd.
thread_local int depth = 0;
thread_local std::vector<Call> group;

ncclResult_t launch_group() {
  auto calls = std::exchange(group, {});
  ncclResult_t result = ncclSuccess;
  while (!calls.empty()) {
    // Those of one communicator start as one, in the order of its first stream.
    Comm* comm = calls.front().comm;
    const cudaStream_t stream = calls.front().stream;
    std::vector<Task> tasks;
    std::vector<Call> rest;
    for (auto& call : calls) {
      if (call.comm != comm) {
        rest.push_back(std::move(call));
      } else if (call.stream != stream) {
        throw std::runtime_error(
            "simulated nccl: a group on several streams of one communicator is not simulated");
      } else {
        tasks.push_back(std::move(call.task));
      }
    }
    const auto each = comm->launch(stream, std::move(tasks));
    result = result == ncclSuccess ? each : result;
    calls = std::move(rest);
  }
  return result;
}

ncclResult_t add(Comm* comm, cudaStream_t stream, Task task) {
  if (comm == nullptr) {
    note_error("comm is null");
    return ncclInvalidArgument;
  }
  if (task.peer < 0 || task.peer >= comm->size) {
    note_error("no such rank: " + std::to_string(task.peer));
    return ncclInvalidArgument;
  }
  group.push_back({comm, stream, task});
  return depth == 0 ? launch_group() : ncclSuccess;
}

Task task(Kind kind, const void* source, void* out, size_t count, ncclDataType_t dtype,
          int peer = 0) {
  Task made;
  made.kind = kind;
  made.source = source;
  made.out = out;
  made.count = count;
  made.dtype = dtype;
  made.peer = peer;
  return made;
}

Task reduction(Comm* comm, Task made, ncclRedOp_t op) {
  if (comm != nullptr) {  // which add() refuses
    comm->resolve(&made, op);
  }
  return made;
}

std::string name_of(const ncclUniqueId& id) {
  return std::string(id.internal, strnlen(id.internal, sizeof id.internal));
}

bool is_blocking(const ncclConfig_t* config) {
  return config == nullptr || config->blocking != 0;
}

}  // namespace

SIMULATED_NCCL_API ncclResult_t ncclGetVersion(int* version) {
  *version = kNcclVersion;
  return ncclSuccess;
}

SIMULATED_NCCL_API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  std::memset(id, 0, sizeof *id);
  std::snprintf(id->internal, sizeof id->internal, "snccl-%d-%08x%08x", getpid(), random(),
                random());
  return ncclSuccess;
}

SIMULATED_NCCL_API const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInternalError:
      return "internal error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
  }
  return "unknown result code";
}

SIMULATED_NCCL_API const char* ncclGetLastError(ncclComm_t) {
  return last_error();
}

SIMULATED_NCCL_API ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int size, ncclUniqueId id,
                                                       int rank, ncclConfig_t* config) {
  *made = new Comm(name_of(id), rank, size, simulated_cuda_physical_device());
  return (*made)->join(is_blocking(config));
}

SIMULATED_NCCL_API ncclResult_t ncclCommInitRank(ncclComm_t* made, int size, ncclUniqueId id,
                                                 int rank) {
  return ncclCommInitRankConfig(made, size, id, rank, nullptr);
}

SIMULATED_NCCL_API ncclResult_t ncclCommInitRankScalable(ncclComm_t* made, int size, int rank, int,
                                                         ncclUniqueId* ids, ncclConfig_t* config) {
  return ncclCommInitRankConfig(made, size, ids[0], rank, config);
}

SIMULATED_NCCL_API ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made,
                                              ncclConfig_t* config) {
  return comm->split(color, key, is_blocking(config), made);
}

SIMULATED_NCCL_API ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (comm != nullptr) {
    comm->abort();
  }
  return ncclSuccess;
}

SIMULATED_NCCL_API ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  if (comm != nullptr) {
    comm->finish();
  }
  return ncclSuccess;
}

SIMULATED_NCCL_API ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (comm != nullptr) {
    comm->finish();
  }
  return ncclSuccess;
}

SIMULATED_NCCL_API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
  if (comm == nullptr) {
    note_error("comm is null");
    return ncclInvalidArgument;
  }
  *result = comm->state();
  return ncclSuccess;
}

SIMULATED_NCCL_API ncclResult_t ncclCommCount(ncclComm_t comm, int* count) {
  *count = comm->size;
  return ncclSuccess;
}

SIMULATED_NCCL_API ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}

SIMULATED_NCCL_API ncclResult_t ncclCommRegister(ncclComm_t, void*, size_t, void** handle) {
  *handle = nullptr;
  return ncclSuccess;
}

SIMULATED_NCCL_API ncclResult_t ncclCommDeregister(ncclComm_t, void*) {
  return ncclSuccess;
}

SIMULATED_NCCL_API ncclResult_t ncclMemAlloc(void** made, size_t bytes) {
  return cudaMalloc(made, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

SIMULATED_NCCL_API ncclResult_t ncclMemFree(void* at) {
  return cudaFree(at) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

SIMULATED_NCCL_API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* factor,
                                                         ncclDataType_t dtype,
                                                         ncclScalarResidence_t residence,
                                                         ncclComm_t comm) {
  double value = 1;
  if (residence == ncclScalarHostImmediate) {
    if (dtype == ncclFloat64) {
      value = *static_cast<double*>(factor);
    } else if (dtype == ncclFloat32) {
      value = *static_cast<float*>(factor);
    } else {
      throw std::runtime_error("simulated nccl: a PreMulSum of this dtype is not simulated");
    }
  }
  *op = static_cast<ncclRedOp_t>(
      comm->add_factor(value, residence == ncclScalarDevice ? factor : nullptr, dtype));
  return ncclSuccess;
}

SIMULATED_NCCL_API ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) {
  return ncclSuccess;
}

SIMULATED_NCCL_API ncclResult_t ncclGroupStart() {
  ++depth;
  return ncclSuccess;
}

SIMULATED_NCCL_API ncclResult_t ncclGroupEnd() {
  return --depth == 0 ? launch_group() : ncclSuccess;
}

SIMULATED_NCCL_API ncclResult_t ncclAllReduce(const void* source, void* out, size_t count,
                                              ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm,
                                              cudaStream_t stream) {
  return add(comm, stream, reduction(comm, task(Kind::AllReduce, source, out, count, dtype), op));
}

SIMULATED_NCCL_API ncclResult_t ncclReduce(const void* source, void* out, size_t count,
                                           ncclDataType_t dtype, ncclRedOp_t op, int root,
                                           ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream,
             reduction(comm, task(Kind::Reduce, source, out, count, dtype, root), op));
}

SIMULATED_NCCL_API ncclResult_t ncclReduceScatter(const void* source, void* out, size_t count,
                                                  ncclDataType_t dtype, ncclRedOp_t op,
                                                  ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream,
             reduction(comm, task(Kind::ReduceScatter, source, out, count, dtype), op));
}

SIMULATED_NCCL_API ncclResult_t ncclBroadcast(const void* source, void* out, size_t count,
                                              ncclDataType_t dtype, int root, ncclComm_t comm,
                                              cudaStream_t stream) {
  return add(comm, stream, task(Kind::Broadcast, source, out, count, dtype, root));
}

SIMULATED_NCCL_API ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t dtype,
                                          int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, dtype, root, comm, stream);
}

SIMULATED_NCCL_API ncclResult_t ncclAllGather(const void* source, void* out, size_t count,
                                              ncclDataType_t dtype, ncclComm_t comm,
                                              cudaStream_t stream) {
  return add(comm, stream, task(Kind::AllGather, source, out, count, dtype));
}

SIMULATED_NCCL_API ncclResult_t ncclAlltoAll(const void* source, void* out, size_t count,
                                             ncclDataType_t dtype, ncclComm_t comm,
                                             cudaStream_t stream) {
  return add(comm, stream, task(Kind::AllToAll, source, out, count, dtype));
}

SIMULATED_NCCL_API ncclResult_t ncclSend(const void* source, size_t count, ncclDataType_t dtype,
                                         int peer, ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream, task(Kind::Send, source, nullptr, count, dtype, peer));
}

SIMULATED_NCCL_API ncclResult_t ncclRecv(void* out, size_t count, ncclDataType_t dtype, int peer,
                                         ncclComm_t comm, cudaStream_t stream) {
  return add(comm, stream, task(Kind::Receive, nullptr, out, count, dtype, peer));
}
