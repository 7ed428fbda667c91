#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>

#include "base/group.h"

namespace c10d_ext {

// How texts tell of a work: its op, and the rank and group that it is of. Formatted only when
// something fails.
class WorkText {
 public:
  // `op` is a literal.
  WorkText(std::string_view op, std::string_view what, const Group& group)
      : op_(op),
        what_(what),
        group_name_(group.name()),
        rank_in_group_(group.rank()),
        group_size_(group.size()) {}
  // Of one that was over at once.
  explicit WorkText(std::string_view op) : op_(op) {}

  std::string_view op() const {
    return op_;
  }
  // The end of a text; one that was over at once does not know.
  std::string place() const {
    return group_size_ > 0 ? " " + where(rank_in_group_, group_size_, group_name_) : "";
  }
  // "all_reduce: the collective must complete, got ..."
  std::string with_cause(const char* cause) const;
  // The backend's error with the op, rank and group it happened to; of a kind of ours where the
  // backend's text tells one. `number`: of the collective in its group.
  std::exception_ptr described(const std::exception_ptr& error, uint64_t number = 0) const;

 private:
  const std::string_view op_;
  const std::string_view what_ = "collective";
  const std::string group_name_;
  const int64_t rank_in_group_ = -1;
  const int64_t group_size_ = 0;
};

}  // namespace c10d_ext
