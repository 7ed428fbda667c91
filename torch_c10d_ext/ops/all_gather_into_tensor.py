"""all_gather_into_tensor: every rank gets all ranks' inputs, concatenated."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_c10d_ext import _inductor, _op_info, _vmap
from torch_c10d_ext._async import deliver_complete, replace, starter, writer, writes_directly
from torch_c10d_ext._dims import check_dim, check_list, rows_to_dim
from torch_c10d_ext._groups import Group, group_name, group_size
from torch_c10d_ext._op_info import Pattern
from torch_c10d_ext.errors import InvalidArgument

_op = torch.ops.c10d_ext.all_gather_into_tensor.default
_coalesced = torch.ops.c10d_ext.all_gather_into_tensor_coalesced.default
_start = starter(_op)
_start_list = starter(_coalesced)
_write = writer(torch.ops.c10d_ext.all_gather_into_tensor_out.default)


def all_gather_single(self: Tensor, gather_dim: int, group: Group = None, tag: str = "") -> Tensor:
    """Concatenates all ranks' tensors along a dimension; every rank gets the result.

    Args:
        self: shape ``(d0, d1, ...)``, the same on every rank, any strides and dtype; left
        untouched.
        gather_dim: the dimension to concatenate along, negative ones count from the end.
        group: the ranks that take part, see :data:`torch_c10d_ext.functional.Group`.
        tag: tells groups of the same ranks apart where ``group`` is a list of ranks.

    Returns:
        A tensor of self's shape with ``gather_dim`` N times as long, rank by rank; a scalar gives
        shape ``(N,)``.

    Raises:
        ValueError: ``gather_dim`` out of range, unknown group.

    Gradient:
        ``reduce_scatter_single(grad, "sum", gather_dim)``.

    Example, 2 ranks::

        x = torch.tensor([[1.0, 2.0]]) + 10 * rank
        all_gather_single(x, 0)  # [[1, 2], [11, 12]] on both
        all_gather_single(x, 1)  # [[1, 2, 11, 12]] on both

    Source: csrc/ops/all_gather_into_tensor.cpp
    """
    name = group if type(group) is str else group_name(group, tag)
    size = group_size(name)
    if gather_dim == 0:
        return _start(self, size, name)
    dim = check_dim("all_gather_single", "gather_dim", gather_dim, self, name)
    gathered = _start(self, size, name)
    return gathered if dim == 0 else deliver_complete(rows_to_dim(gathered, size, dim))


def all_gather_tensor(self: Tensor, gather_dim: int, group: Group = None, tag: str = "") -> Tensor:
    """:func:`all_gather_single` under its older name."""
    return all_gather_single(self, gather_dim, group, tag)


def all_gather_single_autograd(
    self: Tensor, gather_dim: int, group: Group = None, tag: str = ""
) -> Tensor:
    """:func:`all_gather_single`, which differentiates."""
    return all_gather_single(self, gather_dim, group, tag)


def all_gather_tensor_autograd(
    self: Tensor, gather_dim: int, group: Group = None, tag: str = ""
) -> Tensor:
    """:func:`all_gather_single`, which differentiates."""
    return all_gather_single(self, gather_dim, group, tag)


def all_gather_single_coalesced(
    self: list[Tensor], group: Group = None, tag: str = ""
) -> list[Tensor]:
    """Concatenates several tensors over all ranks along dim 0, in one message.

    Args:
        self: tensors of one dtype on one device, any shapes; left untouched.
        group, tag: as for :func:`all_gather_single`.

    Returns:
        One result per tensor, as ``all_gather_single(t, 0)`` would give it.

    Raises:
        ValueError, TypeError: an empty list, mixed dtypes or devices, unknown group.

    Gradient:
        As :func:`all_gather_single`, in one message too.

    Example, 2 ranks::

        all_gather_single_coalesced([torch.tensor([rank]), torch.tensor([5 + rank])])
        # [0, 1] and [5, 6] on both

    Source: csrc/ops/all_gather_into_tensor.cpp
    """
    name = group_name(group, tag)
    check_list("all_gather_single_coalesced", self, name)
    return _start_list(self, group_size(name), name)


def all_gather_into_tensor_coalesced(
    self: list[Tensor], group: Group = None, tag: str = ""
) -> list[Tensor]:
    """:func:`all_gather_single_coalesced` under its older name."""
    return all_gather_single_coalesced(self, group, tag)


def all_gather_tensor_inplace(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: Group = None,
    async_op: bool = False,
    tag: str = "",
    gather_dim: int = 0,
) -> Tensor:
    """Writes ``all_gather_single(input_tensor, gather_dim)`` into ``output_tensor``.

    Returns:
        ``output_tensor``.

    Raises:
        ValueError: ``async_op`` is set; or as :func:`all_gather_single`.
    """
    if async_op:
        raise InvalidArgument(
            "all_gather_tensor_inplace: async_op must be False, got True; use all_gather_single"
        )
    name = group if type(group) is str else group_name(group, tag)
    if (
        gather_dim == 0
        and output_tensor.dim() >= input_tensor.dim()
        and writes_directly(output_tensor, input_tensor)
        and _write(input_tensor, group_size(name), name, out=output_tensor)
    ):
        return output_tensor
    gathered = all_gather_single(input_tensor, gather_dim, name)
    return replace(output_tensor, gathered.view(output_tensor.shape))


def all_gather_inplace(
    tensor_list: list[Tensor],
    tensor: Tensor,
    group: Group = None,
    async_op: bool = False,
    tag: str = "",
) -> list[Tensor]:
    """Writes rank i's ``tensor`` into ``tensor_list[i]``, and returns the list.

    Raises:
        ValueError: ``async_op`` is set, or the list does not hold one tensor of the right shape per
        rank.
    """
    if async_op:
        raise InvalidArgument(
            "all_gather_inplace: async_op must be False, got True; use all_gather_single"
        )
    name = group_name(group, tag)
    shapes = [tuple(t.shape) for t in tensor_list]
    if shapes != [tuple(tensor.shape)] * group_size(name):
        raise InvalidArgument(
            f"all_gather_inplace: tensor_list must hold {group_size(name)} tensors of shape "
            f"{tuple(tensor.shape)}, got {shapes}; use all_gather for uneven sizes"
        )
    gathered = all_gather_single(tensor.unsqueeze(0), 0, name)
    for row, target in enumerate(tensor_list):
        replace(target, gathered[row])  # lazy tensors cannot unbind
    return tensor_list


_vmap.register_forms("all_gather_into_tensor", _vmap.by_rows, keeps_scalar=True)
_inductor.lower("all_gather_into_tensor")

_op_info.declare(
    "all_gather_into_tensor",
    pattern=Pattern.ALL_GATHER,
    wire=lambda n, given, _: (n - 1) * given,
    movable=True,
    moves=True,
)
