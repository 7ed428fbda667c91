#pragma once

// What a rank has to say. No torch in here.

#include <cstdint>
#include <optional>

#include "backends/checked/protocol.h"
#include "control/payload.h"

namespace c10d_ext {

// Something to say about collective, or message, `seq`.
struct News {
  uint64_t seq;
  Says kind;
  Payload words;
  std::optional<Calling> call = std::nullopt;  // in place of words
  // Of a message, which is over once it is said: the rank that wants it.
  std::optional<int> wanted_by = std::nullopt;
  // Of a message whose ends have a line: the other one, and what a send says to it.
  std::optional<int> peer = std::nullopt;
  std::optional<Payload> delivery = std::nullopt;
};

}  // namespace c10d_ext
