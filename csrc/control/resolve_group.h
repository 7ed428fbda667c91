#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "base/group.h"

namespace c10d_ext {

// The group registered under `name`, or a ValueError that lists the known names.
Group resolve_group(std::string_view op, std::string_view name);

// Who can tell the names of the groups of this process (torch keeps them in Python).
void set_group_names_provider(std::function<std::string()> provider);

}  // namespace c10d_ext
