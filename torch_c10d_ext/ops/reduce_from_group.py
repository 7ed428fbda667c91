"""reduce_from_group: all_reduce(sum), whose gradient passes as it is."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_c10d_ext import _op_info, _vmap
from torch_c10d_ext._async import starter
from torch_c10d_ext._groups import Group, group_name
from torch_c10d_ext._op_info import Pattern

_op = torch.ops.c10d_ext.reduce_from_group.default
_start = starter(_op)


def reduce_from_group(self: Tensor, group: Group = None, tag: str = "") -> Tensor:
    """The exit of a tensor-parallel region: all_reduce(sum) forward, identity backward.

    What follows is computed alike on every rank, so each rank's gradient is the full one already:
    Megatron-LM's g (Shoeybi et al. 2019, section 3).

    Args:
        self: this rank's partial result.
        group, tag: the ranks that share the region, as for :func:`all_reduce`.

    Returns:
        The sum of all ranks' ``self``.

    Raises:
        ValueError: unknown group.

    Gradient:
        The identity.

    Example::

        y = reduce_from_group(hidden @ weight_rows, tp)  # this rank's rows

    Source: csrc/ops/reduce_from_group.cpp
    """
    return _start(self, group if type(group) is str else group_name(group, tag))


_vmap.register("reduce_from_group", _vmap.any_dim(_op))

_op_info.declare(
    "reduce_from_group",
    pattern=Pattern.ALL_REDUCE,
    wire=lambda n, given, _: 2 * (n - 1) * given / n,
)
