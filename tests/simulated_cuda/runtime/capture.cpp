#include "runtime/capture.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <unordered_map>
#include <utility>

#include "runtime/device.h"
#include "runtime/fail.h"

namespace simulated_cuda {

namespace {

std::vector<std::shared_ptr<Capture>>& under_way() {
  static auto* instance = new std::vector<std::shared_ptr<Capture>>;
  return *instance;
}

thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;

void add_new(std::vector<Node*>& nodes, const std::vector<Node*>& more) {
  for (auto* node : more) {
    if (std::find(nodes.begin(), nodes.end(), node) == nodes.end()) {
      nodes.push_back(node);
    }
  }
}

// A graph as it is launched: branches run side by side, each node after what it depends on.
class Launch : public std::enable_shared_from_this<Launch> {
 public:
  Launch(std::shared_ptr<Graph> graph, uint64_t number)
      : graph_(std::move(graph)), number_(number), left_(graph_->nodes.size()) {
    for (size_t i = 0; i < graph_->nodes.size(); ++i) {
      index_[graph_->nodes[i].get()] = i;
    }
    waits_for_.resize(graph_->nodes.size());
    followers_.resize(graph_->nodes.size());
    for (size_t i = 0; i < graph_->nodes.size(); ++i) {
      waits_for_[i] = graph_->nodes[i]->dependencies.size();
      for (auto* before : graph_->nodes[i]->dependencies) {
        followers_[index_.at(before)].push_back(i);
      }
    }
  }

  // Returns when all nodes have run.
  void run() {
    std::vector<size_t> first;
    for (size_t i = 0; i < waits_for_.size(); ++i) {
      if (waits_for_[i] == 0) {
        first.push_back(i);
      }
    }
    start(first);
    std::unique_lock<std::mutex> lock(mutex_);
    over_.wait(lock, [&] { return left_ == 0 && branches_ == 0; });
    if (error_) {
      std::rethrow_exception(error_);
    }
  }

 private:
  void start(const std::vector<size_t>& nodes) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const size_t node : nodes) {
      ++branches_;
      std::thread([self = shared_from_this(), node, device = current_device()] {
        current_device() = device;
        self->follow(node);
      }).detach();
    }
  }

  void follow(size_t node) {
    Delays delays((number_ << 20) + node);
    while (true) {
      if (const auto pause = delays.pause() + delays.hold() / 8; pause.count() > 0) {
        std::this_thread::sleep_for(pause);
      }
      std::exception_ptr error;
      try {
        graph_->nodes[node]->run();
      } catch (...) {
        error = std::current_exception();
      }
      std::vector<size_t> next;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        error_ = error_ ? error_ : error;
        --left_;
        for (const size_t follower : followers_[node]) {
          if (--waits_for_[follower] == 0) {
            next.push_back(follower);
          }
        }
        if (next.empty()) {
          --branches_;
          over_.notify_all();
          return;
        }
      }
      node = next.back();
      next.pop_back();
      start(next);
    }
  }

  const std::shared_ptr<Graph> graph_;
  const uint64_t number_;
  std::unordered_map<const Node*, size_t> index_;
  std::vector<size_t> waits_for_;
  std::vector<std::vector<size_t>> followers_;
  std::mutex mutex_;
  std::condition_variable over_;
  size_t left_;
  size_t branches_ = 0;
  std::exception_ptr error_;
};

// Handles hold shared pointers: a launch keeps the graph whatever becomes of the handle.
using GraphHandle = std::shared_ptr<Graph>;

GraphHandle& graph_of(cudaGraph_t handle) {
  return *reinterpret_cast<GraphHandle*>(handle);
}

}  // namespace

std::recursive_mutex& capture_mutex() {
  static auto* instance = new std::recursive_mutex;
  return *instance;
}

cudaError_t invalidate(Capture& capture, cudaError_t error) {
  capture.invalid = true;
  return error;
}

cudaError_t add_to_capture(Stream& stream, const std::function<void()>& run, bool* captured) {
  std::lock_guard<std::recursive_mutex> lock(capture_mutex());
  if (stream.capture == nullptr) {
    return cudaSuccess;
  }
  *captured = true;
  if (stream.capture->invalid) {
    return cudaErrorStreamCaptureInvalidated;
  }
  auto node = std::make_unique<Node>();
  node->run = run;
  node->dependencies = stream.tail;
  stream.tail = {node.get()};
  stream.capture->graph->nodes.push_back(std::move(node));
  return cudaSuccess;
}

cudaError_t join_capture(Stream& stream, const std::shared_ptr<Capture>& capture,
                         const std::vector<Node*>& nodes) {
  if (std::find(under_way().begin(), under_way().end(), capture) == under_way().end()) {
    // Recorded in a capture that is over.
    return stream.capture != nullptr ? invalidate(*stream.capture, cudaErrorStreamCaptureIsolation)
                                     : cudaErrorCapturedEvent;
  }
  if (stream.capture != nullptr && stream.capture != capture) {
    invalidate(*stream.capture, cudaErrorStreamCaptureMerge);
    return invalidate(*capture, cudaErrorStreamCaptureMerge);
  }
  if (stream.capture == nullptr) {
    if ((stream.flags() & cudaStreamNonBlocking) == 0) {
      return invalidate(*capture, cudaErrorStreamCaptureImplicit);
    }
    stream.capture = capture;
    capture->streams.push_back(&stream);
  }
  add_new(stream.tail, nodes);
  return cudaSuccess;
}

cudaError_t refuse_in_capture(Stream* stream) {
  std::lock_guard<std::recursive_mutex> lock(capture_mutex());
  if (stream != nullptr && stream->capture != nullptr) {
    return invalidate(*stream->capture, cudaErrorStreamCaptureUnsupported);
  }
  if (mode_of_thread == cudaStreamCaptureModeRelaxed) {
    return cudaSuccess;
  }
  cudaError_t error = cudaSuccess;
  for (const auto& capture : under_way()) {
    const bool mine = capture->thread == std::this_thread::get_id() &&
                      capture->mode != cudaStreamCaptureModeRelaxed;
    const bool everyones = mode_of_thread == cudaStreamCaptureModeGlobal &&
                           capture->mode == cudaStreamCaptureModeGlobal;
    if (mine || everyones) {
      error = invalidate(*capture, cudaErrorStreamCaptureUnsupported);
    }
  }
  return error;
}

}  // namespace simulated_cuda

using namespace simulated_cuda;

SIMULATED_CUDA_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, mode_of_thread);
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaStreamBeginCapture(cudaStream_t handle,
                                                      cudaStreamCaptureMode mode) {
  static unsigned long long count = 0;
  auto& stream = Stream::of(handle);
  std::lock_guard<std::recursive_mutex> lock(capture_mutex());
  if (stream.capture != nullptr) {
    return failed(cudaErrorInvalidValue);
  }
  if ((stream.flags() & cudaStreamNonBlocking) == 0) {
    return failed(cudaErrorStreamCaptureUnsupported);
  }
  auto capture = std::make_shared<Capture>();
  capture->id = ++count;
  capture->origin = &stream;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->streams = {&stream};
  stream.capture = capture;
  stream.tail.clear();
  under_way().push_back(std::move(capture));
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* made) {
  auto& stream = Stream::of(handle);
  std::lock_guard<std::recursive_mutex> lock(capture_mutex());
  *made = nullptr;
  const auto capture = stream.capture;
  if (capture == nullptr) {
    return failed(cudaErrorInvalidValue);
  }
  if (capture->origin != &stream) {
    return failed(invalidate(*capture, cudaErrorStreamCaptureUnmatched));
  }
  if (capture->mode != cudaStreamCaptureModeRelaxed &&
      capture->thread != std::this_thread::get_id()) {
    return failed(invalidate(*capture, cudaErrorStreamCaptureWrongThread));
  }
  cudaError_t error = capture->invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
  // Every node must lead to the origin's last ones.
  std::vector<Node*> reached = stream.tail;
  for (size_t i = 0; i < reached.size(); ++i) {
    add_new(reached, std::vector<Node*>(reached[i]->dependencies));
  }
  if (error == cudaSuccess && reached.size() != capture->graph->nodes.size()) {
    error = cudaErrorStreamCaptureUnjoined;
  }
  for (auto* joined : capture->streams) {
    joined->capture = nullptr;
    joined->tail.clear();
  }
  under_way().erase(std::find(under_way().begin(), under_way().end(), capture));
  if (error != cudaSuccess) {
    return failed(error);
  }
  *made = reinterpret_cast<cudaGraph_t>(new GraphHandle(capture->graph));
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaStreamIsCapturing(cudaStream_t handle,
                                                     cudaStreamCaptureStatus* status) {
  std::lock_guard<std::recursive_mutex> lock(capture_mutex());
  const auto& capture = Stream::of(handle).capture;
  *status = capture == nullptr ? cudaStreamCaptureStatusNone
            : capture->invalid ? cudaStreamCaptureStatusInvalidated
                               : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle,
                                                        cudaStreamCaptureStatus* status,
                                                        unsigned long long* id, cudaGraph_t* graph,
                                                        const cudaGraphNode_t** dependencies,
                                                        const cudaGraphEdgeData** edges,
                                                        size_t* count) {
  static thread_local std::vector<Node*> tail;
  static thread_local GraphHandle shown;
  std::lock_guard<std::recursive_mutex> lock(capture_mutex());
  auto& stream = Stream::of(handle);
  cudaStreamIsCapturing(handle, status);
  if (*status != cudaStreamCaptureStatusActive) {
    return cudaSuccess;
  }
  if (id != nullptr) {
    *id = stream.capture->id;
  }
  if (graph != nullptr) {
    shown = stream.capture->graph;
    *graph = reinterpret_cast<cudaGraph_t>(&shown);
  }
  tail = stream.tail;
  if (dependencies != nullptr) {
    *dependencies = reinterpret_cast<const cudaGraphNode_t*>(tail.data());
  }
  if (edges != nullptr) {
    *edges = nullptr;
  }
  if (count != nullptr) {
    *count = tail.size();
  }
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t handle,
                                                                   cudaGraphNode_t* nodes,
                                                                   const cudaGraphEdgeData*,
                                                                   size_t count, unsigned flags) {
  std::lock_guard<std::recursive_mutex> lock(capture_mutex());
  auto& stream = Stream::of(handle);
  if (stream.capture == nullptr) {
    return failed(cudaErrorInvalidValue);
  }
  auto* given = reinterpret_cast<Node**>(nodes);
  if (flags == cudaStreamSetCaptureDependencies) {
    stream.tail.clear();
  }
  add_new(stream.tail, std::vector<Node*>(given, given + count));
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t* nodes,
                                                 size_t* count) {
  const auto& graph = *graph_of(handle);
  for (size_t i = 0; nodes != nullptr && i < std::min(*count, graph.nodes.size()); ++i) {
    nodes[i] = reinterpret_cast<cudaGraphNode_t>(graph.nodes[i].get());
  }
  *count = graph.nodes.size();
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t handle,
                                                            cudaGraphNode_t* nodes,
                                                            cudaGraphEdgeData*, size_t* count) {
  const auto& before = reinterpret_cast<Node*>(handle)->dependencies;
  for (size_t i = 0; nodes != nullptr && i < std::min(*count, before.size()); ++i) {
    nodes[i] = reinterpret_cast<cudaGraphNode_t>(before[i]);
  }
  *count = before.size();
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made,
                                                             cudaGraph_t handle,
                                                             unsigned long long) {
  *made = reinterpret_cast<cudaGraphExec_t>(new GraphHandle(graph_of(handle)));
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t on) {
  static std::atomic<uint64_t> count{0};
  const GraphHandle graph = *reinterpret_cast<GraphHandle*>(handle);
  auto& stream = Stream::of(on);
  {
    std::lock_guard<std::recursive_mutex> lock(capture_mutex());
    if (stream.capture != nullptr) {
      not_simulated("a graph launched into a capture");
    }
  }
  return enqueue(stream,
                 [graph, number = ++count] { std::make_shared<Launch>(graph, number)->run(); });
}

SIMULATED_CUDA_API cudaError_t cudaGraphDestroy(cudaGraph_t handle) {
  delete &graph_of(handle);
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
  delete reinterpret_cast<GraphHandle*>(handle);
  return cudaSuccess;
}
