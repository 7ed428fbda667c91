#pragma once

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <stdexcept>
#include <string>

#include "backends/shm/bootstrap.h"
#include "core/gil.h"
#include "core/group.h"

namespace c10d_ext {

// What is kept in `store` under a prefix.
inline shm::KeyValueStore part_of(const std::string& prefix,
                                  const c10::intrusive_ptr<c10d::Store>& store) {
  const auto keys = c10::make_intrusive<c10d::PrefixStore>(prefix, store);
  shm::KeyValueStore values;
  values.set = [keys](const std::string& key, const std::string& value) {
    static_cast<c10d::Store&>(*keys).set(key, value);
  };
  values.get = [keys](const std::string& key, std::chrono::milliseconds timeout) {
    keys->wait({key}, timeout);
    return keys->get_to_str(key);
  };
  values.has = [keys](const std::string& key) { return keys->check({key}); };
  values.interrupt = check_signals;
  return values;
}

// What `join` gives, and in the words of an error of this group's where the ranks do not meet.
template <class Join>
auto joined(const Group& group, const Join& join) {
  try {
    return join();
  } catch (const std::runtime_error& error) {
    C10_THROW_ERROR(
        DistBackendError,
        c10::str("shm: every rank must join the group, got: ", error.what(), ' ', where(group)));
  }
}

}  // namespace c10d_ext
