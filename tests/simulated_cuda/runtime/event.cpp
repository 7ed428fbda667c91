#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>

#include "runtime/capture.h"
#include "runtime/fail.h"
#include "runtime/stream.h"

// Events: what stream, up to which operation, and when that was over.
namespace simulated_cuda {

namespace {

using Clock = std::chrono::steady_clock;

struct Record {
  Stream* stream;
  uint64_t ticket = 0;
  std::atomic<Clock::rep> time{0};

  bool is_done() const {
    return stream->is_done(ticket);
  }
};

struct Event {
  explicit Event(unsigned flags) : flags(flags) {}

  const unsigned flags;
  std::mutex mutex;
  // The last record: in a queue, or in a capture. Neither for an event that was never recorded.
  std::shared_ptr<Record> record;
  std::shared_ptr<Capture> capture;
  std::vector<Node*> nodes;
};

Event& event_of(cudaEvent_t handle) {
  return *reinterpret_cast<Event*>(handle);
}

void record_on(Event& event, Stream& stream) {
  auto record = std::make_shared<Record>();
  record->stream = &stream;
  std::lock_guard<std::mutex> lock(event.mutex);
  record->ticket =
      stream.push({[record] { record->time = Clock::now().time_since_epoch().count(); }, {}});
  event.record = std::move(record);
  event.capture = nullptr;
  event.nodes.clear();
}

// A wait that a stream, or the branch of a graph, does.
void await(const std::shared_ptr<Record>& record) {
  record->stream->wait(record->ticket);
}

}  // namespace

}  // namespace simulated_cuda

using namespace simulated_cuda;

SIMULATED_CUDA_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned flags) {
  *made = reinterpret_cast<cudaEvent_t>(new Event(flags));
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaEventCreate(cudaEvent_t* made) {
  return cudaEventCreateWithFlags(made, cudaEventDefault);
}

SIMULATED_CUDA_API cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  delete reinterpret_cast<Event*>(handle);
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t on,
                                                        unsigned flags) {
  auto& event = event_of(handle);
  auto& stream = Stream::of(on);
  std::lock_guard<std::recursive_mutex> captures(capture_mutex());
  if (stream.capture == nullptr) {
    record_on(event, stream);
    return standing_error();
  }
  if ((flags & cudaEventRecordExternal) != 0) {
    not_simulated("cudaEventRecordExternal in a capture");
  }
  if (stream.capture->invalid) {
    return failed(cudaErrorStreamCaptureInvalidated);
  }
  std::lock_guard<std::mutex> lock(event.mutex);
  event.record = nullptr;
  event.capture = stream.capture;
  event.nodes = stream.tail;
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t on) {
  return cudaEventRecordWithFlags(handle, on, cudaEventRecordDefault);
}

SIMULATED_CUDA_API cudaError_t cudaStreamWaitEvent(cudaStream_t waiting, cudaEvent_t handle,
                                                   unsigned flags) {
  auto& event = event_of(handle);
  auto& stream = Stream::of(waiting);
  std::lock_guard<std::recursive_mutex> captures(capture_mutex());
  std::lock_guard<std::mutex> lock(event.mutex);
  if (event.capture != nullptr) {
    return failed(join_capture(stream, event.capture, event.nodes));
  }
  if (stream.capture != nullptr) {
    if (event.record == nullptr) {
      return cudaSuccess;
    }
    if ((flags & cudaEventWaitExternal) != 0) {
      not_simulated("cudaEventWaitExternal in a capture");
    }
    return failed(invalidate(*stream.capture, cudaErrorStreamCaptureIsolation));
  }
  if (event.record != nullptr) {
    const auto record = event.record;
    stream.push(
        {[record] { await(record); }, [record] { record->stream->demand(record->ticket); }});
  }
  return standing_error();
}

SIMULATED_CUDA_API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  auto& event = event_of(handle);
  std::lock_guard<std::recursive_mutex> captures(capture_mutex());
  std::unique_lock<std::mutex> lock(event.mutex);
  if (event.capture != nullptr) {
    invalidate(*event.capture, cudaErrorCapturedEvent);
    return failed(cudaErrorCapturedEvent);
  }
  if (const auto error = refuse_in_capture(nullptr); error != cudaSuccess) {
    return failed(error);
  }
  if (event.record != nullptr && !event.record->is_done()) {
    return cudaErrorNotReady;
  }
  return standing_error();
}

SIMULATED_CUDA_API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  auto& event = event_of(handle);
  std::shared_ptr<Record> record;
  {
    std::lock_guard<std::recursive_mutex> captures(capture_mutex());
    std::lock_guard<std::mutex> lock(event.mutex);
    if (event.capture != nullptr) {
      invalidate(*event.capture, cudaErrorCapturedEvent);
      return failed(cudaErrorCapturedEvent);
    }
    if (const auto error = refuse_in_capture(nullptr); error != cudaSuccess) {
      return failed(error);
    }
    record = event.record;
  }
  if (record != nullptr) {
    await(record);
  }
  return standing_error();
}

SIMULATED_CUDA_API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from,
                                                    cudaEvent_t to) {
  const auto record_of = [](cudaEvent_t handle) {
    auto& event = event_of(handle);
    std::lock_guard<std::mutex> lock(event.mutex);
    return (event.flags & cudaEventDisableTiming) == 0 ? event.record : nullptr;
  };
  const auto begin = record_of(from);
  const auto end = record_of(to);
  if (begin == nullptr || end == nullptr) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  if (!begin->is_done() || !end->is_done()) {
    return cudaErrorNotReady;
  }
  *milliseconds = std::chrono::duration<float, std::milli>(
                      Clock::duration(end->time.load() - begin->time.load()))
                      .count();
  return cudaSuccess;
}
