#pragma once

// What this rank has called, as any thread of it and the agreement's own know it: the table of
// calls under its lock, what is to be said to rank 0, and who waits for an answer. No torch in
// here, and no connection.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "backends/checked/call_table.h"
#include "backends/checked/news.h"
#include "backends/checked/own_messages.h"
#include "backends/checked/protocol.h"
#include "backends/checked/roster.h"
#include "base/errors.h"
#include "base/fingerprint.h"

namespace c10d_ext {

class OpenCalls {
 public:
  using Clock = CallTable::Clock;
  using Milliseconds = CallTable::Milliseconds;
  using Begin = CallTable::Begin;
  using Failed = CallTable::Failed;
  using Late = CallTable::Late;
  using Asked = std::pair<Says, uint64_t>;  // what, and of which collective or message
  // A call's number among this rank's; with its failure where the group is of no more use.
  using Entered = std::pair<uint64_t, std::optional<Failed>>;

  static constexpr auto kNever = CallTable::kNever;

  // `roster` outlives this. `verdict`: what rank 0 has to find out what is the matter.
  OpenCalls(const Roster& roster, Milliseconds verdict)
      : roster_(roster), messages_(roster), table_(roster, verdict) {}

  // --- From any thread --------------------------------------------------------------------------

  Entered enter(Fingerprint&& called, std::optional<Contribution>&& data, OpenCall&& call);
  // One end of a message, whose data stays here where there is much on its way.
  Entered enter_message(Posted posted, OpenCall&& call);
  void add_news(News news);
  // The data of number `seq` is there. Whether another one may begin now, or something is to be
  // said.
  bool done(uint64_t seq);
  uint64_t count() const {
    return locked([&] { return count_; });
  }
  uint64_t agreed() const {
    return locked([&] { return table_.agreed(); });
  }
  // So many bytes of a message to that rank may travel before rank 0's word.
  size_t most_with_words(int peer) const {
    return locked([&] { return messages_.most_with_words(peer); });
  }
  bool has_collectives() const {
    return locked([&] { return table_.has_collectives(); });
  }
  // Whether a collective, or a message, has neither begun nor failed.
  bool is_waiting(uint64_t seq) const {
    return locked([&] { return table_.is_waiting(seq); });
  }
  bool is_message_waiting(uint64_t number) const {
    return locked([&] { return table_.is_message_waiting(number); });
  }
  // Why number `seq` cannot be done any more; waits that long for somebody to know it.
  std::optional<Failure> failure(const std::string& op, uint64_t seq, Milliseconds within) const;
  std::optional<End> end() const {
    return locked([&] { return table_.end(); });
  }
  // Where a collective has failed after it was begun.
  bool has_abandoned() const {
    return locked([&] { return table_.has_abandoned(); });
  }
  void expect_answer(Asked asked);
  // None where it has not come within that time, but may. It names nobody where none will come, or
  // where the caller gives up.
  std::optional<Difference> answer(Asked asked, Milliseconds within, bool gives_up);
  // What is there has `grace` to end, where there is any, and rank 0 is asked to give up messages
  // that still wait then. Nothing is entered from here on, nor said that waits for others. `wake`
  // has the thread come round.
  void leave(std::optional<Milliseconds> grace, const std::function<void()>& wake);
  void wait_until_left() const;

  // --- From the agreement's thread --------------------------------------------------------------

  bool is_leaving() const {
    return leaving_;
  }
  // When something that runs or waits is late.
  Clock::time_point next_late() const {
    return locked([&] { return table_.next_late(); });
  }
  // To be said at once, and before what has settled is taken.
  std::vector<News> take_news();
  // Its data does not come. Whether rank 0 is to be asked why.
  bool break_off(uint64_t seq);
  // `is_root_stopped` is asked where something is late.
  Late take_late(Clock::time_point now, const std::function<bool()>& is_root_stopped);
  void take_answer(Asked asked, Difference who);
  // Somebody says something about calls, or messages.
  void hear_of_calls(const std::function<void(CallTable&)>& what);
  void hear_of_messages(const std::function<void(OwnMessages&)>& what);
  void deny_message(uint64_t number, ErrorKind kind, const Difference& why, const OtherEnd& other);

  // Messages to begin, what has failed, and the next collective to begin.
  std::tuple<std::vector<Begin>, std::vector<Failed>, std::optional<Begin>> take_settled();
  // The collectives of a group run one after the other, in the order of their calls.
  std::optional<Begin> next_to_begin();
  void notify() const;
  // Messages to begin, and all that is left, which fails.
  std::pair<std::vector<Begin>, std::vector<Failed>> close();
  void set_left();

 private:
  template <class Look>
  std::invoke_result_t<Look> locked(const Look& look) const {
    const std::lock_guard lock(mutex_);
    return look();
  }
  // Where the group is of no more use: takes the call.
  std::optional<Failed> refuse(OpenCall& call, uint64_t seq) const;
  // What has come of what was said about messages.
  void settle_messages();
  void ask(Asked asked);

  const Roster& roster_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  // Guarded by mutex_ from here on.
  uint64_t count_ = 0, posted_ = 0;
  LastCalled last_called_;
  std::atomic<bool> leaving_{false};  // may be read without it
  bool has_left_ = false;
  std::vector<News> news_;
  // The answer once it is there.
  std::map<Asked, std::optional<Difference>> asked_;
  OwnMessages messages_;
  CallTable table_;
};

}  // namespace c10d_ext
