#include "backends/checked/protocol.h"

#include <algorithm>
#include <stdexcept>

namespace c10d_ext {

namespace {

// Another process has said it.
int64_t within(int64_t number, int64_t least, int64_t most) {
  if (number < least || number > most) {
    throw std::runtime_error("a number that means nothing");
  }
  return number;
}

template <class Enum>
Enum take(Payload& words, Enum last) {
  return static_cast<Enum>(within(words.number(), 0, static_cast<int64_t>(last)));
}

constexpr int64_t kMostRanks = 1 << 24;
// What most calls take, in bytes.
constexpr size_t kUsual = 256;
constexpr int64_t kMostGrace = 3'600'000;

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
  called.op_type = take(words, OpType::SparseAllReduce);
  called.unit = words.text();
  called.details = words.text();
  called.tensors = words.number();
  called.reduce_op = take(words, ReduceOp::None);
  called.root = static_cast<int>(within(words.number(), -1, kMostRanks));
  called.count = words.number();
  called.is_uneven = words.number() != 0;
  called.shapes = static_cast<uint64_t>(words.number());
  called.call_site = words.text();
  called.manner = words.text();
  called.sends = words.numbers();
  called.expects = words.numbers();
  return called;
}

Payload encoded(const Calling& call) {
  Payload words = encoded(call.called);
  return put(words, call.data).put(static_cast<int64_t>(call.seq));
}

Payload encoded(const Relayed& calls, const std::vector<int>& to) {
  Payload words;
  words.reserve(kUsual * calls.size());
  words.put(static_cast<int64_t>(calls.size()));
  for (const auto& [rank, call] : calls) {
    words.put(rank).put(encoded(call->called));
    put(words, call->data ? std::optional(call->data->of(to)) : std::nullopt);
    words.put(static_cast<int64_t>(call->seq));
  }
  return words;
}

std::vector<std::pair<int, Calling>> take_relayed(Payload& words, int ranks, size_t hosts,
                                                  const std::function<bool(int rank)>& is_led) {
  std::vector<std::pair<int, Calling>> calls;
  for (auto left = within(words.number(), 1, ranks); left > 0; --left) {
    const auto rank = static_cast<int>(within(words.number(), 0, ranks - 1));
    if (!is_led(rank)) {
      throw std::runtime_error("a call that is not this leader's to pass on");
    }
    calls.emplace_back(rank, take_call(words, ranks, hosts));
  }
  words.expect_no_more_data();
  return calls;
}

Calling take_call(Payload& words, int ranks, size_t hosts) {
  Calling call;
  call.called = take_fingerprint(words);
  const auto is_of_all = [&](const auto& parts) {
    return parts.empty() || parts.size() == static_cast<size_t>(ranks);
  };
  if (!is_of_all(call.called.sends) || !is_of_all(call.called.expects) ||
      call.called.root >= ranks) {
    throw std::runtime_error("a call of another group");
  }
  call.data = take_contribution(words, ranks);
  if (call.data && call.data->size() > most_of_a_rank(call.called.op_type, kMostData,
                                                      static_cast<size_t>(ranks), hosts)) {
    throw std::runtime_error("a call with too much data");
  }
  call.seq = static_cast<uint64_t>(words.number());
  return call;
}

void tell_go(uint64_t seq, const std::vector<Contribution>& data, const std::vector<int>& ranks,
             const std::function<void(int rank, Says kind, const Payload& words)>& tell) {
  const bool has_parts =
      std::any_of(data.begin(), data.end(), [](const auto& one) { return one.has_parts(); });
  std::optional<Payload> words;
  for (const int rank : ranks) {
    if (!words || has_parts) {
      words = Payload().put(static_cast<int64_t>(seq));
      put_all_of(*words, data, rank);
    }
    tell(rank, kGo, *words);
  }
}

void put_data(Payload& words, const std::optional<SharedBytes>& data) {
  words.put(data ? 1 : 0);
  if (data) {
    words.put_data(*data);
  }
}

std::optional<SharedBytes> take_data(Payload& words) {
  auto data = within(words.number(), 0, 1) != 0 ? std::optional(words.data()) : std::nullopt;
  words.expect_no_more_data();
  return data;
}

Payload encoded(const Posted& posted) {
  Payload words;
  words.put(posted.sends ? 1 : 0)
      .put(posted.peer)
      .put(posted.tag)
      .put(static_cast<int64_t>(posted.bytes))
      .put(static_cast<int64_t>(posted.dtype))
      .put(static_cast<int64_t>(posted.delivered));
  put_data(words, posted.data);
  return words;
}

Posted take_posted(Payload& words) {
  Posted posted;
  posted.sends = words.number() != 0;
  posted.peer = static_cast<int>(within(words.number(), -1, kMostRanks));
  posted.tag = words.number();
  posted.bytes = static_cast<uint64_t>(words.number());
  posted.dtype = take(words, DType::Bytes);
  posted.delivered = take(words, Delivered::Data);
  posted.data = take_data(words);
  if (posted.data && (!posted.sends || posted.data->size() != posted.bytes ||
                      posted.data->size() > kLittleMessage)) {
    throw std::runtime_error("data that is not that of the message");
  }
  if (posted.delivered != Delivered::Nothing && (!posted.sends || posted.data)) {
    throw std::runtime_error("a message that cannot be delivered");
  }
  return posted;
}

Payload encoded_wanted(const Posted& receive) {
  return encoded(receive).put(static_cast<int64_t>(receive.number)).put(receive.rank);
}

Posted take_wanted(Payload& words, int sender, int ranks) {
  Posted receive = take_posted(words);
  receive.number = static_cast<uint64_t>(words.number());
  receive.rank = static_cast<int>(within(words.number(), 0, ranks - 1));
  if (receive.sends || receive.peer != sender || receive.rank == sender ||
      receive.bytes > kLittleMessage) {
    throw std::runtime_error("a receive that wants nothing of this rank");
  }
  return receive;
}

Payload encoded_delivery(const Posted& send) {
  return encoded(send).put(static_cast<int64_t>(send.number));
}

Posted take_delivery(Payload& words, int from, int to) {
  Posted send = take_posted(words);
  send.rank = from;
  send.number = static_cast<uint64_t>(words.number());
  if (!send.sends || send.peer != to || send.delivered != Delivered::Nothing) {
    throw std::runtime_error("a delivery of no message");
  }
  return send;
}

Payload& put(Payload& words, const OtherEnd& other) {
  return words.put(other.rank)
      .put(static_cast<int64_t>(other.number))
      .put(static_cast<int64_t>(other.delivered));
}

int take_rank_or_none(Payload& words, int ranks) {
  return static_cast<int>(within(words.number(), -1, ranks - 1));
}

OtherEnd take_other_end(Payload& words, int ranks) {
  OtherEnd other;
  other.rank = take_rank_or_none(words, ranks);
  other.number = static_cast<uint64_t>(words.number());
  other.delivered = take(words, Delivered::Data);
  return other;
}

Payload encoded(const End& end) {
  return Payload()
      .put(static_cast<int64_t>(end.kind))
      .put(end.ranks)
      .put(end.why)
      .put(static_cast<int64_t>(end.grace.count()))
      .put(static_cast<int64_t>(end.agreed));
}

End take_end(Payload& words) {
  End end;
  end.kind = take(words, ErrorKind::Closed);
  end.ranks = words.numbers<int>();
  end.why = words.text();
  end.grace = std::chrono::milliseconds(within(words.number(), -1, kMostGrace));
  end.agreed = static_cast<uint64_t>(words.number());
  return end;
}

}  // namespace c10d_ext
