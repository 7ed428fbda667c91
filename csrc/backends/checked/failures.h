#pragma once

// What calls of this rank fail with. No torch in here.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backends/checked/protocol.h"
#include "base/errors.h"
#include "control/meeting.h"

namespace c10d_ext {

// `seq`: of a collective, or of a message.
Failure failure_of(const Place& place, ErrorKind kind, const std::string& op, uint64_t seq,
                   const std::string& text, std::vector<int> ranks = {});
// What this rank calls after it has left the group, or has in flight as it leaves.
Failure failure_of_left(const Place& place, const std::string& op, uint64_t seq);
// What this rank calls after the group has ended, or has in flight as it ends. `tag`: of a message;
// `seq` of 0: any message.
Failure failure_of(const Place& place, const End& end, const std::string& op, uint64_t seq,
                   const std::optional<int64_t>& tag);

}  // namespace c10d_ext
