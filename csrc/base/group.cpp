#include "base/group.h"

#include <cstdlib>
#include <string>
#include <string_view>

namespace c10d_ext {

namespace {

bool& shortcut_enabled() {
  static bool enabled = [] {
    constexpr const char* kName = "TORCH_C10D_EXT_SINGLE_RANK_SHORTCUT";
    const char* setting = std::getenv(kName);
    const std::string_view value = setting != nullptr ? setting : "";
    TORCH_CHECK_VALUE(value.empty() || value == "0" || value == "1", kName,
                      ": must be 0 or 1, got '", value, "'");
    return value != "0";
  }();
  return enabled;
}

}  // namespace

bool single_rank_shortcut(const Group& group) {
  return group.size() == 1 && shortcut_enabled();
}

void set_single_rank_shortcut(bool enabled) {
  shortcut_enabled() = enabled;
}

std::string where(const Group& group) {
  return where(group.rank(), group.size(), group.name());
}

std::string where(int64_t rank, int64_t size, std::string_view name) {
  return c10::str("(rank ", rank, "/", size, ", group '", name, "')");
}

}  // namespace c10d_ext
