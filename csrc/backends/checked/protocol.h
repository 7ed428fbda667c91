#pragma once

// What the ranks of an agreement say to each other, over the lines. No torch in here.
//
//   rank r                                rank 0
//   Calling: what, and its data if     ->
//     that is little
//                                      <- Go, with all data if all gave theirs, or
//                                         Differ: how; once all ranks call
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
#include <cstddef>
#include <cstdint>
#include <optional>
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

// So many bytes of all ranks together travel with calls at most, whatever is set.
constexpr size_t kMostData = 65536;
// The data that travels with a call, where it does.
void put_data(Payload& words, const std::optional<std::string>& data);
std::optional<std::string> take_data(Payload& words);
// The data of all ranks; none where not all gave theirs.
void put_all_data(Payload& words, const std::vector<std::string>& data);
std::vector<std::string> take_all_data(Payload& words, int ranks);

// But for its rank and number.
Payload encoded(const Posted& posted);
Posted take_posted(Payload& words);

Payload encoded(const End& end);
End take_end(Payload& words);

}  // namespace c10d_ext
