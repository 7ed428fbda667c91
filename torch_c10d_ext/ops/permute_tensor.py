"""permute_tensor: rank m's input goes to rank src_dst[m]."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_c10d_ext import _inductor, _op_info, _vmap
from torch_c10d_ext._async import starter
from torch_c10d_ext._groups import Group, group_name
from torch_c10d_ext._op_info import Pattern

_op = torch.ops.c10d_ext.permute_tensor.default
_start = starter(_op)


def permute_tensor(self: Tensor, src_dst: list[int], group: Group = None, tag: str = "") -> Tensor:
    """Passes tensors between ranks along a permutation.

    Args:
        self: the same shape and dtype on every rank, any shape and strides; left untouched.
        src_dst: ``src_dst[m] == n`` sends rank m's tensor to rank n; a permutation of the ranks.
        group: the ranks that take part, see :data:`torch_c10d_ext.functional.Group`.
        tag: tells groups of the same ranks apart where ``group`` is a list of ranks.

    Returns:
        A tensor of self's shape: that of the rank which sends here.

    Raises:
        ValueError: ``src_dst`` is no permutation of the ranks, unknown group.

    Gradient:
        ``permute_tensor`` along the inverse permutation.

    Example, 3 ranks::

        permute_tensor(torch.tensor([rank]), [1, 2, 0])  # rank 0: [2]; rank 1: [0]; rank 2: [1]

    Source: csrc/ops/permute_tensor.cpp
    """
    name = group if type(group) is str else group_name(group, tag)
    return _start(self, src_dst, name)


_vmap.register_forms("permute_tensor", _vmap.any_dim)
_inductor.lower("permute_tensor")

_op_info.declare(
    "permute_tensor",
    pattern=Pattern.MESSAGE,
    wire=lambda n, given, _: given,
    movable=True,
)
