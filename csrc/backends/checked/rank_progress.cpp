#include "backends/checked/rank_progress.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

namespace c10d_ext {

void RankProgress::hear_call(int rank, Payload& words) {
  auto called = take_fingerprint(words);
  const auto is_of_all = [&](const auto& parts) {
    return parts.empty() || parts.size() == calls_.size();
  };
  if (!is_of_all(called.sends) || !is_of_all(called.expects) ||
      called.root >= roster_.place().size) {
    throw std::runtime_error("a call of another group");
  }
  auto data = take_data(words);
  if (data && data->size() * calls_.size() > kMostData) {
    throw std::runtime_error("a call with too much data");
  }
  if (static_cast<uint64_t>(words.number()) != at(rank) + 1) {
    throw std::runtime_error("a call is missing");
  }
  calls_[static_cast<size_t>(rank)].push_back({std::move(called), std::move(data)});
}

bool RankProgress::has_someone_called() const {
  return std::any_of(calls_.begin(), calls_.end(), [](auto& c) { return !c.empty(); });
}

bool RankProgress::have_all_called() const {
  return std::none_of(calls_.begin(), calls_.end(), [](auto& c) { return c.empty(); });
}

RankProgress::Calls RankProgress::take_calls() {
  ++agreed_;
  Calls calls;
  bool have_all_data = true;
  for (auto& own : calls_) {
    calls.called.push_back(std::move(own.front().called));
    if (auto& data = own.front().data) {
      calls.data.push_back(std::move(*data));
    } else {
      have_all_data = false;
    }
    own.pop_front();
  }
  if (!have_all_data) {
    calls.data.clear();
  }
  return calls;
}

std::vector<int> RankProgress::suspects(uint64_t seq) const {
  std::vector<int> ranks;
  for (size_t rank = 0; seq > agreed_ && rank < calls_.size(); ++rank) {
    if (agreed_ + calls_[rank].size() < seq) {
      ranks.push_back(static_cast<int>(rank));
    }
  }
  for (size_t rank = 1; seq <= agreed_ && rank < calls_.size(); ++rank) {
    ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

bool RankProgress::lose(const std::vector<int>& ranks, const std::string& how) {
  bool any = false;
  for (const int rank : ranks) {
    auto& left = left_[static_cast<size_t>(rank)];
    if (left.empty()) {
      left = how;
      any = true;
    }
  }
  return any;
}

bool RankProgress::has_lost_some() const {
  return std::any_of(left_.begin(), left_.end(), [](auto& how) { return !how.empty(); });
}

bool RankProgress::is_alone() const {
  return std::none_of(left_.begin() + 1, left_.end(), [](auto& how) { return how.empty(); });
}

End RankProgress::lost() const {
  std::vector<int> gone;
  std::chrono::milliseconds grace = kUnlimited;
  for (size_t rank = 0; rank < left_.size(); ++rank) {
    if (!left_[rank].empty()) {
      gone.push_back(static_cast<int>(rank));
      // What would come over a link that is down the kernel has waited for.
      grace = left_[rank] == kUnreachable ? std::chrono::milliseconds(0)
              : left_[rank] == kGone      ? kDataGrace
                                          : grace;
    }
  }
  return {ErrorKind::RankLost, gone,
          roster_.describe(gone, [this](int rank) { return how_left(rank); }), grace};
}

}  // namespace c10d_ext
