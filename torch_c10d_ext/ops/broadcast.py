"""broadcast: every rank gets rank src's input."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_c10d_ext import _inductor, _op_info, _vmap
from torch_c10d_ext._async import replace, starter, writer, writes_directly
from torch_c10d_ext._dims import check_list
from torch_c10d_ext._groups import Group, group_name
from torch_c10d_ext._op_info import Pattern
from torch_c10d_ext.errors import InvalidArgument

_op = torch.ops.c10d_ext.broadcast.default
_op_ = torch.ops.c10d_ext.broadcast_.default
_coalesced = torch.ops.c10d_ext.broadcast_coalesced.default
_start = starter(_op)
_start_list = starter(_coalesced)
_write = writer(_op_)


def broadcast(self: Tensor, src: int, group: Group = None, tag: str = "") -> Tensor:
    """Gives every rank the tensor of rank ``src``.

    Args:
        self: shape and dtype the same on every rank, any strides; values count on ``src`` alone;
            left untouched.
        src: the sending rank, counted within the group.
        group: the ranks that take part, see :data:`torch_c10d_ext.functional.Group`.
        tag: tells groups of the same ranks apart where ``group`` is a list of ranks.

    Returns:
        A tensor of self's shape with src's values.

    Raises:
        ValueError: ``src`` is no rank of the group, unknown group.

    Gradient:
        On ``src`` the sum of all ranks' gradients, zeros elsewhere: ``reduce(grad, "sum", src)``.

    Example, 2 ranks::

        broadcast(torch.tensor([1.0 + rank]), 1)  # [2.] on both

    Source: csrc/ops/broadcast.cpp
    """
    name = group if type(group) is str else group_name(group, tag)
    return _start(self, src, name)


def broadcast_coalesced(
    inputs: list[Tensor], src: int, group: Group = None, tag: str = ""
) -> list[Tensor]:
    """Gives every rank several tensors of rank ``src`` in one message.

    Args:
        inputs: tensors of one dtype on one device, any shapes; left untouched.
        src, group, tag: as for :func:`broadcast`.

    Returns:
        One result per tensor, as :func:`broadcast` would give it.

    Raises:
        ValueError, TypeError: as :func:`broadcast`; an empty list, mixed dtypes or devices.

    Gradient:
        As :func:`broadcast`.

    Example, 2 ranks::

        broadcast_coalesced([torch.tensor([rank]), torch.tensor([5 + rank])], 0)  # [0], [5] on both

    Source: csrc/ops/broadcast.cpp
    """
    name = group_name(group, tag)
    check_list("broadcast_coalesced", inputs, name)
    return _start_list(inputs, src, name)


def broadcast_inplace(
    tensor: Tensor, src: int, group: Group = None, async_op: bool = False, tag: str = ""
) -> Tensor:
    """Replaces ``tensor`` by that of rank ``src``, and waits.

    Args:
        tensor: what ``src`` sends, and where every other rank finds it.
        src, group, tag: as for :func:`broadcast`.
        async_op: must be False; the functional form is the asynchronous one.

    Returns:
        ``tensor``.

    Raises:
        ValueError: ``async_op`` is set, or as :func:`broadcast`.

    Gradient:
        As :func:`broadcast`.

    Example, 2 ranks::

        x = torch.tensor([1.0 + rank])
        broadcast_inplace(x, 1)  # x is [2.] on both

    Source: csrc/ops/broadcast.cpp
    """
    if async_op:
        raise InvalidArgument("broadcast_inplace: async_op must be False, got True; use broadcast")
    name = group if type(group) is str else group_name(group, tag)
    if writes_directly(tensor, tensor) and _write(tensor, src, name):
        return tensor
    return replace(tensor, broadcast(tensor, src, name))


_vmap.register_forms("broadcast", _vmap.any_dim)
_inductor.lower("broadcast", in_place=True)

_op_info.declare(
    "broadcast",
    pattern=Pattern.BROADCAST,
    wire=lambda n, given, _: given,
    movable=True,
    moves=True,
)
