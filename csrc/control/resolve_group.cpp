#include "control/resolve_group.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <mutex>
#include <utility>

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

}  // namespace c10d_ext
