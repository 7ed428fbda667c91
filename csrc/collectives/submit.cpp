#include "collectives/submit.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>

#include "backends/adapter/adapter.h"
#include "backends/adapter/lowering.h"
#include "backends/backend.h"
#include "base/gil.h"
#include "base/memory.h"
#include "work/device_completion.h"
#include "work/pending.h"

namespace c10d_ext {

namespace {

// getBackend() throws where there is none. The direct question is new in torch 2.13.
template <class ProcessGroup>
bool serves_cpu(ProcessGroup& pg) {
  if constexpr (requires { pg.hasBackendForDeviceType(c10::DeviceType::CPU); }) {
    return pg.hasBackendForDeviceType(c10::DeviceType::CPU);
  } else {
    const auto devices = pg.getDeviceTypes();
    return std::any_of(devices.begin(), devices.end(), [](const auto& d) { return d.is_cpu(); });
  }
}

// That of our own which serves the group, or null where another does.
CollectiveBackend* own_backend(const Group& group, const at::Tensor& t) {
  auto* pg = static_cast<c10d::ProcessGroup*>(group.process_group());
  if (!t.is_cpu() || !serves_cpu(*pg)) {
    return nullptr;
  }
  const auto backend = pg->getBackend(c10::DeviceType::CPU);  // which the process group holds
  return CollectiveBackend::of(*backend);
}

}  // namespace

void submit(const Group& group, const CollectiveRequest& request) {
  if (request.outs.empty()) {
    return;
  }
  const at::Tensor& like = request.like();
  if (like.is_meta()) {
    return;
  }
  if (request.type == OpType::Barrier) {
    copy_values(request.outs.front(), request.sources.front());
  } else if (request.is_empty()) {
    return;
  }
  if (single_rank_shortcut(group)) {
    note_over(at::Tensor(), WorkInfo());
    lowering::run_alone(request);
    if (!like.is_cpu()) {
      DeviceCompletions::get().add_written_here(request.outs);
    }
    return;
  }
  // The backend's threads may need the GIL before they let the call in.
  without_gil([&] {
    if (auto* own = own_backend(group, like)) {
      own->post(group, request);
    } else {
      Adapter(request.op, group, like).post(group, request);
    }
  });
}

}  // namespace c10d_ext
