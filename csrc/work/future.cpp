#include "work/future.h"

#include <torch/csrc/jit/python/pybind_utils.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace c10d_ext {

namespace {

namespace py = pybind11;
using torch::jit::PythonFutureWrapper;

// Told of the end of a future, after a wait that Ctrl-C ended, too.
struct Waiters {
  std::mutex mutex;
  std::condition_variable changed;
};

class Future : public PythonFutureWrapper {
 public:
  explicit Future(c10::intrusive_ptr<c10::ivalue::Future> future,
                  std::optional<UnwrapFunc> unwrap = std::nullopt)
      : PythonFutureWrapper(std::move(future), std::move(unwrap)) {
    if (!fut->completed()) {
      waiters_ = std::make_shared<Waiters>();
      // Before anyone's callbacks: who waits does not wait for those.
      fut->addCallback(
          [waiters = waiters_](c10::ivalue::Future&) {
            const std::lock_guard lock(waiters->mutex);
            waiters->changed.notify_all();
          },
          /*uses_future=*/false);
    }
  }

  py::object wait() {
    if (waiters_) {
      // A forked child drops the future, and must not end what a thread it lacks waits in.
      const auto waiters = waiters_;
      std::unique_lock lock(waiters->mutex);
      wait_interruptibly(waiters->changed, lock, std::chrono::steady_clock::time_point::max(),
                         [this] { return fut->completed(); });
    }
    return PythonFutureWrapper::wait();
  }

  std::shared_ptr<Future> then(py::function callback) {
    py::function called = with_this(std::move(callback));
    const py::gil_scoped_release no_gil;
    return std::make_shared<Future>(PythonFutureWrapper::then(std::move(called))->fut);
  }

  void add_done_callback(py::function callback) {
    py::function called = with_this(std::move(callback));
    const py::gil_scoped_release no_gil;
    PythonFutureWrapper::add_done_callback(std::move(called));
  }

 private:
  // torch calls back with a future of its own class.
  py::function with_this(py::function callback) {
    return py::cpp_function(
        [self = std::static_pointer_cast<Future>(shared_from_this()),
         callback = std::move(callback)](const py::object&) { return callback(self); });
  }

  std::shared_ptr<Waiters> waiters_;  // null where there is nothing to wait for
};

// What `last` returns once `future` is done; where that failed, `last` is called all the same, and
// the future fails as it did.
std::shared_ptr<Future> followed(const PythonFutureWrapper& future, py::function last) {
  const auto held = std::make_shared<torch::jit::PythonFunctionGuard>(std::move(last));
  const py::gil_scoped_release no_gil;
  auto result = future.fut->then(
      [held](c10::ivalue::Future& done) -> c10::IValue {
        c10::IValue value;
        std::string failed;
        {
          const py::gil_scoped_acquire gil;
          try {
            value = torch::jit::toIValue(held->func_(), c10::PyObjectType::get());
          } catch (const py::error_already_set& error) {
            failed = error.what();
          }
        }
        if (done.hasError()) {
          std::rethrow_exception(done.exception_ptr());
        }
        if (!failed.empty()) {
          throw std::runtime_error(failed);
        }
        return value;
      },
      c10::PyObjectType::get());
  return std::make_shared<Future>(std::move(result));
}

}  // namespace

}  // namespace c10d_ext

namespace pybind11::detail {

// A std::shared_ptr<Future> would be found by a dynamic_cast, and torch's class has no vtable.
template <>
struct is_holder_type<c10d_ext::Future, std::shared_ptr<torch::jit::PythonFutureWrapper>>
    : std::true_type {};

}  // namespace pybind11::detail

namespace c10d_ext {

void bind_futures(py::module_& m) {
  py::class_<Future, std::shared_ptr<PythonFutureWrapper>, PythonFutureWrapper>(m, "Future")
      .def("wait", &Future::wait, py::call_guard<py::gil_scoped_release>())
      .def("then", &Future::then, py::arg("callback"))
      .def("add_done_callback", &Future::add_done_callback, py::arg("callback"));
  m.def("followed", &followed, py::arg("future"), py::arg("last"));
}

py::object interruptible(c10::intrusive_ptr<c10::ivalue::Future> future) {
  return py::cast(std::make_shared<Future>(std::move(future)));
}

}  // namespace c10d_ext
