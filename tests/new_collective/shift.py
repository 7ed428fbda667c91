"""shift: rank r gets the input of rank r - offset, counted around the group."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_c10d_ext import _inductor, _op_info, _vmap
from torch_c10d_ext._async import starter
from torch_c10d_ext._groups import Group, group_name
from torch_c10d_ext._op_info import Pattern

_start = starter(torch.ops.c10d_ext.shift.default)


def shift(self: Tensor, offset: int, group: Group = None, tag: str = "") -> Tensor:
    """Passes tensors on around the group.

    Args:
        self: the same shape and dtype on every rank, any shape and strides; left untouched.
        offset: by how many ranks, to lower ones where it is negative.
        group: the ranks that take part, see :data:`torch_c10d_ext.functional.Group`.
        tag: tells groups of the same ranks apart where ``group`` is a list of ranks.

    Returns:
        A tensor of self's shape: that of rank ``rank - offset``, modulo the size of the group.

    Raises:
        ValueError: unknown group.

    Gradient:
        ``shift`` by ``-offset``.

    Example, 3 ranks::

        shift(torch.tensor([rank]), 1)  # rank 0: [2]; rank 1: [0]; rank 2: [1]

    Source: csrc/ops/shift.cpp
    """
    return _start(self, offset, group_name(group, tag))


_vmap.register_forms("shift", _vmap.any_dim)
_inductor.lower("shift", in_place=True)

_op_info.declare("shift", pattern=Pattern.MESSAGE, wire=lambda n, given, _: given)
