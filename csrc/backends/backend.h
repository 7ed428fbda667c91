#pragma once

// What csrc asks of a backend of its own, besides c10d::Backend's methods, which are for others.

#include <c10/util/intrusive_ptr.h>

#include <functional>

#include "backends/capabilities.h"
#include "backends/request.h"
#include "base/group.h"

namespace c10d {
class Backend;
class Work;
}  // namespace c10d

namespace c10d_ext {

// A c10d::Backend derives from it to say what it can do. What other backends can do is in the table
// of adapter/capabilities.h.
class DescribedBackend {
 public:
  DescribedBackend();
  virtual ~DescribedBackend();
  DescribedBackend(const DescribedBackend&) = delete;
  DescribedBackend& operator=(const DescribedBackend&) = delete;

  virtual const Capabilities& capabilities() const = 0;

  // `backend` where it is one, or null. Costs a comparison where it is the backend that this thread
  // asked for last.
  static const DescribedBackend* of(const c10d::Backend& backend);
};

// A c10d::Backend derives from it to be given requests as they are. Any other backend is used
// through an Adapter, with the methods of c10d. Its capabilities are those of its messages.
class CollectiveBackend : public DescribedBackend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // Starts the collective, which has data or is a barrier, and attaches it to the storages that it
  // writes (see work/pending.h). `group`: as the op's caller knows it.
  virtual void post(const Group& group, const CollectiveRequest& request) = 0;

  using Start = std::function<WorkPtr(c10d::Backend& backend, int peer)>;
  // Starts a message by `start`, which is told who has its other end, now or once that is there; or
  // moves `wire`, which is what travels of it, by itself.
  virtual WorkPtr post_message(const Message& message, const at::Tensor& wire, Start start) = 0;

  // As DescribedBackend::of().
  static CollectiveBackend* of(c10d::Backend& backend);
};

}  // namespace c10d_ext
