"""barrier: every rank keeps its input, complete when all ranks have called."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_c10d_ext import _inductor, _op_info, _vmap
from torch_c10d_ext._async import starter
from torch_c10d_ext._groups import Group, group_name
from torch_c10d_ext._op_info import Pattern

_op = torch.ops.c10d_ext.barrier.default
_start = starter(_op)


def barrier(self: Tensor, group: Group = None, tag: str = "") -> Tensor:
    """Returns ``self``, complete when every rank of the group has called.

    What uses the result comes after the barrier, what ``self`` is made of before it. A rank that
    calls ``torch.distributed.barrier`` meets those that call this.

    Args:
        self: any shape, dtype and strides, its own on every rank; copied, left untouched, and not
            sent: a tensor of one element serves as well as a large one.
        group: the ranks that take part, see :data:`torch_c10d_ext.functional.Group`.
        tag: tells groups of the same ranks apart where ``group`` is a list of ranks.

    Returns:
        A tensor of self's shape with self's values.

    Raises:
        ValueError: unknown group.
        TypeError: a sparse tensor.

    Gradient:
        The result's own, in which no rank waits for another.

    Example, 2 ranks::

        if rank == 0:
            torch.save(model, path)
        token = barrier(torch.tensor([1.0 + rank]))
        token.item()  # 1.0 on rank 0, 2.0 on rank 1: the file is there

    Source: csrc/ops/barrier.cpp
    """
    return _start(self, group if type(group) is str else group_name(group, tag))


_vmap.register_forms("barrier", _vmap.any_dim, local=True)
_inductor.lower("barrier")

_op_info.declare(
    "barrier",
    pattern=Pattern.BARRIER,
    wire=lambda n, given, _: 0 * given,
)
