#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backends/shm/backend.h"
#include "backends/shm/engine.h"
#include "backends/shm/profiler_span.h"
#include "base/dtype.h"
#include "base/exceptions.h"
#include "base/memory.h"
#include "base/progress_handoff.h"
#include "work/snapshot.h"

namespace c10d_ext {

struct ShmBackend::Call {
  enum class Delivery : uint8_t {
    Async,  // a work, always
    Sync,   // complete on return, no work
    Op,     // a work unless complete already
  };

  std::string_view op;
  c10d::OpType type;
  Delivery delivery = Delivery::Op;
  Milliseconds timeout = c10d::kUnsetTimeout;
  // Of an Op that is complete on return: where to tell of it.
  WorkInfo* done = nullptr;

  static Call of(const MethodCall& call) {
    return {call.op, call.type, call.async ? Delivery::Async : Delivery::Sync, call.timeout};
  }
};

// An operation of the engine with the tensors it reads and writes. Built and submitted by one
// thread; settled by the one that drives the engine.
class ShmBackend::TensorOperation final : public shm::Operation {
 public:
  TensorOperation() : shm::Operation({}, {}) {}

  // Everything that a call sets is set here.
  void start(std::string_view op, OpType type, std::chrono::milliseconds limit, const Group& place,
             size_t sources, size_t targets) {
    op_ = op;
    place_ = &place;
    span_ = ProfilerSpan::open(op);
    timeout = limit;
    request.type = type;
    request.sources.resize(sources);
    request.targets.resize(targets);
  }

  // Without a trace of the last call, but with the memory of its lists. Only for one that has ended
  // well and whose single owner asks: what is allocated costs as much as a small operation.
  void renew() {
    shm::Operation::renew();
    shm::Request& r = request;
    for (auto* parts : {&r.sources, &r.targets}) {
      for (shm::Buffer& part : *parts) {
        part.clear();
      }
    }
    r.dtype = DType::Bytes;
    r.reduce_op = ReduceOp::None;
    r.factor = {};
    r.root = r.peer = -1;
    r.tag = 0;
    r.shapes = 0;
    r.call_site.clear();
    r.members.clear();
    travel_dtype_.reset();
    has_dtype_ = false;
    outputs_.clear();
    state_.store(kRunning, std::memory_order_relaxed);
  }
  bool is_renewable() const {
    return !error_ && !future_ && !listener_ && !carrier_;
  }

  // --- Building ---------------------------------------------------------------------------------

  // The values of `t` travel as part `part`.
  void read(size_t part, const at::Tensor& t) {
    const at::Tensor& values = dense_values(t);
    request.sources[part].push_back({readable(values), values.nbytes()});
  }
  // sizes[0] elements of `t` travel as part 0, the next sizes[1] as part 1, and so on.
  void read_split(const at::Tensor& t, c10::IntArrayRef sizes) {
    const at::Tensor& values = dense_values(t);
    split(request.sources, readable(values), values.itemsize(), sizes);
  }
  void read_evenly(const at::Tensor& t) {
    const at::Tensor& values = dense_values(t);
    split_evenly(request.sources, readable(values), values.nbytes());
  }

  // All of `tensors`: each as part 0; or, where they are divided, a tensor for each part (as many
  // for each), or of every tensor `sizes` elements for each, or equal parts.
  void read_all(at::TensorList tensors, bool divides, bool has_parts, c10::IntArrayRef sizes) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!divides || has_parts) {
        read(divides ? i / (tensors.size() / request.sources.size()) : 0, tensors[i]);
      } else if (!sizes.empty()) {
        read_split(tensors[i], sizes);
      } else {
        read_evenly(tensors[i]);
      }
    }
  }

  // What arrives as part `part` becomes the values of `t`.
  void write(size_t part, const at::Tensor& t) {
    const at::Tensor& memory = landing(t);
    request.targets[part].push_back({writable(memory), memory.nbytes()});
  }
  void write_split(const at::Tensor& t, c10::IntArrayRef sizes) {
    const at::Tensor& memory = landing(t);
    split(request.targets, writable(memory), memory.itemsize(), sizes);
  }
  void write_evenly(const at::Tensor& t) {
    const at::Tensor& memory = landing(t);
    split_evenly(request.targets, writable(memory), memory.nbytes());
  }

  void write_all(at::TensorList tensors, bool divides, bool has_parts, c10::IntArrayRef sizes) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!divides || has_parts) {
        write(divides ? i / (tensors.size() / request.targets.size()) : 0, tensors[i]);
      } else if (!sizes.empty()) {
        write_split(tensors[i], sizes);
      } else {
        write_evenly(tensors[i]);
      }
    }
  }

  // read() and write() of the same tensor.
  void replace(size_t part, const at::Tensor& t) {
    if (C10_UNLIKELY(span_ != nullptr || travel_dtype_ || !is_dense(t))) {
      read(part, t);
      write(part, t);
      return;
    }
    outputs_.push_back(alias_of(t));
    const shm::Piece memory{writable(outputs_.back()), t.nbytes()};
    request.sources[part].push_back(memory);
    request.targets[part].push_back(memory);
  }

  // Elements are converted to `dtype` to travel.
  void travel_as(c10::ScalarType dtype) {
    travel_dtype_ = dtype;
  }
  // All elements have one dtype, or the bytes count.
  void set_dtype(const at::Tensor& t) {
    const DType dtype = dtype_of(t.scalar_type());
    if (!has_dtype_) {
      request.dtype = dtype;
      has_dtype_ = true;
    } else if (request.dtype != dtype) {
      request.dtype = DType::Bytes;
    }
  }
  // What is compared on all ranks.
  void add_shape(const at::Tensor& t) {
    request.shapes =
        c10d_ext::add_shape(request.shapes, t.sizes().data(), static_cast<size_t>(t.dim()));
  }
  uint64_t member_bytes() const {
    return shm::bytes_of(request.type == OpType::ReduceScatter ? request.targets[0]
                                                               : request.sources[0]);
  }
  // Tensors that travel together, on every rank as many.
  void add_members(at::TensorList tensors) {
    if (tensors.size() > 1) {
      for (const auto& t : tensors) {
        request.members.push_back(t.nbytes());
      }
    }
  }
  // A result that the engine does not write itself.
  void add_output(const at::Tensor& t) {
    outputs_.push_back(alias_of(t));
  }
  // Runs when it begins, and the other when the data has arrived, both in the order of calls.
  void around(std::function<void()> prepare, std::function<void()> finish) {
    prepare_ = std::move(prepare);
    finish_ = std::move(finish);
  }
  // Sources that share memory with targets are copied when it begins, but for a rank's own part
  // that is replaced in place, which the engine can do.
  void separate();

  // --- Several operations as one operation
  // -----------------------------------------------------------

  bool can_carry(const TensorOperation& other) const {
    const auto& a = request;
    const auto& b = other.request;
    return a.type == b.type && a.dtype == b.dtype && a.reduce_op == b.reduce_op &&
           a.factor.real == b.factor.real && a.factor.imaginary == b.factor.imaginary &&
           timeout == other.timeout &&
           (a.type == OpType::AllReduce || a.type == OpType::AllGather ||
            a.type == OpType::ReduceScatter);
  }
  void carry(const std::shared_ptr<TensorOperation>& other) {
    if (request.members.empty()) {
      request.members.push_back(member_bytes());
    }
    if (other->request.members.empty()) {
      request.members.push_back(other->member_bytes());
    } else {
      request.members.insert(request.members.end(), other->request.members.begin(),
                             other->request.members.end());
    }
    append(request.sources, other->request.sources);
    append(request.targets, other->request.targets);
    request.shapes = join_shapes(request.shapes, other->request.shapes);
    passengers_.push_back(other);
  }
  // For a call that is in flight when it returns, unless a table of works knows of it.
  void note_writes() {
    writes_ = WritesInFlight(outputs_);
  }
  void hold() {
    held_.store(true, std::memory_order_relaxed);
  }
  // `carrier`: the operation that this is a part of from now on, or null.
  void release(std::shared_ptr<TensorOperation> carrier) {
    carrier_ = std::move(carrier);
    held_.store(false, std::memory_order_release);
  }
  // In an open coalescing block: not submitted yet.
  bool held() const {
    return held_.load(std::memory_order_acquire);
  }
  // What the engine knows.
  TensorOperation& carrier() {
    return carrier_ ? *carrier_ : *this;
  }

  // --- Outcome ----------------------------------------------------------------------------------

  // The result is there, or the error. Future callbacks may still be running.
  bool settled() const {
    return state_.load(std::memory_order_acquire) == kSettled;
  }
  // These two only once it is settled.
  const std::exception_ptr& error() const {
    return error_;
  }
  float milliseconds() const {
    return milliseconds_;
  }
  bool disagrees() const {
    return disagrees_;
  }
  void report() const {
    if (C10_UNLIKELY(error_ != nullptr)) {
      std::rethrow_exception(error_);
    }
  }
  int source() const {
    return settled() ? source_ : -1;
  }
  uint64_t number() const {
    return carrier_ && settled() ? number_ : seq();
  }
  std::string_view op() const {
    return op_;
  }
  Tensors outputs() const {
    return Tensors(outputs_.begin(), outputs_.end());
  }
  c10::intrusive_ptr<c10::ivalue::Future> future() {
    std::unique_lock lock(audience_mutex_);
    if (!future_) {
      future_ =
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
      if (!expect()) {
        lock.unlock();
        complete(future_);
      }
    }
    return future_;
  }
  // Once at most.
  void when_settled(std::function<void(std::exception_ptr)> over) {
    std::unique_lock lock(audience_mutex_);
    if (expect()) {
      listener_ = std::move(over);
    } else {
      lock.unlock();
      over(error_);
    }
  }

  void on_begin() override {
    if (span_) {
      span_->begin();
    }
    if (C10_UNLIKELY(!fills_.empty())) {
      copy(fills_);
    }
    if (C10_UNLIKELY(prepare_)) {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      prepare_();
    }
    for (const auto& [data, copy] : overlaps_) {
      std::memcpy(copy.mutable_data_ptr(), data, copy.nbytes());
    }
    for (const auto& passenger : passengers_) {
      passenger->on_begin();
    }
  }

  void on_arrived() override {
    if (C10_UNLIKELY(!landings_.empty())) {
      copy(landings_);
    }
    if (C10_UNLIKELY(finish_)) {
      attempt(finish_);
    }
    for (const auto& passenger : passengers_) {
      passenger->on_arrived();
    }
  }

  void on_done(const Failure* failure) override {
    settle(failure, *this);
    // They hold this one: the circle ends here.
    for (const auto& passenger : std::exchange(passengers_, {})) {
      passenger->settle(failure, *this);
    }
  }

 private:
  enum State : uint8_t { kRunning, kAwaited, kSettled };
  struct Copy {
    at::Tensor from;
    at::Tensor to;
  };
  struct Overlap {
    const std::byte* data;
    at::Tensor copy;
  };

  template <class F>
  void attempt(const F& something) {
    try {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      something();
    } catch (...) {
      trouble_ = std::current_exception();
    }
  }
  void copy(const std::vector<Copy>& copies) {
    attempt([&] {
      for (const auto& [from, to] : copies) {
        copy_values(to, from);
      }
    });
  }

  // A dense tensor of what the values of `t` are when it begins, kept until the end.
  const at::Tensor& dense_values(const at::Tensor& t) {
    if (C10_UNLIKELY(span_ != nullptr)) {
      span_->add_input(t);
    }
    const bool converted = travel_dtype_ && *travel_dtype_ != t.scalar_type();
    if (C10_LIKELY(is_dense(t) && !converted)) {
      kept_.push_back(alias_of(t));
    } else {
      kept_.push_back(scratch(t));
      fills_.push_back({alias_of(t), kept_.back()});
    }
    return kept_.back();
  }

  // A dense tensor that becomes `t` in the end.
  const at::Tensor& landing(const at::Tensor& t) {
    outputs_.push_back(alias_of(t));
    const bool converted = travel_dtype_ && *travel_dtype_ != t.scalar_type();
    if (C10_LIKELY(is_dense(t) && !converted)) {
      return outputs_.back();
    }
    landings_.push_back({scratch(t), outputs_.back()});
    return landings_.back().from;
  }

  at::Tensor scratch(const at::Tensor& t) const {
    return at::empty(t.sizes(), t.options().dtype(travel_dtype_.value_or(t.scalar_type())));
  }

  static void append(std::vector<shm::Buffer>& parts, const std::vector<shm::Buffer>& more) {
    for (size_t i = 0; i < parts.size(); ++i) {
      parts[i].insert(parts[i].end(), more[i].begin(), more[i].end());
    }
  }
  // The engine writes targets only.
  static std::byte* readable(const at::Tensor& t) {
    return static_cast<std::byte*>(const_cast<void*>(t.const_data_ptr()));
  }
  static std::byte* writable(const at::Tensor& t) {
    return static_cast<std::byte*>(t.mutable_data_ptr());
  }
  static void split(std::vector<shm::Buffer>& parts, std::byte* data, size_t itemsize,
                    c10::IntArrayRef sizes) {
    for (size_t i = 0; i < parts.size(); ++i) {
      const size_t bytes = static_cast<size_t>(sizes[i]) * itemsize;
      parts[i].push_back({data, bytes});
      data += bytes;
    }
  }
  static void split_evenly(std::vector<shm::Buffer>& parts, std::byte* data, size_t total) {
    const size_t bytes = total / parts.size();
    for (auto& part : parts) {
      part.push_back({data, bytes});
      data += bytes;
    }
  }

  // `carrier` is the operation that the engine ran.
  void settle(const Failure* failure, const TensorOperation& carrier) {
    if (C10_UNLIKELY(failure != nullptr)) {
      // The engine knows types of collectives: all_gather is all_gather_into_tensor's as well.
      disagrees_ = failure->kind == ErrorKind::Mismatch;
      std::string op = failure->op, text = failure->text;
      if (op == name_of(request.type) && text.starts_with(op + ":")) {
        text.replace(0, op.size(), op_);
        op = op_;
      }
      error_ = std::make_exception_ptr(
          CollectiveError(failure->kind, text, failure->ranks, op, failure->seq, place_->name()));
    } else if (C10_UNLIKELY(trouble_ != nullptr)) {
      error_ = trouble_;
    }
    if (C10_UNLIKELY(span_ != nullptr)) {
      span_->end();
      span_.reset();
    }
    source_ = carrier.source_rank();
    number_ = carrier.seq();
    milliseconds_ =
        std::chrono::duration<float, std::milli>(carrier.shm::Operation::duration()).count();
    if (C10_UNLIKELY(finish_)) {
      prepare_ = finish_ = nullptr;
      request.room = nullptr;
    }
    landings_.clear();
    fills_.clear();
    overlaps_.clear();
    kept_.clear();
    writes_.clear();
    if (state_.exchange(kSettled, std::memory_order_acq_rel) == kAwaited) {
      std::function<void(std::exception_ptr)> listener;
      c10::intrusive_ptr<c10::ivalue::Future> future;
      {
        std::lock_guard lock(audience_mutex_);
        listener.swap(listener_);
        future = future_;
      }
      if (listener) {
        listener(error_);
      }
      if (future) {
        complete(future);
      }
    }
  }

  // Under audience_mutex_. False: settled already, there is nothing to wait for.
  bool expect() {
    uint8_t state = kRunning;
    return state_.compare_exchange_strong(state, kAwaited, std::memory_order_acq_rel) ||
           state == kAwaited;
  }

  void complete(const c10::intrusive_ptr<c10::ivalue::Future>& future) {
    const ProgressHandoff handoff;
    try {
      if (error_) {
        future->setErrorIfNeeded(error_);
      } else {
        future->markCompleted(c10::IValue(outputs()));
      }
    } catch (const std::exception& e) {
      TORCH_WARN("shm: a callback of ", op_, " failed: ", e.what());
    }
  }

  std::string_view op_;
  const Group* place_ = nullptr;  // the engine's owner has it
  std::unique_ptr<ProfilerSpan> span_;
  std::optional<c10::ScalarType> travel_dtype_;
  bool has_dtype_ = false;

  // What is read, until it is settled; what is written, for as long as somebody may ask.
  c10::SmallVector<at::Tensor, 2> kept_;
  c10::SmallVector<at::Tensor, 2> outputs_;
  WritesInFlight writes_;
  std::vector<Copy> fills_;        // when it begins
  std::vector<Overlap> overlaps_;  // the same, of what shares memory with what is written
  std::vector<Copy> landings_;     // when all is there
  std::exception_ptr trouble_;     // with these
  std::function<void()> prepare_, finish_;

  std::vector<std::shared_ptr<TensorOperation>> passengers_;
  std::shared_ptr<TensorOperation> carrier_;
  std::atomic<bool> held_{false};

  // Written before state_ becomes kSettled.
  std::exception_ptr error_;
  bool disagrees_ = false;
  int source_ = -1;
  uint64_t number_ = 0;
  float milliseconds_ = 0;
  std::atomic<uint8_t> state_{kRunning};
  // Who wants to hear of the end. Guarded by audience_mutex_.
  std::mutex audience_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::function<void(std::exception_ptr)> listener_;
};

}  // namespace c10d_ext
