#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/group.h"
#include "base/python_module.h"
#include "work/work_info.h"

namespace c10d {
class Work;
enum class OpType : std::uint8_t;
}  // namespace c10d

namespace c10d_ext {

// What remains to be done on this rank once the data is there (convert, scatter into strides,
// reduce what was gathered). Runs once, below autograd: on the thread that completes a CPU
// collective, and on the waiting thread's current stream for a CUDA one.
using Finish = std::function<void()>;
Finish then(Finish first, Finish second);
// Runs it, if there is one, and returns what it throws.
std::exception_ptr run_finish(const Finish& finish) noexcept;

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
//  * never waited for = nothing kept: a completed work releases its tensors at once, and its entry
//    at the latest when 64 more were started on its thread. On a device one is found complete then,
//    or by a wait of its thread when 64 are at hand;
//  * `finish` has run exactly once before any wait returns.
void attach(std::string_view op, const Group& group, at::TensorList outputs,
            const c10::intrusive_ptr<c10d::Work>& work, Finish finish, Subscribe subscribe);

// A started collective as a work of its own, for who called a method of c10d: it is in no table.
// `outputs`: what result() and its future hold; `type` and `begun`: of the call, which is timed
// here and not by the backend.
c10::intrusive_ptr<c10d::Work> work_for_caller(std::string_view op, const Group& group,
                                               at::TensorList outputs,
                                               c10::intrusive_ptr<c10d::Work> work,
                                               Subscribe subscribe, c10d::OpType type,
                                               std::chrono::steady_clock::time_point begun);

// A started message as a work of its own, which whoever started it keeps: it is attached to no
// storage. `source`: the rank that sends it, -1 where the backend will know; `timed`: the backend's
// work knows its duration. The caller's work is dropped: the message still arrives, but `finish`
// may not run. `type`: of a method of c10d that was called, whose work is timed here.
c10::intrusive_ptr<c10d::Work> follow(std::string_view op, const Group& group, at::Tensor tensor,
                                      c10::intrusive_ptr<c10d::Work> work, Finish finish,
                                      int64_t source, bool timed,
                                      std::optional<c10d::OpType> type = std::nullopt);

// Attaches a message, as follow() gives it, to its tensor's storage, so that wait_tensor finds it.
void attach_message(const c10::intrusive_ptr<c10d::Work>& message);

// Waits for every collective that writes `t`'s storage. Blocks on CPU, orders streams on CUDA.
void wait(const at::Tensor& t);

// Takes what is complete out of c10d's table of this thread: at exit, so that torch does not count
// it as never waited for.
void sweep();

// Whether somebody has to wait for `t`: a collective of ours still writes its storage, or has
// queued that on a device. If not, no trace of one is left.
bool is_pending(const at::Tensor& t);
// The same, without a look at what failed, or at the works of torch's table.
bool is_being_written(const at::Tensor& t);

// The newest work that writes `t`'s storage, or null.
c10::intrusive_ptr<c10d::Work> work_of(const at::Tensor& t);

// Of a collective on `output` that was complete when its start returned: remembered until this
// thread starts the next one.
void note_over(const at::Tensor& output, const WorkInfo& info);

// The newest work that writes `t`'s storage; where it was over at once, one that tells of it; null
// where nothing was started.
c10::intrusive_ptr<c10d::Work> started_work_of(const at::Tensor& t);

// The work of a collective that nobody has waited for yet: where it is over, one that tells so.
c10::intrusive_ptr<c10d::Work> work_behind(const at::Tensor& t);

// The class of these works in Python.
void bind_works(pybind11::module_& m);

// False while this thread's current stream is captured into a CUDA graph: to ask an event for its
// state would spoil that.
bool may_query_device();

// Works attached, and messages, neither completed nor waited for.
size_t pending_count();

}  // namespace c10d_ext
