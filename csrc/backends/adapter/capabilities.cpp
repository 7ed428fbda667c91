#include "backends/adapter/capabilities.h"

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <mutex>

#include "backends/backend.h"
#include "base/exceptions.h"

namespace c10d_ext {

namespace {

using Futures = Capabilities::Futures;

// The backends that torch brings.
const std::map<std::string, Capabilities>& known() {
  static const auto* rows = [] {
    Capabilities gloo;
    // Its own reduce-scatter is an all-reduce without a future.
    gloo.methods = kMethodsOfC10d.without({Method::ReduceScatterTensor});
    gloo.futures = Futures::Always;
    gloo.reduces_avg = true;
    gloo.keeps_inputs = true;
    gloo.has_every_tag = true;
    gloo.sends_host_memory_only = true;
    gloo.sends_over_sockets = true;
    gloo.has_blocking_messages = true;

    Capabilities nccl;
    // Its gather and scatter copy a rank's own part on the caller's stream, which a wait on another
    // one does not see; an exchange sends the same messages.
    nccl.methods = kMethodsOfC10d.with(Method::AllReduceCoalesced)
                       .with(Method::AllGatherIntoTensorCoalesced)
                       .without({Method::Gather, Method::Scatter});
    nccl.reduces_avg = nccl.reduces_avg_to_one = true;
    nccl.reduces_low_precision = true;
    nccl.reduces_bitwise = false;
    nccl.gathers_uneven = true;
    // It keeps inputs until the wait, and not for the stream that waits.
    nccl.keeps_inputs = false;
    nccl.starts_messages_together = true;
    nccl.may_run_on_callers_stream = true;
    // It is an all_reduce of one float, with or without the name.
    nccl.barrier_blocks_host = true;

    // Moves nothing, whatever it is asked for.
    Capabilities fake;
    fake.methods = nccl.methods.with(Method::Gather).with(Method::Scatter);
    fake.reduces_avg = fake.reduces_avg_to_one = true;
    fake.reduces_low_precision = true;
    fake.gathers_uneven = true;
    fake.sums_in_rank_order = fake.moves_nothing = true;
    fake.sends_any_tensor = true;

    return new std::map<std::string, Capabilities>{{"gloo", gloo}, {"nccl", nccl}, {"fake", fake}};
  }();
  return *rows;
}

// In the order of the enumerators.
constexpr std::array<std::string_view, 14> kMethods{"allreduce",
                                                    "allreduce_coalesced",
                                                    "reduce",
                                                    "broadcast",
                                                    "allgather",
                                                    "all_gather_into_tensor",
                                                    "all_gather_into_tensor_coalesced",
                                                    "reduce_scatter_tensor",
                                                    "all_to_all_single",
                                                    "gather",
                                                    "scatter",
                                                    "barrier",
                                                    "send",
                                                    "recv"};
static_assert(kMethods.size() == static_cast<size_t>(Method::Recv) + 1);

struct Registered {
  std::atomic<bool> any{false};
  std::mutex mutex;
  std::map<std::string, Capabilities> rows;

  static Registered& get() {
    static auto* instance = new Registered;
    return *instance;
  }
};

}  // namespace

std::string_view name_of(Method method) {
  return kMethods[static_cast<size_t>(method)];
}

Methods methods_of(const std::vector<std::string>& names) {
  Methods methods;
  for (const auto& name : names) {
    const auto found = std::find(kMethods.begin(), kMethods.end(), name);
    if (found == kMethods.end()) {
      throw InvalidArgument(c10::str("register_backend_capabilities: methods must be of ",
                                     c10::Join(", ", kMethods), ", got '", name, "'"));
    }
    methods = methods.with(static_cast<Method>(found - kMethods.begin()));
  }
  return methods;
}

Capabilities capabilities_of(const c10d::Backend& backend) {
  if (const auto* described = DescribedBackend::of(backend)) {
    return described->capabilities();
  }
  const std::string backend_name = backend.getBackendName();
  if (auto& registered = Registered::get(); registered.any.load()) {
    const std::lock_guard lock(registered.mutex);
    const auto found = registered.rows.find(backend_name);
    if (found != registered.rows.end()) {
      return found->second;
    }
  }
  const auto found = known().find(backend_name);
  return found != known().end() ? found->second : Capabilities();
}

bool runs_on_callers_stream(const Capabilities& can) {
  if (!can.may_run_on_callers_stream) {
    return false;
  }
  // As torch reads it, though at the first such call and not for each group.
  static const bool waits_block =
      c10d::getCvarBool({"TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"}, false);
  return !waits_block;
}

void register_capabilities(const std::string& backend_name, const Capabilities& capabilities) {
  auto& registered = Registered::get();
  const std::lock_guard lock(registered.mutex);
  registered.rows[backend_name] = capabilities;
  registered.any.store(true);
}

Capabilities capabilities_of_group_without_backends(bool is_cpu) {
  Capabilities group;
  group.methods = {Method::AllReduce, Method::Broadcast, Method::AllToAllSingle,
                   Method::Barrier,   Method::Send,      Method::Recv};
  group.futures = is_cpu ? Futures::IfPossible : Futures::None;
  return group;
}

}  // namespace c10d_ext
