#include "backends/checked/sent_messages.h"

#include <algorithm>

namespace c10d_ext {

namespace {

// Whether its data is on its way, by rank 0 or to who receives it.
bool travels(const Posted& posted) {
  return posted.data || posted.delivered == Delivered::Data;
}

}  // namespace

SentMessages::End SentMessages::end_of(const Posted& posted) {
  return {posted.number, posted.bytes, posted.dtype, travels(posted)};
}

bool SentMessages::is_over(const Channel& channel, const End& send, const End& receive) {
  return channel.is_known && send.has_data && send.bytes == receive.bytes &&
         send.dtype == receive.dtype;
}

bool SentMessages::add(const Posted& send) {
  const Key key{send.peer, send.tag};
  const size_t data = travels(send) ? send.bytes : 0;
  open_.emplace(send.number, Open{key, data});
  bytes_ += data;
  auto& channel = channels_[key];
  if (channel.receives.empty()) {
    channel.sends.push_back(end_of(send));
    return false;
  }
  const bool over = is_over(channel, end_of(send), channel.receives.front());
  channel.receives.pop_front();
  tidy(key);
  return over;
}

std::optional<uint64_t> SentMessages::want(const Posted& receive) {
  const Key key{receive.rank, receive.tag};
  auto& channel = channels_[key];
  if (channel.sends.empty()) {
    channel.receives.push_back(end_of(receive));
    return std::nullopt;
  }
  const End send = channel.sends.front();
  channel.sends.pop_front();
  channel.is_known &= !send.is_in_doubt;
  const bool over = is_over(channel, send, end_of(receive));
  tidy(key);
  return over ? std::optional(send.number) : std::nullopt;
}

void SentMessages::doubt(uint64_t number) {
  const auto found = open_.find(number);
  if (found == open_.end()) {
    return;
  }
  for (End& send : channels_[found->second.key].sends) {
    send.is_in_doubt |= send.number == number;
  }
  tidy(found->second.key);
}

void SentMessages::unwant(int rank, int64_t tag, uint64_t number) {
  const Key key{rank, tag};
  if (const auto found = channels_.find(key); found != channels_.end()) {
    std::erase_if(found->second.receives, [&](const End& end) { return end.number == number; });
    tidy(key);
  }
}

bool SentMessages::is_to(int rank, uint64_t number) const {
  const auto found = open_.find(number);
  return found != open_.end() && found->second.key.first == rank;
}

void SentMessages::settle(uint64_t number) {
  const auto found = open_.find(number);
  if (found == open_.end()) {
    return;
  }
  const Key key = found->second.key;
  bytes_ -= found->second.data;
  open_.erase(found);
  if (const auto channel = channels_.find(key); channel != channels_.end()) {
    std::erase_if(channel->second.sends, [&](const End& end) { return end.number == number; });
    tidy(key);
  }
}

void SentMessages::tidy(const Key& key) {
  const auto& [sends, receives, is_known] = channels_[key];
  if (sends.empty() && receives.empty() && is_known) {
    channels_.erase(key);
  }
}

}  // namespace c10d_ext
