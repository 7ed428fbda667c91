#pragma once

// Collectives of little data, which travels with the calls that ranks agree on (piggybacking): one
// round trip to rank 0 is all they take.

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "backends/capabilities.h"
#include "backends/checked/contribution.h"
#include "backends/request.h"
#include "base/group.h"

namespace c10d_ext {

struct Piggyback {
  // What this rank contributes.
  Contribution data;
  // Makes the result of what all ranks contribute, in their order, or of what leaders have reduced
  // that to. Throws where it has another size than this rank expects.
  std::function<void(const std::vector<SharedBytes>& data)> receive;
};

// What is little, in bytes of all ranks together, unless the user says otherwise. Who has heard of
// all sends as much to each rank that it tells: what that is together is bounded, too. `told`:
// those of a host by their leader, over no link, or all by rank 0.
constexpr size_t usual_piggyback(size_t told, bool by_leaders) {
  const size_t most = size_t{by_leaders ? 256U : 32U} << 10;
  const size_t most_sent = size_t{by_leaders ? 1024U : 256U} << 10;
  return std::min(most, most_sent / std::max<size_t>(told, 1));
}

// So many bytes of all ranks together are little, and as many would be without a setting; of an
// exchange more, by the hosts whose leaders pass them on, and of what leaders reduce those of one
// rank of each host.
struct Little {
  size_t most;
  size_t usual;
  size_t hosts;
};

// Whether values are reduced that are little. The same on all ranks. Whatever moves them, they are
// reduced in the order of ranks, on each rank, or as leaders reduce them (host_sums.h), so that
// results do not depend on whether they could travel with the calls.
bool reduces_little(const HeldRequest& request, const Group& group, const Little& little);
// What ranks must agree on where that is other than usual: on this rank it may be little, or on one
// with the usual setting.
std::string manner_of(const HeldRequest& request, const Group& group, const Little& little);
// How `inner` is used for those: as piggyback_of() does without it. `hosts`: of leaders.
Capabilities capabilities_for_little(Capabilities inner,
                                     const std::vector<std::vector<int>>& hosts);

// What piggyback_of() lowers the collectives of a group to, made once: to make a backend costs more
// than a little collective may.
c10::intrusive_ptr<c10d::Backend> make_piggyback_backend(const Group& group);

// None where it is not little, or no kind that travels so. Reads the sources now, and writes
// nothing but a root's own result of what it broadcasts. `backend`: the group's of that function.
std::optional<Piggyback> piggyback_of(const HeldRequest& request, const Group& group,
                                      const Little& little,
                                      const c10::intrusive_ptr<c10d::Backend>& backend);

}  // namespace c10d_ext
