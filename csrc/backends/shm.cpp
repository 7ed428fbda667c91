// shm: CPU tensors between ranks on one machine, through memory they share.

#include "backends/shm.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <sstream>
#include <thread>
#include <utility>

#include "backends/coalesced.h"
#include "backends/joining.h"
#include "backends/open_groups.h"
#include "backends/parts.h"
#include "backends/shm/aside.h"
#include "backends/shm/bootstrap.h"
#include "backends/shm/layout.h"
#include "backends/sparse.h"
#include "core/at_once.h"
#include "core/call_site.h"
#include "core/failure.h"
#include "core/future.h"
#include "core/gil.h"
#include "core/memory.h"
#include "core/snapshot.h"

namespace c10d_ext {

shm::DType dtype_of(c10::ScalarType dtype) {
  using c10::ScalarType;
  using shm::DType;
  switch (dtype) {
    case ScalarType::Bool:
      return DType::Bool;
    case ScalarType::Byte:
      return DType::UInt8;
    case ScalarType::Char:
      return DType::Int8;
    case ScalarType::Short:
      return DType::Int16;
    case ScalarType::UInt16:
      return DType::UInt16;
    case ScalarType::Int:
      return DType::Int32;
    case ScalarType::UInt32:
      return DType::UInt32;
    case ScalarType::Long:
      return DType::Int64;
    case ScalarType::UInt64:
      return DType::UInt64;
    case ScalarType::Half:
      return DType::Half;
    case ScalarType::BFloat16:
      return DType::BFloat16;
    case ScalarType::Float:
      return DType::Float;
    case ScalarType::Double:
      return DType::Double;
    case ScalarType::ComplexHalf:
      return DType::ComplexHalf;
    case ScalarType::ComplexFloat:
      return DType::ComplexFloat;
    case ScalarType::ComplexDouble:
      return DType::ComplexDouble;
    case ScalarType::Float8_e4m3fn:
      return DType::Float8_e4m3fn;
    case ScalarType::Float8_e4m3fnuz:
      return DType::Float8_e4m3fnuz;
    case ScalarType::Float8_e5m2:
      return DType::Float8_e5m2;
    case ScalarType::Float8_e5m2fnuz:
      return DType::Float8_e5m2fnuz;
    default:
      return DType::Bytes;
  }
}

namespace {

using std::string_view;
using Milliseconds = std::chrono::milliseconds;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Future = c10::ivalue::Future;
using FuturePtr = c10::intrusive_ptr<Future>;

// How long a group that is destroyed with work in flight waits for it.
constexpr Milliseconds kGrace{5000};

shm::ReduceOp reduce_op_of(ReduceOp op) {
  static_assert(static_cast<int>(ReduceOp::Sum) == static_cast<int>(shm::ReduceOp::Sum) &&
                static_cast<int>(ReduceOp::Bxor) == static_cast<int>(shm::ReduceOp::Bxor) &&
                static_cast<int>(ReduceOp::PremulSum) ==
                    static_cast<int>(shm::ReduceOp::PremulSum));
  return static_cast<shm::ReduceOp>(op);
}

FuturePtr future_of_tensors() {
  return c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()));
}

// A profiler's view of one call: opened when the work begins, closed when it ends, on whichever
// thread that is, for the observers of the thread that called.
class Span {
 public:
  // Null when nobody observes.
  static std::unique_ptr<Span> open(string_view op) {
    auto observers = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
    if (C10_LIKELY(!observers)) {
      return nullptr;
    }
    return std::unique_ptr<Span>(new Span(c10::str("shm:", op), std::move(*observers)));
  }

  void add_input(const at::Tensor& t) {
    inputs_.emplace_back(t);
  }
  void begin() {
    at::ThreadLocalStateGuard caller(state_);
    record_.emplace(std::move(observers_));
    record_->_setAsync();
    record_->before(title_.c_str(),
                    c10::ArrayRef<const c10::IValue>(inputs_.data(), inputs_.size()));
  }
  void end() {
    if (record_) {
      at::ThreadLocalStateGuard caller(state_);
      record_->end();
    }
  }

 private:
  Span(std::string title, at::StepCallbacks observers)
      : title_(std::move(title)), observers_(std::move(observers)) {}

  const at::ThreadLocalState state_;
  const std::string title_;
  at::StepCallbacks observers_;
  std::vector<c10::IValue> inputs_;
  std::optional<at::RecordFunction> record_;
};

}  // namespace

struct ShmBackend::Call {
  enum class Delivery : uint8_t {
    Async,  // a work, always
    Sync,   // complete on return, no work
    Op,     // a work unless complete already
  };

  string_view op;
  c10d::OpType type;
  Delivery delivery = Delivery::Op;
  Milliseconds timeout = c10d::kUnsetTimeout;

  template <class Options>
  static Call of(string_view op, c10d::OpType type, const Options& opts) {
    return {op, type, opts.asyncOp ? Delivery::Async : Delivery::Sync, opts.timeout};
  }
};

// An operation of the engine with the tensors it reads and writes. Built and submitted by one
// thread; settled by the one that drives the engine.
class ShmBackend::Flight final : public shm::Operation {
 public:
  Flight() : shm::Operation({}, {}) {}

  // Everything that a call sets is set here.
  void start(string_view op, shm::Verb verb, Milliseconds limit, const Group& place, size_t sources,
             size_t targets) {
    op_ = op;
    place_ = &place;
    span_ = Span::open(op);
    timeout = limit;
    request.verb = verb;
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
    r.dtype = shm::DType::Bytes;
    r.reduce_op = shm::ReduceOp::None;
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
    const shm::DType dtype = dtype_of(t.scalar_type());
    if (!has_dtype_) {
      request.dtype = dtype;
      has_dtype_ = true;
    } else if (request.dtype != dtype) {
      request.dtype = shm::DType::Bytes;
    }
  }
  // What is compared on all ranks.
  void add_shape(const at::Tensor& t) {
    request.shapes = shm::add_shape(request.shapes, t.sizes().data(), static_cast<size_t>(t.dim()));
  }
  uint64_t member_bytes() const {
    return shm::bytes_of(request.verb == shm::Verb::ReduceScatter ? request.targets[0]
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

  // --- Several flights as one operation
  // -----------------------------------------------------------

  bool can_carry(const Flight& other) const {
    const auto& a = request;
    const auto& b = other.request;
    return a.verb == b.verb && a.dtype == b.dtype && a.reduce_op == b.reduce_op &&
           a.factor.real == b.factor.real && a.factor.imaginary == b.factor.imaginary &&
           timeout == other.timeout &&
           (a.verb == shm::Verb::AllReduce || a.verb == shm::Verb::AllGather ||
            a.verb == shm::Verb::ReduceScatter);
  }
  void carry(const std::shared_ptr<Flight>& other) {
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
    request.shapes = shm::join_shapes(request.shapes, other->request.shapes);
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
  void release(std::shared_ptr<Flight> carrier) {
    carrier_ = std::move(carrier);
    held_.store(false, std::memory_order_release);
  }
  // In an open coalescing block: not submitted yet.
  bool held() const {
    return held_.load(std::memory_order_acquire);
  }
  // What the engine knows.
  Flight& carrier() {
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
  string_view op() const {
    return op_;
  }
  Tensors outputs() const {
    return Tensors(outputs_.begin(), outputs_.end());
  }
  FuturePtr future() {
    std::unique_lock lock(audience_mutex_);
    if (!future_) {
      future_ = future_of_tensors();
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

  void on_done(const shm::Failure* failure) override {
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
  void settle(const shm::Failure* failure, const Flight& carrier) {
    if (C10_UNLIKELY(failure != nullptr)) {
      using Kind = CollectiveError::Kind;
      static_assert(
          static_cast<int>(Kind::RankLost) == static_cast<int>(shm::Failure::Kind::RankLost) &&
          static_cast<int>(Kind::Timeout) == static_cast<int>(shm::Failure::Kind::Timeout) &&
          static_cast<int>(Kind::Mismatch) == static_cast<int>(shm::Failure::Kind::Mismatch) &&
          static_cast<int>(Kind::Closed) == static_cast<int>(shm::Failure::Kind::Closed));
      // The engine knows verbs, of which all_gather, say, is all_gather_into_tensor's as well.
      disagrees_ = failure->kind == shm::Failure::Kind::Mismatch;
      std::string op = failure->op, text = failure->text;
      if (op == name_of(request.verb) && text.starts_with(op + ":")) {
        text.replace(0, op.size(), op_);
        op = op_;
      }
      error_ = std::make_exception_ptr(CollectiveError(static_cast<Kind>(failure->kind), text,
                                                       failure->ranks, op, failure->seq,
                                                       place_->name()));
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
      FuturePtr future;
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

  void complete(const FuturePtr& future) {
    const shm::Aside aside;
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

  string_view op_;
  const Group* place_ = nullptr;  // the engine's owner has it
  std::unique_ptr<Span> span_;
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

  std::vector<std::shared_ptr<Flight>> passengers_;
  std::shared_ptr<Flight> carrier_;
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
  FuturePtr future_;
  std::function<void(std::exception_ptr)> listener_;
};

void ShmBackend::Flight::separate() {
  auto& sources = request.sources;
  auto& targets = request.targets;
  if (targets.empty() || sources.empty()) {
    return;
  }
  struct Span {
    const std::byte* begin;
    const std::byte* end;
    size_t part;
    size_t piece;
  };
  std::vector<Span> written;
  for (size_t part = 0; part < targets.size(); ++part) {
    for (size_t piece = 0; piece < targets[part].size(); ++piece) {
      const auto& [data, bytes] = targets[part][piece];
      if (bytes != 0) {
        written.push_back({data, data + bytes, part, piece});
      }
    }
  }
  std::sort(written.begin(), written.end(),
            [](const Span& a, const Span& b) { return a.begin < b.begin; });
  // Where the engine reads and writes the same part of the same rank.
  const auto own = static_cast<size_t>(place_->rank());
  const auto in_place = [&](size_t source_part, size_t target_part) {
    return (sources.size() == 1 ? source_part == 0 : source_part == own) &&
           (targets.size() == 1 ? target_part == 0 : target_part == own);
  };
  for (size_t part = 0; part < sources.size(); ++part) {
    for (size_t piece = 0; piece < sources[part].size(); ++piece) {
      auto& [data, bytes] = sources[part][piece];
      const std::byte* end = data + bytes;
      // Targets do not overlap each other, so their ends are in order too.
      auto hit =
          std::lower_bound(written.begin(), written.end(), data,
                           [](const Span& s, const std::byte* begin) { return s.end <= begin; });
      if (bytes == 0 || hit == written.end() || hit->begin >= end) {
        continue;
      }
      if (hit->begin == data && hit->end == end && hit->piece == piece &&
          in_place(part, hit->part)) {
        continue;
      }
      overlaps_.push_back({data, at::empty({static_cast<int64_t>(bytes)}, at::kByte)});
      data = static_cast<std::byte*>(overlaps_.back().copy.mutable_data_ptr());
    }
  }
}

// --- A group's engine, shared with the works
// ------------------------------------------------------

class ShmBackend::Live {
 public:
  Live(std::unique_ptr<shm::Membership> membership, std::unique_ptr<shm::Engine> engine,
       bool polls_drive, Group place)
      : membership_(std::move(membership)),
        engine_(std::move(engine)),
        polls_drive_(polls_drive),
        place_(std::move(place)),
        peers_(membership_->peers()),
        generation_(shm::fork_generation()) {}

  ~Live() {
    if (is_foreign()) {
      // The parent's: its threads do not exist here, its locks may be held for ever.
      static_cast<void>(membership_.release());
      static_cast<void>(engine_.release());
      return;
    }
    close(Milliseconds(0));
  }

  static std::shared_ptr<Live> start(std::unique_ptr<shm::Membership> membership,
                                     const Settings& settings, const Group& place) {
    shm::Settings engine_settings = settings.engine;
    engine_settings.group = place.name();
    engine_settings.pulses = membership->pulses();
    engine_settings.pulses[static_cast<size_t>(place.rank())] = nullptr;
    auto engine = std::make_unique<shm::Engine>(
        membership->mapping(), settings.arena, static_cast<int>(place.rank()),
        static_cast<int>(place.size()), membership->peers(), engine_settings);
    auto live = std::make_shared<Live>(std::move(membership), std::move(engine),
                                       !settings.engine.progress_thread, place);
    live->membership_->watch([e = live->engine_.get()](int rank) { e->peer_lost(rank); });
    OpenGroups<Live>::of_this_process().add(live);
    return live;
  }

  // The peers are told as soon as it is done: their operations that need this rank fail.
  void close(Milliseconds grace) {
    if (is_foreign()) {
      return;
    }
    // Whoever comes second, from a callback of what is being ended say, leaves it to the first.
    if (!closing_.exchange(true)) {
      without_gil([&] {
        engine_->close(grace);
        membership_->stop();
        membership_.reset();
      });
    }
  }

  shm::Engine& engine() const {
    return *engine_;
  }
  const Group& place() const {
    return place_;
  }
  const std::vector<shm::Peer>& peers() const {
    return peers_;
  }

  bool is_done(Flight& flight) const {
    if (C10_UNLIKELY(!flight.settled() && is_foreign())) {
      wait(flight, kNoTimeout);  // which refuses
    }
    if (!flight.settled() && polls_drive_ && !flight.held() && !is_foreign()) {
      engine_->wait(flight.carrier(), Milliseconds(0), nullptr);
    }
    return flight.settled();
  }

  FuturePtr future(Flight& flight) const {
    // Without a thread nobody would ever complete it.
    if (polls_drive_ && !flight.held()) {
      wait(flight, kNoTimeout);
    }
    return flight.future();
  }

  // Blocks until the flight is settled; its own timeout ends it if `timeout` is not positive.
  void wait(Flight& flight, Milliseconds timeout) const {
    using Kind = CollectiveError::Kind;
    if (flight.settled()) {
      return;
    }
    if (C10_UNLIKELY(flight.held())) {
      throw error(Kind::Closed, flight,
                  "the coalescing block must be closed before its operations are waited for, got "
                  "an open one");
    }
    if (C10_UNLIKELY(is_foreign())) {
      throw error(Kind::Closed, flight,
                  "the work must be waited for in the process that started it, got a forked child");
    }
    const bool limited = timeout > Milliseconds(0);
    bool ended = false;
    without_gil([&] {
      ended = engine_->wait(flight.carrier(), limited ? std::optional(timeout) : std::nullopt,
                            check_signals);
    });
    if (!ended) {
      const auto [ranks, who] = engine_->awaited(flight.carrier());
      throw error(Kind::Timeout, flight, shm::text_of_impatience(timeout, who), ranks);
    }
  }

 private:
  bool is_foreign() const {
    return shm::fork_generation() != generation_;
  }

  CollectiveError error(CollectiveError::Kind kind, const Flight& flight,
                        const std::string& message, std::vector<int> ranks = {}) const {
    return CollectiveError(kind, c10::str(flight.op(), ": ", message, " ", where(place_)),
                           std::move(ranks), std::string(flight.op()), flight.number(),
                           place_.name());
  }

  std::atomic<bool> closing_{false};
  std::unique_ptr<shm::Membership> membership_;
  std::unique_ptr<shm::Engine> engine_;
  const bool polls_drive_;
  const Group place_;
  const std::vector<shm::Peer> peers_;
  const uint64_t generation_;
};

// --- Works
// ----------------------------------------------------------------------------------------

namespace {

class ShmWork final : public c10d::Work {
 public:
  using Live = ShmBackend::Live;
  using Flight = ShmBackend::Flight;

  ShmWork(std::shared_ptr<Live> live, std::shared_ptr<Flight> flight, int rank, c10d::OpType type)
      : c10d::Work(rank, type), live_(std::move(live)), flight_(std::move(flight)) {}

  bool isCompleted() override {
    return live_->is_done(*flight_);
  }
  bool isSuccess() const override {
    return flight_->settled() && !flight_->error();
  }
  std::exception_ptr exception() const override {
    return flight_->settled() ? flight_->error() : nullptr;
  }
  bool wait(Milliseconds timeout) override {
    live_->wait(*flight_, timeout);
    flight_->report();
    return true;
  }
  void synchronize() override {
    wait(kNoTimeout);
  }
  void abort() override {
    live_->engine().abort(c10::str(flight_->op(),
                                   ": the group must be alive, got an abort of "
                                   "this work"));
  }
  int sourceRank() const override {
    const auto type = retrieveOpType();
    const bool receives = type == c10d::OpType::RECV || type == c10d::OpType::RECVANYSOURCE;
    return receives ? flight_->source() : c10d::Work::sourceRank();  // which refuses
  }
  Tensors result() override {
    return flight_->outputs();
  }
  FuturePtr getFuture() override {
    return live_->future(*flight_);
  }
  Flight& flight() const {
    return *flight_;
  }
  uint64_t getSequencenumber() const override {
    return flight_->number();
  }
  float getDuration() const override {
    TORCH_CHECK(flight_->settled(), flight_->op(),
                ": getDuration must be asked once the work is complete, got one in flight");
    return flight_->milliseconds();
  }

 private:
  const std::shared_ptr<Live> live_;
  const std::shared_ptr<Flight> flight_;
};

}  // namespace

// --- From calls to flights
// ------------------------------------------------------------------------

// The flight of this thread's last call that was complete on return.
ShmBackend::FlightPtr& ShmBackend::spare() {
  static thread_local FlightPtr instance;
  return instance;
}

void ShmBackend::recycle(FlightPtr flight) {
  if (flight.use_count() != 1) {
    return;
  }
  // After all that the thread that ended it did before it let go.
  std::atomic_thread_fence(std::memory_order_acquire);
  if (flight->is_renewable()) {
    flight->renew();
    spare() = std::move(flight);
  }
}

ShmBackend::FlightPtr ShmBackend::make(const Call& call, shm::Verb verb) const {
  const auto ranks = static_cast<size_t>(size_);
  size_t sources = 1;
  size_t targets = 1;
  using shm::Verb;
  switch (verb) {
    case Verb::Barrier:
      sources = targets = 0;
      break;
    case Verb::AllGather:
      targets = ranks;
      break;
    case Verb::ReduceScatter:
      sources = ranks;
      break;
    case Verb::AllToAll:
      sources = targets = ranks;
      break;
    case Verb::Send:
      targets = 0;
      break;
    case Verb::Recv:
      sources = 0;
      break;
    case Verb::SparseAllReduce:
      targets = 0;  // made when it is known how large they are
      break;
    // The sides that a root has are filled in with the root.
    case Verb::Reduce:
    case Verb::Gather:
      targets = 0;
      break;
    case Verb::Broadcast:
    case Verb::Scatter:
      sources = 0;
      break;
    case Verb::AllReduce:
      break;
  }
  const Milliseconds timeout =
      call.timeout > Milliseconds(0) ? call.timeout : timeout_.load(std::memory_order_relaxed);
  FlightPtr flight = std::move(spare());
  if (!flight) {
    flight = std::make_shared<Flight>();
  }
  flight->start(call.op, verb, timeout, place_, sources, targets);
  flight->request.async = call.delivery == Call::Delivery::Async ||
                          (call.delivery == Call::Delivery::Op && !AtOnce::is_on());
  return flight;
}

ShmBackend::FlightPtr ShmBackend::make(const Call& call, shm::Verb verb, const Reduction& reduction,
                                       c10::ScalarType dtype) const {
  auto flight = make(call, verb);
  shm::Request& request = flight->request;
  request.reduce_op = reduce_op_of(reduction.op);
  if (C10_UNLIKELY(reduction.factor.has_value())) {
    const c10::Scalar& factor = *reduction.factor;
    if (factor.isComplex()) {
      const auto value = factor.toComplexDouble();
      request.factor = {value.real(), value.imag()};
    } else {
      constexpr int64_t kExact = int64_t{1} << 53;
      C10D_EXT_CHECK_VALUE(
          factor.isFloatingPoint() || std::abs(factor.toLong()) <= kExact, call.op, place_,
          "an integer factor must be at most 2^53 on the shm backend, got ", factor);
      request.factor = {factor.toDouble(), 0};
    }
  }
  if (C10_UNLIKELY(dtype == c10::ScalarType::Float8_e8m0fnu)) {
    // A scale, which no kernel reduces.
    flight->travel_as(c10::kFloat);
    dtype = c10::kFloat;
  }
  request.dtype = dtype_of(dtype);
  return flight;
}

namespace {
thread_local Facts settled_here;
}  // namespace

const Facts& ShmBackend::last_settled() {
  return settled_here;
}

ShmBackend::WorkPtr ShmBackend::launch(const Call& call, FlightPtr flight) {
  using Delivery = Call::Delivery;
  const auto in_place = [](const shm::Request& r) {
    return r.sources.size() == 1 && r.targets.size() == 1 && r.sources[0].size() == 1 &&
           r.targets[0].size() == 1 && r.sources[0][0].data == r.targets[0][0].data;
  };
  if (!in_place(flight->request)) {
    flight->separate();
  }
  if (C10_UNLIKELY(settings_.call_sites)) {
    flight->request.call_site = call_site();
  }
  if (C10_UNLIKELY(batching_.load(std::memory_order_relaxed)) && call.delivery != Delivery::Op) {
    std::lock_guard lock(batch_mutex_);
    flight->hold();
    flight->note_writes();
    flight->request.async = true;
    batch_.push_back(flight);
    return call.delivery == Delivery::Sync
               ? nullptr
               : c10::make_intrusive<ShmWork>(live_, std::move(flight), rank_, call.type);
  }
  if (call.delivery == Delivery::Async) {
    flight->note_writes();
  }
  live_->engine().submit(flight);
  switch (call.delivery) {
    case Delivery::Op:
      // That the ranks disagree is for the wait, however soon it is found out: they go on.
      if (flight->settled() && !flight->disagrees()) {
        flight->report();
        settled_here = {call.type, static_cast<int64_t>(flight->number()), flight->milliseconds()};
        recycle(std::move(flight));
        return {};
      }
      break;
    case Delivery::Sync:
      live_->wait(*flight, kNoTimeout);
      flight->report();
      recycle(std::move(flight));
      return {};
    case Delivery::Async:
      break;
  }
  return c10::make_intrusive<ShmWork>(live_, std::move(flight), rank_, call.type);
}

ShmBackend::WorkPtr ShmBackend::all_reduce(const Call& call, at::TensorList sources,
                                           at::TensorList outs, const Reduction& reduction) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto flight = make(call, shm::Verb::AllReduce, reduction, outs.front().scalar_type());
  for (size_t i = 0; i < outs.size(); ++i) {
    if (sources[i].is_same(outs[i])) {
      flight->replace(0, outs[i]);
    } else {
      flight->read(0, sources[i]);
      flight->write(0, outs[i]);
    }
    flight->add_shape(outs[i]);
  }
  flight->add_members(outs);
  return launch(call, std::move(flight));
}

ShmBackend::WorkPtr ShmBackend::reduce_to(const Call& call, const at::Tensor& source,
                                          const at::Tensor& out, const Reduction& reduction,
                                          int64_t root) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto flight = make(call, shm::Verb::Reduce, reduction, source.scalar_type());
  flight->request.root = static_cast<int>(root);
  flight->read(0, source);
  flight->add_shape(source);
  if (rank_ == root) {
    flight->request.targets.resize(1);
    flight->write(0, out);
  } else {
    flight->add_output(out);
  }
  return launch(call, std::move(flight));
}

ShmBackend::WorkPtr ShmBackend::broadcast_from(const Call& call, at::TensorList sources,
                                               at::TensorList outs, int64_t root) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto flight = make(call, shm::Verb::Broadcast);
  flight->request.root = static_cast<int>(root);
  const bool sends = rank_ == root;
  const bool in_place =
      sends && std::equal(sources.begin(), sources.end(), outs.begin(), outs.end(),
                          [](const auto& s, const auto& o) { return s.is_same(o); });
  if (sends) {
    flight->request.sources.resize(1);
  }
  if (in_place) {
    flight->request.targets.clear();
  }
  flight->add_members(outs);
  for (size_t i = 0; i < outs.size(); ++i) {
    flight->set_dtype(outs[i]);
    flight->add_shape(outs[i]);
    if (sends) {
      flight->read(0, sources[i]);
    }
    if (in_place) {
      flight->add_output(outs[i]);
    } else {
      flight->write(0, outs[i]);
    }
  }
  return launch(call, std::move(flight));
}

ShmBackend::WorkPtr ShmBackend::all_gather(const Call& call, at::TensorList sources,
                                           at::TensorList outs) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto flight = make(call, shm::Verb::AllGather);
  for (size_t i = 0; i < outs.size(); ++i) {
    flight->set_dtype(outs[i]);
    flight->read(0, sources[i]);
    flight->write_evenly(outs[i]);
    flight->add_shape(sources[i]);
  }
  flight->add_members(sources);
  return launch(call, std::move(flight));
}

ShmBackend::WorkPtr ShmBackend::scatter_reduced(const Call& call, at::TensorList sources,
                                                at::TensorList outs, const Reduction& reduction) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto flight = make(call, shm::Verb::ReduceScatter, reduction, outs.front().scalar_type());
  for (size_t i = 0; i < outs.size(); ++i) {
    flight->read_evenly(sources[i]);
    flight->write(0, outs[i]);
    flight->add_shape(outs[i]);
  }
  flight->add_members(outs);
  return launch(call, std::move(flight));
}

ShmBackend::WorkPtr ShmBackend::exchange(const Call& call, const at::Tensor& source,
                                         const at::Tensor& out, c10::IntArrayRef source_sizes,
                                         c10::IntArrayRef out_sizes) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto flight = make(call, shm::Verb::AllToAll);
  flight->set_dtype(out);
  flight->read_split(source, source_sizes);
  flight->write_split(out, out_sizes);
  return launch(call, std::move(flight));
}

namespace {

// What each rank has of a sparse tensor, which becomes the sum of all.
class SparseSum {
 public:
  SparseSum(const at::Tensor& tensor, ReduceOp op) : tensor_(tensor), op_(op) {}

  // This rank's part.
  shm::Buffer own() {
    const at::Tensor own = added_up(tensor_);
    indices_ = own._indices().contiguous();
    values_ = own._values().to(tensor_.scalar_type()).contiguous();
    return pieces(indices_, values_);
  }
  // Where the parts go, which have so many bytes.
  std::vector<shm::Buffer> room(const std::vector<uint64_t>& bytes) {
    std::vector<int64_t> entries = values_.sizes().vec();
    entries[0] = 1;
    const auto each = static_cast<uint64_t>(indices_.size(0)) * sizeof(int64_t) +
                      static_cast<uint64_t>(c10::multiply_integers(entries)) * values_.itemsize();
    std::vector<shm::Buffer> buffers;
    for (const uint64_t b : bytes) {
      TORCH_CHECK(each == 0 ? b == 0 : b % each == 0, "values of ", each, " bytes came as ", b);
      entries[0] = static_cast<int64_t>(each == 0 ? 0 : b / each);
      all_indices_.push_back(at::empty({indices_.size(0), entries[0]}, indices_.options()));
      all_values_.push_back(at::empty(entries, values_.options()));
      buffers.push_back(pieces(all_indices_.back(), all_values_.back()));
    }
    return buffers;
  }
  void add_up() {
    const at::Tensor sum =
        added_up(at::cat(all_indices_, 1), at::cat(all_values_, 0), tensor_.sizes());
    if (op_ == ReduceOp::Avg) {
      sum._values().div_(static_cast<int64_t>(all_values_.size()));
    }
    tensor_.copy_(sum.to(tensor_.scalar_type()));
  }

 private:
  static shm::Buffer pieces(const at::Tensor& indices, const at::Tensor& values) {
    // What this rank sends the engine only reads.
    const auto piece = [](const at::Tensor& t) {
      return shm::Piece{static_cast<std::byte*>(const_cast<void*>(t.const_data_ptr())), t.nbytes()};
    };
    return {piece(indices), piece(values)};
  }

  const at::Tensor tensor_;
  const ReduceOp op_;
  at::Tensor indices_, values_;
  Tensors all_indices_, all_values_;
};

}  // namespace

ShmBackend::WorkPtr ShmBackend::all_reduce_sparse(const Call& call, const at::Tensor& tensor,
                                                  const Reduction& reduction) {
  auto flight = make(call, shm::Verb::SparseAllReduce, reduction, tensor.scalar_type());
  flight->add_shape(tensor);
  flight->add_output(tensor);
  auto& request = flight->request;
  request.sparse_dims = static_cast<int>(tensor.sparse_dim());
  const auto sum = std::make_shared<SparseSum>(tensor, reduction.op);
  request.room = [sum](const std::vector<uint64_t>& bytes) { return sum->room(bytes); };
  flight->around([sum, &request] { request.sources = {sum->own()}; }, [sum] { sum->add_up(); });
  return launch(call, std::move(flight));
}

// --- What the ops call
// ----------------------------------------------------------------------------

ShmBackend::WorkPtr ShmBackend::start_all_reduce(string_view op, at::TensorList sources,
                                                 at::TensorList outs, const Reduction& reduction) {
  return all_reduce({op, c10d::OpType::ALLREDUCE}, sources, outs, reduction);
}

ShmBackend::WorkPtr ShmBackend::start_reduce(string_view op, const at::Tensor& source,
                                             const at::Tensor& out, const Reduction& reduction,
                                             int64_t root) {
  return reduce_to({op, c10d::OpType::REDUCE}, source, out, reduction, root);
}

ShmBackend::WorkPtr ShmBackend::start_broadcast(string_view op, at::TensorList sources,
                                                at::TensorList outs, int64_t root) {
  return broadcast_from({op, c10d::OpType::BROADCAST}, sources, outs, root);
}

ShmBackend::WorkPtr ShmBackend::start_all_gather(string_view op, at::TensorList sources,
                                                 at::TensorList outs) {
  return all_gather({op, c10d::OpType::_ALLGATHER_BASE}, sources, outs);
}

ShmBackend::WorkPtr ShmBackend::start_all_gather_uneven(string_view op, const at::Tensor& source,
                                                        const at::Tensor& out,
                                                        c10::IntArrayRef sizes) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Call call{op, c10d::OpType::ALLGATHER};
  auto flight = make(call, shm::Verb::AllGather);
  flight->set_dtype(out);
  flight->read(0, source);
  flight->write_split(out, sizes);
  return launch(call, std::move(flight));
}

ShmBackend::WorkPtr ShmBackend::start_reduce_scatter(string_view op, at::TensorList sources,
                                                     at::TensorList outs,
                                                     const Reduction& reduction) {
  return scatter_reduced({op, c10d::OpType::_REDUCE_SCATTER_BASE}, sources, outs, reduction);
}

ShmBackend::WorkPtr ShmBackend::start_reduce_scatter_uneven(string_view op,
                                                            const at::Tensor& source,
                                                            const at::Tensor& out,
                                                            const Reduction& reduction,
                                                            c10::IntArrayRef sizes) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Call call{op, c10d::OpType::REDUCE_SCATTER};
  auto flight = make(call, shm::Verb::ReduceScatter, reduction, out.scalar_type());
  flight->read_split(source, sizes);
  flight->write(0, out);
  return launch(call, std::move(flight));
}

ShmBackend::WorkPtr ShmBackend::start_all_to_all(string_view op, const at::Tensor& source,
                                                 const at::Tensor& out,
                                                 c10::IntArrayRef source_sizes,
                                                 c10::IntArrayRef out_sizes) {
  return exchange({op, c10d::OpType::ALLTOALL_BASE}, source, out, source_sizes, out_sizes);
}

ShmBackend::WorkPtr ShmBackend::start_gather(string_view op, const at::Tensor& source,
                                             const at::Tensor& out, int64_t root) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Call call{op, c10d::OpType::GATHER};
  auto flight = make(call, shm::Verb::Gather);
  flight->request.root = static_cast<int>(root);
  flight->set_dtype(source);
  flight->read(0, source);
  flight->add_shape(source);
  if (rank_ == root) {
    flight->request.targets.resize(size_);
    flight->write_evenly(out);
  }
  return launch(call, std::move(flight));
}

ShmBackend::WorkPtr ShmBackend::start_scatter(string_view op, const at::Tensor& source,
                                              const at::Tensor& out, int64_t root) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Call call{op, c10d::OpType::SCATTER};
  auto flight = make(call, shm::Verb::Scatter);
  flight->request.root = static_cast<int>(root);
  flight->set_dtype(out);
  if (rank_ == root) {
    flight->request.sources.resize(size_);
    flight->read_evenly(source);
  }
  flight->write(0, out);
  flight->add_shape(out);
  return launch(call, std::move(flight));
}

ShmBackend::WorkPtr ShmBackend::start_barrier(string_view op) {
  const Call call{op, c10d::OpType::BARRIER};
  return launch(call, make(call, shm::Verb::Barrier));
}

// --- c10d's verbs
// ---------------------------------------------------------------------------------

ShmBackend::WorkPtr ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  constexpr string_view op = "broadcast";
  const at::Tensor& tensor = only(op, "tensor", tensors);
  check_root(op, opts.rootRank);
  if (rank_ == opts.rootRank) {
    check_tensor(op, "tensor", tensor);
  } else {
    check_written(op, "tensor", tensor);
  }
  return broadcast_from(Call::of(op, c10d::OpType::BROADCAST, opts), tensors, tensors,
                        opts.rootRank);
}

ShmBackend::WorkPtr ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  constexpr string_view op = "all_reduce";
  const at::Tensor& tensor = only(op, "tensor", tensors);
  if (C10_UNLIKELY(tensor.defined() && tensor.layout() != c10::kStrided)) {
    return allreduce_sparse(tensors, opts);
  }
  check_written(op, "tensor", tensor);
  return all_reduce(Call::of(op, c10d::OpType::ALLREDUCE, opts), tensors, tensors,
                    reduction_of(op, opts.reduceOp, tensor.scalar_type()));
}

ShmBackend::WorkPtr ShmBackend::allreduce_sparse(Tensors& tensors,
                                                 const c10d::AllreduceOptions& opts) {
  constexpr string_view op = "all_reduce";
  const at::Tensor& tensor = only(op, "tensor", tensors);
  return all_reduce_sparse(Call::of(op, c10d::OpType::_ALLREDUCE_SPARSE, opts), tensor,
                           check_sparse(op, tensor, opts.reduceOp));
}

ShmBackend::WorkPtr ShmBackend::allreduce_coalesced(Tensors& tensors,
                                                    const c10d::AllreduceCoalescedOptions& opts) {
  constexpr string_view op = "all_reduce_coalesced";
  check_list(op, tensors);
  return all_reduce(Call::of(op, c10d::OpType::ALLREDUCE_COALESCED, opts), tensors, tensors,
                    reduction_of(op, opts.reduceOp, tensors[0].scalar_type()));
}

ShmBackend::WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  constexpr string_view op = "reduce";
  const at::Tensor& tensor = only(op, "tensor", tensors);
  check_root(op, opts.rootRank);
  check_written(op, "tensor", tensor);
  return reduce_to(Call::of(op, c10d::OpType::REDUCE, opts), tensor, tensor,
                   reduction_of(op, opts.reduceOp, tensor.scalar_type()), opts.rootRank);
}

ShmBackend::WorkPtr ShmBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "all_gather";
  const at::Tensor& input = only(op, "input", inputs);
  const Tensors& parts = only_list(op, "outputs", outputs);
  check_tensor(op, "input", input);
  check_parts(op, "outputs", parts, input, "input");
  check_all_written(op, parts);
  const auto call = Call::of(op, c10d::OpType::ALLGATHER, opts);
  auto flight = make(call, shm::Verb::AllGather);
  flight->set_dtype(input);
  flight->read(0, input);
  for (int rank = 0; rank < size_; ++rank) {
    flight->write(rank, parts[rank]);
    flight->add_shape(parts[rank]);
  }
  return launch(call, std::move(flight));
}

ShmBackend::WorkPtr ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& opts) {
  constexpr string_view op = "all_gather_into_tensor";
  check_tensor(op, "input", input);
  check_written(op, "output", output);
  check_whole(op, "output", output, "input", input);
  return all_gather(Call::of(op, c10d::OpType::_ALLGATHER_BASE, opts), input, output);
}

ShmBackend::WorkPtr ShmBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "all_gather_coalesced";
  check_lists(op, outputs, inputs);
  const auto call = Call::of(op, c10d::OpType::ALLGATHER_COALESCED, opts);
  auto flight = make(call, shm::Verb::AllGather);
  for (const auto& input : inputs) {
    flight->set_dtype(input);
    flight->read(0, input);
  }
  for (int rank = 0; rank < size_; ++rank) {
    for (const auto& output : outputs[rank]) {
      flight->write(rank, output);
      flight->add_shape(output);
    }
  }
  flight->add_members(inputs);
  C10D_EXT_CHECK_VALUE(
      shm::bytes_of(flight->request.sources[0]) == shm::bytes_of(flight->request.targets[rank_]),
      op, place_, "outputs[", rank_,
      "], this rank's, must have as many elements as the inputs, got others");
  return launch(call, std::move(flight));
}

ShmBackend::WorkPtr ShmBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  constexpr string_view op = "all_gather_into_tensor_coalesced";
  check_pairs(op, outputs, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_whole(op, "each output", outputs[i], "its input", inputs[i]);
  }
  return all_gather(Call::of(op, c10d::OpType::ALLGATHER_COALESCED, opts), inputs, outputs);
}

ShmBackend::WorkPtr ShmBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "gather";
  const at::Tensor& input = only(op, "input", inputs);
  check_root(op, opts.rootRank);
  check_tensor(op, "input", input);
  const auto call = Call::of(op, c10d::OpType::GATHER, opts);
  auto flight = make(call, shm::Verb::Gather);
  flight->request.root = static_cast<int>(opts.rootRank);
  flight->set_dtype(input);
  flight->read(0, input);
  if (rank_ == opts.rootRank) {
    const Tensors& parts = only_list(op, "outputs", outputs);
    check_parts(op, "outputs", parts, input, "input");
    check_all_written(op, parts);
    flight->request.targets.resize(size_);
    for (int rank = 0; rank < size_; ++rank) {
      flight->write(rank, parts[rank]);
    }
  } else {
    check_no_lists(op, "outputs", outputs, opts.rootRank);
  }
  return launch(call, std::move(flight));
}

ShmBackend::WorkPtr ShmBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                        const c10d::ScatterOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "scatter";
  const at::Tensor& output = only(op, "output", outputs);
  check_root(op, opts.rootRank);
  check_written(op, "output", output);
  const auto call = Call::of(op, c10d::OpType::SCATTER, opts);
  auto flight = make(call, shm::Verb::Scatter);
  flight->request.root = static_cast<int>(opts.rootRank);
  flight->set_dtype(output);
  if (rank_ == opts.rootRank) {
    const Tensors& parts = only_list(op, "inputs", inputs);
    check_parts(op, "inputs", parts, output, "output");
    flight->request.sources.resize(size_);
    for (int rank = 0; rank < size_; ++rank) {
      flight->read(rank, parts[rank]);
    }
  } else {
    check_no_lists(op, "inputs", inputs, opts.rootRank);
  }
  flight->write(0, output);
  return launch(call, std::move(flight));
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                               const c10d::ReduceScatterOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "reduce_scatter";
  const at::Tensor& output = only(op, "output", outputs);
  const Tensors& parts = only_list(op, "inputs", inputs);
  check_written(op, "output", output);
  check_parts(op, "inputs", parts, output, "output");
  const auto dtype = output.scalar_type();
  const auto call = Call::of(op, c10d::OpType::REDUCE_SCATTER, opts);
  auto flight = make(call, shm::Verb::ReduceScatter, reduction_of(op, opts.reduceOp, dtype), dtype);
  for (int rank = 0; rank < size_; ++rank) {
    flight->read(rank, parts[rank]);
    flight->add_shape(parts[rank]);
  }
  flight->write(0, output);
  return launch(call, std::move(flight));
}

ShmBackend::WorkPtr ShmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& opts) {
  constexpr string_view op = "reduce_scatter_tensor";
  check_tensor(op, "input", input);
  check_written(op, "output", output);
  check_whole(op, "input", input, "output", output);
  return scatter_reduced(Call::of(op, c10d::OpType::_REDUCE_SCATTER_BASE, opts), input, output,
                         reduction_of(op, opts.reduceOp, output.scalar_type()));
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  constexpr string_view op = "reduce_scatter_tensor_coalesced";
  check_pairs(op, outputs, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_whole(op, "each input", inputs[i], "its output", outputs[i]);
    C10D_EXT_CHECK_VALUE(outputs[i].scalar_type() == outputs[0].scalar_type(), op, place_,
                         "tensors must have one dtype, got ", outputs[0].scalar_type(), " and ",
                         outputs[i].scalar_type());
  }
  return scatter_reduced(Call::of(op, c10d::OpType::REDUCE_SCATTER, opts), inputs, outputs,
                         reduction_of(op, opts.reduceOp, outputs[0].scalar_type()));
}

ShmBackend::WorkPtr ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<int64_t>& output_splits,
                                              std::vector<int64_t>& input_splits,
                                              const c10d::AllToAllOptions& opts) {
  constexpr string_view op = "all_to_all_single";
  check_tensor(op, "input", input);
  check_written(op, "output", output);
  C10D_EXT_CHECK_VALUE(output.scalar_type() == input.scalar_type(), op, place_,
                       "output must have input's dtype, ", input.scalar_type(), ", got ",
                       output.scalar_type());
  return exchange(Call::of(op, c10d::OpType::ALLTOALL_BASE, opts), input, output,
                  elements_of(op, "input", input, input_splits),
                  elements_of(op, "output", output, output_splits));
}

ShmBackend::WorkPtr ShmBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                         const c10d::AllToAllOptions& opts) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "all_to_all";
  const auto ranks = static_cast<size_t>(size_);
  C10D_EXT_CHECK_VALUE(outputs.size() == ranks && inputs.size() == ranks, op, place_,
                       "inputs and outputs must be one tensor for each of the ", size_,
                       " ranks, got ", inputs.size(), " inputs and ", outputs.size(), " outputs");
  check_all_written(op, outputs);
  const auto call = Call::of(op, c10d::OpType::ALLTOALL, opts);
  auto flight = make(call, shm::Verb::AllToAll);
  for (size_t rank = 0; rank < ranks; ++rank) {
    check_tensor(op, "each input", inputs[rank]);
    flight->set_dtype(inputs[rank]);
    flight->read(rank, inputs[rank]);
    flight->write(rank, outputs[rank]);
  }
  C10D_EXT_CHECK_VALUE(inputs[rank_].nbytes() == outputs[rank_].nbytes(), op, place_, "outputs[",
                       rank_, "], which inputs[", rank_, "] goes to, must have its size, ",
                       inputs[rank_].sizes(), ", got ", outputs[rank_].sizes());
  return launch(call, std::move(flight));
}

ShmBackend::WorkPtr ShmBackend::send(Tensors& tensors, int dst, int tag) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  constexpr string_view op = "send";
  const at::Tensor& tensor = only(op, "tensor", tensors);
  check_tensor(op, "tensor", tensor);
  check_peer(op, "destination", dst);
  const Call call{op, c10d::OpType::SEND, Call::Delivery::Async};
  auto flight = make(call, shm::Verb::Send);
  flight->request.peer = dst;
  flight->request.tag = tag;
  flight->set_dtype(tensor);
  flight->read(0, tensor);
  return launch(call, std::move(flight));
}

ShmBackend::WorkPtr ShmBackend::receive(string_view op, c10d::OpType type, Tensors& tensors,
                                        int src, int tag) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor& tensor = only(op, "tensor", tensors);
  check_written(op, "tensor", tensor);
  const Call call{op, type, Call::Delivery::Async};
  auto flight = make(call, shm::Verb::Recv);
  flight->request.peer = src;
  flight->request.tag = tag;
  flight->set_dtype(tensor);
  flight->write(0, tensor);
  return launch(call, std::move(flight));
}

ShmBackend::WorkPtr ShmBackend::recv(Tensors& tensors, int src, int tag) {
  constexpr string_view op = "recv";
  check_peer(op, "source", src);
  return receive(op, c10d::OpType::RECV, tensors, src, tag);
}

ShmBackend::WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return receive("recv", c10d::OpType::RECVANYSOURCE, tensors, -1, tag);
}

ShmBackend::WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& opts) {
  const auto call = Call::of("barrier", c10d::OpType::BARRIER, opts);
  return launch(call, make(call, shm::Verb::Barrier));
}

// The failure of a barrier names all the ranks that are missing, whether asked for all or one.
void ShmBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool /*wait_all_ranks*/) {
  const Call call{"monitored_barrier", c10d::OpType::BARRIER, Call::Delivery::Sync, opts.timeout};
  launch(call, make(call, shm::Verb::Barrier));
}

// --- Coalescing
// -----------------------------------------------------------------------------------

void ShmBackend::startCoalescing() {
  std::lock_guard lock(batch_mutex_);
  C10D_EXT_CHECK_VALUE(!batching_, "start_coalescing", place_,
                       "coalescing blocks must not be nested, got a second one");
  batching_ = true;
}

ShmBackend::WorkPtr ShmBackend::endCoalescing() {
  std::vector<FlightPtr> calls;
  {
    std::lock_guard lock(batch_mutex_);
    C10D_EXT_CHECK_VALUE(batching_, "end_coalescing", place_,
                         "a coalescing block must be open, got none");
    batching_ = false;
    calls.swap(batch_);
  }
  if (calls.empty()) {
    return {};
  }
  // Neighbours of one kind travel as one operation, alike on all ranks. Sends and receives run
  // beside collectives, so they do not part neighbours.
  std::vector<FlightPtr> operations;
  FlightPtr last;
  std::vector<WorkPtr> works;
  for (const auto& call : calls) {
    const auto verb = call->request.verb;
    const bool collective = verb != shm::Verb::Send && verb != shm::Verb::Recv;
    if (collective && last && last->can_carry(*call)) {
      last->carry(call);
      call->release(last);
    } else {
      call->release(nullptr);
      operations.push_back(call);
      if (collective) {
        last = call;
      }
    }
    works.push_back(c10::make_intrusive<ShmWork>(live_, call, rank_, c10d::OpType::COALESCED));
  }
  for (const auto& operation : operations) {
    live_->engine().submit(operation);
  }
  return c10::make_intrusive<CoalescedWork>(std::move(works), rank_);
}

// --- Groups
// ---------------------------------------------------------------------------------------

ShmBackend::ShmBackend(int rank, int size, const Options& options, const Settings& settings,
                       c10::intrusive_ptr<c10d::Store> store, Seats seats,
                       std::shared_ptr<Live> live)
    : DivisibleBackend(rank, size, options, std::move(store), std::move(seats)),
      VerbChecks(live->place()),
      settings_(settings),
      live_(std::move(live)),
      acquaintance_(acquaintance(seats_, [peers = live_->peers()](int rank) {
        const auto& peer = peers[static_cast<size_t>(rank)];
        return shm::has_ended(peer) ? std::optional(peer.pid) : std::nullopt;
      })) {
  init();
}

ShmBackend::~ShmBackend() {
  live_->close(Milliseconds(0));
}

ShmBackend::Connected ShmBackend::connect(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                          int size, const Options& options,
                                          const Settings& settings, const Seats& seats) {
  const bool fits = size <= shm::Layout::kMaxSize;
  const Group place({}, options.group_name, rank, size);
  const Expected expected(place, store, seats);
  auto shared = expected.joined([&] {
    return shm::join(expected.part_of_store("shm"), rank, size,
                     fits ? shm::Engine::mapping_bytes(size, settings.arena) : 0, options.timeout,
                     fits ? ""
                          : c10::str("a group has at most ", shm::Layout::kMaxSize,
                                     " ranks on shared memory, got ", size));
  });
  if (!shared.membership) {
    return {{}, shared.why_not, shared.session};
  }
  auto live = Live::start(std::move(shared.membership), settings, place);
  return {
      c10::make_intrusive<ShmBackend>(rank, size, options, settings, store, seats, std::move(live)),
      {},
      shared.session};
}

bool ShmBackend::when_settled(c10d::Work& work, std::function<void(std::exception_ptr)> over) {
  static_cast<ShmWork&>(work).flight().when_settled(std::move(over));
  return true;
}

void ShmBackend::close_all(Milliseconds grace) {
  OpenGroups<Live>::of_this_process().close_all(
      grace, [](Live& group, Milliseconds left) { group.close(left); });
}

c10::intrusive_ptr<c10d::Backend> ShmBackend::make_backend(
    std::string_view op, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    Milliseconds timeout, const std::string& name, const Seats& seats) const {
  Options options("shm", timeout);
  options.group_name = name;
  auto connected = connect(store, rank, size, options, settings_, seats);
  C10D_EXT_CHECK_VALUE(
      connected.backend, op, place_,
      "ranks that share memory must be able to share some more, got: ", connected.why_not);
  return connected.backend;
}

uint64_t ShmBackend::getSequenceNumberForGroup() {
  return live_->engine().seq();
}

c10d::ErrorType ShmBackend::getError() {
  const auto failure = live_->engine().broken();
  if (!failure) {
    return c10d::ErrorType::SUCCESS;
  }
  switch (failure->kind) {
    case shm::Failure::Kind::Timeout:
      return c10d::ErrorType::TIMEOUT;
    case shm::Failure::Kind::RankLost:
      return c10d::ErrorType::REMOTE_ERROR;
    default:
      return c10d::ErrorType::COMM_ERROR;
  }
}

void ShmBackend::abort() {
  live_->engine().abort("abort: the group must be alive, got an abort of it");
  live_->close(Milliseconds(0));
}

void ShmBackend::shutdown() {
  live_->close(kGrace);
}

// --- Python
// ---------------------------------------------------------------------------------------

void bind_shm(pybind11::module_& m) {
  namespace py = pybind11;
  bind_work<ShmWork>(m, "ShmWork")
      .def("_get_sequence_number", &ShmWork::getSequencenumber,
           "The number of the collective, or of the message, among those of its group.");
  bind_work<CoalescedWork>(m, "CoalescedWork");
  // What torch's own code, and its users', ask of a gloo backend.
  py::class_<DivisibleBackend, c10::intrusive_ptr<DivisibleBackend>, c10d::Backend>(
      m, "DivisibleBackend")
      .def_property_readonly("options", &DivisibleBackend::getBackendOptions,
                             "A copy of the options, with the timeout as it is now.")
      .def("_set_default_timeout", &DivisibleBackend::setTimeout, py::arg("timeout"),
           py::call_guard<py::gil_scoped_release>());
  py::class_<ShmBackend, c10::intrusive_ptr<ShmBackend>, DivisibleBackend>(m, "ShmBackend");
  m.def(
      "connect_shm",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Milliseconds timeout,
         const std::string& group_name, const Seats& seats, size_t arena,
         std::chrono::microseconds spin_time, std::chrono::microseconds inline_time,
         bool progress_thread,
         int strict) -> std::tuple<c10::intrusive_ptr<c10d::Backend>, std::string, std::string> {
        c10d::Backend::Options options("shm", timeout);
        options.group_name = group_name;
        ShmBackend::Settings settings;
        settings.arena = arena;
        settings.engine.spin_time = spin_time;
        settings.engine.inline_time = inline_time;
        settings.engine.progress_thread = progress_thread;
        settings.engine.strict = strict > 0;
        settings.call_sites = strict > 1;
        auto connected = ShmBackend::connect(store, rank, size, options, settings, seats);
        return {connected.backend, connected.why_not, connected.session};
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("group_name"),
      py::arg("seats"), py::kw_only(), py::arg("arena"), py::arg("spin_time"),
      py::arg("inline_time"), py::arg("progress_thread"), py::arg("strict"),
      py::call_guard<py::gil_scoped_release>());
  m.def("close_shm_groups", &ShmBackend::close_all, py::arg("grace"),
        py::call_guard<py::gil_scoped_release>());
  // What torch's cast does to values too large for float8_e4m3fn differs between its versions.
  shm::set_float8_e4m3fn_saturates(static_cast<float>(c10::Float8_e4m3fn(1e6f)) == 448);
  m.def("shm_mapping_bytes", &shm::Engine::mapping_bytes, py::arg("size"), py::arg("arena"));
  m.attr("SHM_MIN_ARENA") = shm::Layout::kMinArena;
}

}  // namespace c10d_ext
