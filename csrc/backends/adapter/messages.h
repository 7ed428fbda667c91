#pragma once

#include <c10/util/ArrayRef.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <optional>
#include <string_view>
#include <vector>

#include "backends/adapter/adapter.h"
#include "backends/request.h"

namespace c10d_ext {

// Starts messages, at least one, together where the backend would otherwise wait for one before the
// next, and returns the work of each. Nothing is attached to a storage. `type`: of the method of
// c10d that was called, if one was.
std::vector<c10::intrusive_ptr<c10d::Work>> start_messages(
    const Adapter& adapter, std::string_view op, const Group& group,
    c10::ArrayRef<Message> messages, std::optional<c10d::OpType> type = std::nullopt);

}  // namespace c10d_ext
