#pragma once

// Sentences of ranks that agree, as they are said and changed at random. C10D_EXT_FUZZ_SECONDS and
// C10D_EXT_FUZZ_SEED: for how long, and which.

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "backends/checked/contribution.h"
#include "backends/checked/protocol.h"
#include "backends/checked/roster.h"
#include "program.h"

namespace c10d_ext::fuzz {

using Clock = std::chrono::steady_clock;

inline constexpr int kRanks = 6;  // two on each host

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int64_t below(int64_t limit) {
    return static_cast<int64_t>(engine_() % static_cast<uint64_t>(limit));
  }
  bool one_in(int64_t times) {
    return below(times) == 0;
  }
  // Small ones, those at the ends of ranges, and any.
  int64_t number() {
    constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
    constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
    const std::vector<int64_t> all{0,
                                   1,
                                   -1,
                                   2,
                                   3,
                                   4,
                                   5,
                                   7,
                                   255,
                                   256,
                                   65536,
                                   INT32_MAX,
                                   kMin,
                                   kMax,
                                   kMin + 1,
                                   kMax - 1,
                                   INT32_MIN,
                                   UINT32_MAX,
                                   static_cast<int64_t>(engine_())};
    return all[static_cast<size_t>(below(static_cast<int64_t>(all.size())))];
  }
  std::string text() {
    std::string text;
    for (int64_t left = below(40); left > 0; --left) {
      text += static_cast<char>(below(256));
    }
    return text;
  }
  // At times as much as is attached.
  std::string data() {
    return (one_in(4) ? std::string(static_cast<size_t>(4090 + below(20)), 'x') : "") + text();
  }

 private:
  std::mt19937_64 engine_;
};

inline std::string changed(std::string bytes, Random& random) {
  for (int64_t changes = random.below(4); changes > 0; --changes) {
    const auto at =
        bytes.empty() ? 0 : static_cast<size_t>(random.below(static_cast<int64_t>(bytes.size())));
    switch (random.below(5)) {
      case 0:
        if (!bytes.empty()) {
          bytes[at] = static_cast<char>(random.below(256));
        }
        break;
      case 1:
        bytes.resize(at);
        break;
      case 2:
        bytes += random.text();
        break;
      case 3:
        if (const size_t word = at / 8 * 8; word + 8 <= bytes.size()) {
          const int64_t number = random.number();
          std::memcpy(bytes.data() + word, &number, sizeof(number));
        }
        break;
      default:
        bytes.insert(at, random.text());
        break;
    }
  }
  return bytes;
}

inline Payload changed(const Payload& words, Random& random) {
  std::string attached;
  for (const auto& piece : words.attached()) {
    attached += piece;
  }
  return Payload(changed(words.words(), random), changed(attached, random));
}

inline std::vector<int64_t> sizes(Random& random) {
  return std::vector<int64_t>(static_cast<size_t>(random.one_in(3) ? random.below(9) : kRanks),
                              random.below(100));
}

// Of a rank: the same for all, or parts; to be reduced, as other ranks' often is, or in another's.
inline Contribution given(Random& random) {
  constexpr ReducedBy kSum{DType::Int32, ReduceOp::Sum};
  if (!random.one_in(4)) {
    const bool has_parts = random.one_in(8);
    const std::string values(4 * kRanks, 'x');
    return (has_parts ? Contribution(values, std::vector<int64_t>(kRanks, 4))
                      : Contribution(values))
        .to_be_reduced(kSum);
  }
  if (random.one_in(8)) {
    return Contribution::in_first();
  }
  const std::string bytes = random.data();
  if (random.one_in(2)) {
    return Contribution(bytes);
  }
  std::vector<int64_t> parts(kRanks);
  for (auto left = static_cast<int64_t>(bytes.size()); auto& part : parts) {
    part = &part == &parts.back() ? left : random.below(left + 1);
    left -= part;
  }
  return {bytes, parts};
}

// Of a message: none, few, or as many as are attached to words.
inline uint64_t message_bytes(Random& random) {
  return random.one_in(2) ? 5000 : static_cast<uint64_t>(random.below(2));
}

// Of a message that is about the last of its rank.
inline OtherEnd other_end(uint64_t number, Random& random) {
  return {static_cast<int>(random.below(kRanks)), number - static_cast<uint64_t>(random.below(3)),
          static_cast<Delivered>(random.below(3))};
}

// What a sender says to the receiver.
inline Payload delivery(int to, uint64_t number, Random& random) {
  Posted send{.number = number,
              .sends = true,
              .peer = to,
              .tag = random.below(3),
              .bytes = message_bytes(random)};
  if (!random.one_in(4)) {
    send.data = std::string(send.bytes, 'x');
  }
  return encoded_delivery(send);
}

// A sentence that makes sense, of a rank whose next call and message are `seq` and `number`.
inline Payload sentence(uint32_t kind, uint64_t seq, uint64_t number, Random& random) {
  switch (kind) {
    case kCalling: {
      Fingerprint called;
      called.op_type = OpType::Barrier;
      called.unit = "float32";
      if (random.one_in(2)) {  // often alike on all ranks
        return encoded(Calling{called, given(random), seq});
      }
      called.op_type = static_cast<OpType>(random.below(12));
      called.reduce_op = static_cast<ReduceOp>(random.below(10));
      called.root = static_cast<int>(random.below(kRanks + 1)) - 1;
      called.count = random.below(10);
      if (random.one_in(2)) {
        called.sends = sizes(random);
        called.expects = sizes(random);
        called.is_uneven = true;
      }
      return encoded(
          Calling{called, random.one_in(2) ? std::optional(given(random)) : std::nullopt, seq});
    }
    case kPosting: {
      Posted posted{.sends = random.one_in(2),
                    .peer = static_cast<int>(random.below(kRanks + 1)) - 1,
                    .tag = random.below(3),
                    .bytes = message_bytes(random),
                    .dtype = static_cast<DType>(random.below(21))};
      if (posted.sends && random.one_in(2)) {
        posted.data = std::string(posted.bytes, 'x');
      } else if (posted.sends) {
        posted.delivered = static_cast<Delivered>(random.below(3));
      }
      return encoded(posted).put(static_cast<int64_t>(number));
    }
    case kWithdrawn: {
      Payload words;
      return put(words, other_end(number, random));
    }
    case kOverdue:
    case kAsking:
    case kAskingOfMessage: {
      Payload words = Payload().put(static_cast<int64_t>(number) - random.below(3));
      if (kind == kOverdue) {
        words.put(random.text());
      }
      return words.put(random.below(kRanks + 1) - 1);
    }
    default:
      return Payload().put(random.below(5)).put(random.text()).put(random.below(5));
  }
}

// Of all ranks, as it comes with the word to go.
inline Payload all_data(Random& random) {
  std::vector<Contribution> data;
  for (int rank = 0; rank < kRanks; ++rank) {
    data.push_back(given(random));
  }
  Payload words;
  return put_all_of(words, data, static_cast<int>(random.below(kRanks)));
}

inline std::vector<Member> members() {
  std::vector<Member> all;
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto host = "host " + std::to_string(rank / 2);
    all.push_back({this_process(), host, host, host});
  }
  return all;
}

// What rank 0 says to rank `self`, or another rank.
inline Payload word(uint32_t kind, uint64_t number, int self, Random& random) {
  switch (kind) {
    case kGo: {
      const auto data = random.one_in(2) ? all_data(random) : Payload().put(0);
      return Payload().put(static_cast<int64_t>(number)).put(data);
    }
    case kGranted: {
      Payload words;
      put(words.put(static_cast<int64_t>(number)), other_end(number, random));
      put_data(words, random.one_in(2) ? std::optional<SharedBytes>(random.data()) : std::nullopt);
      return words;
    }
    case kDelivering:
      return delivery(self, number, random);
    case kTaken:
      return Payload().put(static_cast<int64_t>(number));
    case kWithdraw: {
      Payload words;
      return put(words, other_end(number, random)).put(random.below(3));
    }
    case kWanted:
      return encoded_wanted({.rank = static_cast<int>(random.below(kRanks)),
                             .number = number,
                             .peer = self,
                             .tag = random.below(3),
                             .bytes = message_bytes(random)});
    case kUnwanted:
      return Payload()
          .put(random.below(kRanks))
          .put(random.below(3))
          .put(static_cast<int64_t>(number));
    case kDenied: {
      Payload words = Payload().put(static_cast<int64_t>(number)).put(random.below(6));
      return put(words.put(random.text()).put(std::vector<int>{1}), other_end(number, random));
    }
    case kOver:
      return encoded(
          End{ErrorKind::RankLost, {static_cast<int>(random.below(kRanks))}, "gone", kDataGrace});
    default:
      return Payload()
          .put(static_cast<int64_t>(number))
          .put(random.text())
          .put(std::vector<int>{1});
  }
}

inline double seconds() {
  const char* text = std::getenv("C10D_EXT_FUZZ_SECONDS");
  return text != nullptr ? std::atof(text) : 1.0;
}

// For a sixth of it, as there are six tests; or not all has happened that is to happen.
inline bool is_time_left(Clock::time_point began, bool has_all_happened = true) {
  const auto passed = Clock::now() - began;
  return std::chrono::duration<double>(passed).count() < seconds() / 6 ||
         (!has_all_happened && passed < kLong);
}

inline uint64_t seed() {
  const char* text = std::getenv("C10D_EXT_FUZZ_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : 1;
}

}  // namespace c10d_ext::fuzz
