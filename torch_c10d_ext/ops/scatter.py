"""scatter: rank r gets the r-th part of rank src's input."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_c10d_ext import _inductor, _op_info, _vmap
from torch_c10d_ext._async import deliver_complete, starter
from torch_c10d_ext._dims import check_dim
from torch_c10d_ext._groups import Group, group_name
from torch_c10d_ext._op_info import Pattern

_op = torch.ops.c10d_ext.scatter.default
_start = starter(_op)


def scatter(
    self: Tensor,
    src: int,
    group: Group = None,
    tag: str = "",
    *,
    scatter_dim: int = 0,
    size: int | None = None,
) -> Tensor:
    """Hands each rank its equal part of one rank's tensor.

    Args:
        self: on ``src`` the values to hand out, with ``scatter_dim`` of a length divisible by the
            group's size N; left untouched. Elsewhere the values do not count: a tensor of src's
            shape where ``size`` is None, else any tensor with src's other dimensions and dtype, one
            with ``scatter_dim`` of length 0, say.
        src: the sending rank, counted within the group.
        group: the ranks that take part, see :data:`torch_c10d_ext.functional.Group`.
        tag: tells groups of the same ranks apart where ``group`` is a list of ranks.
        scatter_dim: the dimension to split, negative ones count from the end.
        size: the length of one part along ``scatter_dim``, the same on every rank.

    Returns:
        Part r of src's tensor on rank r: ``scatter_dim`` one N-th as long.

    Raises:
        ValueError: ``src`` is no rank of the group, the length is not divisible by N or not N times
            ``size``, ``scatter_dim`` out of range, unknown group.

    Gradient:
        On ``src`` ``gather(grad, src)``, zeros elsewhere.

    Example, 2 ranks::

        scatter(torch.arange(4.0) + 10 * rank, 1)  # rank 0: [10, 11]; rank 1: [12, 13]

    Source: csrc/ops/scatter.cpp
    """
    name = group if type(group) is str else group_name(group, tag)
    dim = check_dim("scatter", "scatter_dim", scatter_dim, self, name) if scatter_dim != 0 else 0
    if dim == 0:
        return _start(self, src, name, size=size)
    return deliver_complete(
        _start(self.movedim(dim, 0), src, name, size=size).movedim(0, dim).contiguous()
    )


_vmap.register_forms("scatter", _vmap.by_rows)
_inductor.lower("scatter")

_op_info.declare(
    "scatter",
    pattern=Pattern.SCATTER,
    wire=lambda n, _, result: (n - 1) * result,
    movable=True,
    even=False,
)
