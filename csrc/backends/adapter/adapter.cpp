#include "backends/adapter/adapter.h"

#include "backends/adapter/capabilities.h"
#include "backends/adapter/lowering.h"
#include "base/sync_scope.h"
#include "work/snapshot.h"

namespace c10d_ext {

namespace {

Group place_of(const Group& group) {
  return Group({}, group.name(), group.rank(), group.size());
}

}  // namespace

Adapter::Adapter(std::string_view op, const Group& group, const at::Tensor& t)
    : op_(op), place_(place_of(group)) {
  auto* pg = static_cast<c10d::ProcessGroup*>(group.process_group());
  if (!pg->hasBackends()) {
    process_group_ = pg;
    can_ = capabilities_of_group_without_backends(t.is_cpu());
    return;
  }
  try {
    backend_ = pg->getBackend(t.device().type());
  } catch (const c10::Error&) {
    value_error(op, group, "the group must have a backend for the tensor's device, got ",
                t.device());
  }
  can_ = capabilities_of(*backend_);
  on_callers_stream_ = !t.is_cpu() && SyncScope::is_on() && runs_on_callers_stream(can_);
}

Adapter::Adapter(std::string_view op, const Group& group, c10::intrusive_ptr<c10d::Backend> backend,
                 const Capabilities& capabilities, std::optional<std::chrono::milliseconds> timeout)
    : op_(op),
      place_(place_of(group)),
      backend_(std::move(backend)),
      can_(capabilities),
      timeout_(timeout) {}

void Adapter::check_has(Method method) const {
  C10D_EXT_CHECK_VALUE(has(method), op_, place_, "the group's backend must have ", name_of(method),
                       ", of which this is made, got '",
                       backend_ ? backend_->getBackendName() : std::string("a process group"),
                       "' without");
}

Subscribe Adapter::subscribe() const {
  switch (can_.futures) {
    case Capabilities::Futures::None:
      return nullptr;
    case Capabilities::Futures::IfPossible:
      return &subscribe_if_possible;
    case Capabilities::Futures::Always:
      return &subscribe_to_future;
  }
  return nullptr;
}

void Adapter::post(const Group& group, const CollectiveRequest& request) const {
  const at::Tensor& like = request.like();
  c10::OptionalDeviceGuard device_guard;
  if (!like.is_cpu()) {
    device_guard.reset_device(like.device());
  }
  Started started = lowering::start(*this, held(request, rank()));
  attach(request.op, group, request.outs, started.work, std::move(started.finish), subscribe());
}

HeldRequest held(const CollectiveRequest& request, int64_t rank) {
  HeldRequest kept(request, {}, HeldRequest::Tensors(request.outs.begin(), request.outs.end()));
  if (request.type == OpType::Barrier) {
    return kept;  // its tensors are not sent
  }
  TORCH_INTERNAL_ASSERT(request.sources.size() <= request.outs.size(), request.op,
                        ": held() must be given the request of an op, which has an out for each "
                        "source; those of c10d's methods may have none");
  // The method copies the source, on a device in the order of the caller's stream.
  const bool is_copied = request.type == OpType::AllReduce || request.type == OpType::Reduce ||
                         request.type == OpType::Broadcast;
  const bool is_read = request.type != OpType::Scatter || request.root == rank;
  for (size_t i = 0; i < request.sources.size(); ++i) {
    const at::Tensor& source = request.sources[i];
    const at::Tensor& out = request.outs[i];
    if (!is_read || source.is_same(out) || source.storage().is_alias_of(out.storage())) {
      kept.sources.push_back(source);
    } else if (source.is_cpu()) {
      kept.sources.push_back(snapshot_of(source, request.outs));
    } else {
      kept.sources.push_back(FunctionalCall::is_on() && !is_copied ? clone_of(source) : source);
    }
  }
  return kept;
}

}  // namespace c10d_ext
