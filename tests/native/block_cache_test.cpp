// Blocks that are taken and given back. Run without arguments it runs every test; with arguments,
// those named.

#include "base/block_cache.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <utility>

#include "program.h"

using c10d_ext::BlockCache;
using Clock = std::chrono::steady_clock;

namespace {

constexpr size_t kMiB = size_t{1} << 20;

BlockCache& cache() {
  return BlockCache::instance();
}

// A block with something in it.
void* take(size_t bytes) {
  auto* const block = static_cast<char*>(cache().take(bytes));
  CHECK(block != nullptr);
  block[0] = 7;
  return block;
}

// Whether what take() left there still is. Something else may have come to lie there.
bool is_contended(void* data) {
  char value = 0;
  iovec to{&value, 1}, from{data, 1};
  return process_vm_readv(getpid(), &to, 1, &from, 1, 0) == 1 && value == 7;
}

bool is_resident(void* data) {
  unsigned char resident;
  CHECK(mincore(data, 1, &resident) == 0);
  return (resident & 1) != 0;
}

// Whether the thread is there that gives back what nobody asks for.
bool is_tended() {
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::ifstream(task.path() / "comm") >> name;
    if (name == "c10d_ext_memory") {
      return true;
    }
  }
  return false;
}

void start_with(size_t limit) {
  cache().release();
  cache().set_limit(limit);
}

size_t address_space() {
  size_t pages = 0;
  CHECK(std::ifstream("/proc/self/statm") >> pages);
  return pages * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

void a_block_that_is_given_back_is_taken_again() {
  start_with(64 * kMiB);
  auto* const first = static_cast<char*>(cache().take(3 * kMiB));
  CHECK(!is_resident(first));  // nobody but its user touches it
  CHECK(reinterpret_cast<uintptr_t>(first) % (2 * kMiB) == 0);
  std::memset(first, 7, 3 * kMiB);
  cache().give(first);
  CHECK(cache().idle_bytes() == 3 * kMiB);
  auto* const second = static_cast<char*>(cache().take(3 * kMiB));
  CHECK(second == first);
  CHECK(cache().idle_bytes() == 0);
  CHECK(second[3 * kMiB - 1] == 7);
  auto* const other = static_cast<char*>(cache().take(3 * kMiB));
  CHECK(other != second);
  cache().give(second);
  cache().give(other);
}

void the_smallest_that_fits_is_taken() {
  start_with(256 * kMiB);
  void* const four = cache().take(4 * kMiB);
  void* const five = cache().take(5 * kMiB);
  void* const eight = cache().take(8 * kMiB);
  for (void* block : {eight, five, four}) {
    cache().give(block);
  }
  CHECK(cache().take(4 * kMiB) == four);
  CHECK(cache().take(4 * kMiB) == five);
  void* const fresh = cache().take(4 * kMiB);  // half of the last would lie unused
  CHECK(fresh != eight);
  CHECK(cache().take(7 * kMiB) == eight);
  void* const large = cache().take(33 * kMiB);
  cache().give(large);
  CHECK(cache().take(31 * kMiB) == large);
  for (void* block : {four, five, eight, fresh, large}) {
    cache().give(block);
  }
}

void of_equal_blocks_the_one_used_last_is_taken() {
  start_with(64 * kMiB);
  void* const first = cache().take(2 * kMiB);
  void* const second = cache().take(2 * kMiB);
  cache().give(first);
  cache().give(second);
  CHECK(cache().take(2 * kMiB) == second);
  CHECK(cache().take(2 * kMiB) == first);
  cache().give(first);
  cache().give(second);
}

void no_more_is_kept_than_the_limit() {
  start_with(10 * kMiB);
  std::vector<void*> blocks;
  for (int i = 0; i < 5; ++i) {
    blocks.push_back(take(4 * kMiB));
  }
  for (void* block : blocks) {
    cache().give(block);
    CHECK(cache().idle_bytes() <= 10 * kMiB);
  }
  CHECK(cache().idle_bytes() == 8 * kMiB);
  for (size_t i = 0; i < 5; ++i) {
    CHECK(is_contended(blocks[i]) == (i >= 3));  // the ones used last
  }
  void* const large = take(11 * kMiB);
  cache().give(large);  // is more than may be kept, and drives nothing out
  CHECK(!is_contended(large));
  CHECK(cache().idle_bytes() == 8 * kMiB);
  cache().set_limit(4 * kMiB);
  CHECK(cache().idle_bytes() == 4 * kMiB);
  CHECK(!is_contended(blocks[3]) && is_contended(blocks[4]));
  cache().set_limit(0);
  CHECK(!is_contended(blocks[4]));
}

void release_gives_all_back() {
  start_with(64 * kMiB);
  void* const kept = take(2 * kMiB);
  void* const idle = take(8 * kMiB);
  cache().give(idle);
  cache().release();
  CHECK(cache().idle_bytes() == 0);
  CHECK(!is_contended(idle) && is_contended(kept));
  cache().give(kept);
}

void what_nobody_asks_for_goes_back_by_itself() {
  // Not sooner than it may, however late this thread is to look.
  const auto give_for_good = [](void* block) {
    const auto before = Clock::now();
    cache().give(block);
    CHECK(eventually([&] { return !is_contended(block); }));
    CHECK(Clock::now() - before >= BlockCache::kKeep);
    CHECK(cache().idle_bytes() == 0);
    CHECK(eventually([] { return !is_tended(); }));
  };
  start_with(64 * kMiB);
  CHECK(eventually([] { return !is_tended(); }));
  void* const block = take(8 * kMiB);
  CHECK(!is_tended());
  give_for_good(block);
  // What is asked for meanwhile is kept as long again.
  cache().give(take(8 * kMiB));
  std::this_thread::sleep_for(BlockCache::kKeep / 2);
  give_for_good(take(8 * kMiB));
}

void what_is_idle_makes_room_where_there_is_none() {
  const pid_t child = start([] {
    start_with(64 * kMiB);
    cache().give(cache().take(64 * kMiB));
    const rlimit limit{address_space() + 16 * kMiB, RLIM_INFINITY};
    CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
    CHECK(mmap(nullptr, 32 * kMiB, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED);
    void* const block = cache().take(32 * kMiB);
    CHECK(block != nullptr);
    CHECK(cache().idle_bytes() == 0);
    CHECK(cache().take(1024 * kMiB) == nullptr);
    CHECK(cache().take(SIZE_MAX) == nullptr);
    cache().give(block);
  });
  CHECK(finish(child) == 0);
}

void a_forked_child_has_what_was_in_use_and_nothing_idle() {
  start_with(64 * kMiB);
  auto* const used = static_cast<char*>(take(4 * kMiB));
  void* const idle = take(8 * kMiB);
  cache().give(idle);
  CHECK(is_contended(idle));
  const pid_t child = start([&] {
    CHECK(cache().idle_bytes() == 0);
    CHECK(!is_contended(idle));
    CHECK(is_contended(used));
    used[1] = 8;
    cache().give(used);  // the kernel would copy its pages
    CHECK(cache().idle_bytes() == 0);
    CHECK(!is_contended(used));
    void* const own = take(4 * kMiB);
    cache().give(own);
    CHECK(cache().take(4 * kMiB) == own);
    cache().give(own);
    CHECK(eventually([&] { return !is_contended(own); }));  // by a thread of its own
  });
  CHECK(finish(child) == 0);
  CHECK(is_contended(used) && used[1] == 0);
  cache().give(used);
}

// Takes and gives for a while, and looks whether anybody else writes what it has.
void use(unsigned seed, const std::atomic<bool>& over) {
  std::vector<std::pair<char*, size_t>> held;
  const auto mark = static_cast<char>(seed);
  while (!over) {
    seed = seed * 1103515245 + 12345;
    const size_t bytes = kMiB + (seed >> 8) % (4 * kMiB);
    auto* const block = static_cast<char*>(cache().take(bytes));
    CHECK(block != nullptr);
    block[0] = block[bytes - 1] = mark;
    held.emplace_back(block, bytes);
    if (held.size() > 4) {
      const size_t i = (seed >> 16) % held.size();
      const auto [data, size] = held[i];
      CHECK(data[0] == mark && data[size - 1] == mark);
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(i));
      cache().give(data);
    }
    CHECK(cache().idle_bytes() <= 16 * kMiB + 4 * 6 * kMiB);  // some are about to be given back
  }
  for (const auto& [data, size] : held) {
    CHECK(data[0] == mark && data[size - 1] == mark);
    cache().give(data);
  }
}

void threads_share_it() {
  start_with(16 * kMiB);
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (unsigned i = 1; i <= 4; ++i) {
    threads.emplace_back([i, &over] { use(i, over); });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  cache().release();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  over = true;
  for (auto& thread : threads) {
    thread.join();
  }
  CHECK(cache().idle_bytes() <= 16 * kMiB);
}

void forks_beside_threads_leave_it_usable() {
  start_with(16 * kMiB);
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (unsigned i = 1; i <= 2; ++i) {
    threads.emplace_back([i, &over] { use(i, over); });
  }
  threads.emplace_back([&over] {
    while (!over) {
      cache().idle_bytes();  // so that a fork comes while its lock is held
    }
  });
  for (int i = 0; i < 20; ++i) {
    const pid_t child = start([] {
      CHECK(cache().idle_bytes() == 0);
      cache().set_limit(0);  // TSan cannot start a thread here
      void* const block = take(4 * kMiB);
      cache().give(block);
      CHECK(!is_contended(block));
      std::_Exit(0);
    });
    CHECK(finish(child) == 0);
  }
  over = true;
  for (auto& thread : threads) {
    thread.join();
  }
}

}  // namespace

int main(int count, char** names) {
  return run_tests(
      {
          TEST(a_block_that_is_given_back_is_taken_again),
          TEST(the_smallest_that_fits_is_taken),
          TEST(of_equal_blocks_the_one_used_last_is_taken),
          TEST(no_more_is_kept_than_the_limit),
          TEST(release_gives_all_back),
          TEST(what_nobody_asks_for_goes_back_by_itself),
          TEST(what_is_idle_makes_room_where_there_is_none),
          TEST(a_forked_child_has_what_was_in_use_and_nothing_idle),
          TEST(threads_share_it),
          TEST(forks_beside_threads_leave_it_usable),
      },
      count, names);
}
