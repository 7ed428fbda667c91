#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "backends/capabilities.h"

namespace c10d {
class Backend;
}  // namespace c10d

namespace c10d_ext {

// What the backend can do: as it says itself where it is one of ours; else, by its name, as it was
// registered, as the table of those that torch brings has it, or the defaults.
Capabilities capabilities_of(const c10d::Backend& backend);

// Whether a call on a device that waits at once runs on its caller's stream. Not where torch's nccl
// is told (TORCH_NCCL_BLOCKING_WAIT) to have waits block and raise: that takes a work.
bool runs_on_callers_stream(const Capabilities& can);

// For the plug-in that brings the backend. What was registered before under the name is forgotten.
void register_capabilities(const std::string& backend_name, const Capabilities& capabilities);

// "allreduce", "all_to_all_single": how plug-ins call it.
std::string_view name_of(Method method);
// Raises ValueError, which lists the names there are.
Methods methods_of(const std::vector<std::string>& names);

// Of a process group without backends, one written in Python say. C++ reaches a few of its methods
// alone: neither those with a root nor the gather into one tensor.
Capabilities capabilities_of_group_without_backends(bool is_cpu);

}  // namespace c10d_ext
