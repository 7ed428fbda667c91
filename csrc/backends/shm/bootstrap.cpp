// The rendezvous. Rank 0 listens on a socket in Linux' abstract namespace (no file, nothing to
// clean up), under a random name that it puts into the store together with a random token; the
// other ranks connect, or put the reason why they cannot into the store. That a rank gets through
// to the socket is the test for being on one machine.
//
//   rank r                                    rank 0
//   Hello: token, who it is, why it cannot ->
//     + the read end of its pipe
//                                          <- Offer: the peers
//                                             + the memory, the read ends of all other pipes
//   Answer: why it cannot, or empty        ->
//                                          <- Verdict: go / no, and why / failed, and how
//
// Rank 0 alone decides, so all ranks come to the same end. A Verdict may come in place of an Offer.

#include "backends/shm/bootstrap.h"

#include <stdexcept>

#include "backends/shm/bootstrap_messages.h"
#include "backends/shm/liveness.h"
#include "control/handshake.h"

namespace c10d_ext::shm {

Joined join(const KeyValueStore& store, int rank, int size, size_t bytes,
            std::chrono::milliseconds timeout, const Self& self) {
  const Deadline deadline(timeout, store.interrupt);
  if (size > 1) {
    return rank == 0 ? bootstrap::serve(store, size, bytes, deadline, self)
                     : bootstrap::connect(store, rank, size, bytes, deadline, self);
  }
  const auto session = random_secret();
  std::shared_ptr<Mapping> mapping;
  const auto why_not = bootstrap::obstacle_to([&] {
    bootstrap::check_able(self.cannot);
    mapping = Mapping::create(with_pulses(bytes, 1));
  });
  if (why_not.out_of_descriptors) {
    throw std::runtime_error("rank 0: " + why_not.text);
  }
  if (why_not) {
    return {nullptr, "rank 0: " + why_not.text, session};
  }
  return {make_membership(std::move(mapping), 0, {this_process()}, {}, {}), "", session};
}

}  // namespace c10d_ext::shm
