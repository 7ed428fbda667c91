#pragma once

#include <ATen/core/LegacyTypeDispatch.h>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "backends/shm/backend.h"
#include "backends/shm/engine.h"
#include "backends/shm/staging.h"
#include "base/dtype.h"
#include "base/memory.h"
#include "base/profiler_span.h"
#include "work/snapshot.h"

namespace c10d_ext {

// An operation of the engine as it is made of tensors, and how their values get to where the engine
// reads and from where it writes. Built by one thread; filled, landed and released by the one that
// drives the engine.
class ShmBackend::OperationTensors : public shm::Operation {
 public:
  // Everything that a call sets is set here.
  void start(std::string_view op, OpType type, std::chrono::milliseconds limit, const Group& place,
             size_t sources, size_t targets) {
    op_ = op;
    place_ = &place;
    span_ = ProfilerSpan::open("shm", op);
    timeout = limit;
    request.type = type;
    request.sources.resize(sources);
    request.targets.resize(targets);
  }

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
    if (C10_UNLIKELY(span_ != nullptr || staging_.converts() || !is_dense(t))) {
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
    staging_.travel_as(dtype);
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
  // For a call that is in flight when it returns, unless a table of works knows of it.
  void note_writes() {
    writes_ = WritesInFlight(outputs_);
  }

  std::string_view op() const {
    return op_;
  }
  Tensors outputs() const {
    return Tensors(outputs_.begin(), outputs_.end());
  }

 protected:
  OperationTensors() : shm::Operation({}, {}) {}

  // Without a trace of the last call, but with the memory of its lists.
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
    staging_.renew();
    has_dtype_ = false;
    outputs_.clear();
  }

  // When it begins: what the engine reads is there from here on.
  void fill() {
    if (span_) {
      span_->begin();
    }
    staging_.fill();
    if (C10_UNLIKELY(prepare_)) {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      prepare_();
    }
    staging_.fill_overlaps();
  }
  // When all data has arrived.
  void land() {
    staging_.land();
    if (C10_UNLIKELY(finish_)) {
      staging_.attempt(finish_);
    }
  }
  // What went wrong with fill() or land().
  const std::exception_ptr& trouble() const {
    return staging_.trouble();
  }
  // Once it has ended: all but the outputs.
  void release_tensors() {
    if (C10_UNLIKELY(span_ != nullptr)) {
      span_->end();
      span_.reset();
    }
    if (C10_UNLIKELY(finish_)) {
      prepare_ = finish_ = nullptr;
      request.room = nullptr;
    }
    staging_.release();
    writes_.clear();
  }

  const Group& place() const {
    return *place_;
  }

 private:
  const at::Tensor& dense_values(const at::Tensor& t) {
    if (C10_UNLIKELY(span_ != nullptr)) {
      span_->add_input(t);
    }
    return staging_.dense_values(t);
  }
  const at::Tensor& landing(const at::Tensor& t) {
    outputs_.push_back(alias_of(t));
    return staging_.landing(outputs_.back());
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

  std::string_view op_;
  const Group* place_ = nullptr;  // the engine's owner has it
  std::unique_ptr<ProfilerSpan> span_;
  bool has_dtype_ = false;

  Staging staging_;  // what is read, until it is settled
  // What is written, for as long as somebody may ask.
  c10::SmallVector<at::Tensor, 2> outputs_;
  WritesInFlight writes_;
  std::function<void()> prepare_, finish_;
};

}  // namespace c10d_ext
