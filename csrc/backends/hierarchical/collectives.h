#pragma once

// Collectives of several hosts, as schedules of requests to backends of some of the ranks.

#include "backends/hierarchical/hosts.h"
#include "backends/process_group/inner_backend.h"

namespace c10d_ext::hierarchical {

// Runs it to its end, with waits between its requests. Every element is reduced on one rank or in
// the same way on all, so that all ranks get the same bits.
using Schedule = void(const Parts& parts, const InnerCollective& what);
extern const InnerTable<Schedule> kSchedules;

}  // namespace c10d_ext::hierarchical
