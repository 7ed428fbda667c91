// A thread per rank and group talks over the lines. Rank 0's has two parts: that of a rank, which
// all have, and that of the one who compares.
//
//   rank r                                rank 0
//   Calling: what                      ->
//                                      <- Go, or Differ: how; once all ranks call
//   Posting: one end of a message      ->
//                                      <- Granted: who has the other; once it is there
//                                      <- Denied: why not
//   Late, Broken, Overdue: what is
//   the matter                         ->
//   Asking: who has not called it      ->
//                                      <- Awaited: who has not
//                                      <- Ping: are you there?
//   Pong                               ->
//                                      <- Over: the group is of no more use, and why
//   Leaving, Aborting                  ->

#include "backends/agreement/agreement.h"

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
#include <set>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>

#include "backends/agreement/lifelines.h"
#include "backends/agreement/lines.h"
#include "backends/agreement/matching.h"
#include "backends/quiet_thread.h"

namespace c10d_ext {

namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = Agreement::Milliseconds;
using Kind = shm::Failure::Kind;

enum Says : uint32_t {
  kCalling = 16,
  kGo,
  kDiffer,
  kPosting,
  kGranted,
  kDenied,
  kAwaited,
  kLate,
  kBroken,
  kOverdue,
  kAsking,
  kAskingOfMessage,
  kPing,
  kPong,
  kOver,
  kLeaving,
  kAborting
};

constexpr size_t kLongest = size_t{1} << 26;
// What a rank on another machine has to say that it is there.
constexpr Milliseconds kPatience{300};
// What rank 0 has to find out what is the matter.
constexpr Milliseconds kVerdict{2000};
// What a collective whose data is on its way has to come to its end once a rank is gone, which may
// have sent all of its own.
constexpr Milliseconds kGrace{1000};
constexpr auto kNever = Clock::time_point::max();

Clock::time_point after(Milliseconds time) {
  return Clock::now() + std::clamp(time, Milliseconds(0), Milliseconds(std::chrono::days(365)));
}

std::string seconds(Milliseconds time) {
  std::ostringstream out;
  out << std::chrono::duration<double>(time).count() << " s";
  return out.str();
}

Words words_of(const Called& called) {
  Words words;
  words.put(static_cast<int64_t>(called.verb)).put(called.unit);
  words.put(called.rest).put(called.root).put(called.count);
  words.put(static_cast<int64_t>(called.shapes)).put(called.sends).put(called.expects);
  return words;
}

Called take_called(Words& words) {
  Called called;
  called.verb = static_cast<shm::Verb>(words.number());
  called.unit = words.text();
  called.rest = words.text();
  called.root = static_cast<int>(words.number());
  called.count = words.number();
  called.shapes = static_cast<uint64_t>(words.number());
  called.sends = words.numbers();
  called.expects = words.numbers();
  return called;
}

Words words_of(const Agreement::Message& message) {
  return Words()
      .put(message.sends ? 1 : 0)
      .put(message.peer)
      .put(message.tag)
      .put(static_cast<int64_t>(message.bytes))
      .put(static_cast<int64_t>(message.dtype));
}

Posted take_posted(Words& words) {
  Posted posted;
  posted.sends = words.number() != 0;
  posted.peer = static_cast<int>(words.number());
  posted.tag = words.number();
  posted.bytes = static_cast<uint64_t>(words.number());
  posted.dtype = static_cast<shm::DType>(words.number());
  return posted;
}

// Why a group is of no more use.
struct End {
  Kind kind;
  std::vector<int> ranks;
  std::string why;
  // What a collective whose data is on its way still has; negative: all the time that it needs.
  Milliseconds grace;
};

thread_local bool agreeing_here = false;

// Ranks that left in good order have sent what they owe.
constexpr Milliseconds kUnlimited{-1};

Words words_of(const End& end) {
  return Words()
      .put(static_cast<int64_t>(end.kind))
      .put(end.ranks)
      .put(end.why)
      .put(static_cast<int64_t>(end.grace.count()));
}

End take_end(Words& words) {
  End end;
  end.kind = static_cast<Kind>(words.number());
  end.ranks = words.numbers<int>();
  end.why = words.text();
  end.grace = Milliseconds(words.number());
  return end;
}

struct Difference {
  std::string text;
  std::vector<int> ranks;
};

// What is wrong where ranks 0, 1, ... have called these as collective `seq`.
std::optional<Difference> difference(const std::vector<Called>& calls, uint64_t seq) {
  const bool even = std::all_of(calls.begin(), calls.end(), [](auto& c) { return c.count >= 0; });
  const auto agree = [&](const Called& a, const Called& b) {
    return a.verb == b.verb && a.unit == b.unit && a.rest == b.rest &&
           (!even || (a.count == b.count && shm::shapes_agree(a.shapes, b.shapes))) &&
           a.sends.size() == b.sends.size() && a.expects.size() == b.expects.size();
  };
  Difference found;
  for (size_t rank = 1; rank < calls.size(); ++rank) {
    if (!agree(calls[0], calls[rank])) {
      found.ranks.push_back(static_cast<int>(rank));
    }
  }
  if (!found.ranks.empty()) {
    found.text = shm::text_of_difference(
        calls.size(), seq, [&](size_t a, size_t b) { return agree(calls[a], calls[b]); },
        [&](size_t rank) { return text_of(calls[rank]); });
    return found;
  }
  const size_t ranks = calls.size();
  if (even || calls[0].sends.size() != ranks || calls[0].expects.size() != ranks) {
    return std::nullopt;
  }
  for (size_t from = 0; from < ranks; ++from) {
    for (size_t to = 0; to < ranks; ++to) {
      const int root = calls[from].root;
      const bool concerned = calls[0].verb == shm::Verb::Gather    ? static_cast<int>(to) == root
                             : calls[0].verb == shm::Verb::Scatter ? static_cast<int>(from) == root
                                                                   : true;
      const int64_t sent = calls[from].sends[to];
      const int64_t expected = calls[to].expects[from];
      if (concerned && sent != expected) {
        std::ostringstream text;
        text << "what a rank sends must be what the other expects, got " << sent << " x "
             << calls[from].unit << " from rank " << from << " for rank " << to
             << ", which expects " << expected << ", in collective " << seq;
        return Difference{text.str(), {static_cast<int>(from), static_cast<int>(to)}};
      }
    }
  }
  return std::nullopt;
}

}  // namespace

class Agreement::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(Star star, shm::Place place)
      : place_(std::move(place)),
        generation_(shm::fork_generation()),
        wake_(shm::Pipe::open()),
        lines_(std::move(star.lines)),
        members_(std::move(star.members)),
        calls_(members_.size()),
        left_(members_.size()),
        lifelines_(std::in_place, std::move(star.lifelines)) {
    for (const auto* end : {&wake_.read_end, &wake_.write_end}) {
      fcntl(end->get(), F_SETFL, fcntl(end->get(), F_GETFL) | O_NONBLOCK);
    }
  }

  void start() {
    thread_ = quiet_thread("c10d_ext_agree", [self = shared_from_this()] { self->run(); });
  }

  // --- From any thread --------------------------------------------------------------------------

  uint64_t call(Operation operation) {
    Words words = words_of(operation.called);
    return enter(kCalling, std::move(words),
                 {std::move(operation.op), std::nullopt, operation.timeout,
                  std::move(operation.begin), std::move(operation.fail)});
  }

  uint64_t post(Message message) {
    Words words = words_of(message);
    std::string op(name_of(message.sends ? shm::Verb::Send : shm::Verb::Recv));
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
    }
  }

  void broke(uint64_t seq, const std::string& why) {
    bring({seq, kBroken, Words().put(static_cast<int64_t>(seq)).put(why)});
  }

  std::optional<shm::Failure> failure(const std::string& op, uint64_t seq,
                                      Milliseconds patience) const {
    if (is_foreign()) {
      return closed(op, seq, kForked);
    }
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, after(patience), [this] { return end_.has_value() || leaving_; });
    return leaving_ ? std::optional(closed(op, seq, kDestroyed))
           : end_   ? std::optional(told(*end_, op, seq, std::nullopt))
                    : std::nullopt;
  }

  // Of collective or message `number`.
  std::pair<std::vector<int>, std::string> awaited(Says question, uint64_t number,
                                                   Milliseconds patience) {
    if (is_foreign()) {
      return {};
    }
    const std::pair key(question, number);
    std::unique_lock lock(mutex_);
    asked_.try_emplace(key);
    news_.push_back({number, question, Words().put(static_cast<int64_t>(number))});
    lock.unlock();
    wake();
    lock.lock();
    changed_.wait_until(lock, after(patience), [&] {
      const auto found = asked_.find(key);
      return found == asked_.end() || found->second || end_ || leaving_;
    });
    const auto answer = asked_.extract(key);
    return answer && answer.mapped() ? std::pair(answer.mapped()->ranks, answer.mapped()->text)
                                     : std::pair<std::vector<int>, std::string>();
  }

  bool has_abandoned() const {
    std::lock_guard lock(mutex_);
    return abandoned_;
  }

  // The locks of another process may be taken, and nobody here would ever give them back.
  bool is_foreign() const {
    return shm::fork_generation() != generation_;
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
  static constexpr char kLeft[] = "left the group";
  static constexpr char kGone[] = "gone";
  static constexpr char kForked[] =
      "the group must be used in the process that created it, got a forked child";
  static constexpr char kDestroyed[] = "the group must be alive, got a destroyed one";

  struct Flight {
    std::string op;
    std::optional<int64_t> tag;  // of a message
    Milliseconds timeout;
    std::function<void(uint64_t)> begin;  // with the peer of a message, else the number
    std::function<void(const shm::Failure&)> fail;
    Clock::time_point late{};  // when it has taken too long, as far as is known here
    bool asked = false;        // rank 0, what is the matter
  };
  using Flights = std::map<uint64_t, Flight>;
  using Begin = std::pair<uint64_t, std::function<void(uint64_t)>>;

  // Something to say about collective, or message, `seq`.
  struct News {
    uint64_t seq;
    Says kind;
    Words words;
  };

  struct Failed {
    Flight flight;
    shm::Failure failure;
  };

  // Rank 0's: something is the matter with collective `seq`, or message `seq` of rank `of`, or rank
  // `of` asks about one of them.
  struct Question {
    uint64_t seq;
    Says kind;
    std::string why;
    int of = 0;
    Clock::time_point until{};
    std::set<int> silent{};
  };

  // Tells rank 0 of it, with its number after `words`.
  uint64_t enter(Says kind, Words words, Flight flight) {
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

  bool compares() const {
    return place_.rank == 0;
  }

  // --- Texts
  // ----------------------------------------------------------------------------------------------

  shm::Failure failure_of(Kind kind, const std::string& op, uint64_t seq, const std::string& text,
                          std::vector<int> ranks) const {
    return {kind, op + ": " + text + " " + place_.text(), std::move(ranks), op, seq};
  }

  shm::Failure closed(const std::string& op, uint64_t seq, const std::string& text) const {
    return failure_of(Kind::Closed, op, seq, text, {});
  }

  shm::Failure told(const End& end, const std::string& op, uint64_t seq,
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

  static std::string text_of_loss(const std::string& what, const std::string& who) {
    return "every rank must live until the " + what + " is done, got " + who;
  }

  static std::string text_of_message(int64_t tag) {
    return "message with tag " + std::to_string(tag);
  }

  bool is_near(int rank) const {
    return members_[static_cast<size_t>(rank)].machine ==
           members_[static_cast<size_t>(place_.rank)].machine;
  }

  std::string describe(int rank, const std::string& state) const {
    return "rank " + std::to_string(rank) + " (pid " +
           std::to_string(members_[static_cast<size_t>(rank)].peer.pid) + ", " + state + ")";
  }

  std::string describe(const std::vector<int>& ranks,
                       const std::function<std::string(int)>& state) const {
    std::string text;
    for (size_t i = 0; i < ranks.size(); ++i) {
      text += (i == 0                  ? ""
               : i + 1 == ranks.size() ? " and "
                                       : ", ") +
              describe(ranks[i], state(ranks[i]));
    }
    return text;
  }

  // --- The thread
  // -----------------------------------------------------------------------------------------------

  void run() {
    agreeing_here = true;
    while (!is_over()) {
      std::vector<pollfd> fds{{wake_.read_end.get(), POLLIN, 0}, {lifelines_->fd(), POLLIN, 0}};
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
      while (const auto line = lifelines_->next_cut()) {
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
    auto next = kNever;
    for (const auto& question : questions_) {
      next = std::min(next, question.until);
    }
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
        compares() ? judge(rank, sentence->kind, sentence->words)
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
    if (compares()) {
      if (left_[line].empty()) {
        left_[line] = kGone;
        end_for_all(lost());
      }
    } else if (!root_left_) {
      finish({Kind::RankLost, {0}, describe(0, "gone"), kGrace});
    }
  }

  // The ranks that are no more there.
  End lost() const {
    std::vector<int> gone;
    Milliseconds grace = kUnlimited;
    for (size_t rank = 0; rank < left_.size(); ++rank) {
      if (!left_[rank].empty()) {
        gone.push_back(static_cast<int>(rank));
        grace = left_[rank] == kGone ? kGrace : grace;
      }
    }
    return {Kind::RankLost, gone,
            describe(gone, [this](int rank) { return left_[static_cast<size_t>(rank)]; }), grace};
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
  void say(Says kind, Words words) {
    if (compares()) {
      judge(0, kind, words);
    } else if (lines_[0].is_open()) {
      lines_[0].say(kind, words);
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

  void look_at_the_clock() {
    const auto now = Clock::now();
    std::vector<std::pair<Says, Words>> late;
    bool silent = false;
    {
      std::lock_guard lock(mutex_);
      if (!end_ && soonest_ <= now) {
        soonest_ = kNever;
        for (auto* flights : {&waiting_, &messages_}) {
          for (auto& [seq, flight] : *flights) {
            if (flight.late <= now && flight.asked) {
              silent = true;  // rank 0 says nothing
            } else if (flight.late <= now) {
              flight.asked = true;
              flight.late = after(kVerdict);
              late.emplace_back(
                  flight.tag ? kOverdue : kLate,
                  Words().put(static_cast<int64_t>(seq)).put(seconds(flight.timeout)));
            }
            soonest_ = std::min(soonest_, flight.late);
          }
        }
      }
      for (const auto& [seq, flight] : running_) {
        silent |= !end_ && flight.late <= now;
      }
    }
    for (auto& [kind, words] : late) {
      say(kind, std::move(words));
    }
    if (silent) {
      const std::string state = is_near(0) ? shm::process_state(members_[0].peer) : "silent";
      finish({Kind::Timeout,
              {0},
              "the collectives must be done in time, got no answer from " + describe(0, state),
              kGrace});
    }
    std::vector<Question> ripe;
    std::erase_if(questions_, [&](const Question& question) {
      // That data does not come may be for a rank whose end is yet to be heard of.
      const bool answered = question.silent.empty() && question.kind != kBroken;
      if (answered || question.until <= now) {
        ripe.push_back(question);
        return true;
      }
      return false;
    });
    for (const auto& question : ripe) {
      answer(question);
    }
  }

  // Calls what other code has to do, without the lock.
  void settle() {
    std::vector<Begin> begins, grants;
    std::vector<Failed> fails;
    {
      std::lock_guard lock(mutex_);
      begins.swap(begins_);
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
        // Not before it is begun: that comes below.
        const bool begun = std::none_of(begins.begin(), begins.end(),
                                        [&](const auto& b) { return b.first == it->first; });
        if (!begun || it->second.late > now) {
          ++it;
          continue;
        }
        it = fail(running_, it);
        abandoned_ = true;
      }
    }
    for (auto& [seq, begin] : begins) {
      try {
        begin(seq);
      } catch (const std::exception& error) {
        broke(seq, error.what());
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

  void say_goodbye() {
    for (auto& line : lines_) {
      if (line.is_open()) {
        line.say(kLeaving, {});
      }
    }
    lifelines_.reset();
    std::vector<Failed> fails;
    {
      std::lock_guard lock(mutex_);
      abandoned_ |= !running_.empty();
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

  void obey(uint32_t kind, Words& words) {
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
        finish({Kind::RankLost, {0}, describe(0, kLeft), kUnlimited});
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

  // --- Rank 0's part
  // --------------------------------------------------------------------------------------------

  void judge(int rank, uint32_t kind, Words& words) {
    const auto r = static_cast<size_t>(rank);
    switch (kind) {
      case kCalling: {
        auto called = take_called(words);
        if (static_cast<uint64_t>(words.number()) != agreed_ + calls_[r].size() + 1) {
          throw std::runtime_error("a call is missing");
        }
        calls_[r].push_back(std::move(called));
        compare();
        break;
      }
      case kPosting: {
        auto posted = take_posted(words);
        posted.rank = rank;
        posted.number = static_cast<uint64_t>(words.number());
        if (posted.peer == rank || posted.peer >= place_.size ||
            posted.peer < (posted.sends ? 0 : -1)) {
          throw std::runtime_error("a message to or from nobody");
        }
        match(posted);
        break;
      }
      case kLate: {
        const auto seq = static_cast<uint64_t>(words.number());
        const auto within = words.text();
        ask({seq, kLate, within}, suspects(seq));
        break;
      }
      case kBroken: {
        const auto seq = static_cast<uint64_t>(words.number());
        const auto why = words.text();
        ask({seq, kBroken, why}, suspects(seq));
        break;
      }
      case kAsking:
      case kAskingOfMessage: {
        const auto number = static_cast<uint64_t>(words.number());
        const auto question = static_cast<Says>(kind);
        ask({number, question, "", rank}, awaited_by(rank, question, number));
        break;
      }
      case kOverdue: {
        const auto number = static_cast<uint64_t>(words.number());
        const auto within = words.text();
        if (matching_.find(rank, number) != nullptr) {
          ask({number, kOverdue, within, rank}, awaited_by(rank, kOverdue, number));
        }
        break;
      }
      case kPong:
        for (auto& question : questions_) {
          question.silent.erase(rank);
        }
        break;
      case kLeaving:
        left_[r] = kLeft;
        matching_.take_out([&](const Posted& posted) { return posted.rank == rank; });
        deny_those_without_peers();
        compare();
        break;
      case kAborting:
        end_for_all({Kind::Closed,
                     {rank},
                     "the group must be alive, got an abort by rank " + std::to_string(rank),
                     Milliseconds(0)});
        break;
      default:
        throw std::runtime_error("a sentence of an unknown kind");
    }
  }

  void compare() {
    const bool missed = std::any_of(left_.begin(), left_.end(), [](auto& l) { return !l.empty(); });
    const bool wanted =
        std::any_of(calls_.begin(), calls_.end(), [](auto& c) { return !c.empty(); });
    if (wanted && missed) {
      end_for_all(lost());  // what a rank called before it left it will not do
    }
    while (!is_finished() &&
           std::none_of(calls_.begin(), calls_.end(), [](auto& c) { return c.empty(); })) {
      ++agreed_;
      std::vector<Called> calls;
      for (auto& own : calls_) {
        calls.push_back(std::move(own.front()));
        own.pop_front();
      }
      Words words;
      words.put(static_cast<int64_t>(agreed_));
      if (const auto found = difference(calls, agreed_)) {
        words.put(found->text).put(found->ranks);
        say_to_all(kDiffer, words);
        deny(waiting_, agreed_, Kind::Mismatch, *found);
      } else {
        say_to_all(kGo, words);
        go(agreed_);
      }
    }
  }

  void match(const Posted& posted) {
    if (is_finished()) {
      return;
    }
    const auto other = matching_.match(posted);
    if (!other) {
      deny_those_without_peers();
      return;
    }
    const Posted& send = posted.sends ? posted : *other;
    const Posted& receive = posted.sends ? *other : posted;
    if (send.bytes == receive.bytes && send.dtype == receive.dtype) {
      tell(send.rank, kGranted, Words().put(static_cast<int64_t>(send.number)).put(receive.rank));
      tell(receive.rank, kGranted,
           Words().put(static_cast<int64_t>(receive.number)).put(send.rank));
      return;
    }
    const Difference how{shm::text_of_misfit(send.rank, send.bytes, send.dtype, receive.rank,
                                             receive.bytes, receive.dtype, send.tag),
                         {send.rank, receive.rank}};
    deny(send, Kind::Mismatch, how);
    deny(receive, Kind::Mismatch, how);
  }

  void deny(const Posted& posted, Kind kind, const Difference& why) {
    tell(posted.rank, kDenied,
         Words()
             .put(static_cast<int64_t>(posted.number))
             .put(static_cast<int64_t>(kind))
             .put(why.text)
             .put(why.ranks));
  }

  // To a rank, which may be this one.
  void tell(int rank, Says kind, Words words) {
    if (rank == place_.rank) {
      obey(kind, words);
    } else {
      lines_[static_cast<size_t>(rank)].say(kind, words);
    }
  }

  // Whom a message can come from, or go to.
  std::vector<int> peers_of(const Posted& posted) const {
    std::vector<int> peers;
    for (int rank = 0; rank < place_.size; ++rank) {
      if (rank == posted.peer || (posted.peer < 0 && rank != posted.rank)) {
        peers.push_back(rank);
      }
    }
    return peers;
  }

  // Ranks that left post nothing more.
  void deny_those_without_peers() {
    if (std::all_of(left_.begin(), left_.end(), [](auto& l) { return l.empty(); })) {
      return;
    }
    const auto orphans = matching_.take_out([this](const Posted& posted) {
      const auto peers = peers_of(posted);
      return std::none_of(peers.begin(), peers.end(),
                          [this](int r) { return left_[static_cast<size_t>(r)].empty(); });
    });
    for (const auto& orphan : orphans) {
      const auto peers = peers_of(orphan);
      const auto who =
          describe(peers, [this](int rank) { return left_[static_cast<size_t>(rank)]; });
      deny(orphan, Kind::RankLost, {text_of_loss(text_of_message(orphan.tag), who), peers});
    }
  }

  bool is_finished() const {
    std::lock_guard lock(mutex_);
    return end_.has_value();
  }

  void say_to_all(Says kind, const Words& words) {
    for (auto& line : lines_) {
      if (line.is_open()) {
        line.say(kind, words);
      }
    }
  }

  void end_for_all(End end) {
    if (is_finished()) {
      return;
    }
    say_to_all(kOver, words_of(end));
    finish(std::move(end));
  }

  // Ranks that have not called `seq`; where all have, all but this one.
  std::vector<int> suspects(uint64_t seq) const {
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

  // Whom collective or message `number` of `rank` waits for; none where that can be anybody.
  std::vector<int> awaited_by(int rank, Says question, uint64_t number) const {
    if (question == kAsking) {
      return number > agreed_ ? suspects(number) : std::vector<int>();
    }
    const auto* posted = matching_.find(rank, number);
    return posted == nullptr || posted->peer < 0 ? std::vector<int>() : peers_of(*posted);
  }

  void ask(Question question, const std::vector<int>& ranks) {
    // Of one that ends the group one is enough.
    const auto ends = [](const Question& q) { return q.kind == kLate || q.kind == kBroken; };
    const bool asked = std::any_of(questions_.begin(), questions_.end(), ends);
    if (is_finished() || (question.kind == kLate && question.seq <= agreed_) ||
        (ends(question) && asked)) {
      return;
    }
    for (const int rank : ranks) {
      if (rank != 0 && !is_near(rank)) {
        question.silent.insert(rank);
        lines_[static_cast<size_t>(rank)].say(kPing, {});
      }
    }
    // A rank that is gone makes itself known meanwhile.
    question.until = question.kind == kBroken  ? after(kPatience)
                     : question.silent.empty() ? Clock::now()
                                               : after(kPatience);
    questions_.push_back(std::move(question));
  }

  void answer(const Question& question) {
    const auto state_of = [&](int rank) -> std::string {
      return is_near(rank) ? shm::process_state(members_[static_cast<size_t>(rank)].peer)
             : question.silent.count(rank) != 0 ? "silent"
                                                : "alive";
    };
    const uint64_t seq = question.seq;
    if (question.kind == kAsking || question.kind == kAskingOfMessage) {
      const auto ranks = awaited_by(question.of, question.kind, seq);
      tell(question.of, kAwaited,
           Words()
               .put(question.kind)
               .put(static_cast<int64_t>(seq))
               .put(describe(ranks, state_of))
               .put(ranks));
      return;
    }
    if (question.kind == kOverdue) {
      const auto ranks = awaited_by(question.of, question.kind, seq);
      for (const auto& posted : matching_.take_out(
               [&](const Posted& p) { return p.rank == question.of && p.number == seq; })) {
        const auto text = "the " + text_of_message(posted.tag) + " must be done within " +
                          question.why + ", got no answer from " +
                          (ranks.empty() ? "any rank" : describe(ranks, state_of));
        deny(posted, Kind::Timeout, {text, ranks});
      }
      return;
    }
    auto ranks = suspects(seq);
    if (question.kind == kLate) {
      if (seq > agreed_) {
        std::ostringstream text;
        text << "the collective " << seq << " must be done within " << question.why
             << ", got no answer from " << describe(ranks, state_of);
        for (const int rank : ranks) {
          const uint64_t at = agreed_ + calls_[static_cast<size_t>(rank)].size();
          text << "; rank " << rank << " is "
               << (at == 0 ? "before its first collective" : "at collective " + std::to_string(at));
        }
        end_for_all({Kind::Timeout, ranks, text.str(), kGrace});
      }
    } else {
      std::erase_if(ranks, [&](int rank) {
        const auto state = state_of(rank);
        return state != "stopped" && state != "silent";
      });
      std::ostringstream text;
      text << "the data of collective " << seq << " must arrive, got " << question.why;
      if (!ranks.empty()) {
        text << "; no answer from " << describe(ranks, state_of);
      }
      end_for_all({Kind::Timeout, ranks, text.str(), kGrace});
    }
  }

  const shm::Place place_;
  const uint64_t generation_;
  const shm::Pipe wake_;
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
  std::vector<Begin> begins_, grants_;
  std::vector<Failed> fails_;
  std::optional<End> end_;

  // The thread's own from here on.
  std::vector<Line> lines_;
  const std::vector<Member> members_;
  bool root_left_ = false;
  // Rank 0's: what each rank has called since the last collective on which all agreed.
  uint64_t agreed_ = 0;
  std::vector<std::deque<Called>> calls_;
  std::vector<std::string> left_;  // how each rank has, empty: it has not
  Matching matching_;
  std::vector<Question> questions_;
  std::optional<Lifelines> lifelines_;
};

std::unique_ptr<Agreement> Agreement::join(const shm::KeyValueStore& store, const shm::Place& place,
                                           Milliseconds timeout, const std::string& machine) {
  auto impl = std::make_shared<Impl>(connect_star(store, place, timeout, machine), place);
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

std::pair<std::vector<int>, std::string> Agreement::awaited(uint64_t seq, Milliseconds patience) {
  return impl_->awaited(kAsking, seq, patience);
}

std::pair<std::vector<int>, std::string> Agreement::awaited_by_message(uint64_t number,
                                                                       Milliseconds patience) {
  return impl_->awaited(kAskingOfMessage, number, patience);
}

void Agreement::done(uint64_t seq) {
  impl_->done(seq);
}

void Agreement::broke(uint64_t seq, const std::string& why) {
  impl_->broke(seq, why);
}

std::optional<shm::Failure> Agreement::failure(const std::string& op, uint64_t seq,
                                               Milliseconds patience) const {
  return impl_->failure(op, seq, patience);
}

bool Agreement::is_here() {
  return agreeing_here;
}

void Agreement::abort() {
  impl_->abort();
}

}  // namespace c10d_ext
