// Ranks as processes that join, die, stop, fork and are disturbed. Run without arguments it runs
// every test; with arguments, those named. TSan cannot follow a fork of a process with threads, so
// the tests that need one are not in its build.
// One file, for its tests share the processes that are ranks, and what disturbs them.

#include "backends/shm/bootstrap.h"
#include "backends/shm/futex.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <thread>

#include "program.h"

using namespace c10d_ext;
using namespace c10d_ext::shm;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

#define CHECK_EQUAL(a, b)                                                                         \
  do {                                                                                            \
    const std::string left = as_text(a), right = as_text(b);                                      \
    if (left != right) {                                                                          \
      std::fprintf(stderr, "%s:%d: %s is '%s', not '%s'\n", __FILE__, __LINE__, #a, left.c_str(), \
                   right.c_str());                                                                \
      std::_Exit(1);                                                                              \
    }                                                                                             \
  } while (false)

namespace {

constexpr size_t kBytes = 1 << 20;

std::string as_text(const std::string& text) {
  return text;
}
template <class T>
  requires std::is_arithmetic_v<T>
std::string as_text(T value) {
  return std::to_string(value);
}

// Memory that the processes forked from this one share with it.
template <class T>
T* shared() {
  void* data = mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(data != MAP_FAILED);
  return new (data) T();
}

// A log of settings, the last of which counts. No locks, so nobody can die holding one.
struct Log {
  struct Entry {
    std::atomic<bool> ready;
    char key[128];
    char value[1024];
  };
  std::atomic<size_t> used;
  Entry entries[512];

  void set(const std::string& key, const std::string& value) {
    const size_t at = used.fetch_add(1);
    CHECK(at < std::size(entries) && key.size() < 128 && value.size() < 1024);
    std::strcpy(entries[at].key, key.c_str());
    std::strcpy(entries[at].value, value.c_str());
    entries[at].ready.store(true, std::memory_order_release);
  }
  const Entry* find(const std::string& key) const {
    for (size_t at = std::min(used.load(), std::size(entries)); at-- > 0;) {
      if (entries[at].ready.load(std::memory_order_acquire) && key == entries[at].key) {
        return &entries[at];
      }
    }
    return nullptr;
  }
};

KeyValueStore store_in(Log* log) {
  return {
      [log](const std::string& key, const std::string& value) { log->set(key, value); },
      [log](const std::string& key, std::chrono::milliseconds) -> std::string {
        const auto* entry = log->find(key);
        if (entry == nullptr) {
          throw std::runtime_error("no " + key);
        }
        return entry->value;
      },
      [log](const std::string& key) { return log->find(key) != nullptr; },
      nullptr,
  };
}

// --- ranks as processes ------------------------------------------------------------------------

using Rank = std::function<void(int rank)>;

std::vector<pid_t> start_ranks(int size, const Rank& body) {
  std::vector<pid_t> pids;
  for (int rank = 0; rank < size; ++rank) {
    pids.push_back(start([&] { body(rank); }));
  }
  return pids;
}

void run_ranks(int size, const Rank& body) {
  for (const pid_t pid : start_ranks(size, body)) {
    CHECK_EQUAL(finish(pid), 0);
  }
}

struct Group {
  Log* log = shared<Log>();
  // Waits of the ranks for each other that do not go through what is tested.
  std::atomic<int>* arrived = shared<std::atomic<int>>();

  Joined join(int rank, int size, std::chrono::milliseconds timeout = kLong,
              size_t bytes = kBytes) const {
    return c10d_ext::shm::join(store_in(log), rank, size, bytes, timeout);
  }
  std::unique_ptr<Membership> enter(int rank, int size) const {
    auto joined = join(rank, size);
    CHECK_EQUAL(joined.why_not, "");
    CHECK(joined.membership != nullptr);
    return std::move(joined.membership);
  }
  // Returns once `count` calls have been made.
  void meet(int count) const {
    ++*arrived;
    CHECK(eventually([&] { return *arrived >= count; }));
  }
};

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

size_t entries_of(const char* directory) {
  DIR* opened = opendir(directory);
  CHECK(opened != nullptr);
  size_t count = 0;
  while (readdir(opened) != nullptr) {
    ++count;
  }
  closedir(opened);
  return count;
}

int watchers() {
  int count = 0;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(thread.path() / "comm"), name);
    count += name == "c10d_ext_watch";
  }
  return count;
}

// --- joining -----------------------------------------------------------------------------------

void ranks_share_memory() {
  for (const int size : {1, 2, 3, 8, 64}) {
    const Group group;
    run_ranks(size, [&](int rank) {
      const auto member = group.enter(rank, size);
      CHECK(member->mapping()->bytes() >= kBytes);
      const auto* bytes = member->mapping()->data();
      CHECK(std::all_of(bytes + 4 * size, bytes + kBytes,
                        [](std::byte b) { return b == std::byte{}; }));
      auto* slots = reinterpret_cast<std::atomic<int>*>(member->mapping()->data());
      slots[rank].store(rank + 1);
      for (int peer = 0; peer < size; ++peer) {
        CHECK(eventually([&] { return slots[peer].load() == peer + 1; }));
      }
      group.meet(size);  // all have looked, nobody has left
    });
    CHECK(size > 1 || group.log->used == 0);
  }
}

void peers_are_the_processes() {
  const Group group;
  auto* pids = shared<std::array<std::atomic<int>, 3>>();
  run_ranks(3, [&](int rank) {
    (*pids)[rank] = getpid();
    const auto member = group.enter(rank, 3);
    for (int peer = 0; peer < 3; ++peer) {
      CHECK_EQUAL(member->peers()[peer].pid, (*pids)[peer].load());
      const auto state = process_state(member->peers()[peer]);
      CHECK(state == "running" || state == "sleeping");
    }
    group.meet(3);
  });
}

void threads_of_one_process_join() {
  const Group group;
  run_ranks(1, [&](int) {
    std::vector<std::thread> ranks;
    std::atomic<int> lost{0};
    for (int rank = 0; rank < 3; ++rank) {
      ranks.emplace_back([&, rank] {
        auto member = group.enter(rank, 3);
        member->watch([&](int) { ++lost; });
        group.meet(3);
        if (rank != 0) {
          CHECK(eventually([&] { return lost >= 2; }));  // rank 0, on ranks 1 and 2
          CHECK(!member->died(0));                       // it left, but lives
        }
      });
    }
    for (auto& thread : ranks) {
      thread.join();
    }
  });
}

// Rank 0 waits until so many `others` have come, and a little longer.
void come_after(int rank, std::atomic<int>* others, int count) {
  if (rank != 0) {
    ++*others;
    return;
  }
  CHECK(eventually([&] { return *others >= count; }));
  std::this_thread::sleep_for(30ms);
}

// What a rank leaves in the store must not confuse the next group of the same name.
void the_same_store_serves_one_group_after_the_other() {
  const Group group;
  auto* others = shared<std::atomic<int>>();
  setenv("TORCH_C10D_EXT_SHM_DISABLE", "0", 1);
  for (int round = 1; round <= 5; ++round) {
    run_ranks(3, [&](int rank) {
      const bool disabled = round == 3 && rank == 2;
      setenv("TORCH_C10D_EXT_SHM_DISABLE", disabled ? "1" : "0", 1);
      come_after(rank, others, 2 * round);  // who find the last round's address first
      const auto joined = group.join(rank, 3);
      CHECK_EQUAL(joined.why_not, round == 3 ? "rank 2: TORCH_C10D_EXT_SHM_DISABLE=1" : "");
      group.meet(3 * round);
    });
  }
}

// As on another machine, as far as sockets without a file are concerned.
bool leave_network() {
  return unshare(CLONE_NEWNET) == 0 || unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0;
}

void a_rank_out_of_reach() {
  if (finish(start([] { std::_Exit(leave_network() ? 0 : 1); })) != 0) {
    std::puts("  skipped: no network namespaces for this user");
    return;
  }
  const Group group;
  auto* others = shared<std::atomic<int>>();
  for (int round = 1; round <= 3; ++round) {
    run_ranks(4, [&](int rank) {
      CHECK(rank == 0 || rank == 2 || leave_network());
      come_after(rank, others, 3 * round);
      const auto joined = group.join(rank, 4);
      CHECK(joined.membership == nullptr);
      CHECK_EQUAL(joined.why_not,
                  "rank 1: cannot reach rank 0's socket: Connection refused (and 1 more rank)");
      group.meet(4 * round);
    });
  }
}

void a_rank_that_cannot() {
  for (const int culprit : {0, 1, 2}) {
    const Group group;
    run_ranks(3, [&](int rank) {
      if (rank == culprit) {
        setenv("TORCH_C10D_EXT_SHM_DISABLE", "1", 1);
      }
      const auto joined = group.join(rank, 3);
      CHECK(joined.membership == nullptr);
      CHECK_EQUAL(joined.why_not,
                  "rank " + std::to_string(culprit) + ": TORCH_C10D_EXT_SHM_DISABLE=1");
      group.log->set("session of " + std::to_string(rank), joined.session);
    });
    const auto session = [&](int rank) -> std::string {
      return group.log->find("session of " + std::to_string(rank))->value;
    };
    CHECK(!session(0).empty());
    CHECK_EQUAL(session(1), session(0));
    CHECK_EQUAL(session(2), session(0));
  }
  const Group alone;
  run_ranks(1, [&](int) {
    setenv("TORCH_C10D_EXT_SHM_DISABLE", "1", 1);
    CHECK_EQUAL(alone.join(0, 1).why_not, "rank 0: TORCH_C10D_EXT_SHM_DISABLE=1");
    CHECK_EQUAL(c10d_ext::shm::join(store_in(alone.log), 0, 1, kBytes, kLong, {"", "no"}).why_not,
                "rank 0: no");
  });
}

void ranks_that_want_different_memory() {
  const Group group;
  run_ranks(2, [&](int rank) {
    const auto joined = group.join(rank, 2, kLong, rank == 0 ? 4096 : 8192);
    CHECK(joined.membership == nullptr);
    CHECK_EQUAL(joined.why_not, "rank 1: asks for 8192 bytes and 2 ranks, rank 0 for 4096 and 2");
  });
}

// Whatever else differs between builds, this is how they tell.
void ranks_of_different_builds() {
  for (const std::string other : {"2 (cd)", ""}) {
    for (const int odd : {0, 1, 2}) {
      const Group group;
      auto* sessions = shared<std::array<char[64], 3>>();
      run_ranks(3, [&](int rank) {
        const std::string build = rank == odd ? other : "1 (ab)";
        const auto joined = c10d_ext::shm::join(store_in(group.log), rank, 3,
                                                rank == odd ? 4096 : kBytes, kLong, {build, {}});
        CHECK(joined.membership == nullptr);
        const std::string first = other.empty() ? "an earlier one" : other;
        CHECK_EQUAL(joined.why_not, odd == 0 ? "rank 1: runs the build 1 (ab), rank 0 " + first +
                                                   " (and 1 more rank)"
                                             : "rank " + std::to_string(odd) + ": runs the build " +
                                                   other + ", rank 0 1 (ab)");
        joined.session.copy((*sessions)[rank], sizeof((*sessions)[rank]) - 1);
      });
      const std::string session = (*sessions)[0];
      CHECK(!session.empty() && session == (*sessions)[1] && session == (*sessions)[2]);
    }
  }
}

// As an earlier or a later build has it: what must stay as it is.
void a_rank_of_another_build_that_only_knows_the_store() {
  const Group group;
  run_ranks(2, [&](int rank) {
    const auto store = store_in(group.log);
    if (rank == 0) {
      const auto joined = c10d_ext::shm::join(store, 0, 2, kBytes, kLong, {"1 (ab)", {}});
      CHECK_EQUAL(joined.why_not, "rank 1: runs the build 9 (ef), rank 0 1 (ab)");
      return;
    }
    CHECK(eventually([&] { return store.has("address"); }));
    const auto address = store.get("address", kLong);
    CHECK_EQUAL(address.substr(64), "1 (ab)");
    const auto session = address.substr(0, 32);
    const std::string nonce(32, 'n');
    store.set(session + "/1", nonce + "0runs the build 9 (ef), rank 0 1 (ab)");
    CHECK(eventually([&] { return store.has(session + "/verdict"); }));
    CHECK_EQUAL(store.get(session + "/verdict", kLong),
                nonce + "\n1rank 1: runs the build 9 (ef), rank 0 1 (ab)");
  });
}

// A rank runs out of descriptors at every point of the join in turn. All fail, soon, as gloo would
// need still more of them.
void too_few_descriptors() {
  for (const int culprit : {1, 0}) {
    bool worked = false;
    for (size_t spare = 0; !worked; ++spare) {
      CHECK(spare < 40);
      const Group group;
      auto* texts = shared<std::array<char[256], 4>>();
      run_ranks(4, [&](int rank) {
        rlimit many;
        CHECK(getrlimit(RLIMIT_NOFILE, &many) == 0);
        if (rank == culprit) {
          const rlim_t used = entries_of("/proc/self/fd") - 3;  // ., .. and the directory itself
          const rlimit few{used + spare, many.rlim_max};
          CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
        }
        std::string text;
        const auto begin = Clock::now();
        try {
          CHECK(group.join(rank, 4).membership != nullptr);
        } catch (const std::exception& error) {
          text = error.what();
          CHECK(Clock::now() - begin < kLong / 2);
          if (text == "rank 0 left while joining: Connection reset by peer") {
            CHECK_EQUAL(culprit, 0);
            CHECK(rank != 0);
            text = "rank 0 cannot accept connections: Too many open files";  // nor this one
          }
        }
        std::strcpy((*texts)[rank], text.c_str());
        group.meet(4);
        CHECK(setrlimit(RLIMIT_NOFILE, &many) == 0);  // the leak check opens files
      });
      const std::string text = (*texts)[0];
      for (int rank = 1; rank < 4; ++rank) {
        CHECK_EQUAL(std::string((*texts)[rank]), text);
      }
      worked = text.empty();
      if (!worked) {
        CHECK_HAS(text, "rank " + std::to_string(culprit));
        CHECK_HAS(text, "oo many open files");
      }
    }
  }
}

// --- who is not there, and who should not be -----------------------------------------------------

void a_rank_that_never_comes() {
  for (const int absent : {0, 2}) {
    const Group group;
    const auto begin = Clock::now();
    run_ranks(4, [&](int rank) {
      if (rank == absent) {
        return;
      }
      const auto error = error_of([&] { group.join(rank, 4, 2s); });
      CHECK_EQUAL(error, "rank " + std::to_string(absent) + " did not join within 2 s");
    });
    CHECK(Clock::now() - begin > 1990ms);
  }
}

void the_earliest_deadline_counts() {
  const Group group;
  run_ranks(4, [&](int rank) {
    if (rank >= 2) {
      return;
    }
    // Rank 1 has little time, of which it is not to lose any to rank 0.
    CHECK(rank == 0 || eventually([&] { return group.log->find("address") != nullptr; }));
    const auto begin = Clock::now();
    const auto error = error_of([&] { group.join(rank, 4, rank == 1 ? 500ms : 60s); });
    CHECK(error.starts_with("ranks 2, 3 did not join within"));
    CHECK(Clock::now() - begin < 20s);
  });
}

void a_rank_that_dies_while_joining() {
  const Group group;
  const auto pids = start_ranks(2, [&](int rank) {
    auto store = store_in(group.log);
    // Once the address is there, rank 1 waits for nothing but what rank 0 has to say.
    CHECK(rank == 0 || eventually([&] { return group.log->find("address") != nullptr; }));
    int waits = 0;
    store.interrupt = [&] {
      if (rank == 1 && ++waits == 3) {
        group.log->set("connected", "");
      }
    };
    const auto error = error_of([&] { join(store, rank, 3, kBytes, kLong); });
    CHECK_EQUAL(error, std::string(group.log->find("expected")->value));
  });
  group.log->set("expected", "rank 1 (pid " + std::to_string(pids[1]) + ") left while joining");
  CHECK(eventually([&] { return group.log->find("connected") != nullptr; }));
  kill(pids[1], SIGKILL);
  finish(pids[1]);
  CHECK_EQUAL(finish(pids[0]), 0);
}

void an_interrupt_ends_the_join() {
  for (const int interrupted : {0, 1}) {
    const Group group;
    run_ranks(2, [&](int rank) {
      if (rank != interrupted) {
        return;
      }
      auto store = store_in(group.log);
      int calls = 0;
      store.interrupt = [&] {
        if (++calls > 3) {
          throw std::runtime_error("interrupted");
        }
      };
      CHECK_EQUAL(error_of([&] { join(store, rank, 2, kBytes, kLong); }), "interrupted");
    });
  }
}

int connect_to(const std::string& session) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  const auto text = "c10d_ext-" + session;
  std::memcpy(name.sun_path + 1, text.data(), text.size());
  const auto length = offsetof(sockaddr_un, sun_path) + 1 + text.size();
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);
  CHECK(fd >= 0);
  CHECK(connect(fd, reinterpret_cast<sockaddr*>(&name), length) == 0);
  return fd;
}

bool hung_up(int fd) {
  pollfd hangup{fd, POLLIN, 0};
  CHECK(poll(&hangup, 1, 30000) == 1);
  char byte;
  return recv(fd, &byte, 1, 0) <= 0;
}

// Says what rank 1 would say, with this token. The layout is that of Hello in bootstrap_messages.h.
struct Stranger {
  std::string session, token;

  explicit Stranger(Log* log) {
    CHECK(eventually([&] { return log->find("address") != nullptr; }));
    const std::string address = log->find("address")->value;
    session = address.substr(0, 32);
    token = address.substr(32);
  }
  std::string hello(const std::string& with, int32_t rank) const {
    std::string bytes(88, '\0');
    const int32_t size = 2;
    const uint64_t memory = kBytes;
    const int64_t left = 30000;
    std::memcpy(bytes.data() + 4, &rank, 4);
    std::memcpy(bytes.data() + 8, &size, 4);
    std::memcpy(bytes.data() + 12, with.data(), 32);
    std::memcpy(bytes.data() + 48, &memory, 8);
    std::memcpy(bytes.data() + 56, &left, 8);
    return bytes + "a stranger";
  }
};

void strangers_do_not_disturb() {
  const Group group;
  const pid_t rank0 = start([&] { group.enter(0, 2); });
  const Stranger stranger(group.log);
  std::string wrong = stranger.token;
  wrong[31] = wrong[31] == '0' ? '1' : '0';

  std::vector<int> refused;
  const auto say = [&](const std::string& words) {
    refused.push_back(connect_to(stranger.session));
    CHECK(send(refused.back(), words.data(), words.size(), 0) == ssize_t(words.size()));
  };
  say(stranger.hello(wrong, 1));
  say("hello");
  say(std::string(100000, 'x'));
  say(stranger.hello(stranger.token, 0));
  say(stranger.hello(stranger.token, 2));
  say(stranger.hello(stranger.token, -1));
  for (const int fd : refused) {
    CHECK(hung_up(fd));
    close(fd);
  }
  const int silent = connect_to(stranger.session);
  close(connect_to(stranger.session));
  const pid_t rank1 = start([&] { group.enter(1, 2); });
  CHECK_EQUAL(finish(rank0), 0);
  CHECK_EQUAL(finish(rank1), 0);
  CHECK(hung_up(silent));
  close(silent);
}

// What makes the refusals above mean something: with the right token the same words count.
void the_token_makes_a_rank() {
  const Group group;
  const pid_t rank0 = start([&] { CHECK_EQUAL(group.join(0, 2).why_not, "rank 1: a stranger"); });
  const Stranger stranger(group.log);
  const auto words = stranger.hello(stranger.token, 1);
  const int fd = connect_to(stranger.session);
  CHECK(send(fd, words.data(), words.size(), 0) == ssize_t(words.size()));
  CHECK_EQUAL(finish(rank0), 0);
  close(fd);
}

void another_user_is_refused() {
  if (geteuid() != 0) {
    std::puts("  skipped: only root can become another user");
    return;
  }
  const Group group;
  const pid_t rank0 = start([&] { group.enter(0, 2); });
  const Stranger stranger(group.log);
  const pid_t intruder = start([&] {
    CHECK(seteuid(65534) == 0);
    const auto words = stranger.hello(stranger.token, 1);
    const int fd = connect_to(stranger.session);
    send(fd, words.data(), words.size(), MSG_NOSIGNAL);
    CHECK(hung_up(fd));
    close(fd);
    CHECK(seteuid(0) == 0);  // the leak check reads /proc
  });
  CHECK_EQUAL(finish(intruder), 0);
  const pid_t rank1 = start([&] { group.enter(1, 2); });
  CHECK_EQUAL(finish(rank0), 0);
  CHECK_EQUAL(finish(rank1), 0);

  const Group mixed;
  run_ranks(3, [&](int rank) {
    CHECK(rank != 2 || seteuid(65534) == 0);
    CHECK_EQUAL(mixed.join(rank, 3).why_not, "rank 2: runs as user 65534, rank 0 as user 0");
    CHECK(seteuid(0) == 0);
  });
}

// --- memory --------------------------------------------------------------------------------------

void memory_cannot_change_its_size() {
  const auto mapping = Mapping::create(8192);
  CHECK(ftruncate(mapping->fd(), 4096) < 0 && errno == EPERM);
  CHECK(ftruncate(mapping->fd(), 16384) < 0 && errno == EPERM);
  CHECK(fcntl(mapping->fd(), F_ADD_SEALS, F_SEAL_WRITE) < 0);
  const auto adopted = Mapping::adopt(dup(mapping->fd()), 8192);
  adopted->data()[5000] = std::byte{7};
  CHECK(mapping->data()[5000] == std::byte{7});
}

void memory_of_the_wrong_kind_is_not_adopted() {
  const auto before = entries_of("/proc/self/fd");
  {
    const auto mapping = Mapping::create(8192);
    CHECK(error_of([&] {
            Mapping::adopt(dup(mapping->fd()), 4096);
          }).starts_with("the shared memory offered has 8192 bytes instead of 4096"));
    const int open = memfd_create("open", MFD_ALLOW_SEALING | MFD_CLOEXEC);
    CHECK(ftruncate(open, 8192) == 0);
    CHECK_EQUAL(error_of([&] { Mapping::adopt(open, 8192); }),
                "the shared memory offered is not sealed");
    int ends[2];
    CHECK(pipe(ends) == 0);
    CHECK_EQUAL(error_of([&] { Mapping::adopt(ends[0], 8192); }),
                "the shared memory offered is not sealed");
    close(ends[1]);
  }
  CHECK_EQUAL(entries_of("/proc/self/fd"), before);
}

void no_memory_without_an_error() {
  // Reserving first and asking then would have the kernel kill processes.
  for (const int bits : {47, 63}) {
    const auto error = error_of([&] { Mapping::create(size_t{1} << bits); });
    CHECK(error.find("of shared memory, more than half of the") != std::string::npos);
  }
}

// --- leaving -------------------------------------------------------------------------------------

// Survivors put down when they heard of whom.
struct Losses {
  std::atomic<int64_t> at[8][8];  // [survivor][lost]: nanoseconds of the steady clock
  std::atomic<int> watching;

  int heard_of(int lost) const {
    return static_cast<int>(std::count_if(std::begin(at), std::end(at),
                                          [&](const auto& row) { return row[lost] > 0; }));
  }
};

int64_t now() {
  return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count();
}

void watch_losses(Membership& member, int rank, Losses* losses) {
  member.watch([=](int lost) {
    CHECK(losses->at[rank][lost].exchange(now()) == 0);  // once per peer
  });
  ++losses->watching;
}

// Rank `victim` of `size` is ended by `end`; the rest must hear of it, and of nobody else.
std::vector<int64_t> lose(
    int size, int victim, const std::function<void(pid_t)>& end,
    const std::function<void()>& last_words = [] { pause(); }) {
  const Group group;
  auto* losses = shared<Losses>();
  auto* over = shared<std::atomic<bool>>();
  const auto pids = start_ranks(size, [&](int rank) {
    const auto member = group.enter(rank, size);
    watch_losses(*member, rank, losses);
    if (rank == victim) {
      last_words();
    }
    CHECK(eventually([&] { return over->load(); }));
    for (int peer = 0; peer < size; ++peer) {
      CHECK(member->died(peer) == (peer == victim));
    }
    group.meet(size - 1);
    member->stop();
  });
  CHECK(eventually([&] { return losses->watching == size; }));
  std::this_thread::sleep_for(5ms);
  const auto begin = now();
  end(pids[victim]);
  CHECK(eventually([&] { return losses->heard_of(victim) == size - 1; }));
  finish(pids[victim]);
  std::vector<int64_t> latencies;
  for (int rank = 0; rank < size; ++rank) {
    for (int lost = 0; lost < size; ++lost) {
      CHECK((losses->at[rank][lost] > 0) == (rank != victim && lost == victim));
    }
    if (rank != victim) {
      latencies.push_back(losses->at[rank][victim] - begin);
    }
  }
  *over = true;
  for (int rank = 0; rank < size; ++rank) {
    CHECK(rank == victim || finish(pids[rank]) == 0);
  }
  return latencies;
}

void a_killed_rank_is_noticed() {
  std::vector<int64_t> all;
  for (const int size : {2, 3, 8}) {
    for (int round = 0; round < 10; ++round) {
      const auto some = lose(size, round % size, [](pid_t pid) { kill(pid, SIGKILL); });
      all.insert(all.end(), some.begin(), some.end());
    }
  }
  std::sort(all.begin(), all.end());
  std::printf("  from kill() to on_lost: median %.0f us, worst %.0f us, of %zu\n",
              all[all.size() / 2] / 1e3, all.back() / 1e3, all.size());
}

// However much memory the kernel has to free before it closes the victim's descriptors.
void a_death_shows_before_the_memory_is_freed() {
  constexpr size_t kMuch = size_t{256} << 20;
  auto* comes_first = shared<std::atomic<bool>>();
  // Who looks may be held up for as long as that takes, but not each time.
  for (int round = 0; round < 5 && !*comes_first; ++round) {
    const Group group;
    auto* watching = shared<std::atomic<bool>>();
    const auto pids = start_ranks(2, [&](int rank) {
      const auto member = group.enter(rank, 2);
      std::atomic<int64_t> lost{0};
      member->watch([&](int) { lost = now(); });
      if (rank == 1) {
        const std::vector<char> much(kMuch, 1);
        group.meet(2);
        pause();
      }
      group.meet(2);
      *watching = true;
      for (;;) {
        const bool told = lost != 0;
        if (member->died(1)) {
          *comes_first = !told;
          break;
        }
        CHECK(!told);
      }
      const auto died = now();
      CHECK(eventually([&] { return lost > 0; }));
      std::printf("  on_lost comes %.1f ms after died()\n", (lost - died) / 1e6);
    });
    CHECK(eventually([&] { return watching->load(); }));
    kill(pids[1], SIGKILL);
    finish(pids[1]);
    CHECK_EQUAL(finish(pids[0]), 0);
  }
  CHECK(*comes_first);
}

Peer peer_of(pid_t child) {
  std::ifstream file("/proc/" + std::to_string(child) + "/stat");
  std::string field;
  for (int i = 0; i < 22; ++i) {  // the program's name has no blanks
    file >> field;
  }
  return {child, std::stoull(field)};
}

// One of those who sleep, as the kernel wakes no more. Where it wakes nobody for a death, they look
// now and then, as the engine does.
void a_death_wakes_a_sleeper() {
  constexpr auto kTooLong = 10s;
  const bool wakes =
      syscall(449, nullptr, 0, 0, nullptr, CLOCK_MONOTONIC) < 0 && errno == EINVAL;  // futex_waitv
  const std::chrono::milliseconds nap = wakes ? kTooLong : 5ms;
  const Group group;
  auto* word = shared<std::atomic<uint32_t>>();
  auto* asleep = shared<std::atomic<int>>();
  auto* woken = shared<std::atomic<int>>();
  const auto pids = start_ranks(3, [&](int rank) {
    const auto member = group.enter(rank, 3);
    member->watch([](int) {});
    group.meet(3);
    if (rank == 2) {
      pause();
    }
    auto pulses = member->pulses();
    pulses[static_cast<size_t>(rank)] = nullptr;
    ++*asleep;
    const auto began = Clock::now();
    do {
      futex_sleep(*word, 0, pulses, nap);
    } while (!wakes && !member->died(2) && Clock::now() < began + kTooLong);
    CHECK(Clock::now() < began + kTooLong);
    CHECK(member->died(2));
    // Passed on.
    ++*woken;
    ++*word;
    futex_wake_all(*word);
    // A rank that has died is not waited for.
    futex_sleep(*word, *word, pulses, 1ms);
  });
  CHECK(eventually([&] { return asleep->load() == 2; }));
  for (const int rank : {0, 1}) {
    const Peer peer = peer_of(pids[rank]);
    CHECK(eventually([&] { return process_state(peer) == "sleeping"; }));
  }
  CHECK_EQUAL(woken->load(), 0);
  kill(pids[2], SIGKILL);
  finish(pids[2]);
  CHECK_EQUAL(finish(pids[0]), 0);
  CHECK_EQUAL(finish(pids[1]), 0);
  CHECK_EQUAL(woken->load(), 2);
}

void an_exit_is_noticed() {
  auto* go = shared<std::atomic<bool>>();
  const auto wait = [=] { CHECK(eventually([&] { return go->load(); })); };
  for (const int victim : {0, 1}) {
    *go = false;
    lose(3, victim, [&](pid_t) { *go = true; }, [&] { wait(), std::_Exit(3); });
    *go = false;
    lose(3, victim, [&](pid_t) { *go = true; }, [&] { wait(), std::exit(0); });
  }
}

void a_stopped_rank_is_not_lost() {
  const Group group;
  auto* losses = shared<Losses>();
  auto* over = shared<std::atomic<bool>>();
  const auto pids = start_ranks(2, [&](int rank) {
    const auto member = group.enter(rank, 2);
    watch_losses(*member, rank, losses);
    if (rank == 1) {
      raise(SIGSTOP);
    } else {
      CHECK(eventually([&] { return process_state(member->peers()[1]) == "stopped"; }));
      std::this_thread::sleep_for(20ms);
      CHECK_EQUAL(losses->at[0][1].load(), 0);
      CHECK(!member->died(1));
      kill(member->peers()[1].pid, SIGCONT);
    }
    CHECK(eventually([&] { return over->load(); }));
  });
  CHECK(eventually([&] { return losses->watching == 2; }));
  std::this_thread::sleep_for(100ms);
  *over = true;
  CHECK_EQUAL(finish(pids[0]), 0);
  CHECK_EQUAL(finish(pids[1]), 0);
}

void states_of_processes() {
  const pid_t child = start([] { pause(); });
  const Peer peer = peer_of(child);
  CHECK(eventually([&] { return process_state(peer) == "sleeping"; }));
  kill(child, SIGSTOP);
  CHECK(eventually([&] { return process_state(peer) == "stopped"; }));
  CHECK_EQUAL(process_state({child, peer.start_time + 1}), "dead");  // the pid was used again
  CHECK_EQUAL(process_state({child, 0}), "unknown");
  kill(child, SIGKILL);
  CHECK(eventually([&] { return process_state(peer) == "zombie"; }));
  waitpid(child, nullptr, 0);
  CHECK_EQUAL(process_state(peer), "dead");
}

void nothing_is_left() {
  const Group group;
  run_ranks(2, [&](int rank) {
    group.enter(rank, 2)->watch([](int) {});
    CHECK(eventually([] { return watchers() == 0; }));
    const auto descriptors = entries_of("/proc/self/fd");
    for (int round = 0; round < 50; ++round) {
      const auto first = group.enter(rank, 2);
      const auto second = group.enter(rank, 2);
      first->watch([](int) {});
      second->watch([](int) {});
      CHECK(eventually([] { return watchers() == 1; }));  // for both
      if (round % 2 == 0) {
        first->stop();
        first->stop();
      }
    }
    CHECK_EQUAL(entries_of("/proc/self/fd"), descriptors);
    CHECK(eventually([] { return watchers() == 0; }));
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
      CHECK(line.find("c10d_ext (deleted)") == std::string::npos);
    }
  });
}

void nothing_has_a_name() {
  const Group group;
  run_ranks(2, [&](int rank) {
    const auto member = group.enter(rank, 2);
    std::ifstream maps("/proc/self/maps");
    int found = 0;
    for (std::string line; std::getline(maps, line);) {
      found += line.ends_with("/memfd:c10d_ext (deleted)");
      CHECK(line.find("/dev/shm") == std::string::npos);
    }
    CHECK_EQUAL(found, 1);
    group.meet(2);
  });
}

void descriptors_are_not_inherited() {
  const Group group;
  run_ranks(2, [&](int rank) {
    const auto inherited = [] {
      int count = 0;
      for (int fd = 0; fd < 100; ++fd) {
        const int flags = fcntl(fd, F_GETFD);
        count += flags >= 0 && (flags & FD_CLOEXEC) == 0;
      }
      return count;
    };
    const int before = inherited();
    const auto member = group.enter(rank, 2);
    member->watch([](int) {});
    CHECK_EQUAL(inherited(), before);
    group.meet(2);
  });
}

void signals_are_for_other_threads() {
  const Group group;
  run_ranks(2, [&](int rank) {
    const auto member = group.enter(rank, 2);
    member->watch([](int) {});
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGUSR1);
    sigprocmask(SIG_BLOCK, &signals, nullptr);
    kill(getpid(), SIGUSR1);  // would end the process in any thread that does not block it
    std::this_thread::sleep_for(20ms);
    sigpending(&signals);
    CHECK(sigismember(&signals, SIGUSR1));
    group.meet(2);
  });
}

void stop_waits_for_the_call_in_progress() {
  const Group group;
  const auto pids = start_ranks(2, [&](int rank) {
    const auto member = group.enter(rank, 2);
    const auto other = group.enter(rank, 2);  // keeps the thread going
    other->watch([](int) {});
    if (rank == 1) {
      group.meet(2);
      return;
    }
    std::atomic<bool> called{false}, stops{false}, ended{false};
    member->watch([&](int) {
      called = true;
      CHECK(eventually([&] { return stops.load(); }));
      std::this_thread::sleep_for(50ms);
      ended = true;
    });
    group.meet(2);
    CHECK(eventually([&] { return called.load(); }));
    stops = true;
    member->stop();
    CHECK(ended);
  });
  CHECK_EQUAL(finish(pids[0]), 0);
  CHECK_EQUAL(finish(pids[1]), 0);
}

void stopping_within_the_call() {
  const Group group;
  run_ranks(2, [&](int rank) {
    auto member = group.enter(rank, 2);
    if (rank == 1) {
      group.meet(2);
      return;
    }
    std::atomic<bool> done{false};
    member->watch([&](int) {
      member->stop();
      done = true;
    });
    group.meet(2);
    CHECK(eventually([&] { return done.load(); }));
    member.reset();
    CHECK(eventually([] { return watchers() == 0; }));
  });
}

// The interpreter does not destroy what a program leaves behind.
void exiting_while_watching_keeps_the_exit_code() {
  for (int round = 0; round < 20; ++round) {
    const Group group;
    const auto pids = start_ranks(3, [&](int rank) {
      auto* leaked = group.enter(rank, 3).release();
      leaked->watch([](int) {});
      group.meet(3);
      std::exit(40 + rank);
    });
    for (int rank = 0; rank < 3; ++rank) {
      const int status = finish(pids[rank]);
      CHECK(WIFEXITED(status));
      CHECK_EQUAL(WEXITSTATUS(status), 40 + rank);
    }
  }
}

// --- forks ---------------------------------------------------------------------------------------

#if !defined(__SANITIZE_THREAD__)
// Kills a rank once it has said which process it started.
std::function<void(pid_t)> kill_once(const std::atomic<int>* child) {
  return [=](pid_t pid) {
    CHECK(eventually([=] { return child->load() > 0; }));
    CHECK(kill(pid, SIGKILL) == 0);
  };
}

// A child of the victim lives on; what it inherited must not keep the victim alive.
void a_fork_does_not_hide_a_death() {
  auto* child = shared<std::atomic<int>>();
  lose(3, 1, kill_once(child), [=] {
    const int pid = fork();
    if (pid == 0) {
      alarm(60);
    }
    if (pid > 0) {
      *child = pid;
    }
    pause();
  });
  CHECK(kill(*child, SIGKILL) == 0);
}

void a_forked_child_can_only_drop_the_group() {
  const Group group, anew;
  run_ranks(2, [&](int rank) {
    auto member = group.enter(rank, 2);
    auto late = group.enter(rank, 2);
    auto* losses = shared<Losses>();
    watch_losses(*member, rank, losses);
    group.meet(2);
    const auto generation = fork_generation();
    const auto child = start([&] {
      CHECK_EQUAL(fork_generation(), generation + 1);
      // What gets the numbers of the closed descriptors now must survive the drop.
      std::vector<int> taken;
      for (int i = 0; i < 32; ++i) {
        taken.push_back(open("/dev/null", O_RDONLY | O_CLOEXEC));
      }
      CHECK(error_of([&] { late->watch([](int) {}); }).starts_with("this group belongs"));
      member->stop();
      member.reset();
      late.reset();
      for (const int fd : taken) {
        CHECK(fcntl(fd, F_GETFD) >= 0);
      }
      // The child is a process like any other: it can have groups of its own.
      const auto own = anew.enter(rank, 2);
      own->watch([](int) {});
      anew.meet(2);
    });
    CHECK_EQUAL(finish(child), 0);
    CHECK_EQUAL(losses->heard_of(1 - rank), 0);
    CHECK_EQUAL(fork_generation(), generation);
    group.meet(4);
  });
}

// Open pipes, sockets and the like. Allocates nothing: the address sanitizer's lock may be taken in
// a child, for good.
int connections() {
  int count = 0;
  for (int fd = 0; fd < 100; ++fd) {
    char target[64] = "";
    char link[64];
    std::snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    count += readlink(link, target, sizeof(target) - 1) > 0 && target[0] != '/';
  }
  return count;
}

// Threads join and leave all the time while others fork: no child may hang or keep a descriptor.
void forks_at_any_time() {
  const Group group;
  run_ranks(1, [&](int) {
    const int before = connections();
    std::atomic<bool> over{false};
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      ranks.emplace_back([&, rank] {
        for (int round = 0; round < 30; ++round) {
          const auto member = group.enter(rank, 2);
          member->watch([](int) {});
        }
        over = true;
      });
    }
    while (!over) {
      const pid_t child = fork();
      if (child == 0) {
        CHECK_EQUAL(connections(), before);
        std::_Exit(0);
      }
      CHECK_EQUAL(finish(child), 0);
    }
    for (auto& thread : ranks) {
      thread.join();
    }
  });
}

void a_spawned_program_does_not_hide_a_death() {
  auto* child = shared<std::atomic<int>>();
  lose(2, 1, kill_once(child), [=] {
    char name[] = "sleep", time[] = "60";
    char* arguments[] = {name, time, nullptr};
    pid_t pid = 0;
    CHECK(posix_spawnp(&pid, name, nullptr, nullptr, arguments, environ) == 0);
    *child = pid;
    pause();
  });
  CHECK(kill(*child, SIGKILL) == 0);
}
#endif

const std::vector<Test> kTests = {
    TEST(ranks_share_memory),
    TEST(peers_are_the_processes),
    TEST(threads_of_one_process_join),
    TEST(the_same_store_serves_one_group_after_the_other),
    TEST(a_rank_out_of_reach),
    TEST(a_rank_that_cannot),
    TEST(ranks_that_want_different_memory),
    TEST(ranks_of_different_builds),
    TEST(a_rank_of_another_build_that_only_knows_the_store),
    TEST(too_few_descriptors),
    TEST(a_rank_that_never_comes),
    TEST(the_earliest_deadline_counts),
    TEST(a_rank_that_dies_while_joining),
    TEST(an_interrupt_ends_the_join),
    TEST(strangers_do_not_disturb),
    TEST(the_token_makes_a_rank),
    TEST(another_user_is_refused),
    TEST(memory_cannot_change_its_size),
    TEST(memory_of_the_wrong_kind_is_not_adopted),
    TEST(no_memory_without_an_error),
    TEST(a_killed_rank_is_noticed),
    TEST(a_death_shows_before_the_memory_is_freed),
    TEST(a_death_wakes_a_sleeper),
    TEST(an_exit_is_noticed),
    TEST(a_stopped_rank_is_not_lost),
    TEST(states_of_processes),
    TEST(nothing_is_left),
    TEST(nothing_has_a_name),
    TEST(descriptors_are_not_inherited),
    TEST(signals_are_for_other_threads),
    TEST(stop_waits_for_the_call_in_progress),
    TEST(stopping_within_the_call),
    TEST(exiting_while_watching_keeps_the_exit_code),
#if !defined(__SANITIZE_THREAD__)
    TEST(a_fork_does_not_hide_a_death),
    TEST(a_forked_child_can_only_drop_the_group),
    TEST(forks_at_any_time),
    TEST(a_spawned_program_does_not_hide_a_death),
#endif
};

}  // namespace

int main(int count, char** names) {
  return run_tests(kTests, count, names);
}
