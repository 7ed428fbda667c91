#pragma once

// What the ranks of an agreement say to each other, over the lines. No torch in here.
//
//   rank r                                rank 0
//   Calling: what, and its data if     ->
//     that is little
//                                      <- Go, with all data if all gave theirs (where
//                                         each rank has a part of it, with those; where leaders
//                                         reduce it, with what came of it), or
//                                         Differ: how; once all ranks call
//   Posting: one end of a message, and
//     its data if that is little       ->
//                                      <- Granted: who has the other, and the data where it came
//                                         along; once the other is there
//                                      <- Denied: why not
//                                      <- Wanted: by whose receive, that nobody has sent to, if
//                                         little: what is sent to it is over once it is said;
//                                         Unwanted: it waits no longer
//   Late, Broken, Overdue: what is
//   the matter (Overdue: and whose
//   message it waits for; where it is
//   matched, and not known whose it
//   is, it is asked of again)          ->
//   Asking: who has not called it, or
//     is at a message's other end, and
//     whose message it is              ->
//                                      <- Awaited: who has not
//                                      <- Ping: are you there?
//   Pong: it is, and how many
//     collectives it has called; a
//     leader, each rank of its host    ->
//   Done: the data of a long
//     collective is here               ->
//                                      <- Done: here, too; to leaders and rank 0's host
//                                      <- Over: the group is of no more use, and why
//                                      <- Doomed: what has broken off somewhere after the end, or
//                                         what is long and a rank that is gone had not done
//   Leaving: after which collective,
//   Aborting                           ->
//   Beat: nothing, between hosts       <->
//
// Where there are lines among leaders, ranks tell their leaders what they call, and rank 0 hears by
// those of calls with data (of its own host's as above). It says Go to its own host alone where all
// gave their data:
//
//   rank of a host                        its leader             the other leaders
//   Calling; without data to rank 0,
//     too                              ->
//                                         Relaying: the calls
//                                         with data of its
//                                         ranks, or what that
//                                         is reduced to, once
//                                         all have called;
//                                         where some gave
//                                         none, to rank 0
//                                         alone               ->
//                                      <- Go, with all data,
//                                         or the result, once
//                                         all have called
//   Pong, to rank 0: how many collectives it has called, where its leader has left
//   rank 0, to leaders: Singly: somebody has left, and who calls what they will not is to be told
//   at once, which leaders do by a Relaying for each call with data
//   any rank, to rank 0: Severed: which other one it cannot hear any more
//   where rank 0 is lost, ranks to their leaders, and those to each other and to theirs: Doomed;
//   the next host's leader is that of rank 0's host, too
//
// Two ranks that have a line of their own say to each other what a message is, while rank 0 hears
// of both its ends as of others. Who receives it knows which of its receives rank 0 will match it
// with:
//
//   sender                                rank 0                 receiver
//   Delivering: a send, and its data
//     if that is little                ----------------------->
//                                      <----------------------- Taken: by a receive that waited
//   Overdue: it has had its time       ->
//                                         Withdraw            ->
//                                                             <- Withdrawn: no receive takes it
//                                         Denied              -> the sender

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backends/checked/calling.h"
#include "backends/checked/contribution.h"
#include "backends/checked/matching.h"
#include "base/errors.h"
#include "base/fingerprint.h"
#include "control/payload.h"
#include "control/shared_bytes.h"

namespace c10d_ext {

enum Says : uint32_t {
  kCalling = 16,
  kGo,
  kDiffer,
  kPosting,
  kGranted,
  kDenied,
  kAwaited,
  kLate,
  kBroken,
  kOverdue,
  kAsking,
  kAskingOfMessage,
  kPing,
  kPong,
  kOver,
  kLeaving,
  kAborting,
  kDoomed,
  kBeat,
  kRelaying,
  kSevered,
  kWanted,
  kUnwanted,
  kDone,
  kDelivering,
  kTaken,
  kWithdraw,
  kWithdrawn,
  kSingly
};

// Why a group is of no more use.
struct End {
  ErrorKind kind;
  std::vector<int> ranks;
  std::string why;
  // What a collective whose data is on its way still has; negative: all the time that it needs.
  std::chrono::milliseconds grace;
  // The last collective on which rank 0 has heard all ranks agree.
  uint64_t agreed = 0;
  // What the leaders' word to go with one of those, which is on its way, still has. Not told.
  std::chrono::milliseconds word_grace{1000};
};
// Ranks that left in good order have sent what they owe.
constexpr std::chrono::milliseconds kUnlimited{-1};
// What a collective whose data is on its way has to come to its end once a rank is gone, which may
// have sent all of its own.
constexpr std::chrono::milliseconds kDataGrace{1000};

// Has `tell` tell those ranks that all have called it, each with what it is to have of all data.
// `hosts`: those of leaders, who reduce what is to be reduced.
void tell_go(uint64_t seq, const std::vector<Contribution>& data, const std::vector<int>& ranks,
             const std::vector<std::vector<int>>& hosts,
             const std::function<void(int rank, Says kind, const Payload& words)>& tell);

// The data that travels with a message, where it does: all that is attached.
void put_data(Payload& words, const std::optional<SharedBytes>& data);
std::optional<SharedBytes> take_data(Payload& words);
// So many bytes of a message travel with what is said of it at most.
constexpr size_t kLittleMessage = 1048576;
// Over a line over which collectives wait for others' words, or inside a host.
constexpr size_t kLittleAmongWords = 262144;
// By rank 0 where neither end is on its host, so that they go from host to host twice.
constexpr size_t kLittleOnDetour = 4096;
// But for its rank and number.
Payload encoded(const Posted& posted);
Posted take_posted(Payload& words);
// A receive, which waits for rank `sender` of `ranks`.
Payload encoded_wanted(const Posted& receive);
Posted take_wanted(Payload& words, int sender, int ranks);
// What rank `from` sends to `to`, as it is delivered.
Payload encoded_delivery(const Posted& send);
Posted take_delivery(Payload& words, int from, int to);

// The other end of a message, in what rank 0 says of one: where none is there, nobody's.
struct OtherEnd {
  int rank = -1;
  uint64_t number = 0;
  Delivered delivered = Delivered::Nothing;
};
// -1: none.
int take_rank_or_none(Payload& words, int ranks);
Payload& put(Payload& words, const OtherEnd& other);
OtherEnd take_other_end(Payload& words, int ranks);

Payload encoded(const End& end);
End take_end(Payload& words);

}  // namespace c10d_ext
