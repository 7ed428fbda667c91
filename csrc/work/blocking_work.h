#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <exception>
#include <functional>

namespace c10d {
class Work;
}

namespace c10d_ext {

// `work`, of a kind that can only be waited for, and once: as one that any number of threads can
// wait for, each with its own timeout, that says whether it is complete, and has a future.
//
// Who waits first waits at `work`; a question makes that a thread of its own. Dropped before it is
// complete, it lets `work` come to its end.
struct Explanations {
  // Whose time it is that a caller waits.
  std::string backend;
  // Makes of the error of `work` the one to raise.
  std::function<std::exception_ptr(std::exception_ptr error)> failed;
  // For who waits, and has nothing else to do: whether little is left to wait for at `work`, where
  // nothing is heard of Ctrl-C. Lets Ctrl-C through itself.
  std::function<bool()> ends_soon;
  // What a wait raises that ends before `work`.
  std::function<std::exception_ptr(std::chrono::milliseconds timeout)> late;
};
c10::intrusive_ptr<c10d::Work> adapt_blocking_work(c10::intrusive_ptr<c10d::Work> work);
c10::intrusive_ptr<c10d::Work> adapt_blocking_work(c10::intrusive_ptr<c10d::Work> work,
                                                   Explanations explanations);

}  // namespace c10d_ext
