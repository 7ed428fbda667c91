#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "backends/adapter/adapter.h"
#include "backends/checked/agreement.h"
#include "backends/checked/membership.h"
#include "backends/checked/works.h"
#include "backends/process_group/request_backend.h"
#include "backends/request.h"
#include "base/fingerprint.h"
#include "base/group.h"
#include "base/python_module.h"
#include "work/pending.h"

namespace c10d_ext {

struct KnownGroup;

// A backend for CPU tensors, checked: it begins a collective once all ranks have called it and
// agree, and a message once both its ends are there and agree, whoever called it; a rank that is
// lost or does not come is named on all others. Streams of devices are not known here. The "shm"
// backend is this around gloo where ranks cannot share memory.
//
// Requests are lowered to what the inner backend can do, so that they have every dtype, stride,
// size and reduce op.
class CheckedBackend final : public RequestBackend {
 public:
  // Who makes the backend of some ranks of a group; collective over them.
  using Connect = std::function<c10::intrusive_ptr<c10d::Backend>(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Milliseconds timeout,
      const std::string& group_name, const GlobalRanks& global_ranks)>;

  // What has been started ends within `grace` or fails, and the groups of this process are left:
  // the other ranks know at once.
  static void close_all(Milliseconds grace);
  // Then: what rank 0 still does for the others comes to its end, or ends at once without a grace.
  static void end_service(Milliseconds grace);

  // Collective: meets the other ranks.
  // `strict`: 1: shapes must agree, and not only sizes; 2: and the lines that call. `piggyback`: so
  // many bytes of all ranks together travel with the calls; none: as is usual. `connect`: makes the
  // backends of groups that are split off, merged or shrunk; none: what the inner backend makes of
  // itself is checked, too. `counted_as`: the inner backend's name in profilers, as far as it is
  // another one.
  CheckedBackend(c10::intrusive_ptr<c10d::Backend> inner, c10::intrusive_ptr<c10d::Store> store,
                 const Options& options, GlobalRanks global_ranks, int strict,
                 std::optional<size_t> piggyback, Connect connect = {},
                 const std::string& counted_as = {});
  ~CheckedBackend() override;

  void post(const Group& group, const CollectiveRequest& request) override;
  const Capabilities& capabilities() const override {
    return can_;
  }
  // The work is that of both ends; any number of threads can ask and wait for it.
  WorkPtr post_message(const Message& message, const at::Tensor& wire, Start start) override;

  const c10::intrusive_ptr<c10d::Backend>& inner_backend() const {
    return inner_;
  }

  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  // Calls start at once, in a block as outside of it; its end has one work for all of them.
  WorkPtr endCoalescing() override;

  bool supportsSplitting() const override;
  bool supportsShrinking() const override;
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& opts) override;
  c10::intrusive_ptr<Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                    const c10::intrusive_ptr<Options>& opts, const int& rank,
                                    const int& size) override;
  c10::intrusive_ptr<Backend> shrink(const std::vector<int64_t>& ranks_to_exclude, int flags,
                                     const c10::intrusive_ptr<Options>& opts) override;

  void setTimeout(Milliseconds timeout) override;
  uint64_t getSequenceNumberForGroup() override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

 private:
  WorkPtr run(const MethodCall& call, const CollectiveRequest& request) override;
  WorkPtr run(const MethodCall& call, const Message& message) override;
  WorkPtr run(const MethodCall& call, at::TensorList outputs, AgreedCall&& agreed);
  WorkPtr deliver(const MethodCall& call, const WorkPtr& work);
  // Of a request as it is kept until its end. `timeout`: of the call, or unset.
  AgreedCall agreed_call(std::string_view op, Milliseconds timeout, Fingerprint&& called,
                         HeldRequest&& request) const;
  // The work is that of the agreement and of what comes of it, and has a future.
  WorkPtr agree(AgreedCall&& call);
  // For a call with this timeout, or unset. `for_little`: where little is reduced.
  Adapter inner(std::string_view op, Milliseconds timeout, bool for_little) const;

  c10::intrusive_ptr<Backend> make_backend(std::string_view op,
                                           const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                           int size, Milliseconds timeout, const std::string& name,
                                           const GlobalRanks& global_ranks) const override;
  void check_inner(bool can, std::string_view op) const;
  // `inner`, checked as this is; null of null.
  c10::intrusive_ptr<Backend> checked(c10::intrusive_ptr<c10d::Backend> inner,
                                      const c10::intrusive_ptr<c10d::Store>& store,
                                      Milliseconds timeout, const std::string& name,
                                      GlobalRanks global_ranks) const;

  const int strict_;
  const Connect connect_;
  c10::intrusive_ptr<c10d::Backend> inner_;
  const Capabilities inner_can_, can_;
  const std::optional<size_t> piggyback_given_;
  const Inner inner_info_;
  const Group group_;  // for texts
  const std::shared_ptr<MessagesInFlight> messages_ = std::make_shared<MessagesInFlight>();
  // Works may outlive the backend; they hold this while they use it.
  const std::shared_ptr<Agreement> agreement_;
  const std::shared_ptr<Membership> membership_;
  const Little little_;
  const Capabilities little_can_;
  const c10::intrusive_ptr<c10d::Backend> piggyback_;  // what is little is lowered to it
  const std::shared_ptr<const KnownGroup> known_group_;

  // Between startCoalescing and endCoalescing: what has been started.
  std::vector<WorkPtr> batch_;
};

void bind_checked(pybind11::module_& m);

}  // namespace c10d_ext
