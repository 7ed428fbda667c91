#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.h"

namespace c10d_ext {

// Arguments that do not fit, found before anything was started: in Python the class of this name of
// torch_c10d_ext.errors.
class InvalidArgument : public c10::ValueError {
 public:
  explicit InvalidArgument(std::string text)
      : c10::ValueError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, std::move(text)) {}
};

// A collective that failed after it was started. Python sees the class of torch_c10d_ext.errors
// that `kind` names, with these fields as attributes.
class CollectiveError : public c10::DistBackendError {
 public:
  // `text` says it all, op, rank and group included; `ranks` are ranks of the group.
  CollectiveError(ErrorKind kind, std::string text, std::vector<int> ranks, std::string op,
                  uint64_t seq, std::string group)
      : c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                              std::move(text)),
        kind_(kind),
        ranks_(std::move(ranks)),
        op_(std::move(op)),
        seq_(seq),
        group_(std::move(group)) {}

  ErrorKind kind() const {
    return kind_;
  }
  // The ranks at fault: lost, missing, or those that disagree with rank 0.
  const std::vector<int>& ranks() const {
    return ranks_;
  }
  const std::string& op() const {
    return op_;
  }
  // The number of the collective in its group.
  uint64_t seq() const {
    return seq_;
  }
  const std::string& group() const {
    return group_;
  }

 private:
  ErrorKind kind_;
  std::vector<int> ranks_;
  std::string op_;
  uint64_t seq_;
  std::string group_;
};

}  // namespace c10d_ext
