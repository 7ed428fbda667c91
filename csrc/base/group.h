#pragma once

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/intrusive_ptr.h>

#include <string>
#include <string_view>

#include "base/exceptions.h"

namespace c10d_ext {

// A process group of torch.distributed as the ops see it. The c10d types stay out of this header: a
// file that includes them takes ten times longer to compile.
class Group {
 public:
  Group(c10::intrusive_ptr<c10::intrusive_ptr_target> process_group, std::string name, int64_t rank,
        int64_t size)
      : process_group_(std::move(process_group)),
        name_(std::move(name)),
        rank_(rank),
        size_(size) {}

  // The c10d::ProcessGroup.
  c10::intrusive_ptr_target* process_group() const {
    return process_group_.get();
  }
  const std::string& name() const {
    return name_;
  }
  int64_t rank() const {
    return rank_;
  }
  int64_t size() const {
    return size_;
  }

 private:
  c10::intrusive_ptr<c10::intrusive_ptr_target> process_group_;
  std::string name_;
  int64_t rank_;
  int64_t size_;
};

// World size 1 is answered without the backend unless TORCH_C10D_EXT_SINGLE_RANK_SHORTCUT=0.
bool single_rank_shortcut(const Group& group);
void set_single_rank_shortcut(bool enabled);

// "(rank 1/4, group 'tp')", the end of every error text.
std::string where(const Group& group);
std::string where(int64_t rank, int64_t size, std::string_view name);

template <class... Args>
[[noreturn]] void value_error(std::string_view op, const Group& group, const Args&... message) {
  throw InvalidArgument(c10::str(op, ": ", message..., " ", where(group)));
}

template <class... Args>
[[noreturn]] void type_error(std::string_view op, const Group& group, const Args&... message) {
  C10_THROW_ERROR(TypeError, c10::str(op, ": ", message..., " ", where(group)));
}

}  // namespace c10d_ext

// `condition` may be a bool or a SymBool; on a symbolic size it becomes a guard or a runtime
// assert.
#define C10D_EXT_CHECK_VALUE(condition, op, group, ...)    \
  do {                                                     \
    if (C10_UNLIKELY(!::c10d_ext::holds(condition))) {     \
      ::c10d_ext::value_error((op), (group), __VA_ARGS__); \
    }                                                      \
  } while (false)

#define C10D_EXT_CHECK_TYPE(condition, op, group, ...)    \
  do {                                                    \
    if (C10_UNLIKELY(!(condition))) {                     \
      ::c10d_ext::type_error((op), (group), __VA_ARGS__); \
    }                                                     \
  } while (false)

#include <c10/core/SymBool.h>

namespace c10d_ext {

inline bool holds(bool condition) {
  return condition;
}
inline bool holds(const c10::SymBool& condition) {
  return condition.expect_true(__FILE__, __LINE__);
}

}  // namespace c10d_ext
