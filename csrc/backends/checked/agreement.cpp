// A thread per rank and group talks over the lines. Rank 0's is also the coordinator's.

#include "backends/checked/agreement.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>

#include "backends/checked/coordinator.h"
#include "backends/checked/protocol.h"
#include "backends/checked/roster.h"
#include "base/signal_masked_thread.h"
#include "base/timeouts.h"
#include "control/death_sockets.h"

namespace c10d_ext {

namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = Agreement::Milliseconds;
using Kind = ErrorKind;

constexpr size_t kLongest = size_t{1} << 26;
// What rank 0 has to find out what is the matter.
constexpr Milliseconds kVerdict{2000};
constexpr auto kNever = Clock::time_point::max();

Clock::time_point after(Milliseconds time) {
  return Clock::now() + bounded(time);
}

std::string seconds(Milliseconds time) {
  std::ostringstream out;
  out << std::chrono::duration<double>(time).count() << " s";
  return out.str();
}

thread_local bool agreeing_here = false;

}  // namespace

class Agreement::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(Connections star, Place place)
      : roster_(std::move(place), std::move(star.members)),
        generation_(fork_generation()),
        wake_(Pipe::open()),
        lines_(std::move(star.lines)),
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
    std::lock_guard lock(mutex_);
    return count_;
  }

  void done(uint64_t seq) {
    Flight over;  // released without the lock
    std::lock_guard lock(mutex_);
    if (const auto found = running_.find(seq); found != running_.end()) {
      over = std::move(found->second);
      running_.erase(found);
      changed_.notify_all();
      if (!begins_.empty()) {
        wake();
      }
    }
  }

  void broke(uint64_t seq, const std::string& why) {
    bring({seq, kBroken, Payload().put(static_cast<int64_t>(seq)).put(why)});
  }

  std::optional<Failure> failure(const std::string& op, uint64_t seq, Milliseconds within) const {
    if (is_foreign()) {
      return closed(op, seq, kForked);
    }
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, after(within), [this] { return end_.has_value() || leaving_; });
    return leaving_ ? std::optional(closed(op, seq, kDestroyed))
           : end_   ? std::optional(told(*end_, op, seq, std::nullopt))
                    : std::nullopt;
  }

  // Of collective or message `number`.
  std::pair<std::vector<int>, std::string> awaited(Says question, uint64_t number,
                                                   Milliseconds within) {
    if (is_foreign()) {
      return {};
    }
    const std::pair key(question, number);
    std::unique_lock lock(mutex_);
    asked_.try_emplace(key);
    news_.push_back({number, question, Payload().put(static_cast<int64_t>(number))});
    lock.unlock();
    wake();
    lock.lock();
    changed_.wait_until(lock, after(within), [&] {
      const auto found = asked_.find(key);
      return found == asked_.end() || found->second || end_ || leaving_;
    });
    const auto answer = asked_.extract(key);
    return answer && answer.mapped() ? std::pair(answer.mapped()->ranks, answer.mapped()->text)
                                     : std::pair<std::vector<int>, std::string>();
  }

  std::optional<int> gone(int rank) const {
    if (is_foreign()) {
      return std::nullopt;
    }
    bool gone = false;
    if (roster_.is_near(rank)) {
      gone = roster_.has_ended(rank);
    } else {
      std::lock_guard lock(mutex_);
      gone = end_ && end_->kind == Kind::RankLost &&
             end_->why.find(roster_.describe(rank, kGone)) != std::string::npos;
    }
    return gone ? std::optional(roster_.pid(rank)) : std::nullopt;
  }

  bool has_abandoned() const {
    std::lock_guard lock(mutex_);
    return abandoned_;
  }

  // The locks of another process may be taken, and nobody here would ever give them back.
  bool is_foreign() const {
    return fork_generation() != generation_;
  }

  void abort() {
    bring({0, kAborting, {}});
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, after(kVerdict), [this] { return end_.has_value(); });
  }

  void leave(Milliseconds grace) {
    if (is_foreign()) {
      if (thread_.joinable()) {
        thread_.detach();  // there is none
      }
      return;
    }
    std::unique_lock lock(mutex_);
    if (!thread_.joinable()) {
      return;
    }
    const bool can_wait = thread_.get_id() != std::this_thread::get_id();
    thread_.detach();
    if (can_wait) {
      changed_.wait_until(lock, after(grace),
                          [this] { return waiting_.empty() && running_.empty(); });
    }
    leaving_ = true;
    changed_.notify_all();
    wake();
    if (can_wait) {
      changed_.wait(lock, [this] { return has_left_; });
    }
  }

 private:
  static constexpr char kForked[] =
      "the group must be used in the process that created it, got a forked child";
  static constexpr char kDestroyed[] = "the group must be alive, got a destroyed one";

  struct Flight {
    std::string op;
    std::optional<int64_t> tag;  // of a message
    Milliseconds timeout;
    std::function<void(uint64_t)> begin;  // with the peer of a message, else the number
    std::function<void(const Failure&)> fail;
    Clock::time_point late{};  // when it has taken too long, as far as is known here
    bool asked = false;        // rank 0, what is the matter
  };
  using Flights = std::map<uint64_t, Flight>;
  using Begin = std::pair<uint64_t, std::function<void(uint64_t)>>;

  // Something to say about collective, or message, `seq`.
  struct News {
    uint64_t seq;
    Says kind;
    Payload words;
  };

  struct Failed {
    Flight flight;
    Failure failure;
  };

  // Tells rank 0 of it, with its number after `words`.
  uint64_t enter(Says kind, Payload words, Flight flight) {
    if (is_foreign()) {
      flight.fail(closed(flight.op, 0, kForked));
      return 0;
    }
    const bool collective = kind == kCalling;
    std::unique_lock lock(mutex_);
    const uint64_t seq = collective ? ++count_ : ++posted_;
    if (end_ || leaving_) {
      const auto failure =
          leaving_ ? closed(flight.op, seq, kDestroyed) : told(*end_, flight.op, seq, flight.tag);
      lock.unlock();
      flight.fail(failure);
      return seq;
    }
    flight.late = after(flight.timeout);
    soonest_ = std::min(soonest_, flight.late);
    (collective ? waiting_ : messages_).emplace(seq, std::move(flight));
    news_.push_back({seq, kind, words.put(static_cast<int64_t>(seq))});
    lock.unlock();
    wake();
    return seq;
  }

  void bring(News news) {
    {
      std::lock_guard lock(mutex_);
      news_.push_back(std::move(news));
    }
    wake();
  }

  void wake() const {
    const char word = 0;
    [[maybe_unused]] const auto written = ::write(wake_.write_end.get(), &word, 1);
  }

  // --- Texts
  // ----------------------------------------------------------------------------------------------

  Failure failure_of(Kind kind, const std::string& op, uint64_t seq, const std::string& text,
                     std::vector<int> ranks) const {
    return {kind, op + ": " + text + " " + roster_.place().text(), std::move(ranks), op, seq};
  }

  Failure closed(const std::string& op, uint64_t seq, const std::string& text) const {
    return failure_of(Kind::Closed, op, seq, text, {});
  }

  Failure told(const End& end, const std::string& op, uint64_t seq,
               const std::optional<int64_t>& tag) const {
    std::string text = end.why;
    if (end.kind == Kind::RankLost) {
      text = text_of_loss(tag        ? text_of_message(*tag)
                          : seq == 0 ? "message"
                                     : "collective " + std::to_string(seq),
                          text);
    }
    return failure_of(end.kind, op, seq, text, end.ranks);
  }

  // --- The thread
  // -----------------------------------------------------------------------------------------------

  void run() {
    agreeing_here = true;
    while (!is_over()) {
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
      look_at_the_clock();
      settle();
    }
    say_goodbye();
  }

  bool is_over() const {
    std::lock_guard lock(mutex_);
    return leaving_;
  }

  // Until something is late; -1: nothing can be.
  int milliseconds_left() {
    auto next = coordinator_ ? coordinator_->next_look() : kNever;
    {
      std::lock_guard lock(mutex_);
      if (!end_) {
        next = std::min(next, soonest_);
      }
      for (const auto& [seq, flight] : running_) {
        next = std::min(next, flight.late);
      }
    }
    if (next == kNever) {
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
    lines_[line].close();
    if (coordinator_) {
      coordinator_->lose(static_cast<int>(line));
    } else if (!root_left_) {
      finish({Kind::RankLost, {0}, roster_.describe(0, kGone), kGrace});
    }
  }

  // What other threads of this rank have left to be said.
  void tell_news() {
    std::vector<News> news;
    {
      std::lock_guard lock(mutex_);
      news.swap(news_);
    }
    for (auto& one : news) {
      if (one.kind == kBroken) {
        break_off(one);
      } else {
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

  // The data of a collective does not come: asks why.
  void break_off(News& news) {
    {
      std::lock_guard lock(mutex_);
      const auto found = running_.find(news.seq);
      if (found == running_.end() || found->second.asked) {
        return;
      }
      found->second.asked = true;
      if (end_) {
        found->second.late = Clock::now();
        return;
      }
      found->second.late = after(kVerdict);
    }
    say(kBroken, std::move(news.words));
  }

  bool is_root_stopped() const {
    return !coordinator_ && roster_.is_near(0) && roster_.process_state(0) == "stopped";
  }

  void look_at_the_clock() {
    const auto now = Clock::now();
    std::vector<std::pair<Says, Payload>> late;
    std::string unanswered;  // what rank 0 says nothing about
    {
      std::lock_guard lock(mutex_);
      if (!end_ && soonest_ <= now) {
        soonest_ = kNever;
        for (auto* flights : {&waiting_, &messages_}) {
          for (auto& [seq, flight] : *flights) {
            if (flight.late <= now && (flight.asked || is_root_stopped())) {
              unanswered = (flight.tag ? text_of_message(*flight.tag)
                                       : "collective " + std::to_string(seq)) +
                           " must be done within " + seconds(flight.timeout);
            } else if (flight.late <= now) {
              flight.asked = true;
              flight.late = after(kVerdict);
              late.emplace_back(
                  flight.tag ? kOverdue : kLate,
                  Payload().put(static_cast<int64_t>(seq)).put(seconds(flight.timeout)));
            }
            soonest_ = std::min(soonest_, flight.late);
          }
        }
      }
      for (const auto& [seq, flight] : running_) {
        if (!end_ && flight.late <= now) {
          unanswered = "data of collective " + std::to_string(seq) + " must arrive";
        }
      }
    }
    for (auto& [kind, words] : late) {
      say(kind, std::move(words));
    }
    if (!unanswered.empty()) {
      const std::string state = roster_.is_near(0) ? roster_.process_state(0) : "silent";
      finish({Kind::Timeout,
              {0},
              "the " + unanswered + ", got no answer from " + roster_.describe(0, state),
              kGrace});
    }
    if (coordinator_) {
      coordinator_->look(now);
    }
  }

  // Calls what other code has to do, without the lock.
  void settle() {
    std::vector<Begin> grants;
    std::vector<Failed> fails;
    {
      std::lock_guard lock(mutex_);
      grants.swap(grants_);
      fails.swap(fails_);
      const auto fail = [&](Flights& flights, Flights::iterator it) {
        auto failure = told(*end_, it->second.op, it->first, it->second.tag);
        fails.push_back({std::move(it->second), std::move(failure)});
        return flights.erase(it);
      };
      for (auto* flights : {&waiting_, &messages_}) {
        for (auto it = flights->begin(); end_ && it != flights->end();) {
          it = fail(*flights, it);
        }
      }
      const auto now = Clock::now();
      for (auto it = running_.begin(); end_ && it != running_.end();) {
        if (it->second.late > now) {
          ++it;
          continue;
        }
        const auto begun =
            std::erase_if(begins_, [&](auto& b) { return b.first == it->first; }) == 0;
        abandoned_ |= begun;
        it = fail(running_, it);
      }
    }
    while (const auto next = next_to_begin()) {
      try {
        next->second(next->first);
      } catch (const std::exception& error) {
        broke(next->first, error.what());
      }
    }
    for (auto& [peer, begin] : grants) {
      begin(peer);
    }
    for (auto& failed : fails) {
      failed.flight.fail(failed.failure);
    }
    changed_.notify_all();
  }

  // The collectives of a group run one after the other, in the order of their calls.
  std::optional<Begin> next_to_begin() {
    std::lock_guard lock(mutex_);
    if (begins_.empty() || running_.begin()->first != begins_.front().first) {
      return std::nullopt;
    }
    auto next = std::move(begins_.front());
    begins_.pop_front();
    return next;
  }

  void say_goodbye() {
    for (auto& line : lines_) {
      if (line.is_open()) {
        line.say(kLeaving, {});
      }
    }
    death_sockets_.reset();
    std::vector<Failed> fails;
    {
      std::lock_guard lock(mutex_);
      abandoned_ |= running_.size() > begins_.size();
      begins_.clear();
      for (auto* flights : {&waiting_, &running_, &messages_}) {
        for (auto& [seq, flight] : *flights) {
          auto failure =
              end_ ? told(*end_, flight.op, seq, flight.tag) : closed(flight.op, seq, kDestroyed);
          fails.push_back({std::move(flight), std::move(failure)});
        }
        flights->clear();
      }
    }
    for (auto& failed : fails) {
      failed.flight.fail(failed.failure);
    }
    fails.clear();
    {
      std::lock_guard lock(mutex_);
      has_left_ = true;
    }
    changed_.notify_all();
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
        go(static_cast<uint64_t>(words.number()));
        break;
      case kDiffer: {
        const auto seq = static_cast<uint64_t>(words.number());
        const auto text = words.text();
        deny(waiting_, seq, Kind::Mismatch, {text, words.numbers<int>()});
        break;
      }
      case kGranted: {
        const auto number = static_cast<uint64_t>(words.number());
        grant(number, static_cast<uint64_t>(words.number()));
        break;
      }
      case kDenied: {
        const auto number = static_cast<uint64_t>(words.number());
        const auto kind = static_cast<Kind>(words.number());
        const auto text = words.text();
        deny(messages_, number, kind, {text, words.numbers<int>()});
        break;
      }
      case kAwaited: {
        const auto question = static_cast<Says>(words.number());
        const auto number = static_cast<uint64_t>(words.number());
        const auto text = words.text();
        take_answer({question, number}, {text, words.numbers<int>()});
        break;
      }
      case kPing:
        say(kPong, {});
        break;
      case kOver:
        finish(take_end(words));
        break;
      case kLeaving:
        // Nothing else will be agreed.
        root_left_ = true;
        finish({Kind::RankLost, {0}, roster_.describe(0, kLeft), kUnlimited});
        break;
      default:
        throw std::runtime_error("a sentence of an unknown kind");
    }
  }

  void go(uint64_t seq) {
    std::lock_guard lock(mutex_);
    const auto found = waiting_.find(seq);
    if (found == waiting_.end() || end_) {
      return;
    }
    begins_.emplace_back(seq, std::move(found->second.begin));
    found->second.late = kNever;
    found->second.asked = false;
    running_.insert(waiting_.extract(found));
  }

  void take_answer(std::pair<Says, uint64_t> asked, Difference who) {
    {
      std::lock_guard lock(mutex_);
      const auto found = asked_.find(asked);
      if (found == asked_.end()) {
        return;  // nobody waits for it any more
      }
      found->second = std::move(who);
    }
    changed_.notify_all();
  }

  // From here on gloo knows of the message, and of its end.
  void grant(uint64_t number, uint64_t peer) {
    std::lock_guard lock(mutex_);
    const auto found = messages_.find(number);
    if (found == messages_.end() || end_) {
      return;
    }
    grants_.emplace_back(peer, std::move(found->second.begin));
    messages_.erase(found);
  }

  void deny(Flights& flights, uint64_t seq, Kind kind, const Difference& why) {
    std::lock_guard lock(mutex_);
    const auto found = flights.find(seq);
    if (found == flights.end()) {
      return;
    }
    auto& flight = found->second;
    auto failure = failure_of(kind, flight.op, seq, why.text, why.ranks);
    fails_.push_back({std::move(flight), std::move(failure)});
    flights.erase(found);
  }

  // The group is of no more use. The first reason stays.
  void finish(End end) {
    std::lock_guard lock(mutex_);
    if (end_) {
      return;
    }
    for (auto& [seq, flight] : running_) {
      flight.late = flight.asked              ? Clock::now()
                    : end.grace == kUnlimited ? kNever
                                              : after(end.grace);
    }
    end_ = std::move(end);
  }

  const Roster roster_;
  const uint64_t generation_;
  const Pipe wake_;
  std::thread thread_;

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  // Guarded by mutex_.
  uint64_t count_ = 0;
  uint64_t posted_ = 0;
  bool leaving_ = false;
  bool has_left_ = false;
  bool abandoned_ = false;
  std::vector<News> news_;
  Flights waiting_;  // for the other ranks to call it
  Flights running_;
  Flights messages_;  // that wait for their other ends
  // Nothing that waits is late before.
  Clock::time_point soonest_ = kNever;
  // About collectives and messages, and the answer once it is there.
  std::map<std::pair<Says, uint64_t>, std::optional<Difference>> asked_;
  std::deque<Begin> begins_;  // agreed on, in their order
  std::vector<Begin> grants_;
  std::vector<Failed> fails_;
  std::optional<End> end_;

  // The thread's own from here on.
  std::vector<Connection> lines_;
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
