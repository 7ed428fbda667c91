#pragma once

namespace c10d_ext {

// While one lives, what this thread starts is complete when its start returns: for a caller who
// would wait next. Nothing is attached to a storage then, and no progress thread is woken.
class AtOnce {
 public:
  explicit AtOnce(bool at_once) : before_(here()) {
    here() = at_once;
  }
  ~AtOnce() {
    here() = before_;
  }
  AtOnce(const AtOnce&) = delete;
  AtOnce& operator=(const AtOnce&) = delete;

  static bool is_on() {
    return here();
  }

 private:
  static bool& here() {
    static thread_local bool instance = false;
    return instance;
  }

  const bool before_;
};

}  // namespace c10d_ext
