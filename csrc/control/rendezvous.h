#pragma once

// How the ranks of a group meet at its store, and hear of one that will not come.

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/group.h"
#include "base/python_module.h"
#include "control/global_ranks.h"
#include "control/store.h"

namespace c10d_ext {

// A group of this process, which is asked about its ranks for as long as it exists.
struct KnownGroup {
  GlobalRanks global_ranks;
  // The pid of a rank whose process is gone, as far as the group knows.
  std::function<std::optional<int>(int rank)> gone;
};

std::shared_ptr<const KnownGroup> known_group(GlobalRanks global_ranks,
                                              std::function<std::optional<int>(int rank)> gone);

// The ranks that are to join a group. Those of them that are in another group of this process, too,
// are known to be gone when they are.
class Rendezvous {
 public:
  // `backend`: whose group it is, for texts.
  Rendezvous(Group place, c10::intrusive_ptr<c10d::Store> store, GlobalRanks global_ranks,
             std::string backend)
      : place_(std::move(place)),
        store_(std::move(store)),
        global_ranks_(std::move(global_ranks)),
        backend_(std::move(backend)) {}

  // Throws where one of them is gone.
  void look() const;
  // For waits: looks now and then, and lets Ctrl-C through.
  void check() const;

  // What is kept in the group's store under a prefix.
  KeyValueStore part_of_store(const std::string& prefix) const;
  // The same for a backend that waits at it.
  c10::intrusive_ptr<c10d::Store> watched_store(const std::string& prefix) const;

  // What `join` gives, and in the words of an error of the group's where the ranks do not meet.
  template <class Join>
  auto joined(const Join& join) const {
    try {
      return join();
    } catch (const std::runtime_error& error) {
      look();  // who is gone may have led others to leave, of which this one has heard first
      C10_THROW_ERROR(DistBackendError,
                      c10::str(backend_, ": every rank must join the group, got: ", error.what(),
                               ' ', where(place_)));
    }
  }

 private:
  const Group place_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const GlobalRanks global_ranks_;
  const std::string backend_;
  // In a process whose ranks meet at once nobody looks.
  mutable std::chrono::steady_clock::time_point next_look_ =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(5);
};

void bind_rendezvous(pybind11::module_& m);

}  // namespace c10d_ext
