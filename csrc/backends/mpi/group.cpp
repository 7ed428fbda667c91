// How a group of mpi begins and ends.

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
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

#include "backends/mpi/backend.h"
#include "base/timeouts.h"
#include "control/rendezvous.h"

namespace c10d_ext {

namespace {

using mpi::Engine;
using mpi::Library;
using mpi::MpiError;

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

}  // namespace

MpiBackend::MpiBackend(int rank, int size, const std::string& group_name, mpi::Comm collectives,
                       mpi::Comm messages, int tag_limit, int largest)
    : InnerBackend(rank, size, group_name, kPublicName),
      collectives_(collectives),
      messages_(messages),
      tag_limit_(tag_limit),
      largest_(largest),
      id_([] {
        static std::atomic<uint64_t> last{0};
        return ++last;
      }()) {
  init();
}

MpiBackend::~MpiBackend() {
  auto& engine = Engine::of_this_process();
  engine.abandon(id_, 0, error_of("the group was destroyed"));
  if (engine.has_calls_of(id_)) {
    return;  // MPI has them still
  }
  try {
    // By MPI's rules collective, but no library waits for others in it.
    engine.submit({[comms = std::array{collectives_, messages_}](Library& library, auto&) {
                     for (const auto& comm : comms) {
                       library.free(comm);
                     }
                   },
                   [](const std::exception_ptr&) {}, id_, 0});
  } catch (const MpiError&) {
    // Of a process that has forked, or ends.
  }
}

c10::intrusive_ptr<MpiBackend> MpiBackend::connect(const c10::intrusive_ptr<c10d::Store>& store,
                                                   int rank, int size, Milliseconds timeout,
                                                   const std::string& group_name,
                                                   const GlobalRanks& global_ranks, int largest) {
  const Group place({}, group_name, rank, size);
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
    const auto tag = static_cast<int>(hash_of(group_name) % kGroupTags);
    auto made = std::make_shared<std::vector<mpi::Comm>>();
    engine.away(
        "MPI_Comm_create_group", timeout, [&] { expected.check(); },
        [made, ranks, tag](Library& mpi) {
          // A message is never taken for a part of a collective.
          made->push_back(mpi.create_group(ranks, tag));
          made->push_back(mpi.create_group(ranks, tag));
        });
    return c10::make_intrusive<MpiBackend>(rank, size, group_name, made->at(0), made->at(1),
                                           library.tag_limit(), largest);
  } catch (const MpiError& error) {
    fail(error.what());
  }
  return {};
}

void MpiBackend::abort() {
  Engine::of_this_process().abandon(id_, 0, error_of("the group was aborted"));
}

}  // namespace c10d_ext
