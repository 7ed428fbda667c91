#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <utility>

#include "base/gil.h"

namespace c10d_ext {

// The class of futures whose wait() hears of Ctrl-C, a subclass of torch's, whose own does not.
void bind_futures(pybind11::module_& m);

// `future` as one of them.
pybind11::object interruptible(c10::intrusive_ptr<c10::ivalue::Future> future);

// Makes a class of works known to Python, which then gets such futures of them. After
// bind_futures().
template <class W>
pybind11::class_<W, c10::intrusive_ptr<W>, c10d::Work> bind_work(pybind11::module_& m,
                                                                 const char* name) {
  namespace py = pybind11;
  // What goes with a work may wait for a thread that needs the GIL.
  return py::class_<W, c10::intrusive_ptr<W>, c10d::Work>(m, name,
                                                          py::release_gil_before_calling_cpp_dtor())
      .def(
          "get_future",
          [](W& work) {
            c10::intrusive_ptr<c10::ivalue::Future> future;
            without_gil([&] { future = work.getFuture(); });
            return interruptible(std::move(future));
          },
          "The future of the output tensors; Ctrl-C ends its wait.")
      .def("_get_sequence_number", &W::getSequencenumber,
           "The number of the collective, or of the message, among those of its group.");
}

}  // namespace c10d_ext
