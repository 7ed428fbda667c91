"""all_to_all_single: every rank sends a slice of its rows to every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_c10d_ext import _inductor, _op_info, _vmap
from torch_c10d_ext._async import replace, starter, writer, writes_directly
from torch_c10d_ext._groups import Group, group_name, group_size, where
from torch_c10d_ext._op_info import Pattern
from torch_c10d_ext.errors import InvalidArgument

_op = torch.ops.c10d_ext.all_to_all_single.default
_start = starter(_op)
_write = writer(torch.ops.c10d_ext.all_to_all_single_out.default)


def all_to_all_single(
    self: Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    group: Group = None,
    tag: str = "",
) -> Tensor:
    """Sends slice i of the rows to rank i, and concatenates what arrives, rank by rank.

    Args:
        self: shape ``(rows, ...)``, any strides and dtype; left untouched.
        output_split_sizes: how many rows come from each rank; may depend on data.
        input_split_sizes: how many rows go to each rank, ``rows`` in all. Both None: equal parts.
        group: the ranks that take part, see :data:`torch_c10d_ext.functional.Group`.
        tag: tells groups of the same ranks apart where ``group`` is a list of ranks.

    Returns:
        A tensor of shape ``(sum(output_split_sizes), ...)``.

    Raises:
        ValueError: the sizes are not one per rank, negative, do not sum to ``rows``, or disagree
            about what this rank sends itself; only one of them is given; ``rows`` is indivisible
            where neither is; unknown group.

    Gradient:
        ``all_to_all_single(grad, input_split_sizes, output_split_sizes)``.

    Example, 2 ranks::

        x = torch.arange(3) + 10 * rank  # [0, 1, 2] and [10, 11, 12]
        # rank 0 keeps 1 row and sends 2, rank 1 sends 1 and keeps 2
        sends = [[1, 2], [1, 2]][rank]
        receives = [[1, 1], [2, 2]][rank]
        all_to_all_single(x, receives, sends)  # rank 0: [0, 10]; rank 1: [1, 2, 11, 12]

    Source: csrc/ops/all_to_all_single.cpp
    """
    name = group if type(group) is str else group_name(group, tag)
    splits = _splits(self, output_split_sizes, input_split_sizes, name)
    return _start(self, *splits, name)


def all_to_all_single_autograd(
    self: Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    group: Group = None,
    tag: str = "",
) -> Tensor:
    """:func:`all_to_all_single`, which differentiates."""
    return all_to_all_single(self, output_split_sizes, input_split_sizes, group, tag)


def all_to_all_inplace(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
    tag: str = "",
) -> Tensor:
    """Writes :func:`all_to_all_single` of ``input`` into ``output``, and returns it.

    Raises:
        ValueError: ``async_op`` is set; or as :func:`all_to_all_single`.
    """
    if async_op:
        raise InvalidArgument(
            "all_to_all_inplace: async_op must be False, got True; use all_to_all_single"
        )
    name = group if type(group) is str else group_name(group, tag)
    if writes_directly(output, input):
        splits = _splits(input, output_split_sizes, input_split_sizes, name)
        if _write(input, *splits, name, out=output):
            return output
    return replace(output, all_to_all_single(input, output_split_sizes, input_split_sizes, name))


def _splits(
    input: Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    name: str,
) -> tuple[Sequence[int], Sequence[int]]:
    """The split sizes, equal ones where none are given."""
    if output_split_sizes is not None and input_split_sizes is not None:
        return output_split_sizes, input_split_sizes
    size = group_size(name)
    if output_split_sizes is not None or input_split_sizes is not None:
        raise InvalidArgument(
            "all_to_all_single: output_split_sizes and input_split_sizes must be given "
            "together or not at all, "
            f"got {output_split_sizes} and {input_split_sizes} {where(name)}"
        )
    if input.dim() == 0 or input.size(0) % size != 0:
        raise InvalidArgument(
            "all_to_all_single: input's dim 0 must be a multiple of the group's size "
            f"{size} where no split sizes are given, got shape {tuple(input.shape)} "
            f"{where(name)}"
        )
    even = [input.size(0) // size] * size
    return even, even


_vmap.register_forms("all_to_all_single", _vmap.by_rows)
_inductor.lower("all_to_all_single")

_op_info.declare(
    "all_to_all_single",
    pattern=Pattern.ALL_TO_ALL,
    wire=lambda n, given, _: (n - 1) * given / n,
    movable=True,
    even=False,
)
