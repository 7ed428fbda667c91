#include "backends/checked/rank_progress.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

namespace c10d_ext {

void RankProgress::hear_call(int rank, Payload& words) {
  Calling call = take_call(words, roster_.place().size, roster_.hosts().size());
  words.expect_no_more_data();
  if (call.seq != at(rank) + 1) {
    throw std::runtime_error("a call is missing");
  }
  calls_[static_cast<size_t>(rank)].push_back(std::move(call));
}

bool RankProgress::is_next_lost() const {
  bool is_called = false, is_lost = false;
  for (size_t rank = 0; rank < calls_.size(); ++rank) {
    is_called = is_called || !calls_[rank].empty();
    // Who has left after it knew that the others would call it, too.
    const bool has_done = left_[rank] == kLeft && left_after_[rank] > agreed_;
    is_lost = is_lost || (!left_[rank].empty() && !has_done);
  }
  return is_called && is_lost;
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

void RankProgress::hear_done(int rank, uint64_t seq) {
  auto& last = done_[static_cast<size_t>(rank)];
  if (seq <= last || seq > agreed_) {
    throw std::runtime_error("what is done must have begun");
  }
  last = seq;
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

void RankProgress::leave(int rank, uint64_t after) {
  left_[static_cast<size_t>(rank)] = kLeft;
  left_after_[static_cast<size_t>(rank)] = after;
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
