#include "base/block_cache.h"

#include <pthread.h>
#include <sys/mman.h>

#include <cstdint>
#include <system_error>
#include <thread>

#include "base/signal_masked_thread.h"

namespace c10d_ext {

namespace {

constexpr size_t kHugePage = size_t{2} << 20;
// More than any address space; what is added to it does not overflow.
constexpr size_t kMost = size_t{1} << 62;

size_t round_up(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// Sizes that differ by little share their blocks, and a large one ends with a whole huge page.
size_t rounded(size_t bytes) {
  constexpr size_t kSmallUnit = size_t{64} << 10;
  return round_up(bytes, bytes < 8 * kHugePage ? kSmallUnit : kHugePage);
}

// What a block for `bytes` has at most: a fifth of it stays unused.
size_t most_for(size_t bytes) {
  return bytes + bytes / 4;
}

void* map(size_t bytes) {
  constexpr int kProtection = PROT_READ | PROT_WRITE;
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS;
  if (bytes < kHugePage) {
    void* const data = mmap(nullptr, bytes, kProtection, kFlags, -1, 0);
    return data == MAP_FAILED ? nullptr : data;
  }
  // From the boundary of a huge page on: what is before it and behind goes back.
  void* const found = mmap(nullptr, bytes + kHugePage, kProtection, kFlags, -1, 0);
  if (found == MAP_FAILED) {
    return nullptr;
  }
  const auto begin = reinterpret_cast<uintptr_t>(found);
  const uintptr_t data = round_up(begin, kHugePage);
  if (data != begin) {
    munmap(found, data - begin);
  }
  munmap(reinterpret_cast<void*>(data + bytes), begin + kHugePage - data);
  // Fails where huge pages are switched off: nothing is lost.
  static_cast<void>(madvise(reinterpret_cast<void*>(data), bytes, MADV_HUGEPAGE));
  return reinterpret_cast<void*>(data);
}

}  // namespace

BlockCache& BlockCache::instance() {
  static auto* const it = [] {
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] { instance().after_fork_in_child(); });
    return new BlockCache();
  }();
  return *it;
}

void* BlockCache::reuse(size_t bytes) {
  const std::lock_guard lock(mutex_);
  // The smallest; of several the one used last, which may still be in the processor's caches.
  auto best = idle_.end();
  for (auto it = idle_.end(); it != idle_.begin();) {
    --it;
    if (it->bytes >= bytes && it->bytes <= most_for(bytes) &&
        (best == idle_.end() || it->bytes < best->bytes)) {
      best = it;
      if (best->bytes == bytes) {
        break;
      }
    }
  }
  if (best == idle_.end()) {
    return nullptr;
  }
  idle_bytes_ -= best->bytes;
  in_use_.splice(in_use_.end(), idle_, best);
  return best->data;
}

void* BlockCache::take(size_t bytes) {
  if (bytes > kMost) {
    return nullptr;
  }
  bytes = rounded(bytes);
  if (void* const data = reuse(bytes)) {
    return data;
  }
  void* data = map(bytes);
  if (data == nullptr) {
    release();
    data = map(bytes);
  }
  if (data == nullptr) {
    return nullptr;
  }
  try {
    Blocks block{{data, bytes}};
    const std::lock_guard lock(mutex_);
    blocks_.emplace(data, block.begin());
    in_use_.splice(in_use_.end(), block);
  } catch (...) {
    munmap(data, bytes);
    throw;
  }
  return data;
}

void BlockCache::give(void* data) noexcept {
  Blocks gone;
  bool lacks_janitor = false;
  {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(data);
    const auto block = found->second;
    if (block->inherited || block->bytes > limit_) {
      gone.splice(gone.end(), in_use_, block);
      blocks_.erase(found);
    } else {
      block->idle_since = Clock::now();
      idle_bytes_ += block->bytes;
      idle_.splice(idle_.end(), in_use_, block);
      lacks_janitor = !has_janitor_;
      has_janitor_ = true;
    }
  }
  for (const Block& block : gone) {
    munmap(block.data, block.bytes);
  }
  unmap_oldest([this] { return idle_bytes_ > limit_; });
  if (lacks_janitor) {
    start_janitor();
  }
}

template <class MustGo>
void BlockCache::unmap_oldest(const MustGo& must_go) noexcept {
  for (;;) {
    Blocks gone;
    {
      const std::lock_guard lock(mutex_);
      if (idle_.empty() || !must_go()) {
        return;
      }
      gone.splice(gone.end(), idle_, idle_.begin());
      idle_bytes_ -= gone.front().bytes;
      blocks_.erase(gone.front().data);
    }
    munmap(gone.front().data, gone.front().bytes);
  }
}

void BlockCache::set_limit(size_t bytes) noexcept {
  {
    const std::lock_guard lock(mutex_);
    limit_ = bytes;
  }
  unmap_oldest([this] { return idle_bytes_ > limit_; });
}

size_t BlockCache::idle_bytes() const {
  const std::lock_guard lock(mutex_);
  return idle_bytes_;
}

void BlockCache::release() noexcept {
  unmap_oldest([] { return true; });
}

void BlockCache::start_janitor() noexcept {
  try {
    signal_masked_thread("c10d_ext_memory", [this] { tidy(); }).detach();
  } catch (const std::system_error&) {
    {
      const std::lock_guard lock(mutex_);
      has_janitor_ = false;
    }
    release();
  }
}

void BlockCache::tidy() noexcept {
  for (;;) {
    Clock::time_point due;
    {
      const std::lock_guard lock(mutex_);
      if (idle_.empty()) {
        has_janitor_ = false;
        return;
      }
      due = idle_.front().idle_since + kKeep;
    }
    std::this_thread::sleep_until(due);
    const auto now = Clock::now();
    unmap_oldest([&] { return idle_.front().idle_since + kKeep <= now; });
  }
}

// The mutex is held by the thread that forks, the only one that is here.
void BlockCache::after_fork_in_child() noexcept {
  for (const Block& block : idle_) {
    munmap(block.data, block.bytes);
    blocks_.erase(block.data);
  }
  idle_.clear();
  idle_bytes_ = 0;
  for (Block& block : in_use_) {
    block.inherited = true;
  }
  has_janitor_ = false;
  mutex_.unlock();
}

}  // namespace c10d_ext
