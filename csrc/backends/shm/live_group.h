#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backends/shm/backend.h"
#include "backends/shm/bootstrap.h"
#include "backends/shm/operation.h"
#include "base/exceptions.h"
#include "base/gil.h"
#include "control/open_groups.h"
#include "control/process.h"

namespace c10d_ext {

// A group's engine, shared by the backend and the works.
class ShmBackend::LiveGroup {
 public:
  LiveGroup(std::unique_ptr<shm::Membership> membership, std::unique_ptr<shm::Engine> engine,
            bool polls_drive, Group place)
      : membership_(std::move(membership)),
        engine_(std::move(engine)),
        polls_drive_(polls_drive),
        place_(std::move(place)),
        peers_(membership_->peers()),
        generation_(fork_generation()) {}

  ~LiveGroup() {
    if (is_foreign()) {
      // The parent's: its threads do not exist here, its locks may be held for ever.
      static_cast<void>(membership_.release());
      static_cast<void>(engine_.release());
      return;
    }
    close(std::chrono::milliseconds(0));
  }

  static std::shared_ptr<LiveGroup> start(std::unique_ptr<shm::Membership> membership,
                                          const Settings& settings, const Group& place) {
    shm::Settings engine_settings = settings.engine;
    engine_settings.group = place.name();
    engine_settings.pulses = membership->pulses();
    engine_settings.pulses[static_cast<size_t>(place.rank())] = nullptr;
    auto engine = std::make_unique<shm::Engine>(
        membership->mapping(), settings.arena, static_cast<int>(place.rank()),
        static_cast<int>(place.size()), membership->peers(), engine_settings);
    auto live = std::make_shared<LiveGroup>(std::move(membership), std::move(engine),
                                            !settings.engine.progress_thread, place);
    live->membership_->watch([e = live->engine_.get()](int rank) { e->peer_lost(rank); });
    OpenGroups<LiveGroup>::of_this_process().add(live);
    return live;
  }

  // The peers are told as soon as it is done: their operations that need this rank fail.
  void close(std::chrono::milliseconds grace) {
    if (is_foreign()) {
      return;
    }
    // Whoever comes second, from a callback of what is being ended say, leaves it to the first.
    if (!closing_.exchange(true)) {
      without_gil([&] {
        engine_->close(grace);
        membership_->stop();
        membership_.reset();
      });
    }
  }

  shm::Engine& engine() const {
    return *engine_;
  }
  const Group& place() const {
    return place_;
  }
  const std::vector<Peer>& peers() const {
    return peers_;
  }

  bool is_done(TensorOperation& operation) const {
    if (C10_UNLIKELY(!operation.settled() && is_foreign())) {
      wait(operation, kNoTimeout);  // which refuses
    }
    if (!operation.settled() && polls_drive_ && !operation.held() && !is_foreign()) {
      engine_->wait(operation.carrier(), std::chrono::milliseconds(0), nullptr);
    }
    return operation.settled();
  }

  c10::intrusive_ptr<c10::ivalue::Future> future(TensorOperation& operation) const {
    // Without a thread nobody would ever complete it.
    if (polls_drive_ && !operation.held()) {
      wait(operation, kNoTimeout);
    }
    return operation.future();
  }

  // Blocks until the operation is settled; its own timeout ends it if `timeout` is not positive.
  void wait(TensorOperation& operation, std::chrono::milliseconds timeout) const {
    using Kind = ErrorKind;
    if (operation.settled()) {
      return;
    }
    if (C10_UNLIKELY(operation.held())) {
      throw error(Kind::Closed, operation,
                  "the coalescing block must be closed before its operations are waited for, got "
                  "an open one");
    }
    if (C10_UNLIKELY(is_foreign())) {
      throw error(Kind::Closed, operation,
                  "the work must be waited for in the process that started it, got a forked child");
    }
    const bool limited = timeout > std::chrono::milliseconds(0);
    bool ended = false;
    without_gil([&] {
      ended = engine_->wait(operation.carrier(), limited ? std::optional(timeout) : std::nullopt,
                            check_signals);
    });
    if (!ended) {
      const auto [ranks, who] = engine_->awaited(operation.carrier());
      throw error(Kind::Timeout, operation, text_of_wait_timeout(timeout, who), ranks);
    }
  }

 private:
  bool is_foreign() const {
    return fork_generation() != generation_;
  }

  CollectiveError error(ErrorKind kind, const TensorOperation& operation,
                        const std::string& message, std::vector<int> ranks = {}) const {
    return CollectiveError(kind, c10::str(operation.op(), ": ", message, " ", where(place_)),
                           std::move(ranks), std::string(operation.op()), operation.number(),
                           place_.name());
  }

  std::atomic<bool> closing_{false};
  std::unique_ptr<shm::Membership> membership_;
  std::unique_ptr<shm::Engine> engine_;
  const bool polls_drive_;
  const Group place_;
  const std::vector<Peer> peers_;
  const uint64_t generation_;
};

}  // namespace c10d_ext
