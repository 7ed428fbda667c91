#include "backends/shm/group_health.h"

#include <linux/futex.h>

#include <chrono>
#include <sstream>
#include <utility>

namespace c10d_ext::shm {

namespace {

std::string name_of_op(const Operation& op) {
  return std::string(name_of(op.request.type));
}

// "collective 7", "message with tag 3"
std::string what(const Operation& op) {
  return is_point_to_point(op.request.type) ? "message with tag " + std::to_string(op.request.tag)
                                            : "collective " + std::to_string(op.seq());
}

std::string seconds(Operation::Clock::duration d) {
  std::ostringstream out;
  out << std::chrono::duration<double>(d).count() << " s";
  return out.str();
}

}  // namespace

GroupHealth::GroupHealth(const GroupMemory& memory, const Place& place, std::vector<Peer> peers,
                         std::vector<std::atomic<uint32_t>*> pulses)
    : memory_(memory),
      place_(place),
      peers_(std::move(peers)),
      pulses_(std::move(pulses)),
      lost_(static_cast<size_t>(place.size)) {}

void GroupHealth::mark_lost(int rank) {
  lost_[static_cast<size_t>(rank)].store(true, std::memory_order_seq_cst);
  any_lost_.store(true, std::memory_order_seq_cst);
}

bool GroupHealth::has_died(int rank) const {
  const auto* pulse = pulses_.empty() ? nullptr : pulses_[static_cast<size_t>(rank)];
  return pulse != nullptr && (pulse->load(std::memory_order_acquire) & FUTEX_OWNER_DIED) != 0;
}

bool GroupHealth::is_lost(int rank) {
  const auto& lost = lost_[static_cast<size_t>(rank)];
  if (!lost.load(std::memory_order_acquire) && has_died(rank)) {
    mark_lost(rank);
    // The kernel has woken one sleeper, of any rank.
    memory_.ring_sleepers();
  }
  return lost.load(std::memory_order_acquire);
}

std::vector<int> GroupHealth::lost_among(const std::vector<int>& ranks) {
  std::vector<int> lost;
  for (const int rank : ranks) {
    if (is_lost(rank)) {
      lost.push_back(rank);
    }
  }
  return lost;
}

bool GroupHealth::has_left(int rank) const {
  return memory_.control(rank).left.load(std::memory_order_acquire) != 0;
}

void GroupHealth::poison(ErrorKind kind, OpType op, uint64_t seq, const std::vector<int>& ranks) {
  Poison& p = memory_.header().poison;
  uint32_t none = 0;
  if (p.state.compare_exchange_strong(none, 1)) {
    p.kind = static_cast<uint32_t>(kind);
    p.rank = place_.rank;
    p.type = static_cast<uint32_t>(op);
    p.seq = seq;
    for (const int r : ranks) {
      p.ranks[r / 64] |= uint64_t{1} << (r % 64);
    }
    p.state.store(2, std::memory_order_seq_cst);
    memory_.ring_sleepers();
  }
}

std::optional<Failure> GroupHealth::poisoned() const {
  if (memory_.header().poison.state.load(std::memory_order_acquire) != 2) {
    return std::nullopt;
  }
  return read_poison();
}

Failure GroupHealth::read_poison() const {
  const Poison& p = memory_.header().poison;
  Failure failure;
  failure.kind =
      p.kind == static_cast<uint32_t>(ErrorKind::Timeout) ? ErrorKind::Timeout : ErrorKind::Closed;
  failure.seq = p.seq;
  std::ostringstream text;
  if (failure.kind == ErrorKind::Timeout) {
    for (int r = 0; r < place_.size; ++r) {
      if (p.ranks[r / 64] >> (r % 64) & 1) {
        failure.ranks.push_back(r);
      }
    }
    failure.op = name_of(static_cast<OpType>(p.type));
    text << failure.op << ": collective " << p.seq << " must be done in time, got rank " << p.rank
         << " giving up on " << (failure.ranks.empty() ? "the others" : describe(failure.ranks));
  } else {
    failure.op = "abort";
    failure.ranks = {p.rank};
    text << "the group must be alive, got an abort by rank " << p.rank;
  }
  text << " " << place_.text();
  failure.text = text.str();
  return failure;
}

std::string GroupHealth::describe(int rank) const {
  const size_t r = static_cast<size_t>(rank);
  std::ostringstream out;
  out << "rank " << rank;
  if (r < peers_.size() && peers_[r].pid != 0) {
    out << " (pid " << peers_[r].pid << ", ";
    if (lost_[r].load()) {
      out << (has_left(rank) ? "left the group" : "gone");
    } else {
      out << process_state(peers_[r]);
    }
    out << ")";
  }
  return out.str();
}

std::string GroupHealth::describe(const std::vector<int>& ranks) const {
  std::string text;
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ") + describe(ranks[i]);
  }
  return text;
}

Failure GroupHealth::closed(const Operation& op, const std::string& why) const {
  const std::string name = name_of_op(op);
  return {ErrorKind::Closed, name + ": " + why + " " + place_.text(), {}, name, op.seq()};
}

Failure GroupHealth::rank_lost(const Operation& op, const std::vector<int>& gone) const {
  const std::string name = name_of_op(op);
  std::ostringstream text;
  text << name << ": every rank must live until the " << what(op) << " is done, got "
       << describe(gone) << " " << place_.text();
  return {ErrorKind::RankLost, text.str(), gone, name, op.seq()};
}

Failure GroupHealth::timed_out(const Operation& op, const std::vector<int>& missing) const {
  const std::string name = name_of_op(op);
  std::ostringstream text;
  text << name << ": the " << what(op) << " must be done within " << seconds(op.timeout)
       << ", got no answer from " << (missing.empty() ? "any rank" : describe(missing));
  if (!is_point_to_point(op.request.type)) {
    for (const int p : missing) {
      const uint64_t at = memory_.control(p).stage.load() >> kStepBits;
      text << "; rank " << p << " is ";
      if (at >= op.seq()) {
        text << "in the middle of it";
      } else if (at == 0) {
        text << "before its first collective";
      } else {
        text << "at collective " << at;
      }
    }
  }
  text << " " << place_.text();
  return {ErrorKind::Timeout, text.str(), missing, name, op.seq()};
}

Failure GroupHealth::restated(Failure why, const Operation& op) {
  const std::string name = name_of_op(op);
  if (why.seq != op.seq() || why.op != name) {
    why.text = name + ": " +
               (why.kind == ErrorKind::Closed ? why.text : "the group is broken since " + why.text);
    why.op = name;
    why.seq = op.seq();
  }
  return why;
}

}  // namespace c10d_ext::shm
