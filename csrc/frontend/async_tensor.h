#pragma once

#include <Python.h>

#include <ATen/core/Tensor.h>

#include <optional>

// The C++ half of AsyncCollectiveTensor (torch_c10d_ext/_async.py), what an eager functional
// collective returns: a tensor of Python's class whose values live in another tensor, `elem`, and
// are there once somebody has waited.
//
// Autograd records on the wrapper: elem has no history, and shares the wrapper's version counter.
// The wrapper's own storage is sealed, so that nobody reads memory past the wait.
//
// An op on a wrapper takes one of two ways. Where only its values or a view of them are wanted,
// and nobody watches (no mode, transform or trace), it is answered here: the dispatch key
// DeferredInit, which torch leaves to extensions, comes before autograd, so the op goes on with
// elem in the wrapper's place, and with the wrapper's edge in autograd's graph. Everything else
// goes the way of torch's own class, through autograd to __torch_dispatch__.
namespace c10d_ext {

// The class, and the op that traced results are waited for with. Said once, at import.
void set_async_tensor_type(PyObject* type, PyObject* wait);

// Whether `t` is a wrapper made here. Those around fake or traced tensors are made in Python.
bool is_async_tensor(const at::Tensor& t);
// Whether Python's object is of the class itself.
bool is_async_object(PyObject* object);

// `t` wrapped, with its history: a new reference. None where t is no plain dense tensor, or has a
// conj or neg bit.
PyObject* wrap_async(const at::Tensor& t);

// The result of a start op as users get it: wrapped, or waited for where it is traced or under a
// transform. A new reference.
PyObject* deliver(const at::Tensor& result);

// What deliver() makes of a result that is complete: wrapped, or itself.
PyObject* deliver_complete(const at::Tensor& result);

// Of a wrapper made here: its values, unwaited for.
const at::Tensor& elem_of(const at::Tensor& wrapper);
// Puts another tensor in their place; the wrapper's shape, dtype and strides follow.
void set_elem(const at::Tensor& wrapper, const at::Tensor& elem);
// The same after elem itself was reshaped in place.
void follow_elem(const at::Tensor& wrapper);

// Whether the wrapper has been waited for.
bool is_waited(const at::Tensor& wrapper);
// Waits, once.
void wait_async(const at::Tensor& wrapper);
// The values with the wrapper's history, as a plain tensor: waited for, whether gradients are
// recorded now or not. None where the wait is an op for a tracer to see.
std::optional<at::Tensor> plain_of(const at::Tensor& wrapper);

}  // namespace c10d_ext
