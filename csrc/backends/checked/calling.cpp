#include "backends/checked/calling.h"

#include <algorithm>
#include <stdexcept>
#include <string_view>
#include <utility>

namespace c10d_ext {

namespace {

// What most calls take, in bytes.
constexpr size_t kUsual = 256;

}  // namespace

Payload encoded(const Fingerprint& called) {
  Payload words;
  words.reserve(kUsual);
  words.put(static_cast<int64_t>(called.op_type)).put(called.unit);
  words.put(called.details).put(called.tensors).put(static_cast<int64_t>(called.reduce_op));
  words.put(called.root).put(called.count).put(called.is_uneven ? 1 : 0);
  words.put(static_cast<int64_t>(called.shapes)).put(called.call_site).put(called.manner);
  words.put(called.sends).put(called.expects);
  return words;
}

Fingerprint take_fingerprint(Payload& words) {
  Fingerprint called;
  called.op_type = words.one_of(OpType::SparseAllReduce);
  called.unit = words.text();
  called.details = words.text();
  called.tensors = words.number();
  called.reduce_op = words.one_of(ReduceOp::None);
  called.root = static_cast<int>(words.number_within(-1, kMostRanks));
  called.count = words.number();
  called.is_uneven = words.number() != 0;
  called.shapes = static_cast<uint64_t>(words.number());
  called.call_site = words.text();
  called.manner = words.text();
  called.sends = words.numbers();
  called.expects = words.numbers();
  return called;
}

Called::Called(Fingerprint fingerprint) {
  std::string words = encoded(fingerprint).words();
  said_ = std::make_shared<const Said>(Said{std::move(fingerprint), std::move(words)});
}

const Called& LastCalled::or_new(Fingerprint&& called) {
  const bool is_alike = last_ && last_->fingerprint() == called;
  return is_alike ? *last_ : last_.emplace(std::move(called));
}

std::optional<Difference> difference(const std::vector<Called>& calls, uint64_t seq) {
  const Called& first = calls.front();
  const bool are_alike = std::all_of(calls.begin() + 1, calls.end(),
                                     [&](const Called& called) { return called == first; });
  const auto& alike = first.fingerprint();
  if (are_alike && (alike.count >= 0 || alike.sends.empty())) {
    return std::nullopt;  // else their parts may not fit together
  }
  std::vector<Fingerprint> all;
  for (const auto& called : calls) {
    all.push_back(called.fingerprint());
  }
  return difference(all, seq);
}

Payload encoded(const Calling& call) {
  Payload words;
  words.reserve(kUsual);
  words.put(call.called.words());
  return put(words, call.data).put(static_cast<int64_t>(call.seq));
}

Payload encoded(const Relayed& calls, const std::vector<int>& to) {
  Payload words;
  words.reserve(kUsual * calls.size());
  words.put(static_cast<int64_t>(calls.size()));
  for (const auto& [rank, call] : calls) {
    words.put(rank).put(call->called.words());
    put(words, call->data ? std::optional(call->data->of(to)) : std::nullopt);
    words.put(static_cast<int64_t>(call->seq));
  }
  return words;
}

const Called& CallReader::take_called(Payload& words) {
  const std::string_view said = words.text_view();
  if (const auto* last = last_.said_as(said)) {
    return *last;
  }
  Payload own{std::string(said)};
  Fingerprint called = take_fingerprint(own);
  own.expect_end();
  const auto is_of_all = [this](const auto& parts) {
    return parts.empty() || parts.size() == static_cast<size_t>(ranks_);
  };
  if (!is_of_all(called.sends) || !is_of_all(called.expects) || called.root >= ranks_) {
    throw std::runtime_error("a call of another group");
  }
  return last_.or_new(std::move(called));
}

Calling CallReader::take_one(Payload& words) {
  Calling call{take_called(words), std::nullopt};
  call.data = take_contribution(words, ranks_);
  if (call.data && call.data->size() > most_of_a_rank(call.called.fingerprint().op_type, kMostData,
                                                      static_cast<size_t>(ranks_), hosts_,
                                                      call.data->reduced_by().has_value())) {
    throw std::runtime_error("a call with too much data");
  }
  call.seq = static_cast<uint64_t>(words.number());
  return call;
}

Calling CallReader::take(Payload& words) {
  Calling call = take_one(words);
  if (call.data && call.data->is_in_first()) {
    throw std::runtime_error("a call with the data of another one");
  }
  return call;
}

std::vector<std::pair<int, Calling>> CallReader::take_relayed(
    Payload& words, const std::function<bool(int rank)>& is_led) {
  std::vector<std::pair<int, Calling>> calls;
  auto left = words.number_within(1, ranks_);
  calls.reserve(static_cast<size_t>(left));
  for (; left > 0; --left) {
    const auto rank = static_cast<int>(words.number_within(0, ranks_ - 1));
    if (!is_led(rank)) {
      throw std::runtime_error("a call that is not this leader's to pass on");
    }
    calls.emplace_back(rank, take_one(words));
    const auto& data = calls.back().second.data;
    const auto& first = calls.front().second.data;
    if (data && data->is_in_first() && !(first && first->reduced_by())) {
      throw std::runtime_error("a call with the data of another one");
    }
  }
  words.expect_end();
  return calls;
}

}  // namespace c10d_ext
