#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
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

// An event that other processes may open: how often it was recorded, and how many of those are
// over.
struct Shared {
  std::atomic<uint64_t> recorded{0};
  std::atomic<uint64_t> done{0};

  bool is_done(uint64_t number) const {
    return done >= number;
  }
  void wait(uint64_t number) const {
    constexpr auto kLimit = std::chrono::seconds(60);
    const auto ends = Clock::now() + kLimit;
    while (!is_done(number)) {
      if (Clock::now() > ends) {
        throw std::runtime_error("an event of another process did not come in 60 s");
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

// The shared page of an event, mapped.
class Page {
 public:
  // Takes the descriptor.
  explicit Page(int file) : file_(file) {
    void* at = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (at == MAP_FAILED) {
      close(file);
      throw std::runtime_error("simulated CUDA: an event's page cannot be mapped");
    }
    shared_ = static_cast<Shared*>(at);
  }
  Page(const Page&) = delete;
  Page& operator=(const Page&) = delete;
  ~Page() {
    munmap(shared_, sizeof(Shared));
    close(file_);
  }
  int file() const {
    return file_;
  }
  Shared* operator->() const {
    return shared_;
  }

  static std::shared_ptr<Page> make() {
    const int file = memfd_create("simulated CUDA event", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, sizeof(Shared)) != 0) {
      throw std::runtime_error("simulated CUDA: no memory for an event of several processes");
    }
    return std::make_shared<Page>(file);
  }

 private:
  const int file_;
  Shared* shared_;
};

struct EventHandle {
  pid_t process;
  int file;
};
static_assert(sizeof(EventHandle) <= sizeof(cudaIpcEventHandle_t));

// Made and not destroyed.
std::atomic<int> live_events{0};
std::atomic<int> recorded_events{0};

struct Event {
  explicit Event(unsigned flags) : flags(flags) {
    ++live_events;
    if ((flags & cudaEventInterprocess) != 0) {
      page = Page::make();
    }
  }
  // Of another process.
  explicit Event(std::shared_ptr<Page> opened)
      : flags(cudaEventInterprocess | cudaEventDisableTiming),
        page(std::move(opened)),
        is_opened(true) {
    ++live_events;
  }
  ~Event() {
    --live_events;
  }

  const unsigned flags;
  std::shared_ptr<Page> page;
  const bool is_opened = false;
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
  const auto page = event.page;
  const uint64_t number = page ? ++(*page)->recorded : 0;
  record->ticket = stream.push({[record, page, number] {
                                  record->time = Clock::now().time_since_epoch().count();
                                  if (page) {
                                    (*page)->done = number;
                                  }
                                },
                                {}});
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

// For tests: how many events there are.
SIMULATED_CUDA_API int simulated_cuda_live_events() {
  return live_events;
}

// How often one was recorded.
SIMULATED_CUDA_API int simulated_cuda_recorded_events() {
  return recorded_events;
}

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
  ++recorded_events;
  auto& event = event_of(handle);
  auto& stream = Stream::of(on);
  if (event.is_opened) {
    not_simulated("a record of another process's event");
  }
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
  if (event.is_opened) {
    stream.push(
        {[page = event.page, number = (*event.page)->recorded.load()] { (*page)->wait(number); },
         {}});
  } else if (event.record != nullptr) {
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
  if (event.is_opened && !(*event.page)->is_done((*event.page)->recorded)) {
    return cudaErrorNotReady;
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
  if (event.is_opened) {
    (*event.page)->wait((*event.page)->recorded);
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

SIMULATED_CUDA_API cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* out,
                                                     cudaEvent_t handle) {
  const auto& event = event_of(handle);
  if (event.page == nullptr || event.is_opened) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  const EventHandle made{getpid(), event.page->file()};
  std::memset(out, 0, sizeof *out);
  std::memcpy(out, &made, sizeof made);
  return cudaSuccess;
}

SIMULATED_CUDA_API cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* made,
                                                      cudaIpcEventHandle_t given) {
  EventHandle handle;
  std::memcpy(&handle, &given, sizeof handle);
  const std::string path =
      "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.file);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  *made = reinterpret_cast<cudaEvent_t>(new Event(std::make_shared<Page>(file)));
  return cudaSuccess;
}
