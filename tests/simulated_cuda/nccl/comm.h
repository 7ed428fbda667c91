#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "nccl/abi.h"
#include "nccl/mesh.h"
#include "nccl/numbers.h"

// One call, as it is queued on a stream.
struct Task {
  enum class Kind {
    AllReduce,
    Reduce,
    Broadcast,
    AllGather,
    ReduceScatter,
    AllToAll,
    Send,
    Receive
  };
  Kind kind;
  const void* source;
  void* out;
  size_t count;
  ncclDataType_t dtype;
  int peer = 0;  // or the root
  simulated_nccl::Reducer reducer;
  bool is_scaled = false;  // by a PreMulSum
  const void* device_factor = nullptr;
};

// A communicator. Handles are never freed: a queued operation may still look at one that was
// aborted.
struct Comm {
  Comm(std::string name, int rank, int size, int device);

  // Meets the other ranks, here or on a thread of its own.
  ncclResult_t join(bool blocking);
  // Queues the calls of one group.
  ncclResult_t launch(cudaStream_t stream, std::vector<Task> tasks);
  ncclResult_t split(int color, int key, bool blocking, Comm** made);
  void abort();
  // No more calls; waits for those in flight.
  void finish();
  ncclResult_t state() const {
    return state_;
  }

  const std::string name;
  const int rank;
  const int size;
  const int device;

  int add_factor(double factor, const void* device_factor, ncclDataType_t dtype);
  void resolve(Task* task, ncclRedOp_t op);

 private:
  struct Factor {
    double value;
    const void* at;
    ncclDataType_t dtype;
  };

  ncclResult_t connect();
  void run(uint64_t turn, const std::vector<Task>& tasks);
  void run_batch(const std::vector<Task>& tasks);
  void run_collective(const Task& task);
  void break_down(ncclResult_t error, const std::string& why);
  void await_abort();
  bool is_aborted() const {
    return aborted_;
  }

  std::atomic<ncclResult_t> state_{ncclInProgress};
  std::atomic<bool> aborted_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t launched_ = 0;
  uint64_t served_ = 0;
  uint64_t calls_ = 0;
  int splits_ = 0;
  std::vector<Factor> factors_;
  std::unique_ptr<simulated_nccl::Mesh> data_;
  std::unique_ptr<simulated_nccl::Mesh> control_;
};

// The text of the last error, for ncclGetLastError.
void note_error(const std::string& text);
const char* last_error();
