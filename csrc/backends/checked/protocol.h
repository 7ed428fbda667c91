#pragma once

// What the ranks of an agreement say to each other, over the lines. No torch in here.
//
//   rank r                                rank 0
//   Calling: what                      ->
//                                      <- Go, or Differ: how; once all ranks call
//   Posting: one end of a message      ->
//                                      <- Granted: who has the other; once it is there
//                                      <- Denied: why not
//   Late, Broken, Overdue: what is
//   the matter                         ->
//   Asking: who has not called it      ->
//                                      <- Awaited: who has not
//                                      <- Ping: are you there?
//   Pong                               ->
//                                      <- Over: the group is of no more use, and why
//                                      <- Doomed: has broken off somewhere after the end
//   Leaving, Aborting                  ->
//   Beat: nothing, between hosts       <->

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "backends/checked/matching.h"
#include "base/errors.h"
#include "base/fingerprint.h"
#include "control/connection.h"

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
  kBeat
};

// Why a group is of no more use.
struct End {
  ErrorKind kind;
  std::vector<int> ranks;
  std::string why;
  // What a collective whose data is on its way still has; negative: all the time that it needs.
  std::chrono::milliseconds grace;
};
// Ranks that left in good order have sent what they owe.
constexpr std::chrono::milliseconds kUnlimited{-1};
// What a collective whose data is on its way has to come to its end once a rank is gone, which may
// have sent all of its own.
constexpr std::chrono::milliseconds kDataGrace{1000};

Payload encoded(const Fingerprint& called);
Fingerprint take_fingerprint(Payload& words);

// But for its rank and number.
Payload encoded(const Posted& posted);
Posted take_posted(Payload& words);

Payload encoded(const End& end);
End take_end(Payload& words);

}  // namespace c10d_ext
