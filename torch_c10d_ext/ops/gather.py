"""gather: rank dst gets all ranks' inputs, concatenated."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_c10d_ext import _inductor, _op_info, _vmap
from torch_c10d_ext._async import deliver_complete, starter
from torch_c10d_ext._dims import check_dim
from torch_c10d_ext._groups import Group, group_name
from torch_c10d_ext._op_info import Pattern

_op = torch.ops.c10d_ext.gather.default
_start = starter(_op)


def gather(
    self: Tensor, dst: int, group: Group = None, tag: str = "", *, gather_dim: int = 0
) -> Tensor:
    """Concatenates all ranks' tensors along a dimension on one rank.

    Args:
        self: the same shape and dtype on every rank, any strides; left untouched.
        dst: the receiving rank, counted within the group.
        group: the ranks that take part, see :data:`torch_c10d_ext.functional.Group`.
        tag: tells groups of the same ranks apart where ``group`` is a list of ranks.
        gather_dim: the dimension to concatenate along, negative ones count from the end.

    Returns:
        On ``dst`` a tensor of self's shape with ``gather_dim`` N times as long (shape ``(N,)`` for
        scalars), rank by rank; on every other rank one with ``gather_dim`` of length 0.

    Raises:
        ValueError: ``dst`` is no rank of the group, ``gather_dim`` out of range, unknown group.

    Gradient:
        ``dst``'s gradient, scattered: ``scatter(grad, dst)``.

    Example, 2 ranks::

        gather(torch.tensor([1.0 + rank]), 0)  # rank 0: [1., 2.]; rank 1: []

    Source: csrc/ops/gather.cpp
    """
    name = group if type(group) is str else group_name(group, tag)
    dim = check_dim("gather", "gather_dim", gather_dim, self, name) if gather_dim != 0 else 0
    if dim == 0:
        return _start(self, dst, name)
    # dim to the front, where the ranks' parts are concatenated, and back.
    return deliver_complete(_start(self.movedim(dim, 0), dst, name).movedim(0, dim).contiguous())


_vmap.register_forms("gather", _vmap.by_rows, keeps_scalar=True)
_inductor.lower("gather")

_op_info.declare(
    "gather",
    pattern=Pattern.GATHER,
    wire=lambda n, given, _: (n - 1) * given,
    movable=True,
    even=False,
)
