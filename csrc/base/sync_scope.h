#pragma once

namespace c10d_ext {

// While one lives, what this thread starts is complete when its start returns: for a caller who
// would wait next. Nothing is attached to a storage then, and no progress thread is woken.
class SyncScope {
 public:
  explicit SyncScope(bool is_sync) : before_(here()) {
    here() = is_sync;
  }
  ~SyncScope() {
    here() = before_;
  }
  SyncScope(const SyncScope&) = delete;
  SyncScope& operator=(const SyncScope&) = delete;

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
