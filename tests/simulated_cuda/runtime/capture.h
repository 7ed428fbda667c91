#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/stream.h"

// Captures: the operations of streams as nodes of a graph, with what each depends on.
namespace simulated_cuda {

struct Node {
  std::function<void()> run;
  std::vector<Node*> dependencies;
};

struct Graph {
  std::vector<std::unique_ptr<Node>> nodes;
};

struct Capture {
  unsigned long long id = 0;
  Stream* origin = nullptr;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread;
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
  std::vector<Stream*> streams;  // the origin and those that joined
  bool invalid = false;
};

// Guards the captures, and what streams and events say of theirs.
std::recursive_mutex& capture_mutex();

// Adds an operation to the graph that the stream is captured into, if it is.
cudaError_t add_to_capture(Stream& stream, const std::function<void()>& run, bool* captured);
// The stream waits for nodes of a capture, and is captured from then on.
cudaError_t join_capture(Stream& stream, const std::shared_ptr<Capture>& capture,
                         const std::vector<Node*>& nodes);
// A capture that met what it cannot hold: returns the error.
cudaError_t invalidate(Capture& capture, cudaError_t error);
// The error of a call that the captures under way forbid this thread, which then are invalid: of
// one that waits or asks (for `stream`, or any), allocates or frees.
cudaError_t refuse_in_capture(Stream* stream);

}  // namespace simulated_cuda
