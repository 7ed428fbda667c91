#include "backends/checked/matching.h"

#include <algorithm>
#include <iterator>

namespace c10d_ext {

namespace {

bool could_take(const Posted& receive, const Posted& send) {
  return receive.peer == send.rank || receive.peer < 0;
}

}  // namespace

std::optional<Posted> Matching::match(const Posted& posted) {
  const auto key = std::make_pair(posted.sends ? posted.peer : posted.rank, posted.tag);
  const auto box = boxes_.try_emplace(key).first;
  auto& others = posted.sends ? box->second.receives : box->second.sends;
  const auto other = std::find_if(others.begin(), others.end(), [&](const Posted& o) {
    return posted.sends ? could_take(o, posted) : could_take(posted, o);
  });
  if (other == others.end()) {
    auto& kept = (posted.sends ? box->second.sends : box->second.receives).emplace_back(posted);
    if (kept.data) {
      kept.data = kept.data->kept();
    }
    return std::nullopt;
  }
  const Posted found = *other;
  others.erase(other);
  if (box->second.sends.empty() && box->second.receives.empty()) {
    boxes_.erase(box);
  }
  return found;
}

const Posted* Matching::receive_for(const Posted& send) const {
  const auto box = boxes_.find({send.peer, send.tag});
  if (box == boxes_.end()) {
    return nullptr;
  }
  const auto& receives = box->second.receives;
  const auto found = std::find_if(receives.begin(), receives.end(),
                                  [&](const Posted& receive) { return could_take(receive, send); });
  return found == receives.end() ? nullptr : &*found;
}

bool Matching::want_last(int rank, int64_t tag) {
  auto& receives = boxes_.at({rank, tag}).receives;
  Posted& last = receives.back();
  last.is_wanted = std::none_of(receives.begin(), std::prev(receives.end()), [&](const Posted& o) {
    return !o.is_wanted && (o.peer < 0 || o.peer == last.peer);
  });
  return last.is_wanted;
}

const Posted* Matching::find_any(const std::function<bool(const Posted&)>& which) const {
  for (const auto& [key, box] : boxes_) {
    for (const auto* ends : {&box.sends, &box.receives}) {
      const auto found = std::find_if(ends->begin(), ends->end(), which);
      if (found != ends->end()) {
        return &*found;
      }
    }
  }
  return nullptr;
}

const Posted* Matching::find(int rank, uint64_t number) const {
  return find_any([&](const Posted& o) { return o.rank == rank && o.number == number; });
}

void Matching::give_up(int rank, uint64_t number) {
  for (auto& [key, box] : boxes_) {
    for (Posted& send : box.sends) {
      send.is_given_up |= send.rank == rank && send.number == number;
    }
  }
}

std::optional<Posted> Matching::take_out(int rank, uint64_t number) {
  const auto taken =
      take_out([&](const Posted& o) { return o.rank == rank && o.number == number; });
  return taken.empty() ? std::nullopt : std::optional(taken.front());
}

std::vector<Posted> Matching::take_out(const std::function<bool(const Posted&)>& which) {
  std::vector<Posted> taken;
  for (auto box = boxes_.begin(); box != boxes_.end();) {
    for (auto* ends : {&box->second.sends, &box->second.receives}) {
      for (auto end = ends->begin(); end != ends->end();) {
        if (which(*end)) {
          taken.push_back(*end);
          end = ends->erase(end);
        } else {
          ++end;
        }
      }
    }
    box = box->second.sends.empty() && box->second.receives.empty() ? boxes_.erase(box)
                                                                    : std::next(box);
  }
  return taken;
}

}  // namespace c10d_ext
