#pragma once

// Works of a group whose ranks agree before the inner backend begins.

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "backends/checked/agreement.h"
#include "backends/checked/piggyback.h"
#include "backends/request.h"
#include "base/group.h"
#include "base/thread_pool.h"
#include "work/pending.h"

namespace c10d_ext {

// What a work must know of the inner backend.
struct Inner {
  std::string name;
  bool has_futures = false;  // its works have some
  // What takes a while to begin does so here: the agreement's thread hears of lost ranks meanwhile.
  std::shared_ptr<ThreadPool> beginnings = ThreadPool::make("c10d_ext_begin");
  // Callbacks run here, which may wait for what the agreement's thread has yet to begin.
  std::shared_ptr<ThreadPool> callbacks = ThreadPool::make("c10d_ext_ends");
  // Whether a message was aborted that it is still at: its end would wait for that.
  std::shared_ptr<std::atomic<bool>> abandoned = std::make_shared<std::atomic<bool>>(false);
};

// A collective that the ranks are to agree on.
struct AgreedCall {
  std::string_view op;
  Fingerprint called;
  std::chrono::milliseconds timeout;
  // Hands it to the inner backend once all ranks have called it and what was called before is done;
  // no work: it is done then. `quick`: it takes less than a millisecond.
  Begin begin;
  bool quick = false;
  // Instead of `begin`, where all ranks' data comes with the calls.
  std::optional<Piggyback> piggyback = std::nullopt;
};

c10::intrusive_ptr<c10d::Work> start_agreed(const std::shared_ptr<Agreement>& agreement,
                                            const Group& group, const Inner& inner,
                                            AgreedCall&& call);
// For who waits next for what start_agreed() returned: does the agreement's work until it begins or
// has failed, or not at all where another thread does that. Throws what signals' handlers raise.
void take_part(c10d::Work& work);

struct StartedMessage {
  c10::intrusive_ptr<c10d::Work> work;  // for the caller
  // What the inner backend does: an abort ends it. Several threads may wait for it.
  c10::intrusive_ptr<c10d::Work> end;
};

struct GrantedCall {
  Message message;
  at::Tensor wire;  // what travels of it
  size_t most;      // of so many bytes it may arrive with the word that its other end is there
  std::chrono::milliseconds timeout;
  // Hands it to the inner backend once its other end is there, at `peer`.
  std::function<c10::intrusive_ptr<c10d::Work>(int peer)> begin;
};

StartedMessage start_granted(const std::shared_ptr<Agreement>& agreement, const Group& group,
                             const Inner& inner, GrantedCall call);

}  // namespace c10d_ext
