#pragma once

// What leaders pass on to each other and to rank 0, and what is said of it.

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backends/checked/protocol.h"

namespace c10d_ext {

inline std::string data_of(uint64_t call, int rank) {
  return std::to_string(call) + " of rank " + std::to_string(rank);
}

inline Payload calling(uint64_t seq, const Fingerprint& called,
                       const std::optional<std::string>& data) {
  return encoded(Calling{called, data ? std::optional(Contribution(*data)) : std::nullopt, seq});
}

struct Said {
  int rank;
  Says kind;
  std::string words;
  auto operator<=>(const Said&) const = default;
};

// As a leader passes on what ranks of its host call, those from `first` on.
inline Payload together(int first, const std::vector<Payload>& calls) {
  Payload all = Payload().put(static_cast<int64_t>(calls.size()));
  for (size_t i = 0; i < calls.size(); ++i) {
    all.put(first + static_cast<int>(i)).put(calls[i]);
  }
  return all;
}

inline const std::vector<std::string> kThree = {"a", "a", "b", "b", "c", "c"};

}  // namespace c10d_ext
