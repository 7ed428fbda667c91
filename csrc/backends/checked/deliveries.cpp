#include "backends/checked/deliveries.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace c10d_ext {

namespace {

// So many bytes of a rank are held at most, beside what receives are about to take: it has 1 MiB on
// its way, and may have heard of what became of that before this one does.
constexpr size_t kMostHeld = size_t{1} << 22;

size_t most_of(uint64_t bytes) {
  return static_cast<size_t>(std::min<uint64_t>(bytes, kLittleMessage));
}

size_t size_of(const Posted& send) {
  return send.data ? send.data->size() : 0;
}

Deliveries::Send key_of(const Posted& send) {
  return {send.rank, send.number};
}

Deliveries::Send key_of(const OtherEnd& send) {
  return {send.rank, send.number};
}

}  // namespace

void Deliveries::post(const Posted& receive) {
  const int rank = roster_.place().rank;
  if (receive.peer < 0 ? !roster_.has_direct(rank) : !roster_.are_direct(receive.peer, rank)) {
    return;
  }
  channels_[receive.tag].receives.push_back(
      {receive.number, receive.peer, receive.bytes, receive.dtype});
  tags_.emplace(receive.number, receive.tag);
  expected_ += most_of(receive.bytes);
  settle(receive.tag);
}

void Deliveries::add(Posted send) {
  const int rank = roster_.place().rank;
  auto& last = last_[send.rank];
  auto& held = held_[send.rank];
  const size_t size = size_of(send);
  if (send.peer != rank || !roster_.are_direct(send.rank, rank) || send.number <= last ||
      held + size > kMostHeld + expected_) {
    throw std::runtime_error("a delivery that cannot be for this rank");
  }
  last = send.number;
  if (const auto awaited = awaited_.extract(key_of(send))) {
    if (const auto& receive = awaited.mapped()) {
      if (!send.data) {
        throw std::runtime_error("a delivery without its data");
      }
      received_.push_back({*receive, send.rank, std::move(*send.data)});
    }
    return;
  }
  if (send.data && !receive_for(send)) {
    send.data = send.data->kept();  // a receive that is in doubt may have lent its memory
  }
  held += size;
  const int64_t tag = send.tag;
  channels_[tag].sends[send.rank].push_back(std::move(send));
  settle(tag);
}

void Deliveries::doubt(uint64_t number) {
  const auto tag = tags_.find(number);
  if (tag == tags_.end()) {
    return;
  }
  for (auto& receive : channels_.at(tag->second).receives) {
    receive.is_in_doubt |= receive.number == number;
  }
}

int Deliveries::sender_for(uint64_t number) const {
  if (const auto tag = tags_.find(number); tag != tags_.end()) {
    const auto& receives = channels_.at(tag->second).receives;
    return std::find_if(receives.begin(), receives.end(),
                        [&](const Receive& one) { return one.number == number; })
        ->peer;
  }
  const auto awaited = std::find_if(awaited_.begin(), awaited_.end(),
                                    [&](const auto& one) { return one.second == number; });
  return awaited == awaited_.end() ? -1 : awaited->first.first;
}

bool Deliveries::grant(uint64_t number, const OtherEnd& send) {
  const auto found = take_receive(number);
  if (!found) {
    return true;
  }
  const auto& [tag, receive] = *found;
  to_withdraw_.erase(key_of(send));
  bool begins = false;
  if (receive.over_by) {
    if (*receive.over_by != key_of(send)) {
      throw std::runtime_error("another message than the one that has come");
    }
  } else if (send.delivered == Delivered::Nothing) {
    begins = true;
  } else if (auto here = take(tag, key_of(send))) {
    begins = send.delivered == Delivered::Words;
    if (here->data.has_value() == begins) {
      throw std::runtime_error("a message that came otherwise than its sender says");
    }
    if (!begins) {
      received_.push_back({number, send.rank, std::move(*here->data)});
    }
  } else {
    begins = send.delivered == Delivered::Words;
    awaited_[key_of(send)] = begins ? std::nullopt : std::optional(number);
    if (!begins && receive.peer < 0 && receive.is_in_doubt) {
      known_.push_back(number);
    }
  }
  settle(tag);
  return begins;
}

void Deliveries::deny(uint64_t number, const OtherEnd& send) {
  const auto found = take_receive(number);
  if (!found) {
    return;
  }
  if (send.delivered != Delivered::Nothing && !take(found->first, key_of(send))) {
    awaited_[key_of(send)] = std::nullopt;
  }
  settle(found->first);
}

void Deliveries::withdraw(const OtherEnd& send, int64_t tag) {
  to_withdraw_[key_of(send)] = {tag, send.delivered};
  channels_.try_emplace(tag);
  settle(tag);
}

void Deliveries::settle(int64_t tag) {
  const auto found = channels_.find(tag);
  if (found == channels_.end()) {
    return;
  }
  auto& channel = found->second;
  for (auto& [from, sends] : channel.sends) {
    pair(sends, channel.receives);
  }
  let_go(tag, channel);
  std::erase_if(channel.sends, [](const auto& sends) { return sends.second.empty(); });
  if (channel.receives.empty() && channel.sends.empty()) {
    channels_.erase(found);
  }
}

Deliveries::Receive* Deliveries::receive_of(const Posted& send, std::list<Receive>& receives) {
  for (auto& receive : receives) {
    if (receive.over_by || (receive.peer >= 0 && receive.peer != send.rank)) {
      continue;
    }
    const bool is_known = receive.peer >= 0 && !receive.is_in_doubt;
    const bool fits = send.data && send.bytes == receive.bytes && send.dtype == receive.dtype;
    return is_known && fits ? &receive : nullptr;
  }
  return nullptr;
}

void Deliveries::pair(std::deque<Posted>& sends, std::list<Receive>& receives) {
  while (!sends.empty()) {
    auto* const receive = receive_of(sends.front(), receives);
    if (receive == nullptr) {
      return;
    }
    const Send send = key_of(sends.front());
    receive->over_by = send;
    taken_.push_back(send);
    received_.push_back({receive->number, send.first, std::move(*take_first(sends).data)});
  }
}

std::optional<uint64_t> Deliveries::receive_for(const Posted& send) {
  if (const auto awaited = awaited_.find(key_of(send)); awaited != awaited_.end()) {
    return awaited->second;
  }
  const auto channel = channels_.find(send.tag);
  if (channel == channels_.end() || channel->second.sends.count(send.rank) != 0) {
    return std::nullopt;
  }
  const auto* const receive = receive_of(send, channel->second.receives);
  return receive == nullptr ? std::nullopt : std::optional(receive->number);
}

void Deliveries::let_go(int64_t tag, Channel& channel) {
  for (auto it = to_withdraw_.begin(); it != to_withdraw_.end();) {
    const auto one = it++;
    const auto& [send, how] = *one;
    if (how.tag != tag) {
      continue;
    }
    bool is_over = false, is_wanted = false;
    for (const auto& receive : channel.receives) {
      is_over |= receive.over_by == send;
      is_wanted |= !receive.over_by && (receive.peer < 0 || receive.peer == send.first);
    }
    if (is_over || (is_wanted && how.delivered == Delivered::Data)) {
      continue;  // rank 0 is about to match them
    }
    drop(send, channel);
    withdrawn_.push_back(send);
    to_withdraw_.erase(one);
  }
}

void Deliveries::drop(const Send& send, Channel& channel) {
  auto& sends = channel.sends[send.first];
  const auto found = std::find_if(sends.begin(), sends.end(),
                                  [&](const Posted& one) { return one.number == send.second; });
  if (found == sends.end()) {
    awaited_[send] = std::nullopt;
    return;
  }
  held_[send.first] -= size_of(*found);
  sends.erase(found);
}

std::optional<Posted> Deliveries::take(int64_t tag, const Send& send) {
  auto& all = channels_[tag].sends;
  const auto found = all.find(send.first);
  if (found == all.end() || found->second.empty()) {
    return std::nullopt;
  }
  if (found->second.front().number != send.second) {
    throw std::runtime_error("a message before those that were sent before it");
  }
  return take_first(found->second);
}

Posted Deliveries::take_first(std::deque<Posted>& sends) {
  Posted first = std::move(sends.front());
  sends.pop_front();
  held_[first.rank] -= size_of(first);
  return first;
}

std::optional<std::pair<int64_t, Deliveries::Receive>> Deliveries::take_receive(uint64_t number) {
  const auto tag = tags_.extract(number);
  if (!tag) {
    return std::nullopt;
  }
  auto& receives = channels_.at(tag.mapped()).receives;
  const auto found = std::find_if(receives.begin(), receives.end(),
                                  [&](const Receive& one) { return one.number == number; });
  expected_ -= most_of(found->bytes);
  std::pair taken(tag.mapped(), *found);
  receives.erase(found);
  return taken;
}

std::vector<Deliveries::Received> Deliveries::take_received() {
  return std::exchange(received_, {});
}

std::vector<Deliveries::Send> Deliveries::take_taken() {
  return std::exchange(taken_, {});
}

std::vector<Deliveries::Send> Deliveries::take_withdrawn() {
  return std::exchange(withdrawn_, {});
}

std::vector<uint64_t> Deliveries::take_known() {
  return std::exchange(known_, {});
}

}  // namespace c10d_ext
