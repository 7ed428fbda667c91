#include "backends/checked/duties.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "backends/checked/service.h"

namespace c10d_ext {

Duties::Duties(const Roster& roster, OpenCalls& calls, std::vector<Connection> lines,
               std::vector<FdOwner> death_sockets, Participant::Lose lose)
    : roster_(roster),
      calls_(calls),
      star_(roster, *this, std::move(lines), std::move(death_sockets)),
      participant_(
          roster, calls, [this](Says kind, Payload words) { say(kind, std::move(words)); },
          [this](const Calling& call) { say_call(call); },
          [this](int other, Says kind, const Payload& words) { star_.say(other, kind, words); },
          [this] { star_.wake(); }, std::move(lose)),
      last_words_(
          roster, [this](int other, const Payload& words) { star_.say(other, kDoomed, words); },
          [this](uint64_t seq) { participant_.doom(seq); }) {
  const auto tell_it = [this](int rank, Says kind, const Payload& words) {
    tell(rank, kind, words);
  };
  const int rank = roster.place().rank;
  if (rank == 0) {
    coordinator_.emplace(roster, tell_it);
  }
  if (!roster.own_host().empty() && roster.own_host().front() == rank) {
    relay_.emplace(roster, tell_it);
  }
}

Duties::Clock::time_point Duties::work(const Star::Ready& ready) {
  star_.take_in(ready);
  const auto now = Clock::now();  // what is late by now rank 0 hears of before it is asked
  participant_.tell_news();
  star_.beat();
  participant_.look(now);
  if (coordinator_) {
    coordinator_->look(now);
  }
  settle();
  return next_look();
}

Duties::Clock::time_point Duties::tell_news() {
  participant_.tell_news();
  settle();  // it may have been the last call, or a message that was wanted
  return next_look();
}

Duties::Clock::time_point Duties::next_look() const {
  return std::min({coordinator_ ? coordinator_->next_look() : OpenCalls::kNever, calls_.next_late(),
                   star_.next_beat()});
}

void Duties::say_goodbye() {
  participant_.tell_news();  // of messages whose data is here
  if (!coordinator_) {
    star_.leave(calls_.agreed());
  }
  auto [grants, fails] = calls_.close();
  for (const auto& [peer, begin] : grants) {
    begin(peer);
  }
  for (auto& failed : fails) {
    failed.call.fail(failed.failure);
  }
  star_.wake(Star::Waiter::Caller);
  auto& service = Service::of_this_process();
  service.add(&star_);
  calls_.set_left();
  if (coordinator_) {
    serve();
    star_.leave(calls_.agreed());
  }
  star_.linger(kLinger, [&](bool is_heard) {
    if (is_heard || service.ends_at_once()) {
      service.remove(&star_);
    }
  });
}

void Duties::settle() {
  participant_.settle();
  if (helped_) {
    star_.wake(Star::Waiter::Caller);
  }
}

void Duties::hear(int rank, uint32_t kind, Payload& words) {
  if (coordinator_) {
    if (relay_ && kind == kCalling && !roster_.is_linked(rank)) {
      const Calling call = relay_->take_call(rank, words);
      relay_->add_call(rank, call);
      coordinator_->add_call(rank, call);
    } else {
      coordinator_->hear(rank, kind, words);
    }
  } else if (relay_ && kind == kRelaying) {
    relay_->hear_calls(rank, words);
  } else if (rank == 0) {
    obey(kind, words);
  } else {
    hear_beside_the_star(rank, kind, words);
  }
}

std::shared_ptr<Landing> Duties::find_landing(int rank, uint32_t kind, Payload words) {
  std::optional<uint64_t> receive;
  const size_t bytes = words.attached_bytes();
  try {
    if (kind == kPosting && coordinator_) {
      receive = coordinator_->receive_for(rank, words);
    } else if (kind == kGranted && rank == 0) {
      receive = static_cast<uint64_t>(words.number());
    } else if (kind == kDelivering) {
      const auto send = take_delivery(words, rank, roster_.place().rank);
      calls_.hear_of_messages([&](OwnMessages& messages) { receive = messages.receive_for(send); });
    }
  } catch (const std::runtime_error&) {
    // The sentence is heard, and refused, once its data is here.
  }
  std::shared_ptr<Landing> landing;
  if (receive) {
    calls_.hear_of_calls(
        [&](CallTable& calls) { landing = calls.reserve_landing(*receive, bytes); });
  }
  return landing;
}

void Duties::obey(uint32_t kind, Payload& words) {
  if (relay_ && kind == kSingly) {
    relay_->pass_on_singly();
    return;
  }
  if (relay_ && kind == kPing) {
    participant_.tell_news();
    participant_.say_count(relay_->counts());
    return;
  }
  if (relay_ && (kind == kGo || kind == kDiffer)) {
    Payload number = words.first_numbers(1);
    relay_->settle(static_cast<uint64_t>(number.number()));
  }
  participant_.obey(kind, words);
}

void Duties::hear_beside_the_star(int rank, uint32_t kind, Payload& words) {
  if (kind == kLeaving) {
    left_.insert(rank);
    if (is_led_by(rank)) {
      participant_.say_count();  // it may have told nobody of this one's last call
    }
  } else if (kind == kDoomed && tells_of_the_end(rank)) {
    last_words_.add(static_cast<uint64_t>(words.number()));
  } else if (relay_ && kind == kCalling) {
    relay_->hear_call(rank, std::move(words));
  } else if (kind == kGo && is_led_by(rank)) {
    participant_.obey(kind, words);
  } else {
    participant_.hear_of_message(rank, kind, words);
  }
}

bool Duties::tells_of_the_end(int rank) const {
  // Rank 0's host tells the next one's leader.
  return roster_.is_leader(rank) || !roster_.is_linked(rank) || roster_.is_beside_root(rank);
}

bool Duties::is_led_by(int rank) const {
  const auto& own = roster_.own_host();
  return !own.empty() && own.front() == rank && rank != roster_.place().rank;
}

void Duties::lose(const std::vector<int>& ranks, const std::string& how) {
  if (coordinator_) {
    coordinator_->lose(ranks, how);
    return;
  }
  for (const int rank : ranks) {
    if (rank == 0) {
      participant_.lose_root(how);
      last_words_.lose_root();
      if (const auto undone = participant_.undone_by_root()) {
        last_words_.add(*undone);
      }
    } else if (left_.count(rank) == 0) {
      say(kSevered, Payload().put(rank));
    }
  }
}

void Duties::say(Says kind, Payload words) {
  if (!coordinator_ && kind == kBroken) {
    Payload told = words;
    last_words_.add(static_cast<uint64_t>(told.number()));
  }
  coordinator_ ? coordinator_->hear(0, kind, words) : star_.say(0, kind, words);
}

void Duties::say_call(const Calling& call) {
  const bool by_leader = roster_.calls_by_leader(roster_.place().rank);
  if (relay_) {
    relay_->add_call(roster_.place().rank, call);
  }
  if (coordinator_) {
    coordinator_->add_call(0, call);
    return;
  }
  std::optional<Payload> words;
  if (!relay_ && by_leader) {
    const int leader = roster_.own_host().front();
    words = encoded(call);
    if (left_.count(leader) == 0) {
      star_.say(leader, kCalling, *words);
    } else {
      participant_.say_count();
    }
  }
  if (!by_leader || !call.data) {
    star_.say(0, kCalling, words ? *words : encoded(call));
  }
}

void Duties::tell(int rank, Says kind, const Payload& words) {
  if (rank != roster_.place().rank) {
    star_.say(rank, kind, words);
    return;
  }
  Payload own = words;
  obey(kind, own);
}

void Duties::serve() {
  auto& service = Service::of_this_process();
  Payload left;
  left.put(static_cast<int64_t>(calls_.agreed()));
  coordinator_->hear(0, kLeaving, left);
  while (!coordinator_->is_alone() && !service.ends_at_once() &&
         (Clock::now() < service.until() || coordinator_->has_messages())) {
    const auto until = service.until() > Clock::now() ? service.until() : OpenCalls::kNever;
    star_.take_in(star_.wait(Star::Waiter::Thread,
                             std::min({coordinator_->next_look(), star_.next_beat(), until})));
    star_.beat();
    coordinator_->look(Clock::now());
  }
}

}  // namespace c10d_ext
