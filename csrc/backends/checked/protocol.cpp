#include "backends/checked/protocol.h"

#include <algorithm>
#include <stdexcept>

#include "backends/checked/host_sums.h"

namespace c10d_ext {

namespace {

constexpr int64_t kMostGrace = 3'600'000;

}  // namespace

void tell_go(uint64_t seq, const std::vector<Contribution>& data, const std::vector<int>& ranks,
             const std::vector<std::vector<int>>& hosts,
             const std::function<void(int rank, Says kind, const Payload& words)>& tell) {
  const bool has_parts =
      std::any_of(data.begin(), data.end(), [](const auto& one) { return one.has_parts(); });
  std::optional<Payload> words;
  // The first of them says it, and tells itself last: it has other things to do then.
  for (auto rank = ranks.rbegin(); rank != ranks.rend(); ++rank) {
    if (!words || has_parts) {
      words = Payload().put(static_cast<int64_t>(seq));
      const auto result = reduced(data, hosts, *rank);
      result ? words->put(1).put_data(*result) : put_all_of(*words, data, *rank);
    }
    tell(*rank, kGo, *words);
  }
}

void put_data(Payload& words, const std::optional<SharedBytes>& data) {
  words.put(data ? 1 : 0);
  if (data) {
    words.put_data(*data);
  }
}

std::optional<SharedBytes> take_data(Payload& words) {
  auto data = words.number_within(0, 1) != 0 ? std::optional(words.data()) : std::nullopt;
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
  posted.peer = static_cast<int>(words.number_within(-1, kMostRanks));
  posted.tag = words.number();
  posted.bytes = static_cast<uint64_t>(words.number());
  posted.dtype = words.one_of(DType::Bytes);
  posted.delivered = words.one_of(Delivered::Data);
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
  receive.rank = static_cast<int>(words.number_within(0, ranks - 1));
  words.expect_end();
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
  words.expect_end();
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
  return static_cast<int>(words.number_within(-1, ranks - 1));
}

OtherEnd take_other_end(Payload& words, int ranks) {
  OtherEnd other;
  other.rank = take_rank_or_none(words, ranks);
  other.number = static_cast<uint64_t>(words.number());
  other.delivered = words.one_of(Delivered::Data);
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
  end.kind = words.one_of(ErrorKind::Closed);
  end.ranks = words.numbers<int>();
  end.why = words.text();
  end.grace = std::chrono::milliseconds(words.number_within(-1, kMostGrace));
  end.agreed = static_cast<uint64_t>(words.number());
  return end;
}

}  // namespace c10d_ext
