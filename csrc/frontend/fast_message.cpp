#include "frontend/fast_message.h"

#include <ATen/MemoryOverlap.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <limits>
#include <string>
#include <string_view>

#include "base/timeouts.h"
#include "collectives/p2p.h"
#include "control/resolve_group.h"
#include "frontend/fast_call.h"

namespace c10d_ext::fast_call {

PyObject* pass_message(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count) {
  std::string_view name;
  Message message;
  if (count != 5 || is_watched() || !THPVariable_CheckExact(arguments[0]) ||
      !read(arguments[1], message.peer) || !read(arguments[2], name) ||
      !read(arguments[3], message.tag)) {
    Py_RETURN_FALSE;
  }
  message.tensor = THPVariable_Unpack(arguments[0]);
  message.sends = arguments[4] == Py_True;
  if (!is_plain(message.tensor) || message.tag < 0 ||
      message.tag > std::numeric_limits<int>::max() ||
      (!message.sends && at::has_internal_overlap(message.tensor) == at::MemOverlap::Yes)) {
    Py_RETURN_FALSE;
  }
  bool is_sensible = false;
  const bool done = run([&] {
    const c10::AutoGradMode no_grad(false);
    const Group group = resolve_group(message.sends ? "send" : "recv", name);
    is_sensible = message.peer >= 0 && message.peer < group.size() && message.peer != group.rank();
    if (is_sensible) {
      start_message(group, message)->wait(kNoTimeout);
    }
  });
  return done ? PyBool_FromLong(is_sensible ? 1 : 0) : nullptr;
}

}  // namespace c10d_ext::fast_call
