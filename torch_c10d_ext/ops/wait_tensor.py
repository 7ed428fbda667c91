"""wait_tensor: the end of every collective."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_c10d_ext import _vmap
from torch_c10d_ext._async import AsyncCollectiveTensor, entry

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_op = torch.ops.c10d_ext.wait_tensor.default
_enter = entry(_op)


def wait_tensor(tensor: Tensor) -> Tensor:
    """Waits for the collective that writes ``tensor``, and returns ``tensor``.

    Waiting blocks the caller on CPU; on CUDA it orders the current stream after the collective.
    Waiting twice, or for a tensor that no collective writes, does nothing. Works of torch's own
    functional collectives are waited for as well, and torch's ``wait_tensor`` waits for ours.

    Args:
        tensor: the result of a start op, any view of it, or a tensor written in place by one.

    Returns:
        ``tensor`` with its values in place; a plain tensor for an ``AsyncCollectiveTensor``.

    Raises:
        torch.distributed.DistBackendError: the collective failed; the text names op, rank and
        group.

    Gradient:
        The identity.

    Example::

        y = torch.ops.c10d_ext.all_reduce(x, "sum", "0")  # in flight
        y = wait_tensor(y)  # there

    Source: csrc/ops/wait_tensor.cpp
    """
    if _is_dynamo_compiling():
        return _op(tensor)
    if type(tensor) is AsyncCollectiveTensor:
        return tensor.trigger_wait()
    return _enter(tensor)


_vmap.register("wait_tensor", _vmap.any_dim(_op, local=True))
