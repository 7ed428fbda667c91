#pragma once

#include <Python.h>

namespace c10d_ext::fast_call {

// A message, complete on return, as pass_message(tensor, peer, group, tag, sends), where `peer` is
// a rank of the group and `group` a ProcessGroup: what start_messages and the work's wait do,
// without the lists and the work in Python. Returns True; False where any argument is not plain, or
// anything but the backend needs to know of the message, or what is asked for makes no sense: then
// nothing has happened.
PyObject* pass_message(PyObject* module, PyObject* const* arguments, Py_ssize_t count);

}  // namespace c10d_ext::fast_call
