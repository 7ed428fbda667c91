#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "backends/backend.h"
#include "backends/capabilities.h"
#include "backends/request.h"
#include "base/group.h"
#include "base/memory.h"
#include "base/reduction.h"
#include "work/pending.h"

// torch 2.13 renamed _allgather_base, alltoall_base and their kin; 2.11 has the old names alone.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace c10d_ext {

// How one call reaches a c10d::Backend of others, with what that can do. A ProcessGroup without
// backends (one written in Python, say) is used through its own virtual methods, which have the
// same names. Copies may outlive the call.
class Adapter {
 public:
  // Of the backend that serves the device of `t` in `group`.
  Adapter(std::string_view op, const Group& group, const at::Tensor& t);
  // Of one backend, for who decorates it. `timeout`: of the call; none: the backend's.
  Adapter(std::string_view op, const Group& group, c10::intrusive_ptr<c10d::Backend> backend,
          const Capabilities& capabilities, std::optional<std::chrono::milliseconds> timeout);

  // Starts the collective and attaches it to the storages that it writes.
  void post(const Group& group, const CollectiveRequest& request) const;

  // A process group without backends passes most of what it was not given on to the backends that
  // it does not have.
  template <class Call>
  c10::intrusive_ptr<c10d::Work> start(Call&& call) const {
    if (backend_) {
      return call(*backend_);
    }
    try {
      return call(*process_group_);
    } catch (const c10::Error& error) {
      if (std::string_view(error.what()).find("No backend type associated") ==
          std::string_view::npos) {
        throw;
      }
      value_error(op_, place_,
                  "a process group without backends must define allreduce, broadcast and "
                  "all_to_all_single (or alltoall_base), got one that lacks what this call needs");
    }
  }

  // Starts a message, of which `wire` travels. `call` is told the backend and who has the message's
  // other end.
  template <class Call>
  c10::intrusive_ptr<c10d::Work> start_message(const Message& message, const at::Tensor& wire,
                                               Call&& call) const {
    if (auto* own = backend_ ? CollectiveBackend::of(*backend_) : nullptr) {
      return own->post_message(message, wire, call);
    }
    check_has(message.sends ? Method::Send : Method::Recv);
    const auto peer = static_cast<int>(message.peer);
    return start([&](auto& backend) { return call(backend, peer); });
  }

  // A method's options, with the timeout of the call that it serves.
  template <class Options>
  Options options() const {
    Options options;
    options.asyncOp = !on_callers_stream_;
    if (timeout_) {
      options.timeout = *timeout_;
    }
    return options;
  }

  const Capabilities& can() const {
    return can_;
  }
  bool has(Method method) const {
    return can_.methods.has(method);
  }
  // Raises what says what the backend lacks.
  void check_has(Method method) const;
  // A process group that may lack even what it is said to have.
  bool is_process_group() const {
    return process_group_ != nullptr;
  }

  ReductionPlan plan(const Reduction& reduction, c10::ScalarType dtype) const {
    return plan_reduction(reduction.op, dtype, can_.reduces_low_precision, can_.reduces_bitwise,
                          can_.keeps_nan);
  }
  // Whether barrier() can be called now.
  bool may_call_barrier() const {
    return has(Method::Barrier) && (!can_.barrier_blocks_host || may_query_device());
  }
  // What keeps a collective's input until the wait, which may be on another stream than its memory
  // is from.
  Finish keep(const at::Tensor& t) const {
    return can_.keeps_inputs ? Finish() : Finish([t = alias_of(t)] { used_here(t); });
  }
  Subscribe subscribe() const;

  // Around calls that start as one, which the work of the second holds.
  void begin_batch(c10::DeviceType device) const {
    backend_ ? backend_->startCoalescing() : process_group_->startCoalescing(device);
  }
  c10::intrusive_ptr<c10d::Work> end_batch(c10::DeviceType device) const {
    return backend_ ? backend_->endCoalescing() : process_group_->endCoalescing(device);
  }

  int64_t rank() const {
    return place_.rank();
  }
  int64_t size() const {
    return place_.size();
  }

 private:
  std::string_view op_;  // the names of ops are literals
  Group place_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  c10d::ProcessGroup* process_group_ = nullptr;
  Capabilities can_;
  std::optional<std::chrono::milliseconds> timeout_;
  // Of a call on a device that waits at once.
  bool on_callers_stream_ = false;
};

// The request with tensors that live as long as it needs them, and whose sources stay as they are
// now whatever their owner writes, but for what snapshot_of() leaves to who waits: of a collective
// that an op has called. `rank` is this one's: of a scatter, only the root's source is read.
HeldRequest held(const CollectiveRequest& request, int64_t rank);

}  // namespace c10d_ext
