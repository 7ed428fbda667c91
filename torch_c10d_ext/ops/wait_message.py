"""wait_message: the end of a message."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_c10d_ext import _inductor

_op = torch.ops.c10d_ext.wait_message.default


def wait_message(ticket: Tensor, like: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Waits for a message, and takes it.

    Args:
        ticket: what :func:`~torch_c10d_ext.functional.batch_isend_irecv` returned for the message;
            each serves once.
        like: for a message that is received, a tensor of its shape and dtype.

    Returns:
        The message, contiguous and of like's shape, empty where it was sent; and the rank within
        the group that sent it, an int64 scalar.

    Raises:
        ValueError: no ticket, or one that has served; another shape or dtype than the message's.
        DistBackendError: the message was not delivered, within the group's timeout.

    Gradient:
        None: nothing flows back through a message.

    Example, 2 ranks::

        x = torch.tensor([1.0 + rank])
        (ticket,) = batch_isend_irecv([x], [1 - rank], [rank == 0])
        wait_message(ticket, x)  # ([1.], 0) on rank 1

    Source: csrc/ops/wait_message.cpp
    """
    if like is None:
        values, source = _op(ticket, [0], torch.float32)
    else:
        values, source = _op(ticket, like.shape, like.dtype)
    return values, source


_inductor.ordered(_op)


@_inductor.lowering(_op)
def _lowering(ticket: Any, *args: Any) -> Any:
    return _inductor.start_in_order(_op, ticket, *args)
