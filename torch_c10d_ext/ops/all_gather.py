"""all_gather: every rank gets all ranks' rows, of which each may have another number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_c10d_ext import _inductor, _op_info, _vmap
from torch_c10d_ext._async import deliver_complete, starter
from torch_c10d_ext._dims import check_dim
from torch_c10d_ext._groups import Group, group_name
from torch_c10d_ext._op_info import Pattern

_op = torch.ops.c10d_ext.all_gather.default
_start = starter(_op)


def all_gather(
    self: Tensor, sizes: Sequence[int], group: Group = None, tag: str = "", *, gather_dim: int = 0
) -> Tensor:
    """Concatenates tensors of uneven lengths over all ranks; every rank gets the result.

    Args:
        self: on rank i a tensor with ``gather_dim`` of length ``sizes[i]``, the other dimensions
            and the dtype the same on every rank; left untouched.
        sizes: every rank's length, the same list on every rank; 0 is a length.
        group: the ranks that take part, see :data:`torch_c10d_ext.functional.Group`.
        tag: tells groups of the same ranks apart where ``group`` is a list of ranks.
        gather_dim: the dimension to concatenate along, negative ones count from the end.

    Returns:
        A tensor with ``gather_dim`` of length ``sum(sizes)``, rank by rank.

    Raises:
        ValueError: ``sizes`` is not one length per rank, negative, or not self's; a scalar;
            ``gather_dim`` out of range; unknown group.

    Gradient:
        ``reduce_scatter(grad, "sum", sizes)``.

    Example, 2 ranks::

        x = torch.arange(1 + rank) + 10 * rank  # [0] and [10, 11]
        all_gather(x, [1, 2])  # [0, 10, 11] on both

    Source: csrc/ops/all_gather.cpp
    """
    name = group if type(group) is str else group_name(group, tag)
    dim = check_dim("all_gather", "gather_dim", gather_dim, self, name) if gather_dim != 0 else 0
    if dim == 0:
        return _start(self, sizes, name)
    return deliver_complete(_start(self.movedim(dim, 0), sizes, name).movedim(0, dim).contiguous())


_vmap.register_forms("all_gather", _vmap.by_rows)
_inductor.lower("all_gather")

_op_info.declare(
    "all_gather",
    pattern=Pattern.ALL_GATHER,
    wire=lambda n, given, result: result - given,
    movable=True,
    even=False,
)
