#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>

#include "backends/fallback.h"
#include "core/group.h"
#include "core/memory.h"
#include "core/patience.h"
#include "core/pending.h"
#include "core/reduction.h"

// torch 2.13 renamed _allgather_base, alltoall_base and their kin; 2.11 has the old names alone.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace c10d_ext {

// A backend and what it can do; a ProcessGroup without backends (one written in Python, say) is
// used through its own virtual methods, which have the same names. Copies may outlive the call.
class Carrier {
 public:
  Carrier(std::string_view op, const Group& group, const at::Tensor& t)
      : op_(op), place_({}, group.name(), group.rank(), group.size()) {
    auto* pg = static_cast<c10d::ProcessGroup*>(group.process_group());
    const Claim* claim = Claim::here();
    if (claim != nullptr) {
      timeout_ = claim->timeout();
    }
    if (!pg->hasBackends()) {
      process_group_ = pg;
      has_future_ = t.is_cpu();
      return;
    }
    try {
      backend_ = pg->getBackend(t.device().type());
    } catch (const c10::Error&) {
      value_error(op, group, "the group must have a backend for the tensor's device, got ",
                  t.device());
    }
    if (claim != nullptr) {
      over_gloo_ = &claim->backend();
    } else if (auto* found = backend_.get(); typeid(*found) == typeid(OverGloo)) {
      over_gloo_ = static_cast<OverGloo*>(found);
      backend_ = over_gloo_->gloo();
    }
    const std::string name = backend_->getBackendName();
    gloo_ = name == "gloo";
    nccl_ = name == "nccl";
    complete_ = name == "shm" || name == "fake";
    timed_ = name == "shm";
    has_future_ = gloo_ || timed_;
  }

  // A process group without backends passes most of what it was not given on to the backends that
  // it does not have.
  template <class Verb>
  c10::intrusive_ptr<c10d::Work> start(Verb&& verb) const {
    if (backend_) {
      return verb(*backend_);
    }
    try {
      return verb(*process_group_);
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

  // A verb's options, with the timeout of the call that it serves.
  template <class Options>
  Options options() const {
    Options options;
    if (timeout_) {
      options.timeout = *timeout_;
    }
    return options;
  }

  ReductionPlan plan(const Reduction& reduction, c10::ScalarType dtype) const {
    // shm's min and max are NaN where a rank's value is, and so they are over gloo.
    return plan_reduction(reduction.op, dtype, nccl_ || complete_, !nccl_, over_gloo_ == nullptr);
  }

  // gloo's own reduce-scatter is an all-reduce without a future.
  bool has_reduce_scatter() const {
    return !gloo_ && !process_group_;
  }
  // Of a process group written in Python C++ reaches a few verbs alone: neither those with a root
  // nor the gather into one tensor. They are made of all_reduce and all_to_all.
  bool has_rooted() const {
    return !process_group_;
  }
  // Parts to or from one rank. The verbs of torch.distributed exchange them, which can be of any
  // sizes there, and are to be met. nccl's copy a rank's own part on the caller's stream, which a
  // wait on another one does not see; its exchange sends the same messages.
  bool has_rooted_parts() const {
    return has_rooted() && over_gloo_ == nullptr && !nccl_;
  }
  bool gathers_in_order() const {
    return has_rooted() && !nccl_;
  }
  bool has_all_gather() const {
    return !process_group_;
  }
  // Uneven lists of tensors in all_gather and reduce_scatter.
  bool has_uneven_lists() const {
    return nccl_ || complete_;
  }
  bool has_avg(bool reduce_to_one) const {
    return nccl_ || complete_ || (gloo_ && !reduce_to_one);
  }
  bool has_coalesced() const {
    return nccl_ || complete_;
  }
  // The wait for nccl's blocks the host, which no capture allows. It is an all_reduce of one float,
  // with or without the name.
  bool has_barrier() const {
    return !nccl_ || may_query_device();
  }

  // Messages of any dtype and strides.
  bool has_any_message() const {
    return complete_;
  }
  // One message is not done before its peer's is started, so several must start as one.
  bool starts_messages_together() const {
    return nccl_;
  }
  // A message as a work that any number of threads can ask and wait for.
  c10::intrusive_ptr<c10d::Work> askable(c10::intrusive_ptr<c10d::Work> work) const {
    return gloo_ && over_gloo_ == nullptr ? with_patience(std::move(work)) : work;
  }

  // Works know how long they took.
  bool is_timed() const {
    return timed_;
  }

  // Gloo keeps a collective's inputs alive itself, and nccl until the wait, which may be on another
  // stream than the memory is from; of others nothing is known.
  Finish keep(const at::Tensor& t) const {
    return gloo_ ? Finish() : Finish([t = alias_of(t)] { used_here(t); });
  }

  int64_t rank() const {
    return place_.rank();
  }
  int64_t size() const {
    return place_.size();
  }

 protected:
  // Ranks agree before they send anything, and what they call in flight begins in its turn.
  OverGloo* over_gloo() const {
    return over_gloo_;
  }
  // Around calls that start as one, which the work of the second holds.
  void begin_batch(c10::DeviceType device) const {
    backend_ ? backend_->startCoalescing() : process_group_->startCoalescing(device);
  }
  c10::intrusive_ptr<c10d::Work> end_batch(c10::DeviceType device) const {
    return backend_ ? backend_->endCoalescing() : process_group_->endCoalescing(device);
  }
  Subscribe subscribe() const {
    return !has_future_ ? nullptr : process_group_ ? &subscribe_if_possible : &subscribe_to_future;
  }

 private:
  std::string_view op_;  // the names of ops are literals
  Group place_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  c10d::ProcessGroup* process_group_ = nullptr;
  OverGloo* over_gloo_ = nullptr;
  std::optional<std::chrono::milliseconds> timeout_;
  bool gloo_ = false;
  bool nccl_ = false;
  bool complete_ = false;
  bool has_future_ = false;
  bool timed_ = false;
};

}  // namespace c10d_ext
