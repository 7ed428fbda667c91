#pragma once

#include <Python.h>

namespace c10d_ext::fast_call {

// pass_message(tensor, peer, group, tag, sends) sends or receives a message, and returns once that
// is complete. `peer` is a rank of the group, `group` a ProcessGroup. It does what start_messages
// and the work's wait do, without lists and a work in Python. Returns True; or False, and nothing
// has happened, where an argument is not plain, something but the backend needs to know of the
// message, or what is asked for makes no sense.
PyObject* pass_message(PyObject* module, PyObject* const* arguments, Py_ssize_t count);

}  // namespace c10d_ext::fast_call
