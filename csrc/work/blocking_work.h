#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <exception>
#include <functional>

namespace c10d {
class Work;
}

namespace c10d_ext {

// What a group does for who waits.
struct OnWait {
  // Whose time it is that a caller waits.
  std::string backend;
  // Makes of the error of `work` the one to raise.
  std::function<std::exception_ptr(std::exception_ptr error)> failed;
  // What there is to do here for `work` to come to its end. Lets Ctrl-C through. Whether that is
  // over: it need not be waited for.
  std::function<bool()> help;
  // What a wait raises that ends before `work`.
  std::function<std::exception_ptr(std::chrono::milliseconds timeout)> late;
};

// `work`, of a kind that can only be waited for, and once: as one that any number of threads can
// wait for, each with its own timeout, that says whether it is complete, and has a future.
//
// Who waits first waits at `work`; a question has another thread do that. Dropped before it is
// complete, it lets `work` come to its end.
c10::intrusive_ptr<c10d::Work> adapt_blocking_work(c10::intrusive_ptr<c10d::Work> work);
c10::intrusive_ptr<c10d::Work> adapt_blocking_work(c10::intrusive_ptr<c10d::Work> work,
                                                   OnWait on_wait);

// Has a thread wait for `work`, whose peer counts on it though nobody here waits. Does nothing
// where the system has no more threads.
void wait_aside(const c10::intrusive_ptr<c10d::Work>& work) noexcept;

}  // namespace c10d_ext
