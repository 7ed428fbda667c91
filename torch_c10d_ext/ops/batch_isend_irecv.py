"""batch_isend_irecv: starts messages to and from other ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_c10d_ext import _inductor
from torch_c10d_ext._dims import check_list
from torch_c10d_ext._groups import Group, group_name

_op = torch.ops.c10d_ext.batch_isend_irecv.default


def batch_isend_irecv(
    tensors: list[Tensor],
    peers: list[int],
    sends: list[bool],
    tags: list[int] | None = None,
    group: Group = None,
) -> list[Tensor]:
    """Starts messages, and returns a ticket for each to wait for it with.

    What :mod:`torch_c10d_ext.distributed` traces its point to point to. In a graph messages start
    and are waited for in the order of the program; a batch has no order of its own.

    Args:
        tensors: what is sent, copied at the start, any shape, strides and dtype; for a message that
            is received, a tensor of its shape and dtype, left untouched.
        peers: the other rank of each message, counted within the group; -1 receives from any.
        sends: which of the messages this rank sends.
        tags: 0 or more; a message is received by the next call with its tag. None: all 0.
        group: see :data:`torch_c10d_ext.functional.Group`.

    Returns:
        One ticket per message, for :func:`~torch_c10d_ext.functional.wait_message`. A ticket that
        is dropped drops what it would have received; what was sent still arrives.

    Raises:
        ValueError: a peer that is not in the group, this rank as a peer, a negative tag, lists of
            different lengths, several devices.
        TypeError: a sparse tensor.

    Gradient:
        None: nothing flows back through a message.

    Example, 2 ranks::

        x, y = torch.tensor([1.0 + rank]), torch.empty(1)
        sent, received = batch_isend_irecv([x, y], [1 - rank] * 2, [True, False])
        wait_message(sent)
        wait_message(received, y)[0]  # [2.] on rank 0, [1.] on rank 1

    Source: csrc/ops/batch_isend_irecv.cpp
    """
    name = group_name(group)
    check_list("batch_isend_irecv", tensors, name)
    return _op(tensors, peers, sends, [0] * len(tensors) if tags is None else tags, name)


_inductor.ordered(_op)


@_inductor.lowering(_op)
def _lowering(tensors: Any, *args: Any) -> Any:
    return _inductor.start_in_order(_op, tensors, *args)
