// A thread per rank and group talks over the lines. Rank 0's is also the coordinator's.

#include "backends/checked/agreement.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "backends/checked/coordinator.h"
#include "backends/checked/heartbeat.h"
#include "backends/checked/open_calls.h"
#include "backends/checked/protocol.h"
#include "backends/checked/roster.h"
#include "base/signal_masked_thread.h"
#include "base/timeouts.h"
#include "control/death_sockets.h"

namespace c10d_ext {

namespace {

using Clock = OpenCalls::Clock;
using Milliseconds = Agreement::Milliseconds;
using Kind = ErrorKind;

constexpr size_t kLongest = size_t{1} << 26;
// What rank 0 has to find out what is the matter.
constexpr Milliseconds kVerdict{2000};
Clock::time_point after(Milliseconds time) {
  return Clock::now() + bounded(time);
}

thread_local bool agreeing_here = false;

}  // namespace

class Agreement::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(Connections star, Place place)
      : roster_(std::move(place), std::move(star.members)),
        calls_(roster_, kVerdict),
        generation_(fork_generation()),
        wake_(Pipe::open()),
        lines_(std::move(star.lines)),
        heartbeat_([this] {
          std::vector<bool> is_far(lines_.size());
          for (size_t i = 0; i < lines_.size(); ++i) {
            is_far[i] = lines_[i].is_open() && roster_.is_linked(static_cast<int>(i));
          }
          return is_far;
        }()),
        death_sockets_(std::in_place, std::move(star.death_sockets)) {
    if (roster_.place().rank == 0) {
      coordinator_.emplace(
          roster_, [this](int rank, Says kind, const Payload& words) { tell(rank, kind, words); });
    }
    for (const auto* end : {&wake_.read_end, &wake_.write_end}) {
      fcntl(end->get(), F_SETFL, fcntl(end->get(), F_GETFL) | O_NONBLOCK);
    }
  }

  void start() {
    thread_ = signal_masked_thread("c10d_ext_agree", [self = shared_from_this()] { self->run(); });
  }

  // --- From any thread --------------------------------------------------------------------------

  uint64_t call(Operation operation) {
    Payload words = encoded(operation.called);
    return enter(kCalling, std::move(words),
                 {std::move(operation.op), std::nullopt, operation.timeout,
                  std::move(operation.begin), std::move(operation.fail)});
  }

  uint64_t post(Message message) {
    Payload words = encoded(Posted{.sends = message.sends,
                                   .peer = message.peer,
                                   .tag = message.tag,
                                   .bytes = message.bytes,
                                   .dtype = message.dtype});
    std::string op(name_of(message.sends ? OpType::Send : OpType::Recv));
    return enter(
        kPosting, std::move(words),
        {std::move(op), message.tag, message.timeout,
         [begin = std::move(message.begin)](uint64_t peer) { begin(static_cast<int>(peer)); },
         std::move(message.fail)});
  }

  uint64_t count() const {
    return calls_.count();
  }

  void done(uint64_t seq) {
    if (calls_.done(seq)) {
      wake();
    }
  }

  void broke(uint64_t seq, const std::string& why) {
    bring({seq, kBroken, Payload().put(static_cast<int64_t>(seq)).put(why)});
  }

  std::optional<Failure> failure(const std::string& op, uint64_t seq, Milliseconds within) const {
    if (is_foreign()) {
      return calls_.closed(op, seq, kForked);
    }
    return calls_.failure(op, seq, within);
  }

  // Of collective or message `number`.
  std::pair<std::vector<int>, std::string> awaited(Says question, uint64_t number,
                                                   Milliseconds within) {
    if (is_foreign()) {
      return {};
    }
    calls_.expect_answer({question, number});
    wake();
    const auto who = calls_.answer({question, number}, within);
    return who ? std::pair(who->ranks, who->text) : std::pair<std::vector<int>, std::string>();
  }

  std::optional<int> gone(int rank) const {
    if (is_foreign()) {
      return std::nullopt;
    }
    bool gone = false;
    if (roster_.is_near(rank)) {
      gone = roster_.has_ended(rank);
    } else {
      const auto end = calls_.end();
      const auto names = [&](const char* how) {
        return end->why.find(roster_.describe(rank, how)) != std::string::npos;
      };
      gone = end && end->kind == Kind::RankLost && (names(kGone) || names(kUnreachable));
    }
    return gone ? std::optional(roster_.pid(rank)) : std::nullopt;
  }

  bool has_abandoned() const {
    return calls_.has_abandoned();
  }

  // The locks of another process may be taken, and nobody here would ever give them back.
  bool is_foreign() const {
    return fork_generation() != generation_;
  }

  void abort() {
    bring({0, kAborting, {}});
    calls_.wait_for_end(kVerdict);
  }

  void leave(Milliseconds grace) {
    if (is_foreign()) {
      if (thread_.joinable()) {
        thread_.detach();  // there is none
      }
      return;
    }
    bool can_wait = false;
    {
      const std::lock_guard lock(thread_mutex_);
      if (!thread_.joinable()) {
        return;
      }
      can_wait = thread_.get_id() != std::this_thread::get_id();
      thread_.detach();
    }
    calls_.leave(can_wait ? std::optional(grace) : std::nullopt);
    wake();
    if (can_wait) {
      calls_.wait_until_left();
    }
  }

 private:
  static constexpr char kForked[] =
      "the group must be used in the process that created it, got a forked child";

  // Tells rank 0 of it, with its number after `words`.
  uint64_t enter(Says kind, Payload words, OpenCall call) {
    if (is_foreign()) {
      call.fail(calls_.closed(call.op, 0, kForked));
      return 0;
    }
    auto [seq, failed] = calls_.enter(kind, std::move(words), std::move(call));
    if (failed) {
      failed->call.fail(failed->failure);
    } else {
      wake();
    }
    return seq;
  }

  void bring(OpenCalls::News news) {
    calls_.add_news(std::move(news));
    wake();
  }

  void wake() const {
    const char word = 0;
    [[maybe_unused]] const auto written = ::write(wake_.write_end.get(), &word, 1);
  }

  // --- The thread
  // -----------------------------------------------------------------------------------------------

  void run() {
    agreeing_here = true;
    while (!calls_.is_leaving()) {
      std::vector<pollfd> fds{{wake_.read_end.get(), POLLIN, 0}, {death_sockets_->fd(), POLLIN, 0}};
      const size_t others = fds.size();
      std::vector<size_t> of;
      for (size_t i = 0; i < lines_.size(); ++i) {
        if (lines_[i].is_open()) {
          const int events = POLLIN | (lines_[i].has_unsent() ? POLLOUT : 0);
          fds.push_back({lines_[i].fd(), static_cast<int16_t>(events), 0});
          of.push_back(i);
        }
      }
      if (::poll(fds.data(), fds.size(), milliseconds_left()) < 0) {
        continue;
      }
      if (fds[0].revents != 0) {
        std::array<char, 64> words;
        while (::read(wake_.read_end.get(), words.data(), words.size()) > 0) {
        }
      }
      for (size_t i = 0; i < of.size(); ++i) {
        if (fds[others + i].revents != 0) {
          lines_[of[i]].flush();
          hear(of[i]);
        }
      }
      while (const auto line = death_sockets_->next_cut()) {
        cut(*line);
      }
      tell_news();
      beat();
      look_at_the_clock();
      settle();
    }
    say_goodbye();
  }

  // Until something is late; -1: nothing can be.
  int milliseconds_left() {
    const auto next = std::min({coordinator_ ? coordinator_->next_look() : OpenCalls::kNever,
                                calls_.next_late(), heartbeat_.next()});
    if (next == OpenCalls::kNever) {
      return -1;
    }
    const auto left = std::chrono::ceil<Milliseconds>(next - Clock::now());
    return static_cast<int>(std::clamp(left, Milliseconds(0), Milliseconds(60'000)).count());
  }

  // What comes over a line; rank 0's others, and theirs to rank 0.
  void hear(size_t line) {
    const int rank = static_cast<int>(line);
    const bool stays = lines_[line].listen(kLongest);
    try {
      while (auto sentence = lines_[line].next()) {
        heartbeat_.heard(line);
        if (sentence->kind == kBeat) {
          continue;
        }
        coordinator_ ? coordinator_->hear(rank, sentence->kind, sentence->words)
                     : obey(sentence->kind, sentence->words);
      }
    } catch (const std::runtime_error&) {
      lose(line);  // talks nonsense
      return;
    }
    if (!stays) {
      lose(line);
    }
  }

  void beat() {
    for (const size_t line : heartbeat_.take_due(Clock::now())) {
      if (lines_[line].is_open()) {
        lines_[line].say(kBeat, {});
      }
    }
  }

  // Before the kernel says so: what the rank has said still counts.
  void cut(size_t line) {
    if (lines_[line].is_open()) {
      hear(line);
    }
    if (lines_[line].is_open()) {
      lose(line);
    }
  }

  void lose(size_t line) {
    const bool is_unreachable = lines_[line].is_unreachable();
    const std::string how = is_unreachable ? kUnreachable : kGone;
    lines_[line].close();
    if (!coordinator_) {
      if (!root_left_) {
        calls_.finish({Kind::RankLost,
                       {0},
                       roster_.describe(0, how),
                       is_unreachable ? Milliseconds(0) : kGrace});
      }
      return;
    }
    std::vector<int> ranks{static_cast<int>(line)};
    const auto now = Clock::now();
    for (size_t other = 0; is_unreachable && other < lines_.size(); ++other) {
      // With a machine all of its ranks are.
      if (lines_[other].is_open() && heartbeat_.is_quiet(other, now) &&
          roster_.are_on_one_machine(static_cast<int>(other), static_cast<int>(line))) {
        lines_[other].close();
        ranks.push_back(static_cast<int>(other));
      }
    }
    coordinator_->lose(ranks, how);
  }

  // What other threads of this rank have left to be said.
  void tell_news() {
    for (auto& one : calls_.take_news()) {
      if (one.kind != kBroken || calls_.break_off(one.seq)) {
        say(one.kind, std::move(one.words));
      }
    }
  }

  // To rank 0, which may be this one.
  void say(Says kind, Payload words) {
    if (coordinator_) {
      coordinator_->hear(0, kind, words);
    } else if (lines_[0].is_open()) {
      lines_[0].say(kind, words);
    }
  }

  // As the coordinator. To a rank, which may be this one.
  void tell(int rank, Says kind, Payload words) {
    if (rank == 0) {
      obey(kind, words);
    } else if (auto& line = lines_[static_cast<size_t>(rank)]; line.is_open()) {
      line.say(kind, words);
    }
  }

  bool is_root_stopped() const {
    return !coordinator_ && roster_.is_near(0) && roster_.process_state(0) == "stopped";
  }

  void look_at_the_clock() {
    const auto now = Clock::now();
    auto late = calls_.take_late(now, [this] { return is_root_stopped(); });
    for (auto& [kind, words] : late.questions) {
      say(kind, std::move(words));
    }
    if (!late.unanswered.empty()) {
      const std::string state = roster_.is_near(0) ? roster_.process_state(0) : "silent";
      calls_.finish(
          {Kind::Timeout,
           {0},
           "the " + late.unanswered + ", got no answer from " + roster_.describe(0, state),
           kGrace});
    }
    if (coordinator_) {
      coordinator_->look(now);
    }
  }

  // Calls what other code has to do, without the lock.
  void settle() {
    const auto [grants, fails] = calls_.take_settled();
    while (const auto next = calls_.next_to_begin()) {
      try {
        next->second(next->first);
      } catch (const std::exception& error) {
        broke(next->first, error.what());
      }
    }
    for (const auto& [peer, begin] : grants) {
      begin(peer);
    }
    for (const auto& failed : fails) {
      failed.call.fail(failed.failure);
    }
    calls_.notify();
  }

  void say_goodbye() {
    for (auto& line : lines_) {
      if (line.is_open()) {
        line.say(kLeaving, {});
      }
    }
    death_sockets_.reset();
    for (auto& failed : calls_.close()) {
      failed.call.fail(failed.failure);
    }
    calls_.set_left();
    linger();
  }

  // A connection closed with words in it that nobody has read takes back what was said last.
  void linger() {
    for (const auto& line : lines_) {
      if (line.is_open()) {
        ::shutdown(line.fd(), SHUT_WR);
      }
    }
    for (const auto until = after(kVerdict); Clock::now() < until;) {
      std::vector<pollfd> fds;
      for (auto& line : lines_) {
        if (line.is_open() && !line.listen(kLongest)) {
          line.close();
        }
        while (line.next()) {
        }
        if (line.is_open()) {
          fds.push_back({line.fd(), POLLIN, 0});
        }
      }
      if (fds.empty()) {
        break;
      }
      ::poll(fds.data(), fds.size(), 100);
    }
  }

  // --- A rank's part
  // --------------------------------------------------------------------------------------------

  void obey(uint32_t kind, Payload& words) {
    switch (kind) {
      case kGo:
        calls_.go(static_cast<uint64_t>(words.number()));
        break;
      case kDiffer: {
        const auto seq = static_cast<uint64_t>(words.number());
        const auto text = words.text();
        calls_.deny_collective(seq, Kind::Mismatch, {text, words.numbers<int>()});
        break;
      }
      case kGranted: {
        const auto number = static_cast<uint64_t>(words.number());
        const auto peer = words.number();
        if (peer < 0 || peer >= roster_.place().size) {
          throw std::runtime_error("a message to or from nobody");
        }
        calls_.grant(number, static_cast<uint64_t>(peer));
        break;
      }
      case kDenied: {
        const auto number = static_cast<uint64_t>(words.number());
        const auto said = words.number();
        if (said < 0 || said > static_cast<int64_t>(Kind::Closed)) {
          throw std::runtime_error("an error of an unknown kind");
        }
        const auto kind = static_cast<Kind>(said);
        const auto text = words.text();
        calls_.deny_message(number, kind, {text, words.numbers<int>()});
        break;
      }
      case kAwaited: {
        const auto question = static_cast<Says>(words.number());
        const auto number = static_cast<uint64_t>(words.number());
        const auto text = words.text();
        calls_.take_answer({question, number}, {text, words.numbers<int>()});
        break;
      }
      case kPing:
        say(kPong, {});
        break;
      case kOver:
        calls_.finish(take_end(words));
        break;
      case kDoomed:
        calls_.doom(static_cast<uint64_t>(words.number()));
        break;
      case kLeaving:
        // Nothing else will be agreed.
        root_left_ = true;
        calls_.finish({Kind::RankLost, {0}, roster_.describe(0, kLeft), kUnlimited});
        break;
      default:
        throw std::runtime_error("a sentence of an unknown kind");
    }
  }

  const Roster roster_;
  OpenCalls calls_;
  const uint64_t generation_;
  const Pipe wake_;
  std::mutex thread_mutex_;
  std::thread thread_;  // let go of by the first to leave

  // The thread's own from here on.
  std::vector<Connection> lines_;
  Heartbeat heartbeat_;
  bool root_left_ = false;
  std::optional<Coordinator> coordinator_;  // rank 0's
  std::optional<DeathSockets> death_sockets_;
};

std::unique_ptr<Agreement> Agreement::join(const KeyValueStore& store, const Place& place,
                                           Milliseconds timeout, const std::string& machine) {
  auto impl = std::make_shared<Impl>(connect_to_coordinator(store, place, timeout, machine), place);
  return std::unique_ptr<Agreement>(new Agreement(std::move(impl)));
}

Agreement::Agreement(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {
  impl_->start();
}

Agreement::~Agreement() {
  leave(Milliseconds(0));
}

void Agreement::leave(Milliseconds grace) {
  impl_->leave(grace);
}

std::optional<int> Agreement::gone(int rank) const {
  return impl_->gone(rank);
}

bool Agreement::has_abandoned() const {
  return impl_->has_abandoned();
}

bool Agreement::is_foreign() const {
  return impl_->is_foreign();
}

uint64_t Agreement::call(Operation operation) {
  return impl_->call(std::move(operation));
}

uint64_t Agreement::count() const {
  return impl_->count();
}

uint64_t Agreement::post(Message message) {
  return impl_->post(std::move(message));
}

std::pair<std::vector<int>, std::string> Agreement::awaited(uint64_t seq, Milliseconds within) {
  return impl_->awaited(kAsking, seq, within);
}

std::pair<std::vector<int>, std::string> Agreement::awaited_by_message(uint64_t number,
                                                                       Milliseconds within) {
  return impl_->awaited(kAskingOfMessage, number, within);
}

void Agreement::done(uint64_t seq) {
  impl_->done(seq);
}

void Agreement::broke(uint64_t seq, const std::string& why) {
  impl_->broke(seq, why);
}

std::optional<Failure> Agreement::failure(const std::string& op, uint64_t seq,
                                          Milliseconds within) const {
  return impl_->failure(op, seq, within);
}

bool Agreement::is_here() {
  return agreeing_here;
}

void Agreement::abort() {
  impl_->abort();
}

}  // namespace c10d_ext
