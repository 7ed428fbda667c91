#include "runtime/stream.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "runtime/capture.h"
#include "runtime/device.h"
#include "runtime/fail.h"

namespace simulated_cuda {

namespace {

// A queue as long as this is not held back: whoever fills it waits for nothing.
constexpr size_t kLong = 256;

struct Streams {
  std::mutex mutex;
  std::set<Stream*> all;
  std::array<Stream*, kMostDevices> legacy{};
  uint64_t count = 0;
};

// Never destroyed: threads may use it while the process exits.
Streams& streams() {
  static Streams* instance = new Streams;
  return *instance;
}

uint64_t next_number() {
  static std::atomic<uint64_t> count{0};
  return count++;
}

// Kernels must not run while the process takes its libraries apart.
std::atomic<bool> ending{false};
std::atomic<int> running{0};

void end_of_process() {
  ending = true;
  const auto ends = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  while (running > 0 && std::chrono::steady_clock::now() < ends) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void run_guarded(const std::function<void()>& run) {
  ++running;
  if (!ending) {
    try {
      run();
    } catch (const std::exception& error) {
      fail_for_good(cudaErrorLaunchFailure, std::string("an operation failed: ") + error.what());
    }
  }
  --running;
}

}  // namespace

Stream::Stream(int device, int priority, unsigned flags)
    : device_(device), priority_(priority), flags_(flags), delays_(next_number()) {
  static std::once_flag once;
  std::call_once(once, [] { std::atexit(&end_of_process); });
  std::lock_guard<std::mutex> lock(streams().mutex);
  streams().all.insert(this);
  std::thread([this] { serve(); }).detach();
}

uint64_t Stream::push(Operation operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back(std::move(operation));
  changed_.notify_all();
  return ++pushed_;
}

uint64_t Stream::newest() {
  std::lock_guard<std::mutex> lock(mutex_);
  return pushed_;
}

bool Stream::is_done(uint64_t ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_ >= ticket;
}

void Stream::demand(uint64_t ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (demanded_ < ticket) {
    demanded_ = ticket;
    changed_.notify_all();
  }
}

void Stream::wait(uint64_t ticket) {
  demand(ticket);
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return done_ >= ticket; });
}

void Stream::retire() {
  {
    std::lock_guard<std::mutex> lock(streams().mutex);
    streams().all.erase(this);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  retired_ = true;
  changed_.notify_all();
}

void Stream::serve() {
  current_device() = device_;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return !queue_.empty() || retired_; });
    if (queue_.empty()) {
      return;
    }
    const uint64_t ticket = done_ + 1;
    if (const auto hold = delays_.hold(); hold.count() > 0) {
      changed_.wait_for(lock, hold,
                        [&] { return demanded_ >= ticket || queue_.size() > kLong || retired_; });
    }
    Operation operation = std::move(queue_.front());
    queue_.pop_front();
    const auto pause = delays_.pause();
    lock.unlock();
    if (pause.count() > 0) {
      std::this_thread::sleep_for(pause);
    }
    if (operation.demand_others) {
      operation.demand_others();
    }
    run_guarded(operation.run);
    operation = {};
    lock.lock();
    done_ = ticket;
    changed_.notify_all();
  }
}

Stream& Stream::of(cudaStream_t handle) {
  if (handle == cudaStreamPerThread) {
    not_simulated("cudaStreamPerThread");
  }
  if (handle != nullptr && handle != cudaStreamLegacy) {
    return *reinterpret_cast<Stream*>(handle);
  }
  const int device = current_device();
  {
    std::lock_guard<std::mutex> lock(streams().mutex);
    if (auto* made = streams().legacy.at(device)) {
      return *made;
    }
  }
  auto* fresh = new Stream(device, 0, cudaStreamDefault);
  std::lock_guard<std::mutex> lock(streams().mutex);
  auto& slot = streams().legacy.at(device);
  if (slot == nullptr) {
    slot = fresh;
  }
  return *slot;
}

std::vector<Stream*> Stream::all(int device) {
  std::lock_guard<std::mutex> lock(streams().mutex);
  std::vector<Stream*> found;
  std::copy_if(streams().all.begin(), streams().all.end(), std::back_inserter(found),
               [&](const Stream* s) { return s->device() == device; });
  return found;
}

void drain(int device) {
  for (auto* stream : Stream::all(device)) {
    stream->wait(stream->newest());
  }
}

cudaError_t enqueue(Stream& stream, std::function<void()> run) {
  if (standing_error() != cudaSuccess) {
    return standing_error();
  }
  bool captured = false;
  const cudaError_t error = add_to_capture(stream, run, &captured);
  if (!captured && error == cudaSuccess) {
    stream.push({std::move(run), {}});
  }
  return failed(error);
}

}  // namespace simulated_cuda

using namespace simulated_cuda;

// torch and gloo ask for non-blocking streams alone; the others are ordered with the legacy stream.
SIMULATED_CUDA_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* made, unsigned flags,
                                                            int priority) {
  if (flags != cudaStreamNonBlocking) {
    not_simulated("a stream without cudaStreamNonBlocking");
  }
  *made = (new Stream(current_device(), priority, flags))->handle();
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* made, unsigned flags) {
  return cudaStreamCreateWithPriority(made, flags, 0);
}

SIMULATED_CUDA_API cudaError_t cudaStreamCreate(cudaStream_t* made) {
  return cudaStreamCreateWithPriority(made, cudaStreamDefault, 0);
}

SIMULATED_CUDA_API cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  Stream::of(handle).retire();
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  *priority = Stream::of(handle).priority();
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  auto& stream = Stream::of(handle);
  if (const auto error = refuse_in_capture(&stream); error != cudaSuccess) {
    return failed(error);
  }
  return stream.is_done(stream.newest()) ? standing_error() : cudaErrorNotReady;
}

SIMULATED_CUDA_API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  auto& stream = Stream::of(handle);
  if (const auto error = refuse_in_capture(&stream); error != cudaSuccess) {
    return failed(error);
  }
  stream.wait(stream.newest());
  return standing_error();
}

SIMULATED_CUDA_API cudaError_t cudaDeviceSynchronize() {
  if (const auto error = refuse_in_capture(nullptr); error != cudaSuccess) {
    return failed(error);
  }
  drain(current_device());
  return standing_error();
}

SIMULATED_CUDA_API cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t f, void* data) {
  return enqueue(Stream::of(handle), [=] { f(data); });
}

SIMULATED_CUDA_API cudaError_t cudaStreamAddCallback(cudaStream_t handle,
                                                     cudaStreamCallback_t callback, void* data,
                                                     unsigned) {
  return enqueue(Stream::of(handle), [=] { callback(handle, standing_error(), data); });
}

// For libsimulated_kernels: a kernel that is a function of this process.
SIMULATED_CUDA_API cudaError_t simulated_cuda_enqueue(cudaStream_t handle,
                                                      std::function<void()>* run) {
  return enqueue(Stream::of(handle), std::move(*run));
}
