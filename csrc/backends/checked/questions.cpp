#include "backends/checked/questions.h"

#include <algorithm>
#include <utility>

namespace c10d_ext {

namespace {

// How long rank 0 waits to hear that a rank has ended, where the data of another one has not come.
constexpr std::chrono::milliseconds kNews{300};
// The same where another rank has lost its line to it.
constexpr std::chrono::milliseconds kEndsMeanwhile{150};

}  // namespace

bool Questions::has(const Question& question) const {
  return std::any_of(questions_.begin(), questions_.end(), [&](const Question& open) {
    return open.kind == question.kind && open.seq == question.seq && open.of == question.of;
  });
}

void Questions::add(Question question) {
  const auto now = Clock::now();
  // A rank that is gone makes itself known meanwhile.
  const auto news = question.kind == kSevered   ? kEndsMeanwhile
                    : question.waits_for_news() ? kNews
                                                : std::chrono::milliseconds(0);
  question.from = now + news;
  question.until = now + (question.kind == kSevered ? news : kSilent);
  questions_.push_back(std::move(question));
}

void Questions::hear(int rank) {
  for (auto& question : questions_) {
    question.silent.erase(rank);
  }
}

Questions::Clock::time_point Questions::next() const {
  auto next = Clock::time_point::max();
  for (const auto& question : questions_) {
    next = std::min(next, question.silent.empty() ? question.from : question.until);
  }
  return next;
}

std::vector<Question> Questions::take_ripe(Clock::time_point now) {
  std::vector<Question> ripe;
  std::erase_if(questions_, [&](const Question& question) {
    if ((question.silent.empty() ? question.from : question.until) <= now) {
      ripe.push_back(question);
      return true;
    }
    return false;
  });
  return ripe;
}

}  // namespace c10d_ext
