#pragma once

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/delays.h"

// Streams: a thread each, which runs what it is given in order.
namespace simulated_cuda {

struct Capture;
struct Node;

// What a stream runs; `needs` is told to the streams it depends on as soon as it is next.
struct Operation {
  std::function<void()> run;
  std::function<void()> demand_others;
};

class Stream {
 public:
  Stream(int device, int priority, unsigned flags);

  // Queues an operation, and returns its ticket.
  uint64_t push(Operation operation);
  // The ticket of the operation that was queued last.
  uint64_t newest();
  bool is_done(uint64_t ticket);
  // Runs what is up to the ticket without holding it back any longer.
  void demand(uint64_t ticket);
  void wait(uint64_t ticket);
  // The thread ends with the queue; the object is never freed, for events may refer to it.
  void retire();

  int device() const {
    return device_;
  }
  int priority() const {
    return priority_;
  }
  unsigned flags() const {
    return flags_;
  }

  // What it is captured into, and the nodes that the next one depends on. Guarded by the lock of
  // captures (capture.h).
  std::shared_ptr<Capture> capture;
  std::vector<Node*> tail;

  // The stream behind a handle; the legacy stream of the current device for 0.
  static Stream& of(cudaStream_t handle);
  // All streams of a device that anybody has used.
  static std::vector<Stream*> all(int device);
  cudaStream_t handle() {
    return reinterpret_cast<cudaStream_t>(this);
  }

 private:
  void serve();

  const int device_;
  const int priority_;
  const unsigned flags_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Operation> queue_;
  uint64_t pushed_ = 0;
  uint64_t done_ = 0;
  uint64_t demanded_ = 0;
  bool retired_ = false;
  Delays delays_;
};

// Queues an operation, or adds it to the graph that the stream is captured into.
cudaError_t enqueue(Stream& stream, std::function<void()> run);

// Waits for everything of a device.
void drain(int device);

}  // namespace simulated_cuda
