// How a group of mpi begins and ends, and the engine's calls for it.

#include "backends/mpi/communicators.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/timeouts.h"
#include "control/rendezvous.h"

namespace c10d_ext::mpi {

namespace {

using Milliseconds = std::chrono::milliseconds;

// Tags of groups are hashes of their names: MPI guarantees that many.
constexpr uint64_t kGroupTags = 32767;

// FNV-1a: the same on every rank.
uint64_t hash_of(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  }
  return hash;
}

std::exception_ptr error_of(std::string text) {
  return std::make_exception_ptr(c10::DistBackendError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, std::move(text)));
}

}  // namespace

void abandon(uint64_t owner, uint64_t number, std::string why) {
  Engine::of_this_process().abandon(owner, number, error_of(std::move(why)));
}

Communicators::Communicators(Group place, Comm collectives, Comm messages, int tag_limit,
                             int largest)
    : place_(std::move(place)),
      collectives_(collectives),
      messages_(messages),
      tag_limit_(tag_limit),
      largest_(largest),
      owner_([] {
        static std::atomic<uint64_t> last{0};
        return ++last;
      }()),
      losses_(std::make_shared<Losses>(static_cast<int>(place_.size()))) {}

Communicators::~Communicators() {
  abandon(owner_, 0, "the group was destroyed");
  auto& engine = Engine::of_this_process();
  if (engine.has_calls_of(owner_)) {
    return;  // MPI has them still
  }
  try {
    // By MPI's rules collective, but no library waits for others in it.
    engine.submit({{[comms = std::array{collectives_, messages_}](Library& library, auto&) {
                     for (const auto& comm : comms) {
                       library.free(comm);
                     }
                   }},
                   [](const std::exception_ptr&) {},
                   owner_,
                   0});
  } catch (const MpiError&) {
    // Of a process that has forked, or ends.
  }
}

std::shared_ptr<const Communicators> Communicators::connect(
    const c10::intrusive_ptr<c10d::Store>& store, const Group& place, Milliseconds timeout,
    const GlobalRanks& global_ranks, int largest) {
  const int rank = static_cast<int>(place.rank()), size = static_cast<int>(place.size());
  const auto fail = [&](const std::string& what) {
    C10_THROW_ERROR(DistBackendError, c10::str("mpi: ", what, ' ', where(place)));
  };
  try {
    auto& engine = Engine::of_this_process();
    Library& library = engine.library();
    const Rendezvous expected(place, store, global_ranks, kPublicName);
    const KeyValueStore meeting = expected.part_of_store("world_ranks");
    // Where everybody is in MPI_COMM_WORLD.
    meeting.set(std::to_string(rank), c10::str(library.rank(), ' ', library.size()));
    std::vector<int> ranks;
    std::set<int> sizes;
    const auto until = std::chrono::steady_clock::now() + bounded(timeout);
    for (int other = 0; other < size; ++other) {
      const auto key = std::to_string(other);
      while (!meeting.has(key)) {
        if (std::chrono::steady_clock::now() >= until) {
          fail(c10::str("every rank must join the group within ",
                        std::chrono::duration<double>(timeout).count(), " s, got none of rank ",
                        other));
        }
        meeting.interrupt();
        std::this_thread::sleep_for(Milliseconds(1));
      }
      std::istringstream text(meeting.get(key, timeout));
      int world_rank = -1, world_size = 0;
      text >> world_rank >> world_size;
      ranks.push_back(world_rank);
      sizes.insert(world_size);
    }
    if (sizes.size() != 1 || std::set<int>(ranks.begin(), ranks.end()).size() != ranks.size()) {
      fail(c10::str(
          "the ranks must be processes of one MPI_COMM_WORLD, which mpirun, srun or "
          "torchrun starts, got ranks ",
          c10::Join(", ", ranks), " of worlds of ", c10::Join(", ", sizes), " by ",
          library.version(), library.is_open_mpi() ? " (Open MPI needs its own mpirun)" : ""));
    }
    const auto tag = static_cast<int>(hash_of(place.name()) % kGroupTags);
    auto made = std::make_shared<std::vector<Comm>>();
    engine.away(
        "MPI_Comm_create_group", timeout, [&] { expected.check(); },
        [made, ranks, tag](Library& mpi) {
          made->push_back(mpi.create_group(ranks, tag));
          made->push_back(mpi.create_group(ranks, tag));
        });
    return std::make_shared<Communicators>(place, made->at(0), made->at(1), library.tag_limit(),
                                           largest);
  } catch (const MpiError& error) {
    fail(error.what());
  }
  return {};
}

void Communicators::call(const WorkPtr& work, std::vector<Step> steps, Over over,
                         uint64_t number) const {
  auto end = [work, over = std::move(over)](std::exception_ptr error) {
    if (!error) {
      try {
        over();
        return;
      } catch (...) {
        error = std::current_exception();
      }
    }
    try {
      std::rethrow_exception(error);
    } catch (const MpiError& refused) {
      error = error_of(refused.what());
    } catch (...) {
    }
    work->end(error);
  };
  try {
    Engine::of_this_process().submit({std::move(steps), std::move(end), owner_, number, losses_});
  } catch (const MpiError& refused) {
    C10_THROW_ERROR(DistBackendError, c10::str("mpi: ", refused.what(), ' ', where(place_)));
  }
}

void Channel::add(Library& library, Requests& requests, bool sends, std::byte* data, int64_t bytes,
                  int peer, int tag) const {
  if (sends && losses->has(peer)) {
    throw MpiError("the rank that is sent to must live, got one that is gone");
  }
  int64_t offset = 0;
  do {
    const auto size = static_cast<int>(std::min<int64_t>(largest, bytes - offset));
    requests.push_back(sends ? library.send(data + offset, size, peer, tag, comm)
                             : library.receive(data + offset, size, peer, tag, comm));
    offset += size;
  } while (offset < bytes);
}

}  // namespace c10d_ext::mpi
