#pragma once

// What a rank has to say. No torch in here.

#include <cstdint>
#include <optional>
#include <string>

#include "backends/checked/protocol.h"
#include "control/payload.h"

namespace c10d_ext {

// A collective or message that has had its time, of which rank 0 is asked.
struct LateCall {
  Says kind;
  uint64_t seq;
  std::string what;
  int sender = -1;  // whose message a receive waits for; -1: nobody knows

  Payload words() const {
    Payload words = Payload().put(static_cast<int64_t>(seq)).put(what);
    return kind == kOverdue ? words.put(sender) : words;
  }
};

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
