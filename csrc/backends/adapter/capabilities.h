#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "backends/capabilities.h"

namespace c10d_ext {

// What a backend of this name can do: as it was registered, else as the table of those that torch
// brings has it, else the defaults.
Capabilities capabilities_of(const std::string& backend_name);

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
