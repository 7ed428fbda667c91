"""reduce_scatter: rank r gets sizes[r] rows of the reduction of all ranks' inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_c10d_ext import _inductor, _op_info, _vmap
from torch_c10d_ext._async import deliver_complete, starter
from torch_c10d_ext._dims import check_dim
from torch_c10d_ext._groups import Group, group_name
from torch_c10d_ext._op_info import Pattern

_op = torch.ops.c10d_ext.reduce_scatter.default
_start = starter(_op)


def reduce_scatter(
    self: Tensor,
    reduceOp: str,
    sizes: Sequence[int],
    group: Group = None,
    tag: str = "",
    *,
    scatter_dim: int = 0,
    factor: complex | None = None,
) -> Tensor:
    """Reduces a tensor over all ranks and hands rank i ``sizes[i]`` of the result.

    Args:
        self: the same shape and dtype on every rank, with ``scatter_dim`` of length ``sum(sizes)``;
            left untouched.
        reduceOp, factor: as for :func:`torch_c10d_ext.functional.all_reduce`.
        sizes: every rank's length, the same list on every rank; 0 is a length.
        group: the ranks that take part, see :data:`torch_c10d_ext.functional.Group`.
        tag: tells groups of the same ranks apart where ``group`` is a list of ranks.
        scatter_dim: the dimension to split, negative ones count from the end.

    Returns:
        On rank i a tensor with ``scatter_dim`` of length ``sizes[i]``.

    Raises:
        ValueError: ``sizes`` is not one length per rank, negative, or does not sum to self's
            length; a scalar; ``scatter_dim`` out of range; unknown ``reduceOp`` or group.
        TypeError: ``reduceOp`` has no meaning for self's dtype.

    Gradient:
        ``sum``: ``all_gather(grad, sizes)``; the other reduce ops as ``all_reduce`` has it.

    Example, 2 ranks::

        x = torch.arange(3.0) + 10 * rank  # [0, 1, 2] and [10, 11, 12]
        reduce_scatter(x, "sum", [1, 2])  # rank 0: [10]; rank 1: [12, 14]

    Source: csrc/ops/reduce_scatter.cpp
    """
    name = group if type(group) is str else group_name(group, tag)
    dim = (
        check_dim("reduce_scatter", "scatter_dim", scatter_dim, self, name)
        if scatter_dim != 0
        else 0
    )
    if dim == 0:
        return _start(self, reduceOp, sizes, name, factor=factor)
    rows = self.movedim(dim, 0)
    return deliver_complete(
        _start(rows, reduceOp, sizes, name, factor=factor).movedim(0, dim).contiguous()
    )


_vmap.register_forms("reduce_scatter", _vmap.by_rows)
_inductor.lower("reduce_scatter")

_op_info.declare(
    "reduce_scatter",
    pattern=Pattern.REDUCE_SCATTER,
    wire=lambda n, given, result: given - result,
    movable=True,
    even=False,
)
