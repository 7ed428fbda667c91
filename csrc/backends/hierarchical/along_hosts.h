#pragma once

// Collectives whose data goes from each host to the next one, part after part, so that each link
// carries everything once, and to one host and from one host alone.

#include <ATen/core/Tensor.h>

#include "backends/hierarchical/hosts.h"
#include "base/reduction.h"

namespace c10d_ext::hierarchical {

// Whether a broadcast takes less so than by a tree, in which the root's link carries everything for
// each of the hosts that hear from it.
bool broadcasts_along_hosts(const Parts& parts, const at::Tensor& t);
// `root`: a host. Inside, each part is told as it comes, but on that host where `is_known_there`.
void broadcast_along_hosts(const Parts& parts, const at::Tensor& t, int root, int on_rail,
                           bool is_known_there);

// The others, of hosts with as many ranks each, go round: from the last host to the first one.
// `part`: what a rank contributes to an all_gather, or gets of a reduce_scatter.
bool goes_round(const Parts& parts, const at::Tensor& part);
void all_gather_along_hosts(const Parts& parts, const at::Tensor& in, const at::Tensor& out);
// Each element is reduced on its way to the host that gets it, from the host after that on.
void reduce_scatter_along_hosts(const Parts& parts, const at::Tensor& in, const at::Tensor& out,
                                const Reduction& reduction);

}  // namespace c10d_ext::hierarchical
