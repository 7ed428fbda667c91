"""all_reduce: every rank gets the reduction of all ranks' inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_c10d_ext import _inductor, _op_info, _vmap
from torch_c10d_ext._async import replace, starter, writer, writes_directly
from torch_c10d_ext._dims import check_list
from torch_c10d_ext._groups import Group, group_name
from torch_c10d_ext._op_info import Pattern
from torch_c10d_ext.errors import InvalidArgument

_op = torch.ops.c10d_ext.all_reduce.default
_op_ = torch.ops.c10d_ext.all_reduce_.default
_coalesced = torch.ops.c10d_ext.all_reduce_coalesced.default
_start = starter(_op)
_start_list = starter(_coalesced)
_write = writer(_op_)


def all_reduce(
    self: Tensor,
    reduceOp: str,
    group: Group = None,
    tag: str = "",
    *,
    factor: complex | None = None,
) -> Tensor:
    """Reduces a tensor over the ranks of a group; every rank gets the result.

    Args:
        self: any shape, strides and dtype; left untouched.
        reduceOp: ``sum``, ``avg``, ``product``, ``min``, ``max``, ``band``, ``bor``, ``bxor`` or
            ``premul_sum``, in any case. Half, bfloat16 and float8 values are accumulated in float32
            on CPU. ``sum`` and ``product`` of bools are or and and. Whether ``min`` and ``max``
            keep a NaN is the backend's choice; gloo may drop it.
        group: the ranks that take part, see :data:`torch_c10d_ext.functional.Group`.
        tag: tells groups of the same ranks apart where ``group`` is a list of ranks.
        factor: what this rank's input is multiplied with first (``premul_sum`` alone).

    Returns:
        A tensor of self's shape, contiguous, with the same bits on every rank.

    Raises:
        ValueError: unknown ``reduceOp`` or group; ``factor`` missing or out of place.
        TypeError: ``reduceOp`` has no meaning for self's dtype (``avg`` of integers, ``min`` of
            complex values, ``band`` of floats).

    Gradient:
        ``sum``: the sum of all ranks' gradients; ``avg``: their mean; ``premul_sum``: their sum
        times the conjugate of ``factor``; ``min``/``max``: their sum for the ranks that hold the
        winning value, shared evenly; ``product``: their sum times the product of the other ranks'
        values.

    Example, 2 ranks::

        x = torch.arange(3.0) + 10 * rank  # [0, 1, 2] and [10, 11, 12]
        all_reduce(x, "sum", None)  # [10, 12, 14] on both

    Source: csrc/ops/all_reduce.cpp
    """
    name = group if type(group) is str else group_name(group, tag)
    return _start(self, reduceOp, name, factor=factor)


def all_reduce_coalesced(
    self: list[Tensor],
    reduceOp: str,
    group: Group = None,
    tag: str = "",
    *,
    factor: complex | None = None,
) -> list[Tensor]:
    """Reduces several tensors over the ranks of a group in one message.

    Args:
        self: tensors of one dtype on one device, any shapes; left untouched.
        reduceOp, group, tag, factor: as for :func:`all_reduce`.

    Returns:
        One result per tensor, as :func:`all_reduce` would give it.

    Raises:
        ValueError, TypeError: as :func:`all_reduce`; an empty list, mixed dtypes or devices.

    Gradient:
        As :func:`all_reduce`, in one message too.

    Example, 2 ranks::

        all_reduce_coalesced([torch.ones(2), torch.full((3,), rank)], "sum", None)
        # [2, 2] and [1, 1, 1] on both

    Source: csrc/ops/all_reduce.cpp
    """
    name = group_name(group, tag)
    check_list("all_reduce_coalesced", self, name)
    return _start_list(self, reduceOp, name, factor=factor)


def all_reduce_inplace(
    tensor: Tensor, op: str = "sum", group: Group = None, async_op: bool = False, tag: str = ""
) -> Tensor:
    """Replaces ``tensor`` by its reduction over the ranks of a group, and waits.

    Args:
        tensor: what every rank contributes, and where every rank finds the result.
        op: the reduce op, as for :func:`all_reduce`.
        group, tag: as for :func:`all_reduce`.
        async_op: must be False; the functional form is the asynchronous one.

    Returns:
        ``tensor``.

    Raises:
        ValueError: ``async_op`` is set, or as :func:`all_reduce`.

    Gradient:
        As :func:`all_reduce`.

    Example, 2 ranks::

        x = torch.tensor([1.0 + rank])
        all_reduce_inplace(x)  # x is [3.] on both

    Source: csrc/ops/all_reduce.cpp
    """
    if async_op:
        raise InvalidArgument(
            "all_reduce_inplace: async_op must be False, got True; use all_reduce"
        )
    name = group if type(group) is str else group_name(group, tag)
    if writes_directly(tensor, tensor) and _write(tensor, op, name):
        return tensor
    # The gradient of these needs the values that are overwritten.
    source = tensor.clone() if op.lower() in ("min", "max", "product") else tensor
    return replace(tensor, all_reduce(source, op, name))


_vmap.register_forms("all_reduce", _vmap.any_dim)
_inductor.lower("all_reduce", in_place=True)

_op_info.declare(
    "all_reduce",
    pattern=Pattern.ALL_REDUCE,
    wire=lambda n, given, _: 2 * (n - 1) * given / n,
    movable=True,
)
