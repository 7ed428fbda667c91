#include "core/group.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdlib>
#include <mutex>
#include <string_view>

namespace c10d_ext {

namespace {

std::mutex provider_mutex;
std::function<std::string()>& provider() {
  static std::function<std::string()> instance;
  return instance;
}

std::string known_names() {
  std::function<std::string()> names;
  {
    std::lock_guard<std::mutex> lock(provider_mutex);
    names = provider();
  }
  return names ? names() : "not listed here";
}

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

void set_group_names_provider(std::function<std::string()> names) {
  std::lock_guard<std::mutex> lock(provider_mutex);
  provider() = std::move(names);
}

Group resolve_group(std::string_view op, std::string_view name) {
  std::string key(name);
  c10::intrusive_ptr<c10d::ProcessGroup> pg;
  try {
    pg = c10d::resolve_process_group(key);
  } catch (const c10::Error&) {
    throw InvalidArgument(c10::str(
        op, ": group_name must name a process group of this process (known: ", known_names(),
        "), got '", key, "'"));
  }
  const int64_t rank = pg->getRank();
  const int64_t size = pg->getSize();
  return Group(std::move(pg), std::move(key), rank, size);
}

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
