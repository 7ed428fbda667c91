#pragma once

// How a collective fails that was started. No torch in here.

#include <cstdint>
#include <string>
#include <vector>

namespace c10d_ext {

enum class ErrorKind : uint8_t { RankLost, Timeout, Mismatch, Closed };

// A failure as engines and checks report it; CollectiveError is what becomes of it in torch.
struct Failure {
  using Kind = ErrorKind;
  ErrorKind kind;
  // The whole text, "(rank 1/4, group 'tp')" included.
  std::string text;
  // The ranks at fault: lost, missing, or those that disagree with rank 0.
  std::vector<int> ranks;
  std::string op;
  uint64_t seq = 0;
  // No later operation of the group can succeed.
  bool ends_group = false;
};

// Which rank of which group: the end of every text.
struct Place {
  int rank;
  int size;
  std::string group;

  // "(rank 1/4, group 'tp')"
  std::string text() const {
    return "(rank " + std::to_string(rank) + "/" + std::to_string(size) + ", group '" + group +
           "')";
  }
};

}  // namespace c10d_ext
