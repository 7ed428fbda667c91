"""reduce: rank dst gets the reduction of all ranks' inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_c10d_ext import _inductor, _op_info, _vmap
from torch_c10d_ext._async import starter
from torch_c10d_ext._groups import Group, group_name
from torch_c10d_ext._op_info import Pattern

_op = torch.ops.c10d_ext.reduce.default
_start = starter(_op)


def reduce(
    self: Tensor,
    reduceOp: str,
    dst: int,
    group: Group = None,
    tag: str = "",
    *,
    factor: complex | None = None,
) -> Tensor:
    """Reduces a tensor over the ranks of a group to one of them.

    Args:
        self: the same shape and dtype on every rank, any strides; left untouched.
        reduceOp, factor: as for :func:`torch_c10d_ext.functional.all_reduce`.
        dst: the receiving rank, counted within the group.
        group: the ranks that take part, see :data:`torch_c10d_ext.functional.Group`.
        tag: tells groups of the same ranks apart where ``group`` is a list of ranks.

    Returns:
        A tensor of self's shape: the reduction on ``dst``, zeros on every other rank, which makes
        it the exact adjoint of ``broadcast``. (The in-place op leaves the other ranks' tensors
        alone.)

    Raises:
        ValueError: ``dst`` is no rank of the group; unknown ``reduceOp`` or group.
        TypeError: ``reduceOp`` has no meaning for self's dtype.

    Gradient:
        ``sum``: ``broadcast(grad, dst)``; the other reduce ops as ``all_reduce`` has it.

    Example, 2 ranks::

        reduce(torch.tensor([1.0 + rank]), "sum", 0)  # rank 0: [3.]; rank 1: [0.]

    Source: csrc/ops/reduce.cpp
    """
    name = group if type(group) is str else group_name(group, tag)
    return _start(self, reduceOp, dst, name, factor=factor)


_vmap.register_forms("reduce", _vmap.any_dim)
_inductor.lower("reduce")

_op_info.declare(
    "reduce",
    pattern=Pattern.REDUCE,
    wire=lambda n, given, _: given,
    movable=True,
)
