#include "backends/shm/scheduler.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "backends/shm/collective.h"

namespace c10d_ext::shm {

std::optional<Failure> Scheduler::number(Operation& op) {
  op.seq_ = is_point_to_point(op.request.type) ? ++point_to_point_seq_ : ++seq_;
  notice_poison();
  return broken_ ? std::optional(GroupHealth::restated(*broken_, op)) : std::nullopt;
}

void Scheduler::add(const Item& operation) {
  Operation& op = *operation;
  if (is_point_to_point(op.request.type)) {
    begin(op);
    messages_late_ = std::min(messages_late_, op.submitted_ + op.timeout);
    messages_.post(operation);
  } else {
    queue_.push_back(operation);
  }
}

bool Scheduler::advance(std::vector<Ended>& ended, bool thorough) {
  bool moved = false;
  if (!queue_.empty()) {
    if (!task_ && !begin_front()) {
      moved = true;
      take_front(ended, *broken_);
    } else if (task_.advance()) {
      moved = true;
      if (task_.finished()) {
        take_front(ended, outcome());
        if (broken_) {
          fail_all(ended);
        }
      }
    }
  }
  if (!messages_.idle()) {
    moved |= collect_messages(ended);
  }
  if (!moved && (thorough || ++rounds_without_movement_ % 64 == 0 || health_.any_lost())) {
    look_for_trouble(ended);
    moved = !ended.empty();
  }
  return moved;
}

void Scheduler::fail(Failure why, std::vector<Ended>& ended) {
  if (!broken_) {
    broken_ = std::make_shared<const Failure>(std::move(why));
  }
  fail_all(ended);
}

std::vector<int> Scheduler::awaited(const Operation& op) const {
  std::vector<int> ranks;
  if (is_point_to_point(op.request.type)) {
    ranks.assign(op.request.peer >= 0 ? 1 : 0, op.request.peer);
  } else if (task_) {
    ranks = task_.wait().missing();  // of the collective that runs now, which comes first
  }
  return ranks;
}

void Scheduler::begin(Operation& op) {
  op.begun_ = Clock::now();
  op.on_begin();
}

bool Scheduler::begin_front() {
  Operation& op = *queue_.front();
  try {
    begin(op);
    task_ = run_collective(memory_, op.request, op.seq_, health_.place(), selection_, strict_);
    return true;
  } catch (const std::exception& e) {
    give_up(op, e.what());
    return false;
  }
}

void Scheduler::take_front(std::vector<Ended>& ended, std::optional<Failure> failure) {
  task_ = Task();
  if (!failure) {
    queue_.front()->on_arrived();
  }
  ended.push_back({std::move(queue_.front()), std::move(failure)});
  queue_.pop_front();
}

std::optional<Failure> Scheduler::outcome() {
  try {
    auto failure = task_.failure();
    // On every rank alike: no poison is needed.
    if (failure && failure->ends_group) {
      broken_ = std::make_shared<const Failure>(*failure);
    }
    return failure;
  } catch (const std::exception& e) {
    give_up(*queue_.front(), e.what());
    return *broken_;
  }
}

// An exception (out of memory) in the middle of a collective: the other ranks cannot complete it.
void Scheduler::give_up(const Operation& op, const std::string& why) {
  broken_ = std::make_shared<const Failure>(health_.closed(op, why));
  health_.poison(ErrorKind::Closed, op.request.type, op.seq_, {});
}

bool Scheduler::collect_messages(std::vector<Ended>& ended) {
  outcomes_.clear();
  const bool moved = messages_.advance(outcomes_);
  for (PointToPoint::Outcome& o : outcomes_) {
    o.operation->source_rank_ = o.source_rank;
    if (!o.failure) {
      o.operation->on_arrived();
    }
    ended.push_back({std::move(o.operation), std::move(o.failure)});
  }
  return moved;
}

void Scheduler::look_for_trouble(std::vector<Ended>& ended) {
  notice_poison();
  const auto now = Clock::now();
  if (broken_ || (!queue_.empty() && look_at_collective(now))) {
    fail_all(ended);
    return;
  }
  if (health_.any_lost()) {
    collect_messages(ended);
  }
  look_at_messages(now, ended);
}

bool Scheduler::look_at_collective(Clock::time_point now) {
  const Operation& op = *queue_.front();
  const std::vector<int> gone = health_.lost_among(task_.wait().missing());
  // A lost rank may have published the stage before it was lost: check again after lost_among().
  if (!gone.empty() && !GroupMemory::Wait(task_.wait()).over()) {
    broken_ = std::make_shared<const Failure>(health_.rank_lost(op, gone));
    return true;
  }
  if (now < op.submitted_ + op.timeout) {
    return false;
  }
  const std::vector<int> missing = task_.wait().missing();
  if (missing.empty()) {
    return false;
  }
  broken_ = std::make_shared<const Failure>(health_.timed_out(op, missing));
  health_.poison(ErrorKind::Timeout, op.request.type, op.seq_, missing);
  return true;
}

void Scheduler::look_at_messages(Clock::time_point now, std::vector<Ended>& ended) {
  bool lost = false;
  // A rank that died without leaving ends messages between other ranks, too: the peer may know of
  // the death and never post its end.
  std::vector<int> dead;
  for (int p = 0; p < memory_.size() && !messages_.idle(); ++p) {
    if (p != memory_.rank() && health_.is_lost(p)) {
      lost = true;
      if (!health_.has_left(p)) {
        dead.push_back(p);
      }
    }
  }
  if (!lost && now < messages_late_) {
    return;  // without visiting each message: there may be thousands
  }
  messages_late_ = Clock::time_point::max();
  std::vector<Ended> failed;
  messages_.each([&](const Item& op, bool started) {
    const auto late = op->submitted_ + op->timeout;
    const int peer = op->request.peer;
    std::vector<int> gone;
    for (int p = 0; p < memory_.size(); ++p) {
      if ((peer == p || peer == -1) && health_.is_lost(p)) {
        gone.push_back(p);
      }
    }
    if (gone.empty() && !dead.empty()) {
      gone = dead;
      if (started && !broken_) {
        // A part of the message has been written.
        broken_ = std::make_shared<const Failure>(health_.rank_lost(*op, gone));
      }
    }
    if (!gone.empty()) {
      failed.push_back({op, health_.rank_lost(*op, gone)});
    } else if (now < late) {
      messages_late_ = std::min(messages_late_, late);
    } else {
      std::vector<int> missing;
      if (peer >= 0) {
        missing.push_back(peer);
      }
      failed.push_back({op, health_.timed_out(*op, missing)});
      if (started) {
        // A started message cannot be cancelled.
        health_.poison(ErrorKind::Timeout, op->request.type, op->seq_, missing);
      }
    }
  });
  for (Ended& e : failed) {
    messages_.remove(e.operation);
    ended.push_back(std::move(e));
  }
}

void Scheduler::notice_poison() {
  if (!broken_) {
    if (auto poison = health_.poisoned()) {
      broken_ = std::make_shared<const Failure>(std::move(*poison));
    }
  }
}

void Scheduler::fail_all(std::vector<Ended>& ended) {
  while (!queue_.empty()) {
    take_front(ended, GroupHealth::restated(*broken_, *queue_.front()));
  }
  std::vector<Item> rest;
  messages_.each([&](const Item& op, bool) {
    if (std::find(rest.begin(), rest.end(), op) == rest.end()) {
      rest.push_back(op);
    }
  });
  for (const auto& op : rest) {
    messages_.remove(op);
    ended.push_back({op, GroupHealth::restated(*broken_, *op)});
  }
}

}  // namespace c10d_ext::shm
