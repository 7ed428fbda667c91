#pragma once

// What a rank says of a collective that it calls, and what a leader passes on of it. No torch in
// here.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backends/checked/contribution.h"
#include "base/fingerprint.h"
#include "control/payload.h"

namespace c10d_ext {

// No group has more.
constexpr int64_t kMostRanks = 1 << 24;

Payload encoded(const Fingerprint& called);
Fingerprint take_fingerprint(Payload& words);

// A fingerprint and how it is said, made once for calls that are alike, as most are: they share it.
class Called {
 public:
  Called(Fingerprint fingerprint);  // NOLINT(google-explicit-constructor)

  const Fingerprint& fingerprint() const {
    return said_->fingerprint;
  }
  const std::string& words() const {
    return said_->words;
  }
  friend bool operator==(const Called& a, const Called& b) {
    return a.said_ == b.said_ || a.words() == b.words();
  }

 private:
  struct Said {
    Fingerprint fingerprint;
    std::string words;
  };
  std::shared_ptr<const Said> said_;
};

// What was called last, which the next call is mostly like.
class LastCalled {
 public:
  // That, if `called` is like it; else `called`, which is the last from here on.
  const Called& or_new(Fingerprint&& called);
  const Called* said_as(std::string_view words) const {
    return last_ && last_->words() == words ? &*last_ : nullptr;
  }

 private:
  std::optional<Called> last_;
};

// Of calls by rank, as difference() of their fingerprints.
std::optional<Difference> difference(const std::vector<Called>& calls, uint64_t seq);

// What a rank says of its call, which ends with its number.
struct Calling {
  Called called;
  std::optional<Contribution> data;
  uint64_t seq = 0;
};
Payload encoded(const Calling& call);

// Calls of some ranks, as a leader passes them on to the host of those in `to`, which have parts of
// their data.
using Relayed = std::vector<std::pair<int, const Calling*>>;
Payload encoded(const Relayed& calls, const std::vector<int>& to);

// Hears of calls. What is called like the last time is not taken apart again.
class CallReader {
 public:
  // In a group of so many ranks and hosts.
  CallReader(int ranks, size_t hosts) : ranks_(ranks), hosts_(hosts) {}

  // Both throw std::runtime_error where that can be of no rank of the group, and of relayed calls
  // where one is by a rank that is not led by who says it.
  Calling take(Payload& words);
  std::vector<std::pair<int, Calling>> take_relayed(Payload& words,
                                                    const std::function<bool(int rank)>& is_led);

 private:
  const Called& take_called(Payload& words);
  Calling take_one(Payload& words);

  const int ranks_;
  const size_t hosts_;
  LastCalled last_;
};

}  // namespace c10d_ext
