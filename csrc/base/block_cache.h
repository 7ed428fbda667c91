#pragma once

#include <chrono>
#include <cstddef>
#include <list>
#include <mutex>
#include <optional>
#include <unordered_map>

namespace c10d_ext {

// Large blocks of memory, of which those given back are kept for a while for who asks next: fresh
// pages have to be cleared by the system first, which takes as long as the collective that fills
// them.
//
// At most `limit` bytes are kept idle, those used last; what nobody has asked for within kKeep goes
// back to the system, by a thread that exists only while something is idle. No block is read or
// written here: its pages are where its first user wants them.
//
// Usable from any thread, and in the child of a fork, which starts with nothing idle.
class BlockCache {
 public:
  static constexpr std::chrono::milliseconds kKeep{1500};

  // The one of this process. Never destroyed: blocks are given back until the very end.
  static BlockCache& instance();

  // A block of at least `bytes`, as its last user left it; null where the system has none.
  void* take(size_t bytes);
  // A block that take() returned.
  void give(void* data) noexcept;

  void set_limit(size_t bytes) noexcept;
  size_t idle_bytes() const;
  // Gives all that is idle back to the system.
  void release() noexcept;

  BlockCache(const BlockCache&) = delete;
  BlockCache& operator=(const BlockCache&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  struct Block {
    void* data;
    size_t bytes;
    Clock::time_point idle_since;
    // Its pages are a forked child's and its parent's: the kernel copies each when it is written.
    bool inherited = false;
  };
  using Blocks = std::list<Block>;  // moved from list to list, which takes no memory

  BlockCache() = default;

  void* reuse(size_t bytes);
  // Unmaps the longest idle blocks for as long as `must_go`, asked with the mutex held, says so.
  template <class MustGo>
  void unmap_oldest(const MustGo& must_go) noexcept;

  void start_janitor() noexcept;
  void tidy() noexcept;

  void after_fork_in_child() noexcept;

  mutable std::mutex mutex_;
  Blocks in_use_;
  Blocks idle_;  // the longest idle first
  std::unordered_map<void*, Blocks::iterator> blocks_;
  size_t idle_bytes_ = 0;
  size_t limit_ = 0;
  bool has_janitor_ = false;
};

}  // namespace c10d_ext
