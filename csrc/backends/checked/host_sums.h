#pragma once

// Leaders reduce what ranks give to an all_reduce or reduce_scatter of little data: that of their
// hosts before they pass it on, as one rank's, and what all have then, so that ranks hear what
// comes of it alone. Each host's values are reduced in the order of its ranks, and then those of
// hosts in theirs, whoever does it. No torch in here.

#include <optional>
#include <utility>
#include <vector>

#include "backends/checked/calling.h"
#include "backends/checked/contribution.h"
#include "control/shared_bytes.h"

namespace c10d_ext {

// What ranks of a host call, by rank, with their data: the first one's becomes that of all. Nothing
// is done where they do not fit together, or are not to be reduced. Whether all call the same is
// seen later: of parts that differ ranks say different things.
void reduce_on_host(std::vector<std::pair<int, Calling>>& calls);

// What comes of all for a rank, some hosts' reduced already. None where they do not fit together,
// or are not to be reduced.
std::optional<SharedBytes> reduced(const std::vector<Contribution>& all,
                                   const std::vector<std::vector<int>>& hosts, int rank);

}  // namespace c10d_ext
