#include "backends/checked/own_messages.h"

#include <utility>

namespace c10d_ext {

namespace {

// So many bytes of this rank's messages are on their way at a time, and may wait where they go.
constexpr size_t kMostHeld = size_t{1} << 20;

}  // namespace

size_t OwnMessages::most_with_words(int peer) const {
  const int rank = roster_.place().rank;
  const bool is_for_root = peer >= 0 && (rank == 0 || peer == 0) && roster_.is_linked(peer);
  if (is_direct(peer) || (is_for_root && !roster_.hosts().empty())) {
    const bool is_of_leaders = roster_.is_leader(rank) && roster_.is_leader(peer);
    return is_of_leaders ? kLittleAmongWords : kLittleMessage;
  }
  const bool is_short =
      roster_.are_on_one_machine(rank, 0) || (peer >= 0 && roster_.are_on_one_machine(peer, 0));
  return is_short ? kLittleAmongWords : kLittleOnDetour;
}

News OwnMessages::post(Posted posted) {
  posted.rank = roster_.place().rank;
  if (posted.data && (sent_.bytes() + posted.data->size() > kMostHeld ||
                      posted.data->size() > most_with_words(posted.peer))) {
    posted.data.reset();
  }
  News news{posted.number, kPosting, {}};
  if (posted.sends && is_direct(posted.peer)) {
    news.peer = posted.peer;
    news.delivery = encoded_delivery(posted);
    posted.delivered = posted.data ? Delivered::Data : Delivered::Words;
    posted.data.reset();
  }
  news.words = encoded(posted).put(static_cast<int64_t>(posted.number));
  if (!posted.sends) {
    deliveries_.post(posted);
  } else if (sent_.add(posted)) {
    news.wanted_by = posted.peer;
  }
  return news;
}

void OwnMessages::grant(uint64_t number, const OtherEnd& other, std::optional<SharedBytes> data) {
  sent_.settle(number);
  if (deliveries_.grant(number, other)) {
    granted_.push_back({number, other.rank, std::move(data)});
  }
}

void OwnMessages::deny(uint64_t number, const OtherEnd& other) {
  sent_.settle(number);
  deliveries_.deny(number, other);
}

void OwnMessages::want(const Posted& receive) {
  if (const auto over = sent_.want(receive)) {
    granted_.push_back({*over, receive.rank, SharedBytes()});
  }
}

void OwnMessages::take(int from, uint64_t number) {
  if (sent_.is_to(from, number)) {
    granted_.push_back({number, from, SharedBytes()});
  }
}

std::vector<OwnMessages::Granted> OwnMessages::take_granted() {
  for (auto& [number, from, data] : deliveries_.take_received()) {
    granted_.push_back({number, from, std::move(data)});
  }
  return std::exchange(granted_, {});
}

std::vector<News> OwnMessages::take_news() {
  std::vector<News> news;
  for (const auto& [rank, number] : deliveries_.take_taken()) {
    news.push_back({number, kTaken, Payload().put(static_cast<int64_t>(number))});
    news.back().peer = rank;
  }
  for (const auto& [rank, number] : deliveries_.take_withdrawn()) {
    Payload words;
    news.push_back({number, kWithdrawn, put(words, {rank, number, Delivered::Data})});
  }
  return news;
}

}  // namespace c10d_ext
