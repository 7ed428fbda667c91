#pragma once

#include <Python.h>

namespace c10d_ext::fast_call {

// The synchronous calls of torch_c10d_ext.distributed, each with the arguments that its function
// has: (output, input[, op], group). They do what the function and its op do, in one call of C.
// Each returns True; or False, and nothing has happened, where an argument is not plain, something
// but the kernel needs to know of the call, or the function has more to do: an error of its own to
// raise, or an input to reshape.
PyObject* write_all_gather(PyObject* module, PyObject* const* arguments, Py_ssize_t count);
PyObject* write_reduce_scatter(PyObject* module, PyObject* const* arguments, Py_ssize_t count);
PyObject* write_all_to_all(PyObject* module, PyObject* const* arguments, Py_ssize_t count);

}  // namespace c10d_ext::fast_call
