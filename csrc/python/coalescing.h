#pragma once

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>

#include <optional>
#include <string>
#include <vector>

namespace c10d_ext {

// Calls that a coalescing block holds back mostly look like the one before them, and are then told
// by the identity of their arguments.

// remember(function, op, group, ranks, inputs, outputs): calls of `function` with these very
// objects are held in these two lists (one, where there is no input of its own). Without arguments:
// none is.
PyObject* remember(PyObject*, PyObject* const* arguments, Py_ssize_t given);

// hold_again(function, op, group, input, output): whether this call was put into the lists. It was
// if it is as remembered and its tensors go with those that are there.
PyObject* hold_again(PyObject*, PyObject* const* arguments, Py_ssize_t given);

// Raises what a call would be refused for at the end of its block, when others were sent.
void check_held(const std::string& op, const std::string& group_name, const std::string& reduce_op,
                const std::optional<c10::Scalar>& factor, const at::Tensor& input,
                const at::Tensor& output);

// check_apart(group_name, inputs, outputs, inputs, outputs, ...): raises where a call of a block,
// one of each list, touches what another one writes: they have no order. Of dense tensors alone;
// whether others overlap is too hard to tell. Of sizes that a trace cannot compare it does not.
PyObject* check_apart(PyObject*, PyObject* const* arguments, Py_ssize_t given);

}  // namespace c10d_ext

// The calls of a coalescing block as one, from and into the caller's own tensors, without a
// gradient. Each output has as many elements as its call needs. Complete on return unless
// `async_op`; false, and nothing has happened, where the backend may not write a tensor itself.
namespace c10d_ext {

bool write_all_gather_block(bool async_op, const std::vector<at::Tensor>& inputs,
                            const std::vector<at::Tensor>& outputs, const std::string& group_name);

bool write_reduce_scatter_block(bool async_op, const std::vector<at::Tensor>& inputs,
                                const std::vector<at::Tensor>& outputs,
                                const std::string& reduce_op,
                                const std::optional<c10::Scalar>& factor,
                                const std::string& group_name);

}  // namespace c10d_ext
