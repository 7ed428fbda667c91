#include "backends/shm/engine.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <iterator>
#include <list>
#include <mutex>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include "backends/shm/aside.h"
#include "backends/shm/collective.h"
#include "backends/shm/crowd.h"
#include "backends/shm/postbox.h"
#include "backends/shm/select.h"
#include "backends/shm/spread.h"
#include "backends/shm/task.h"
#include "backends/shm/team.h"
#include "core/bounded.h"

namespace c10d_ext::shm {

namespace {

using Clock = Operation::Clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

// A sleeper looks around at least this often, for what nobody rings for.
constexpr milliseconds kNap{5};
// What is left until a deadline passes while a thread falls asleep and wakes up.
constexpr microseconds kShortest{50};
// The first sleep of a wait, which hears of what is published alone, so that it costs less.
constexpr milliseconds kDoze{1};
constexpr milliseconds kInterruptEvery{50};
// How long the progress thread leaves work to a caller who is about to wait for it anyway.
constexpr microseconds kHeadStart{100};
// Much data starts to move at once. The rest waits until the progress thread looks by itself, each
// kGlance for kLinger after it last found something: waking it would cost more than the collective.
constexpr size_t kUrgent = size_t{4} << 20;
constexpr milliseconds kGlance{1};
constexpr milliseconds kLinger{20};

constexpr std::string_view kVerbs[] = {"barrier",    "all_reduce",     "reduce",     "broadcast",
                                       "all_gather", "reduce_scatter", "all_to_all", "gather",
                                       "scatter",    "send",           "recv",       "all_reduce"};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Of the thread that calls: woken, it waits for its turn. Otherwise it would take the core from who
// woke it, in the middle of the call that started something to be done aside.
void be_patient() {
  if (sched_getscheduler(0) == SCHED_OTHER) {
    const sched_param none{};
    static_cast<void>(sched_setscheduler(0, SCHED_BATCH, &none));  // where it may
  }
}

bool is_point_to_point(Verb verb) {
  return verb == Verb::Send || verb == Verb::Recv;
}

std::string seconds(Clock::duration d) {
  std::ostringstream out;
  out << std::chrono::duration<double>(d).count() << " s";
  return out.str();
}

}  // namespace

std::string_view name_of(Verb verb) {
  const size_t i = static_cast<size_t>(verb);
  return i < std::size(kVerbs) ? kVerbs[i] : "unknown";
}

namespace {

constexpr uint64_t kExact = uint64_t{1} << 63;
constexpr int kSizeBits = 60;
// For each size, by how many dimensions there are.
constexpr int kBits[] = {60, 60, 30, 20, 15, 12, 10};

uint64_t hashed(uint64_t hash, uint64_t value) {
  return (hash ^ (value + 0x9e3779b97f4a7c15ULL + (hash << 6) + (hash >> 2))) & ~kExact;
}

// Dimensions in bits 60 to 62, and equal parts of the rest for their sizes; 0 where they do not
// fit.
uint64_t exact(const int64_t* sizes, size_t dimensions) {
  if (dimensions >= std::size(kBits)) {
    return 0;
  }
  uint64_t code = kExact | static_cast<uint64_t>(dimensions) << kSizeBits;
  int at = 0;
  for (size_t i = 0; i < dimensions; ++i) {
    const auto size = static_cast<uint64_t>(sizes[i]);
    if (size >> kBits[dimensions] != 0) {
      return 0;
    }
    code |= size << at;
    at += kBits[dimensions];
  }
  return code;
}

}  // namespace

namespace {

std::string list_of(const std::vector<int>& ranks) {
  std::ostringstream out;
  out << (ranks.size() == 1 ? "rank " : "ranks ");
  for (size_t i = 0; i < ranks.size(); ++i) {
    out << (i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ") << ranks[i];
  }
  return out.str();
}

}  // namespace

std::string text_of_difference(size_t ranks, uint64_t seq,
                               const std::function<bool(size_t, size_t)>& agree,
                               const std::function<std::string(size_t)>& said) {
  std::ostringstream text;
  text << "every rank must enter the same collective with matching arguments, got ";
  // Ranks that say the same share a line.
  std::vector<bool> told(ranks);
  const char* separator = "";
  for (size_t rank = 0; rank < ranks; ++rank) {
    if (told[rank]) {
      continue;
    }
    std::vector<int> same;
    for (size_t other = rank; other < ranks; ++other) {
      if (!told[other] && agree(rank, other)) {
        told[other] = true;
        same.push_back(static_cast<int>(other));
      }
    }
    text << separator << said(rank) << " on " << list_of(same);
    separator = ", ";
  }
  text << " in collective " << seq;
  return text.str();
}

std::string text_of_misfit(int from, uint64_t sent, DType sent_dtype, int to, uint64_t expected,
                           DType expected_dtype, int64_t tag) {
  const auto elements = [](uint64_t bytes, DType dtype) {
    return std::to_string(bytes / std::max<size_t>(size_of(dtype), 1)) + " x " +
           std::string(name_of(dtype));
  };
  std::ostringstream text;
  text << "what is sent must be what is received, got " << elements(sent, sent_dtype)
       << " from rank " << from << ", " << elements(expected, expected_dtype)
       << " expected by rank " << to << ", tag " << tag;
  return text.str();
}

std::string text_of_impatience(std::chrono::milliseconds timeout, const std::string& who) {
  return "the wait must end within " + std::to_string(timeout.count()) + " ms, got " +
         (who.empty() ? "none of the result by then" : "no answer from " + who) +
         "; what it waits for goes on";
}

uint64_t add_shape(uint64_t shapes, const int64_t* sizes, size_t dimensions) {
  const uint64_t code = exact(sizes, dimensions);
  if (code != 0 && (shapes == 0 || shapes == code)) {
    return code;
  }
  uint64_t hash = hashed(shapes, dimensions);
  for (size_t i = 0; i < dimensions; ++i) {
    hash = hashed(hash, static_cast<uint64_t>(sizes[i]));
  }
  return hash;
}

uint64_t join_shapes(uint64_t first, uint64_t second) {
  return first == second ? first : hashed(first, second);
}

bool shapes_agree(uint64_t first, uint64_t second) {
  return first == 0 || second == 0 || first == second;
}

std::string text_of_shapes(uint64_t shapes) {
  std::ostringstream text;
  if ((shapes & kExact) == 0) {
    if (shapes != 0) {
      text << "hash " << std::hex << shapes;
    }
    return text.str();
  }
  const size_t dimensions = shapes >> kSizeBits & 7;
  text << '[';
  for (size_t i = 0; i < dimensions; ++i) {
    const int bits = kBits[dimensions];
    text << (i == 0 ? "" : ", ")
         << (shapes >> static_cast<int>(i) * bits & ((uint64_t{1} << bits) - 1));
  }
  text << ']';
  return text.str();
}

size_t bytes_of(const Buffer& buffer) {
  size_t bytes = 0;
  for (const Piece& piece : buffer) {
    bytes += piece.bytes;
  }
  return bytes;
}

std::string Place::text() const {
  return "(rank " + std::to_string(rank) + "/" + std::to_string(size) + ", group '" + group + "')";
}

class Engine::Impl : public std::enable_shared_from_this<Engine::Impl> {
 public:
  Impl(std::shared_ptr<Mapping> mapping, size_t arena, int rank, int size, std::vector<Peer> peers,
       Settings settings)
      : settings_(std::move(settings)),
        place_{rank, size, settings_.group},
        team_(std::move(mapping), rank, size, arena),
        selection_(size, settings_.algorithms),
        spread_(team_),
        postbox_(team_, place_),
        peers_(std::move(peers)),
        lost_(static_cast<size_t>(size)),
        generation_(fork_generation()) {
    // More ranks than cores: whoever spins keeps from running whom it waits for, so it gives way
    // each time. Measured with 4 ranks on 2 cores, 8 B all_reduce: 27 us when it sleeps instead,
    // 12 us when it yields.
    if (static_cast<unsigned>(size) > std::max(1u, std::thread::hardware_concurrency())) {
      spins_ = 1;
      settings_.inline_time *= 3;
    }
    const std::string& overrides = selection_.overrides();
    const size_t shown = std::min(overrides.size(), Control::kMaxOverrides - 1);
    std::memcpy(team_.control(rank).overrides, overrides.data(), shown);
  }

  ~Impl() {
    if (forked()) {
      // The threads exist in the parent only.
      static_cast<void>(new std::list<std::thread>(std::move(threads_)));
    }
  }

  void submit(const std::shared_ptr<Operation>& operation) {
    Operation& op = *operation;
    op.submitted_ = Clock::now();
    op.timeout = bounded(op.timeout);
    if (forked()) {
      end(operation,
          closed(op, "the group must be used in the process that created it, got a forked child"));
      return;
    }
    spread_.tell();
    std::vector<Ended> ended;
    {
      std::unique_lock lock(mutex_);
      if (is_point_to_point(op.request.verb)) {
        op.seq_ = ++point_to_point_seq_;
      } else {
        op.seq_ = ++seq_;
      }
      if (const auto why = reason_to_refuse(op)) {
        lock.unlock();
        end(operation, *why);
        return;
      }
      pending_.fetch_add(1);
      op.urgent_ = is_urgent(op);
      urgent_.fetch_add(op.urgent_);
      if (is_point_to_point(op.request.verb)) {
        begin(op);
        messages_late_ = std::min(messages_late_, op.submitted_ + op.timeout);
        postbox_.post(operation);
      } else {
        queue_.push_back(operation);
      }
      // Now, so that the peers hear of it at once.
      advance(ended);
    }
    finish(ended);
    // Much data is for the thread that waits, or for the progress thread: the caller goes on.
    const bool leave = op.request.async && urgent_.load() != 0;
    if (!op.done() && !leave && settings_.inline_time.count() != 0) {
      const auto deadline = op.submitted_ + settings_.inline_time;
      drive([&] { return op.done(); }, [&](Clock::time_point now) { return now < deadline; },
            deadline);
    }
    if (!op.done() && op.request.async) {
      wake_progress_thread();
    }
  }

  bool wait(Operation& operation, std::optional<milliseconds> timeout,
            const std::function<void()>& interrupt) {
    if (operation.done()) {
      return true;
    }
    const auto start = Clock::now();
    const auto deadline = timeout ? start + bounded(*timeout) : Clock::time_point::max();
    Driving driving(*this);
    auto next_interrupt = start + kInterruptEvery;
    const bool ok = drive([&] { return operation.done(); },
                          [&](Clock::time_point now) {
                            if (interrupt && now >= next_interrupt) {
                              next_interrupt = now + kInterruptEvery;
                              interrupt();
                            }
                            return now < deadline;
                          },
                          deadline);
    return ok;
  }

  std::pair<std::vector<int>, std::string> awaited(const Operation& op) const {
    std::lock_guard lock(mutex_);
    std::vector<int> ranks;
    if (is_point_to_point(op.request.verb)) {
      ranks.assign(op.request.peer >= 0 ? 1 : 0, op.request.peer);
    } else if (task_) {
      ranks = task_.wait().missing();  // whoever an earlier one waits for, this one waits for, too
    }
    return {ranks, describe(ranks)};
  }

  void peer_lost(int rank) {
    lost_[static_cast<size_t>(rank)].store(true, std::memory_order_seq_cst);
    any_lost_.store(true, std::memory_order_seq_cst);
    wake_self();
  }

  void abort(const std::string& why) {
    if (forked()) {
      return;
    }
    poison(Failure::Kind::Closed, Verb::Barrier, 0, {});
    std::vector<Ended> ended;
    {
      std::lock_guard lock(mutex_);
      Failure failure{Failure::Kind::Closed, why + " " + place_.text(), {}, "abort", seq_};
      if (!broken_) {
        broken_ = std::make_shared<const Failure>(std::move(failure));
      }
      fail_all(ended);
    }
    finish(ended);
  }

  void close(milliseconds grace) {
    if (forked()) {
      return;
    }
    {
      std::lock_guard lock(gate_);
      if (closing_) {
        return;
      }
      closing_ = true;
    }
    if (pending_.load() != 0 && grace.count() > 0) {
      Driving driving(*this);
      const auto deadline = Clock::now() + grace;
      drive([&] { return pending_.load() == 0; },
            [&](Clock::time_point now) { return now < deadline; }, deadline);
    }
    std::vector<Ended> ended;
    {
      std::lock_guard lock(mutex_);
      if (!broken_) {
        broken_ = std::make_shared<const Failure>(
            Failure{Failure::Kind::Closed,
                    "the group must be alive, got a destroyed one " + place_.text(),
                    {},
                    "destroy",
                    seq_});
      }
      fail_all(ended);
    }
    finish(ended);
    {
      std::lock_guard lock(gate_);
      stop_ = true;
      gate_opens_.notify_all();
      handover_.notify_all();
    }
    wake_self();
    for (std::thread& thread : threads_) {  // there will be no more
      if (thread.get_id() == std::this_thread::get_id()) {
        // The last reference went away in a callback.
        thread.detach();
      } else {
        thread.join();
      }
    }
    team_.control(place_.rank).left.store(1, std::memory_order_seq_cst);
  }

  uint64_t seq() const {
    std::lock_guard lock(mutex_);
    return seq_;
  }
  std::shared_ptr<const Failure> broken() const {
    std::lock_guard lock(mutex_);
    return broken_;
  }
  const Place& place() const {
    return place_;
  }

 private:
  struct Ended {
    std::shared_ptr<Operation> operation;
    std::optional<Failure> failure;
  };

  // A thread's duty to this engine, for as long as it lives.
  class OnDuty : public Duty {
   protected:
    explicit OnDuty(Impl& impl) : impl_(impl), outer_(std::exchange(here, this)) {}
    ~OnDuty() {
      here = outer_;
    }
    Impl& impl_;

   private:
    Duty* const outer_;
  };

  // Of a thread that waits: the progress thread leaves the work to it.
  class Driving final : public OnDuty {
   public:
    explicit Driving(Impl& impl) : OnDuty(impl) {
      resume();
    }
    ~Driving() {
      leave();
    }
    void leave() override {
      if (impl_.drivers_.fetch_sub(1) == 1 && impl_.pending_.load() != 0) {
        impl_.wake_progress_thread();
      }
    }
    void resume() override {
      impl_.drivers_.fetch_add(1);
    }
  };

  // Of the progress thread: one thread at a time.
  class Shift final : public OnDuty {
   public:
    explicit Shift(Impl& impl) : OnDuty(impl) {}
    void leave() override {
      std::lock_guard lock(impl_.gate_);
      impl_.manned_ = false;
      impl_.lingers_.store(false);
      if (impl_.is_left_alone()) {
        impl_.call_progress_thread();
      }
    }
    void resume() override {
      std::lock_guard lock(impl_.gate_);
      over_ = impl_.manned_;
      if (!over_) {
        impl_.manned_ = true;
        impl_.lingers_.store(true);
      }
    }
    // Another thread took it over.
    bool over() const {
      return over_;
    }

   private:
    bool over_ = false;
  };

  bool forked() const {
    return fork_generation() != generation_;
  }

  // --- Under mutex_ -----------------------------------------------------------------------------

  static void begin(Operation& op) {
    op.begun_ = Clock::now();
    op.on_begin();
  }

  // One round over everything that is pending. False: nothing moved.
  // Now and then, and when `thorough`, a round without movement looks for the reason.
  bool advance(std::vector<Ended>& ended, bool thorough = false) {
    bool moved = false;
    if (!queue_.empty()) {
      if (!task_ && !begin_front()) {
        moved = true;
        take_front(ended, *broken_);
      } else if (task_.advance()) {
        moved = true;
        if (task_.finished()) {
          take_front(ended, outcome());
        }
      }
    }
    if (!postbox_.idle()) {
      moved |= collect_messages(ended);
    }
    if (!moved && (thorough || ++glances_ % 64 == 0 || any_lost_.load())) {
      look_for_trouble(ended);
      moved = !ended.empty();
    }
    return moved;
  }

  bool begin_front() {
    Operation& op = *queue_.front();
    try {
      begin(op);
      task_ = run_collective(team_, op.request, op.seq_, place_, selection_, settings_.strict);
      return true;
    } catch (const std::exception& e) {
      give_up(op, e.what());
      return false;
    }
  }

  // Out of memory in the middle of a collective: the others cannot go on without this rank.
  void give_up(const Operation& op, const std::string& why) {
    broken_ = std::make_shared<const Failure>(closed(op, why));
    poison(Failure::Kind::Closed, op.request.verb, op.seq_, {});
  }

  bool collect_messages(std::vector<Ended>& ended) {
    outcomes_.clear();
    const bool moved = postbox_.advance(outcomes_);
    for (Postbox::Outcome& o : outcomes_) {
      o.operation->source_rank_ = o.source_rank;
      if (!o.failure) {
        o.operation->on_arrived();
      }
      ended.push_back({std::move(o.operation), std::move(o.failure)});
    }
    return moved;
  }

  std::optional<Failure> outcome() {
    try {
      return task_.failure();
    } catch (const std::exception& e) {
      give_up(*queue_.front(), e.what());
      return *broken_;
    }
  }

  void take_front(std::vector<Ended>& ended, std::optional<Failure> failure) {
    task_ = Task();
    if (!failure) {
      queue_.front()->on_arrived();
    }
    ended.push_back({std::move(queue_.front()), std::move(failure)});
    queue_.pop_front();
  }

  bool has_died(int rank) const {
    const auto* pulse =
        settings_.pulses.empty() ? nullptr : settings_.pulses[static_cast<size_t>(rank)];
    return pulse != nullptr && (pulse->load(std::memory_order_acquire) & FUTEX_OWNER_DIED) != 0;
  }

  bool is_lost(int rank) {
    auto& lost = lost_[static_cast<size_t>(rank)];
    if (!lost.load(std::memory_order_acquire) && has_died(rank)) {
      lost.store(true, std::memory_order_seq_cst);
      any_lost_.store(true, std::memory_order_seq_cst);
      // The kernel has told one of those who wait.
      team_.ring_sleepers();
    }
    return lost.load(std::memory_order_acquire);
  }

  // Nothing moves: is that for good?
  void look_for_trouble(std::vector<Ended>& ended) {
    notice_poison();
    if (broken_) {
      fail_all(ended);
      return;
    }
    const auto now = Clock::now();
    if (!queue_.empty()) {
      const std::shared_ptr<Operation> op = queue_.front();
      std::vector<int> gone;
      for (int p : task_.wait().missing()) {
        if (is_lost(p)) {
          gone.push_back(p);
        }
      }
      // What a rank published before it went counts: looked at once more, after is_lost().
      if (!gone.empty() && !Team::Wait(task_.wait()).over()) {
        broken_ = std::make_shared<const Failure>(rank_lost(*op, gone));
        fail_all(ended);
        return;
      }
      if (now >= op->submitted_ + op->timeout) {
        const std::vector<int> missing = task_.wait().missing();
        if (!missing.empty()) {
          broken_ = std::make_shared<const Failure>(timed_out(*op, missing));
          poison(Failure::Kind::Timeout, op->request.verb, op->seq_, missing);
          fail_all(ended);
          return;
        }
      }
    }
    if (any_lost_.load()) {
      collect_messages(ended);
    }
    look_for_trouble_with_messages(now, ended);
  }

  void look_for_trouble_with_messages(Clock::time_point now, std::vector<Ended>& ended) {
    bool lost = false;
    // Who ended without leaving ends the messages of others, too: the rank at the other end may
    // have heard of it, and not come any more.
    std::vector<int> dead;
    for (int p = 0; p < place_.size && !postbox_.idle(); ++p) {
      if (p != place_.rank && is_lost(p)) {
        lost = true;
        if (team_.control(p).left.load(std::memory_order_acquire) == 0) {
          dead.push_back(p);
        }
      }
    }
    if (!lost && now < messages_late_) {
      return;  // without a look at each of them, of which there may be thousands
    }
    messages_late_ = Clock::time_point::max();
    std::vector<Ended> failed;
    postbox_.each([&](const std::shared_ptr<Operation>& op, bool started) {
      const auto late = op->submitted_ + op->timeout;
      const int peer = op->request.peer;
      std::vector<int> gone;
      for (int p = 0; p < place_.size; ++p) {
        if ((peer == p || peer == -1) && is_lost(p)) {
          gone.push_back(p);
        }
      }
      if (gone.empty() && !dead.empty()) {
        gone = dead;
        if (started && !broken_) {
          broken_ = std::make_shared<const Failure>(rank_lost(*op, gone));  // half of it is there
        }
      }
      if (!gone.empty()) {
        failed.push_back({op, rank_lost(*op, gone)});
      } else if (now < late) {
        messages_late_ = std::min(messages_late_, late);
      } else {
        std::vector<int> missing;
        if (peer >= 0) {
          missing.push_back(peer);
        }
        failed.push_back({op, timed_out(*op, missing)});
        if (started) {
          // Half of a message cannot be taken back.
          poison(Failure::Kind::Timeout, op->request.verb, op->seq_, missing);
        }
      }
    });
    for (Ended& e : failed) {
      postbox_.remove(e.operation);
      ended.push_back(std::move(e));
    }
  }

  void fail_all(std::vector<Ended>& ended) {
    while (!queue_.empty()) {
      const Failure failure = restated(*queue_.front());
      take_front(ended, failure);
    }
    std::vector<std::shared_ptr<Operation>> rest;
    postbox_.each([&](const std::shared_ptr<Operation>& op, bool) {
      if (std::find(rest.begin(), rest.end(), op) == rest.end()) {
        rest.push_back(op);
      }
    });
    for (const auto& op : rest) {
      postbox_.remove(op);
      ended.push_back({op, restated(*op)});
    }
  }

  // Why the group is broken, as this operation's failure.
  Failure restated(const Operation& op) const {
    Failure failure = *broken_;
    const std::string name(name_of(op.request.verb));
    if (failure.seq != op.seq_ || failure.op != name) {
      failure.text =
          name + ": " +
          (failure.kind == Failure::Kind::Closed ? failure.text
                                                 : "the group is broken since " + failure.text);
      failure.op = name;
      failure.seq = op.seq_;
    }
    return failure;
  }

  std::optional<Failure> reason_to_refuse(const Operation& op) {
    notice_poison();
    return broken_ ? std::optional(restated(op)) : std::nullopt;
  }

  void notice_poison() {
    if (!broken_ && team_.header().poison.state.load(std::memory_order_acquire) == 2) {
      broken_ = std::make_shared<const Failure>(read_poison());
    }
  }

  Failure closed(const Operation& op, const std::string& what) const {
    const std::string name(name_of(op.request.verb));
    return {Failure::Kind::Closed, name + ": " + what + " " + place_.text(), {}, name, op.seq_};
  }

  std::string describe(int rank) const {
    const size_t r = static_cast<size_t>(rank);
    std::ostringstream out;
    out << "rank " << rank;
    if (r < peers_.size() && peers_[r].pid != 0) {
      out << " (pid " << peers_[r].pid << ", ";
      if (lost_[r].load()) {
        out << (team_.control(rank).left.load() != 0 ? "left the group" : "gone");
      } else {
        out << process_state(peers_[r]);
      }
      out << ")";
    }
    return out.str();
  }
  std::string describe(const std::vector<int>& ranks) const {
    std::string text;
    for (size_t i = 0; i < ranks.size(); ++i) {
      text += (i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ") + describe(ranks[i]);
    }
    return text;
  }

  Failure rank_lost(const Operation& op, const std::vector<int>& gone) const {
    const std::string name(name_of(op.request.verb));
    std::ostringstream text;
    text << name << ": every rank must live until the " << what(op) << " is done, got "
         << describe(gone) << " " << place_.text();
    return {Failure::Kind::RankLost, text.str(), gone, name, op.seq_};
  }

  Failure timed_out(const Operation& op, const std::vector<int>& missing) const {
    const std::string name(name_of(op.request.verb));
    std::ostringstream text;
    text << name << ": the " << what(op) << " must be done within " << seconds(op.timeout)
         << ", got no answer from " << (missing.empty() ? "any rank" : describe(missing));
    if (!is_point_to_point(op.request.verb)) {
      for (int p : missing) {
        const uint64_t at = team_.control(p).stage.load() >> kStepBits;
        text << "; rank " << p << " is ";
        if (at >= op.seq_) {
          text << "in the middle of it";
        } else if (at == 0) {
          text << "before its first collective";
        } else {
          text << "at collective " << at;
        }
      }
    }
    text << " " << place_.text();
    return {Failure::Kind::Timeout, text.str(), missing, name, op.seq_};
  }

  std::string what(const Operation& op) const {
    std::ostringstream out;
    if (is_point_to_point(op.request.verb)) {
      out << "message with tag " << op.request.tag;
    } else {
      out << "collective " << op.seq_;
    }
    return out.str();
  }

  // Makes a failure everybody's. The first one stays.
  void poison(Failure::Kind kind, Verb verb, uint64_t seq, const std::vector<int>& ranks) {
    Poison& p = team_.header().poison;
    uint32_t none = 0;
    if (p.state.compare_exchange_strong(none, 1)) {
      p.kind = static_cast<uint32_t>(kind);
      p.rank = place_.rank;
      p.verb = static_cast<uint32_t>(verb);
      p.seq = seq;
      for (int r : ranks) {
        p.ranks[r / 64] |= uint64_t{1} << (r % 64);
      }
      p.state.store(2, std::memory_order_seq_cst);
      team_.ring_sleepers();
    }
  }

  Failure read_poison() const {
    const Poison& p = team_.header().poison;
    Failure failure;
    failure.kind = p.kind == static_cast<uint32_t>(Failure::Kind::Timeout) ? Failure::Kind::Timeout
                                                                           : Failure::Kind::Closed;
    failure.seq = p.seq;
    std::ostringstream text;
    if (failure.kind == Failure::Kind::Timeout) {
      for (int r = 0; r < place_.size; ++r) {
        if (p.ranks[r / 64] >> (r % 64) & 1) {
          failure.ranks.push_back(r);
        }
      }
      failure.op = name_of(static_cast<Verb>(p.verb));
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

  // --- Without locks ----------------------------------------------------------------------------

  void end(const std::shared_ptr<Operation>& operation, std::optional<Failure> failure) {
    operation->ended_ = Clock::now();
    if (operation->begun_ == Clock::time_point()) {
      operation->begun_ = operation->submitted_;
    }
    operation->failure_ = std::move(failure);
    operation->on_done(operation->failure());
    operation->done_.store(true, std::memory_order_release);
  }

  void finish(std::vector<Ended>& ended) {
    if (ended.empty()) {
      return;
    }
    for (Ended& e : ended) {
      urgent_.fetch_sub(e.operation->urgent_);
      pending_.fetch_sub(1);
      end(e.operation, std::move(e.failure));
    }
    ended.clear();
    // Another thread of this rank may sleep until one of them is done.
    if (team_.control(place_.rank).sleepers.load(std::memory_order_seq_cst) != 0) {
      wake_self();
    }
  }

  void wake_self() {
    Control& c = team_.control(place_.rank);
    c.bell.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(c.bell);
  }

  // Works at what is pending until `satisfied`, false when `go_on` says to stop before.
  template <class Satisfied, class GoOn>
  bool drive(const Satisfied& satisfied, const GoOn& go_on, Clock::time_point deadline) {
    Control& self = team_.control(place_.rank);
    std::vector<Ended> ended;
    const auto round = [&](bool thorough) {
      bool moved;
      {
        std::lock_guard lock(mutex_);
        moved = advance(ended, thorough);
      }
      finish(ended);
      return moved;
    };
    auto idle_since = Clock::now();
    bool dozed = false;
    for (int rounds = 0;; ++rounds) {
      if (satisfied()) {
        return true;
      }
      if (round(/*thorough=*/false)) {
        idle_since = Clock::now();
        dozed = false;
        if (!go_on(idle_since)) {
          return satisfied();
        }
        continue;
      }
      pause();
      if (rounds % spins_ != 0) {
        continue;
      }
      const auto now = Clock::now();
      if (!go_on(now)) {
        return satisfied();
      }
      thread_local Crowd crowd;
      const bool crowded = crowd.is_there(now);
      if (!crowded && now - idle_since < settings_.spin_time) {
        spread_.look(now);
        // The rank that is waited for may want this very core.
        sched_yield();
        crowd.gave_way(now, Clock::now());
        continue;
      }
      if (crowded && deadline - now < kShortest) {
        continue;
      }
      // From here on whoever publishes rings. What was published before that is seen now.
      self.sleepers.fetch_add(1, std::memory_order_seq_cst);
      const uint32_t seen = self.bell.load(std::memory_order_seq_cst);
      if (!round(/*thorough=*/true) && !satisfied()) {
        if (std::exchange(dozed, true)) {
          futex_sleep(self.bell, seen, settings_.pulses,
                      std::min<Clock::duration>(kNap, deadline - now));
        } else {
          futex_sleep(self.bell, seen, std::min<Clock::duration>(kDoze, deadline - now));
        }
      }
      self.sleepers.fetch_sub(1, std::memory_order_seq_cst);
      idle_since = Clock::now();
    }
  }

  static bool is_urgent(const Operation& op) {
    size_t bytes = 0;
    for (const auto* buffers : {&op.request.sources, &op.request.targets}) {
      for (const Buffer& buffer : *buffers) {
        bytes += bytes_of(buffer);
      }
    }
    return bytes >= kUrgent;
  }

  void wake_progress_thread() {
    // Either this sees that the thread does not linger any more, or the thread sees what is
    // pending.
    if (!settings_.progress_thread || (lingers_.load() && urgent_.load() == 0)) {
      return;
    }
    std::lock_guard lock(gate_);
    if (drivers_.load() == 0) {
      call_progress_thread();
    }
  }

  // Under gate_.
  void call_progress_thread() {
    if (stop_) {
      return;
    }
    wanted_ = true;
    if (manned_) {
      gate_opens_.notify_one();
      return;
    }
    if (spares_ != 0) {
      handed_over_ = true;
      handover_.notify_one();
    } else {
      try {
        threads_.emplace_back([self = shared_from_this()] { self->progress(); });
      } catch (const std::system_error& error) {
        throw std::system_error(error.code(), "shm: a group needs a thread of its own");
      }
    }
    manned_ = true;
  }

  bool is_left_alone() const {
    return pending_.load() != 0 && drivers_.load() == 0;
  }

  // Starts with the shift, and waits for another one once that was taken over by a thread that
  // may be in a callback next.
  void progress() {
    be_patient();
    pthread_setname_np(pthread_self(), "c10d_ext_shm");
    for (;;) {
      Shift shift(*this);
      const auto relieved = [&] { return shift.over() || !is_left_alone(); };
      while (!shift.over()) {
        if (!wait_for_work()) {
          return;
        }
        drive(relieved, [&](Clock::time_point) { return !stopping(); }, Clock::time_point::max());
      }
      std::unique_lock lock(gate_);
      ++spares_;
      handover_.wait(lock, [&] { return stop_ || handed_over_; });
      --spares_;
      if (stop_) {
        return;
      }
      handed_over_ = false;
    }
  }

  // False: the end.
  bool wait_for_work() {
    std::unique_lock lock(gate_);
    const auto deadline = Clock::now() + kLinger;
    lingers_.store(true);
    for (;;) {
      if (wanted_ && !stop_) {
        wanted_ = false;
        gate_opens_.wait_for(lock, kHeadStart, [&] { return stop_; });
        return !stop_;
      }
      if (!lingers_.load()) {
        gate_opens_.wait(lock, [&] { return stop_ || wanted_; });
      } else if (!gate_opens_.wait_for(lock, kGlance, [&] { return stop_ || wanted_; })) {
        lingers_.store(Clock::now() < deadline);
        if (is_left_alone()) {
          return true;
        }
      }
      if (stop_) {
        return false;
      }
    }
  }

  bool stopping() {
    std::lock_guard lock(gate_);
    return stop_;
  }

  Settings settings_;
  const Place place_;
  const Team team_;
  const Selection selection_;
  Spread spread_;

  mutable std::mutex mutex_;
  std::deque<std::shared_ptr<Operation>> queue_;
  Task task_;  // of queue_.front()
  Postbox postbox_;
  // No message is late before.
  Clock::time_point messages_late_ = Clock::time_point::max();
  std::vector<Postbox::Outcome> outcomes_;
  uint64_t seq_ = 0;
  uint64_t point_to_point_seq_ = 0;
  unsigned glances_ = 0;
  std::shared_ptr<const Failure> broken_;

  const std::vector<Peer> peers_;
  std::vector<std::atomic<bool>> lost_;
  std::atomic<bool> any_lost_{false};
  std::atomic<size_t> pending_{0};
  std::atomic<size_t> urgent_{0};
  std::atomic<int> drivers_{0};
  const uint64_t generation_;
  // Rounds between two looks at the clock.
  int spins_ = 16;

  std::mutex gate_;
  std::condition_variable gate_opens_;
  std::atomic<bool> lingers_{false};
  bool wanted_ = false;
  bool stop_ = false;
  bool closing_ = false;
  // Whether a thread is at the progress thread's place, and those that wait for their turn there.
  bool manned_ = false;
  int spares_ = 0;
  bool handed_over_ = false;
  std::condition_variable handover_;
  std::list<std::thread> threads_;
};

size_t Engine::mapping_bytes(int size, size_t arena) {
  return Layout(size, arena).total();
}

Engine::Engine(std::shared_ptr<Mapping> mapping, size_t arena, int rank, int size,
               std::vector<Peer> peers, Settings settings)
    : impl_(std::make_shared<Impl>(std::move(mapping), arena, rank, size, std::move(peers),
                                   std::move(settings))) {}

Engine::~Engine() {
  impl_->close(std::chrono::milliseconds(0));
}

void Engine::submit(const std::shared_ptr<Operation>& operation) {
  impl_->submit(operation);
}
bool Engine::wait(Operation& operation, std::optional<std::chrono::milliseconds> timeout,
                  const std::function<void()>& interrupt) {
  return impl_->wait(operation, timeout, interrupt);
}
std::pair<std::vector<int>, std::string> Engine::awaited(const Operation& operation) const {
  return impl_->awaited(operation);
}
void Engine::peer_lost(int rank) {
  impl_->peer_lost(rank);
}
void Engine::abort(const std::string& why) {
  impl_->abort(why);
}
void Engine::close(std::chrono::milliseconds grace) {
  impl_->close(grace);
}
uint64_t Engine::seq() const {
  return impl_->seq();
}
std::shared_ptr<const Failure> Engine::broken() const {
  return impl_->broken();
}
int Engine::rank() const {
  return impl_->place().rank;
}
int Engine::size() const {
  return impl_->place().size;
}

}  // namespace c10d_ext::shm
