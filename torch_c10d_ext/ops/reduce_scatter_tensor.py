"""reduce_scatter_tensor: rank r gets the reduction of all ranks' r-th part."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_c10d_ext import _inductor, _op_info, _vmap
from torch_c10d_ext._async import replace, starter, writer, writes_directly
from torch_c10d_ext._dims import check_dim, check_list, dim_to_rows
from torch_c10d_ext._groups import Group, group_name, group_size, where
from torch_c10d_ext._op_info import Pattern
from torch_c10d_ext.errors import InvalidArgument

_op = torch.ops.c10d_ext.reduce_scatter_tensor.default
_coalesced = torch.ops.c10d_ext.reduce_scatter_tensor_coalesced.default
_start = starter(_op)
_start_list = starter(_coalesced)
_write = writer(torch.ops.c10d_ext.reduce_scatter_tensor_out.default)


def reduce_scatter_single(
    self: Tensor,
    reduceOp: str,
    scatter_dim: int,
    group: Group = None,
    tag: str = "",
    *,
    factor: complex | None = None,
) -> Tensor:
    """Reduces a tensor over all ranks and hands each rank its equal part of the result.

    Args:
        self: the same shape on every rank, any strides and dtype; left untouched.
        reduceOp: as for :func:`torch_c10d_ext.functional.all_reduce`.
        scatter_dim: the dimension to split, of a length divisible by the group's size N; negative
            ones count from the end.
        group, tag: the ranks that take part, see :data:`torch_c10d_ext.functional.Group`.
        factor: what this rank's input is multiplied with first (``premul_sum`` alone).

    Returns:
        A tensor of self's shape with ``scatter_dim`` one N-th as long: part r on rank r.

    Raises:
        ValueError: ``scatter_dim`` out of range or of indivisible length; unknown ``reduceOp`` or
        group.
        TypeError: ``reduceOp`` has no meaning for self's dtype.

    Gradient:
        ``sum``: ``all_gather_single(grad, scatter_dim)``; the other reduce ops as ``all_reduce``
        has it, with the gathered gradient in place of the summed one.

    Example, 2 ranks::

        x = torch.arange(4.0) + 10 * rank  # [0, 1, 2, 3] and [10, 11, 12, 13]
        reduce_scatter_single(x, "sum", 0)  # rank 0: [10, 12]; rank 1: [14, 16]

    Source: csrc/ops/reduce_scatter_tensor.cpp
    """
    name = group if type(group) is str else group_name(group, tag)
    size = group_size(name)
    if scatter_dim != 0:
        self = _to_rows("reduce_scatter_single", self, scatter_dim, size, name)
    return _start(self, reduceOp, size, name, factor=factor)


def reduce_scatter_tensor(
    self: Tensor,
    reduceOp: str,
    scatter_dim: int,
    group: Group = None,
    tag: str = "",
    *,
    factor: complex | None = None,
) -> Tensor:
    """:func:`reduce_scatter_single` under its older name."""
    return reduce_scatter_single(self, reduceOp, scatter_dim, group, tag, factor=factor)


def reduce_scatter_single_autograd(
    self: Tensor, reduceOp: str, scatter_dim: int, group: Group = None, tag: str = ""
) -> Tensor:
    """:func:`reduce_scatter_single`, which differentiates."""
    return reduce_scatter_single(self, reduceOp, scatter_dim, group, tag)


def reduce_scatter_tensor_autograd(
    self: Tensor, reduceOp: str, scatter_dim: int, group: Group = None, tag: str = ""
) -> Tensor:
    """:func:`reduce_scatter_single`, which differentiates."""
    return reduce_scatter_single(self, reduceOp, scatter_dim, group, tag)


def reduce_scatter_single_coalesced(
    inputs: list[Tensor],
    reduceOp: str,
    scatter_dim: list[int],
    group: Group = None,
    tag: str = "",
) -> list[Tensor]:
    """Reduces and scatters several tensors in one message.

    Args:
        inputs: tensors of one dtype on one device; left untouched, and so is the list.
        reduceOp: as for :func:`torch_c10d_ext.functional.all_reduce`.
        scatter_dim: one dimension per tensor.
        group, tag: as for :func:`reduce_scatter_single`.

    Returns:
        One result per tensor, as :func:`reduce_scatter_single` would give it.

    Raises:
        ValueError, TypeError: as :func:`reduce_scatter_single`; not one dimension per tensor, an
            empty list, mixed dtypes or devices.

    Gradient:
        As :func:`reduce_scatter_single`, in one message too.

    Example, 2 ranks::

        reduce_scatter_single_coalesced([torch.ones(2), torch.ones(2, 4)], "sum", [0, 1])
        # [2] and [[2, 2], [2, 2]] on both

    Source: csrc/ops/reduce_scatter_tensor.cpp
    """
    name = group_name(group, tag)
    check_list("reduce_scatter_single_coalesced", inputs, name)
    size = group_size(name)
    if len(scatter_dim) != len(inputs):
        raise InvalidArgument(
            "reduce_scatter_single_coalesced: scatter_dim must hold one dimension per input, "
            f"{len(inputs)}, got {scatter_dim} {where(name)}"
        )
    rows = [
        t if dim == 0 else _to_rows("reduce_scatter_single_coalesced", t, dim, size, name)
        for t, dim in zip(inputs, scatter_dim, strict=True)
    ]
    return _start_list(rows, reduceOp, size, name)


def reduce_scatter_tensor_coalesced(
    inputs: list[Tensor],
    reduceOp: str,
    scatter_dim: list[int],
    group: Group = None,
    tag: str = "",
) -> list[Tensor]:
    """:func:`reduce_scatter_single_coalesced` under its older name."""
    return reduce_scatter_single_coalesced(inputs, reduceOp, scatter_dim, group, tag)


def reduce_scatter_tensor_inplace(
    output: Tensor,
    input: Tensor,
    op: str = "sum",
    group: Group = None,
    async_op: bool = False,
    scatter_dim: int = 0,
    tag: str = "",
) -> Tensor:
    """Writes ``reduce_scatter_single(input, op, scatter_dim)`` into ``output``, and returns it.

    Raises:
        ValueError: ``async_op`` is set; or as :func:`reduce_scatter_single`.
    """
    if async_op:
        raise InvalidArgument(
            "reduce_scatter_tensor_inplace: async_op must be False, got True; use "
            "reduce_scatter_single"
        )
    name = group if type(group) is str else group_name(group, tag)
    if (
        scatter_dim == 0
        and output.dim() == input.dim()
        and writes_directly(output, input)
        and _write(input, op, group_size(name), name, out=output)
    ):
        return output
    return replace(output, reduce_scatter_single(input, op, scatter_dim, name))


def _to_rows(op: str, input: Tensor, scatter_dim: int, size: int, name: str) -> Tensor:
    dim = check_dim(op, "scatter_dim", scatter_dim, input, name)
    if input.dim() > 0 and input.size(dim) % size != 0:
        raise InvalidArgument(
            f"{op}: input's dim {dim} must be a multiple of the group's size {size}, got "
            f"{input.size(dim)} {where(name)}"
        )
    return dim_to_rows(input, size, dim)


_vmap.register_forms("reduce_scatter_tensor", _vmap.by_rows)
_inductor.lower("reduce_scatter_tensor")

_op_info.declare(
    "reduce_scatter_tensor",
    pattern=Pattern.REDUCE_SCATTER,
    wire=lambda n, given, _: (n - 1) * given / n,
    movable=True,
)
