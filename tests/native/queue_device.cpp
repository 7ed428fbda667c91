// A device for PrivateUse1, as small as one can be: streams are queues on the host, memory comes
// from a caching allocator that follows CUDA's rules, and a c10d backend serves its tensors. What
// is not ordered by an event is not in order: an operation begins late.
// One file, for it is compiled by itself, as an extension.

#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);

// Streams and events.

// How long an operation waits before it begins.
std::atomic<int> delay_us{0};

class Queue {
 public:
  Queue() {
    std::thread([this] { serve(); }).detach();
  }

  uint64_t push(std::function<void()> run) {
    const std::lock_guard lock(mutex_);
    operations_.push_back(std::move(run));
    changed_.notify_all();
    return ++pushed_;
  }
  uint64_t newest() const {
    const std::lock_guard lock(mutex_);
    return pushed_;
  }
  bool is_done(uint64_t ticket) const {
    const std::lock_guard lock(mutex_);
    return done_ >= ticket;
  }
  void wait(uint64_t ticket) const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= ticket; });
  }

 private:
  void serve() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return !operations_.empty(); });
      const auto run = std::move(operations_.front());
      operations_.pop_front();
      lock.unlock();
      if (const int delay = delay_us; delay > 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(delay));
      }
      run();
      lock.lock();
      ++done_;
      changed_.notify_all();
    }
  }

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<std::function<void()>> operations_;
  uint64_t pushed_ = 0;
  uint64_t done_ = 0;
};

// Never destroyed: their threads serve until the process is gone. Stream 0 is the default one.
Queue& queue_of(c10::StreamId id) {
  static auto& mutex = *new std::mutex;
  static auto& queues = *new std::map<c10::StreamId, std::unique_ptr<Queue>>;
  const std::lock_guard lock(mutex);
  auto& queue = queues[id];
  if (queue == nullptr) {
    queue = std::make_unique<Queue>();
  }
  return *queue;
}

thread_local c10::StreamId current = 0;

Queue& here() {
  return queue_of(current);
}

c10::Stream stream_of(c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, kDevice, id);
}

c10::StreamId new_stream() {
  static std::atomic<c10::StreamId> made{0};
  return ++made;
}

// Where in a queue.
struct Mark {
  Queue* queue = nullptr;
  uint64_t ticket = 0;

  static Mark of(Queue& queue) {
    return {&queue, queue.newest()};
  }
  bool is_done() const {
    return queue == nullptr || queue->is_done(ticket);
  }
  void wait() const {
    if (queue != nullptr) {
      queue->wait(ticket);
    }
  }
  void block(Queue& other) const {
    if (queue != nullptr && queue != &other) {
      other.push([mark = *this] { mark.wait(); });
    }
  }
};

// Memory.

// Memory given back is handed out again on the stream that it came from, at once; where others have
// been recorded as its users, when they have come as far as they were then.
class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const size_t size = (bytes + 511) / 512 * 512;
    const std::lock_guard lock(mutex_);
    give_back();
    auto& pool = unused_[{current, size}];
    void* data = nullptr;
    if (pool.empty()) {
      data = std::aligned_alloc(512, std::max<size_t>(size, 512));
    } else {
      data = pool.back();
      pool.pop_back();
    }
    blocks_[data] = {current, size, {}};
    return {data, data, &Allocator::release, kDevice};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  void record(const void* data, c10::StreamId user) {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(const_cast<void*>(data));
    if (found != blocks_.end() && found->second.home != user) {
      found->second.users.push_back(user);
    }
  }

  static Allocator& get() {
    static auto& instance = *new Allocator;
    return instance;
  }

 private:
  struct Block {
    c10::StreamId home;
    size_t size;
    std::vector<c10::StreamId> users;
  };
  struct Busy {
    void* data;
    Block block;
    std::vector<Mark> until;
  };

  static void release(void* data) {
    get().take_back(data);
  }

  void take_back(void* data) {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(data);
    Busy busy{data, std::move(found->second), {}};
    blocks_.erase(found);
    for (const auto user : busy.block.users) {
      busy.until.push_back(Mark::of(queue_of(user)));
    }
    busy_.push_back(std::move(busy));
    give_back();
  }

  void give_back() {
    for (auto it = busy_.begin(); it != busy_.end();) {
      bool over = true;
      for (const auto& mark : it->until) {
        over = over && mark.is_done();
      }
      if (over) {
        unused_[{it->block.home, it->block.size}].push_back(it->data);
      }
      it = over ? busy_.erase(it) : std::next(it);
    }
  }

  std::mutex mutex_;
  std::map<void*, Block> blocks_;
  std::map<std::pair<c10::StreamId, size_t>, std::vector<void*>> unused_;
  std::list<Busy> busy_;
};

// What torch asks of a device.

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return kDevice;
  }
  c10::Device getDevice() const override {
    return kDevice;
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override {
    return stream_of(current);
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return stream_of(0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return stream_of(new_stream());
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return stream_of(new_stream());
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream_of(std::exchange(current, next.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    delete static_cast<Mark*>(*event);
    *event = new Mark(Mark::of(queue_of(stream.id())));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      static_cast<Mark*>(event)->block(queue_of(stream.id()));
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || static_cast<Mark*>(event)->is_done();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      static_cast<Mark*>(event)->wait();
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Mark*>(event);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return Mark::of(queue_of(stream.id())).is_done();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Mark::of(queue_of(stream.id())).wait();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Allocator::get().record(data.get(), stream.id());
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
};

// The ops of aten.

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// The same memory as a tensor of the CPU. Keeps nothing: a kernel is launched with addresses.
at::Tensor on_host(const at::Tensor& t) {
  if (t.is_cpu()) {
    return t;
  }
  const auto options = t.options().device(c10::kCPU);
  at::Tensor host = t.numel() == 0 ? at::empty_strided(t.sizes(), t.strides(), options)
                                   : at::from_blob(t.data_ptr(), t.sizes(), t.strides(), options);
  host._set_conj(t.is_conj());
  host._set_neg(t.is_neg());
  return host;
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::Tensor(at::detail::empty_generic(size, &Allocator::get(), kKeys,
                                              c10::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::Tensor(at::detail::empty_strided_generic(size, stride, &Allocator::get(), kKeys,
                                                      c10::dtype_or_default(dtype)));
}

at::Tensor strided_view(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                        std::optional<int64_t> offset) {
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride,
                                                    offset.value_or(self.storage_offset()));
  return made;
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) {
  const auto sizes = at::infer_size_dv(size, self.numel());
  const auto strides = at::detail::computeStride(self.sizes(), self.strides(), sizes);
  TORCH_CHECK(strides.has_value(), "view: the strides cannot be kept");
  return strided_view(self, sizes, *strides, self.storage_offset());
}

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return strided_view(self, size, stride, self.storage_offset());
}

at::Tensor as(c10::ScalarType dtype, const at::Tensor& self, c10::IntArrayRef sizes,
              c10::IntArrayRef strides, int64_t offset) {
  at::Tensor made =
      at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()),
                                               self.key_set(), c10::scalarTypeToTypeMeta(dtype));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return made;
}

at::Tensor view_as_real(const at::Tensor& self) {
  auto sizes = self.sizes().vec();
  auto strides = self.strides().vec();
  for (auto& stride : strides) {
    stride *= 2;
  }
  sizes.push_back(2);
  strides.push_back(1);
  return as(c10::toRealValueType(self.scalar_type()), self, sizes, strides,
            2 * self.storage_offset());
}

at::Tensor view_as_complex(const at::Tensor& self) {
  auto sizes = self.sizes().vec();
  auto strides = self.strides().vec();
  sizes.pop_back();
  strides.pop_back();
  for (auto& stride : strides) {
    stride /= 2;
  }
  return as(c10::toComplexType(self.scalar_type()), self, sizes, strides,
            self.storage_offset() / 2);
}

at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
  auto sizes = self.sizes().vec();
  auto strides = self.strides().vec();
  const int64_t at = dim < 0 ? dim + self.dim() : dim;
  sizes.push_back(size);
  strides.push_back(strides[at]);
  sizes[at] = (sizes[at] - size) / step + 1;
  strides[at] *= step;
  return strided_view(self, sizes, strides, self.storage_offset());
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  // Strides may be anything, and self of another shape: it is expanded.
  const at::Tensor source = self.sizes() == to.sizes() ? self : self.expand(to.sizes());
  const at::Tensor from = on_host(source.is_cpu() ? source.clone() : source);
  here().push([from, into = on_host(to)] { at::Tensor(into).copy_(from); });
  if (to.is_cpu()) {
    Mark::of(here()).wait();
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (self.sizes() != to.sizes()) {
    to.resize_(self.sizes());
  }
  return copy_from(self, to, false);
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size,
                         std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t needed = (impl->storage_offset() + self.numel()) * self.itemsize();
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (needed > storage->nbytes()) {
    storage->set_data_ptr_noswap(Allocator::get().allocate(needed));
    storage->set_nbytes(needed);
  }
  return self;
}

at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  here().push([into = on_host(self), value] { at::Tensor(into).fill_(value); });
  return self;
}

at::Scalar local_scalar(const at::Tensor& self) {
  Mark::of(here()).wait();
  return at::_local_scalar_dense(on_host(self));
}

// The rest computes on the CPU, with copies there and back in the order of the stream.
void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", strided_view);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view_as_real", view_as_real);
  m.impl("view_as_complex", view_as_complex);
  m.impl("unfold", unfold);
  m.impl("resize_", resize);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("fill_.Scalar", fill);
  m.impl("_local_scalar_dense", local_scalar);
}

// The copy heeds the bits itself: torch's fallbacks would resolve them by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
}

// A backend of c10d.

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// What a collective on the backend's stream has come to.
struct Outcome {
  std::mutex mutex;
  std::exception_ptr error;
};

class QueueWork : public c10d::Work {
 public:
  QueueWork(int rank, c10d::OpType type, Mark end, std::shared_ptr<Outcome> outcome)
      : c10d::Work(rank, type), end_(end), outcome_(std::move(outcome)) {}

  bool isCompleted() override {
    return end_.is_done();
  }
  bool isSuccess() const override {
    return exception() == nullptr;
  }
  std::exception_ptr exception() const override {
    const std::lock_guard lock(outcome_->mutex);
    return outcome_->error;
  }
  // The current stream goes on after it; the host is free.
  bool wait(std::chrono::milliseconds) override {
    end_.block(here());
    return true;
  }
  void synchronize() override {
    wait(kNoTimeout);
  }

 private:
  const Mark end_;
  const std::shared_ptr<Outcome> outcome_;
};

// Collectives on a stream of its own, as nccl's; what moves the bytes is a backend of the CPU.
class QueueBackend : public c10d::Backend {
 public:
  explicit QueueBackend(c10::intrusive_ptr<c10d::Backend> carrier)
      : c10d::Backend(carrier->getRank(), carrier->getSize()),
        carrier_(std::move(carrier)),
        stream_(queue_of(new_stream())) {}

  ~QueueBackend() override {
    Mark::of(stream_).wait();
  }

  const std::string getBackendName() const override {
    return "queue";
  }

  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) override {
    return start(c10d::OpType::ALLREDUCE, [this, t = on_host(tensors.at(0)), opts] {
      std::vector<at::Tensor> copy{t.clone()};
      spoil(t);
      carrier_->allreduce(copy, opts)->wait();
      at::Tensor(t).copy_(copy[0]);
    });
  }

  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits,
                        std::vector<int64_t>& in_splits,
                        const c10d::AllToAllOptions& opts) override {
    return start(c10d::OpType::ALLTOALL_BASE,
                 [this, to = on_host(out), from = on_host(in), out_splits, in_splits, opts] {
                   auto given = from.clone();
                   auto got = to;
                   auto outs = out_splits, ins = in_splits;
                   spoil(to);
                   carrier_->alltoall_base(got, given, outs, ins, opts)->wait();
                 });
  }

 private:
  // Whoever reads an output too early sees that.
  static void spoil(const at::Tensor& t) {
    if (t.numel() > 0) {
      std::memset(t.data_ptr(), 0x5a, t.nbytes());
    }
  }

  WorkPtr start(c10d::OpType type, std::function<void()> run) {
    const auto outcome = std::make_shared<Outcome>();
    Mark::of(here()).block(stream_);
    stream_.push([run = std::move(run), outcome] {
      try {
        run();
      } catch (...) {
        const std::lock_guard lock(outcome->mutex);
        outcome->error = std::current_exception();
      }
    });
    return c10::make_intrusive<QueueWork>(rank_, type, Mark::of(stream_), outcome);
  }

  const c10::intrusive_ptr<c10d::Backend> carrier_;
  Queue& stream_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("create",
        [](const c10::intrusive_ptr<c10d::Backend>& carrier) -> c10::intrusive_ptr<c10d::Backend> {
          return c10::make_intrusive<QueueBackend>(carrier);
        });
  m.def("new_stream", &new_stream);
  m.def("exchange_stream", [](c10::StreamId next) { return std::exchange(current, next); });
  m.def("wait_stream", [](c10::StreamId waiting, c10::StreamId other) {
    Mark::of(queue_of(other)).block(queue_of(waiting));
  });
  m.def(
      "synchronize", [](c10::StreamId id) { Mark::of(queue_of(id)).wait(); },
      py::call_guard<py::gil_scoped_release>());
  m.def("is_idle", [](c10::StreamId id) { return Mark::of(queue_of(id)).is_done(); });
  m.def("sleep", [](int milliseconds) {
    here().push([=] { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); });
  });
  m.def("set_delay", [](int microseconds) { delay_us = microseconds; });
}
