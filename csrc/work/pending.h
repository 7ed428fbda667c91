#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "base/group.h"
#include "work/work_info.h"

namespace c10d {
class Work;
enum class OpType : std::uint8_t;
}  // namespace c10d

namespace c10d_ext {

class CheckedBackend;
struct Fingerprint;

// What remains to be done on this rank once the data is there (convert, scatter into strides,
// reduce what was gathered). Runs once, below autograd: on the thread that completes a CPU
// collective, and on the waiting thread's current stream for a CUDA one.
using Finish = std::function<void()>;
Finish then(Finish first, Finish second);

// An exchange that a backend has begun, no work where it has nothing to do.
struct Started {
  c10::intrusive_ptr<c10d::Work> work;
  Finish finish;
};
// Begins one, on any thread, below autograd.
using Begin = std::function<Started()>;

// Calls `over` when a backend's work is complete, from whichever thread notices; false where the
// work cannot tell. Null for one that never can: it is finished by who waits for it or asks.
using Subscribe = bool (*)(c10d::Work& work, std::function<void(std::exception_ptr error)> over);
bool subscribe_to_future(c10d::Work& work, std::function<void(std::exception_ptr error)> over);
// The same of a work that may have none, as those written in Python.
bool subscribe_if_possible(c10d::Work& work, std::function<void(std::exception_ptr error)> over);

// Attaches a started collective to the storages it writes, so that wait_tensor (ours and torch's)
// finds it. A work that is complete already is finished on the spot and leaves nothing behind; so
// does any other, once it is, under SyncScope.
//
// Invariants, the reason this wraps c10d's registry instead of using it bare:
//  * found from any thread: c10d keeps one table per thread, a wait on another thread would not
//  wait;
//  * never waited for = nothing kept: a completed work lets go of its tensors at once and of its
//  entry
//    at the latest when 64 more were started on its thread;
//  * `finish` has run exactly once before any wait returns.
void attach(std::string_view op, const Group& group, at::TensorList outputs,
            const c10::intrusive_ptr<c10d::Work>& work, Finish finish, Subscribe subscribe);

// While one lives, what this thread starts belongs to who made it, and not to the storages that it
// writes: attach() leaves no entry anywhere. For one collective, or messages, of a backend.
class Claim {
 public:
  // What is done on this rank before the collective reads anything, and after all that it leaves to
  // do itself.
  struct Around {
    Finish before;
    Finish after;
  };
  // `backend`: whose verb it is. `called`: what the verb says to the other ranks, null: nothing.
  // `outputs`: what result() and the future of the work hold. `timeout`: of the call, negative: the
  // group's.
  Claim(CheckedBackend& backend, const Fingerprint* called, c10d::OpType type,
        std::vector<at::Tensor> outputs, Around around, std::chrono::milliseconds timeout);
  ~Claim();
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

  // Of this thread, or null.
  static Claim* here();

  CheckedBackend& backend() const {
    return backend_;
  }
  const Fingerprint* called() const {
    return called_;
  }
  c10d::OpType type() const {
    return type_;
  }
  std::chrono::milliseconds timeout() const {
    return timeout_;
  }

  // `begin` with what is done before and after. Once.
  Begin around(Begin begin);

  // Whether something is in flight.
  bool has_work() const {
    return work_ != nullptr;
  }
  // The work. Once.
  c10::intrusive_ptr<c10d::Work> take();

  // attach() under a claim.
  void attach(std::string_view op, const Group& group, const c10::intrusive_ptr<c10d::Work>& work,
              Subscribe subscribe);

 private:
  CheckedBackend& backend_;
  const Fingerprint* const called_;
  const c10d::OpType type_;
  const std::chrono::milliseconds timeout_;
  const std::chrono::steady_clock::time_point begun_;
  std::vector<at::Tensor> outputs_;
  Around around_;
  c10::intrusive_ptr<c10d::Work> work_;
  Claim* const outer_;
};

// A started message as a work of its own, which whoever started it keeps: it is attached to no
// storage. `source`: the rank that sends it, -1 where the backend will know; `timed`: the backend's
// work knows its duration. The caller's work is dropped: the message still arrives, but `finish`
// may not run.
c10::intrusive_ptr<c10d::Work> follow(std::string_view op, const Group& group, at::Tensor tensor,
                                      c10::intrusive_ptr<c10d::Work> work, Finish finish,
                                      int64_t source, bool timed);

// Attaches a message, as follow() gives it, to its tensor's storage, so that wait_tensor finds it.
void attach_message(const c10::intrusive_ptr<c10d::Work>& message);

// Waits for every collective that writes `t`'s storage. Blocks on CPU, orders streams on CUDA.
void wait(const at::Tensor& t);

// Takes what is complete out of c10d's table of this thread: at exit, so that torch does not count
// it as never waited for.
void sweep();

// Whether a collective of ours still writes `t`'s storage. If not, no trace of one is left.
bool is_pending(const at::Tensor& t);
// The same, without a look at what failed, or at the works of torch's table.
bool is_being_written(const at::Tensor& t);

// The newest work that writes `t`'s storage, or null.
c10::intrusive_ptr<c10d::Work> work_of(const at::Tensor& t);

// Of a collective on `output` that was complete when its start returned: remembered until this
// thread starts the next one.
void note_over(const at::Tensor& output, const WorkInfo& facts);

// The newest work that writes `t`'s storage; where it was over at once, one that tells of it; null
// where nothing was started.
c10::intrusive_ptr<c10d::Work> started_work_of(const at::Tensor& t);

// The work of a collective that nobody has waited for yet: where it is over, one that tells so.
c10::intrusive_ptr<c10d::Work> work_behind(const at::Tensor& t);

// The class of these works in Python.
void bind_works(pybind11::module_& m);

// False while this thread's current stream is captured into a CUDA graph, and in a build without
// CUDA.
bool may_query_device();

// Works attached, and messages, neither completed nor waited for.
size_t pending_count();

}  // namespace c10d_ext
