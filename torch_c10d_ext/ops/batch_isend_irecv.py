"""batch_isend_irecv: starts messages to and from other ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_c10d_ext import _C, _inductor, _op_info
from torch_c10d_ext._async import deliver, writes_directly
from torch_c10d_ext._dims import check_list
from torch_c10d_ext._groups import Group, group_name, root_of, where
from torch_c10d_ext._op_info import Pattern
from torch_c10d_ext.errors import InvalidArgument

_op = torch.ops.c10d_ext.batch_isend_irecv.default
_wait_op = torch.ops.c10d_ext.wait_message.default
_group_name = group_name  # which is an argument's name, too


def batch_isend_irecv(
    tensors: list[Tensor],
    peers: list[int],
    sends: list[bool],
    tags: list[int] | None = None,
    group: Group = None,
) -> list[Tensor]:
    """Starts messages, and returns a ticket for each to wait for it with.

    What :mod:`torch_c10d_ext.distributed` traces its point to point to. In a graph messages start
    and are waited for in the order of the program; a batch has no order of its own.

    Args:
        tensors: what is sent, copied at the start, any shape, strides and dtype; for a message that
            is received, a tensor of its shape and dtype, left untouched.
        peers: the other rank of each message, counted within the group; -1 receives from any.
        sends: which of the messages this rank sends.
        tags: 0 or more; a message is received by the next call with its tag. None: all 0.
        group: see :data:`torch_c10d_ext.functional.Group`.

    Returns:
        One ticket per message, for :func:`~torch_c10d_ext.functional.wait_message`. A ticket that
        is dropped drops what it would have received; what was sent still arrives.

    Raises:
        ValueError: a peer that is not in the group, this rank as a peer, a negative tag, lists of
            different lengths, several devices.
        TypeError: a sparse tensor.

    Gradient:
        None: nothing flows back through a message.

    Example, 2 ranks::

        x, y = torch.tensor([1.0 + rank]), torch.empty(1)
        sent, received = batch_isend_irecv([x, y], [1 - rank] * 2, [True, False])
        wait_message(sent)
        wait_message(received, y)[0]  # [2.] on rank 0, [1.] on rank 1

    Source: csrc/ops/batch_isend_irecv.cpp
    """
    name = group_name(group)
    check_list("batch_isend_irecv", tensors, name)
    return _op(tensors, peers, sends, [0] * len(tensors) if tags is None else tags, name)


def _exchange(
    tensors: list[Tensor], peers: list[int], sends: list[bool], tags: list[int], name: str
) -> list[Tensor]:
    """From and into the tensors themselves; in eager what is returned waits when it is used."""
    if all(writes_directly(tensor, tensor) for tensor in tensors):
        messages = _C.start_messages(tensors, peers, sends, tags, name)
        for message in messages:
            _C.attach_message(message)
        return [deliver(tensor.detach()) for tensor in tensors]
    with torch.no_grad():
        tickets = _op(tensors, peers, sends, tags, name)
        for ticket, tensor, sent in zip(tickets, tensors, sends, strict=True):
            if not sent:
                tensor.copy_(_wait_op(ticket, tensor.shape, tensor.dtype)[0])
    return tensors


def _rank_of(op: str, role: str, name: str, rank: int | None, rank_in_group: int) -> int:
    return root_of(op, role, name, rank, None if rank_in_group == -1 else rank_in_group)


def isend_inplace(
    tensor: Tensor, dst: int | None, tag: int = 0, group: Group = None, group_dst: int = -1
) -> Tensor:
    """Starts to send ``tensor`` to another rank.

    Args:
        tensor: any shape, strides and dtype; in eager not to be written before the result is waited
            for. In a graph it is copied.
        dst: the receiver by its rank in the world; None where
        group_dst: is given, its rank in the group.
        tag: 0 or more; the message is received by a call with the same one.
        group: see :data:`torch_c10d_ext.functional.Group`.

    Returns:
        ``tensor``'s memory; its first use waits until the message has left.

    Raises:
        ValueError: both or neither of the receiver's ranks, one that is not in the group, this
            rank, a negative tag.
        TypeError: a sparse tensor.

    Gradient:
        None: nothing flows back through a message.

    Example, 2 ranks::

        x, y = torch.tensor([1.0 + rank]), torch.empty(1)
        sent = isend_inplace(x, 1 - rank)
        irecv_inplace(y, 1 - rank)  # [2.] on rank 0, [1.] on rank 1

    Source: csrc/ops/batch_isend_irecv.cpp
    """
    name = group_name(group)
    peer = _rank_of("isend_inplace", "dst", name, dst, group_dst)
    return _exchange([tensor], [peer], [True], [tag], name)[0]


def irecv_inplace(
    tensor: Tensor, src: int | None, tag: int = 0, group: Group = None, group_src: int = -1
) -> Tensor:
    """Starts to receive ``tensor`` from another rank.

    In a graph it is waited for here: what this rank sends to get an answer must come before, or in
    one :func:`batch_p2p_ops_inplace` with it.

    Args:
        tensor: of the message's shape and dtype, overwritten.
        src: the sender by its rank in the world; None where
        group_src: is given, its rank in the group.
        tag, group: as for :func:`isend_inplace`.

    Returns:
        ``tensor``'s memory; its first use waits for the message.

    Raises:
        ValueError, TypeError: as :func:`isend_inplace`; a tensor with two elements in one place.

    Gradient:
        None: nothing flows back through a message.

    Example, 2 ranks: see :func:`isend_inplace`.

    Source: csrc/ops/batch_isend_irecv.cpp
    """
    name = group_name(group)
    peer = _rank_of("irecv_inplace", "src", name, src, group_src)
    return _exchange([tensor], [peer], [False], [tag], name)[0]


def batch_p2p_ops_inplace(
    op_list: list[str],
    peer_list: list[int],
    tag_list: list[int],
    tensors: list[Tensor],
    group_name: Group = None,
) -> list[Tensor]:
    """Starts messages together: no order among them can make ranks wait for each other.

    Args:
        op_list: "isend" or "irecv", for each message.
        peer_list: the other rank of each, counted within the group; -1 receives from any.
        tag_list: 0 or more; a message is received by the next call with its tag.
        tensors: what is sent, and what is overwritten.
        group_name: see :data:`torch_c10d_ext.functional.Group`.

    Returns:
        The tensors' memory; the first use of each waits for its message. In a graph what is
        received is waited for here.

    Raises:
        ValueError: other ops, lists of different lengths; as :func:`isend_inplace`.
        TypeError: a sparse tensor.

    Gradient:
        None: nothing flows back through a message.

    Example, 2 ranks::

        x, y = torch.tensor([1.0 + rank]), torch.empty(1)
        batch_p2p_ops_inplace(["isend", "irecv"], [1 - rank] * 2, [0, 0], [x, y])[1]
        # [2.] on rank 0, [1.] on rank 1

    Source: csrc/ops/batch_isend_irecv.cpp
    """
    op = "batch_p2p_ops_inplace"
    name = _group_name(group_name)
    check_list(op, tensors, name)
    counts = {len(op_list), len(peer_list), len(tag_list), len(tensors)}
    if len(counts) != 1:
        raise InvalidArgument(
            f"{op}: op_list, peer_list, tag_list and tensors must have one length, got "
            f"{len(op_list)}, {len(peer_list)}, {len(tag_list)} and {len(tensors)} {where(name)}"
        )
    others = [each for each in op_list if each not in ("isend", "irecv")]
    if others:
        raise InvalidArgument(
            f"{op}: op_list must hold 'isend' and 'irecv', got {others[0]!r} {where(name)}"
        )
    sends = [each == "isend" for each in op_list]
    return _exchange(list(tensors), list(peer_list), sends, list(tag_list), name)


_inductor.ordered(_op)


@_inductor.lowering(_op)
def _lowering(tensors: Any, *args: Any) -> Any:
    return _inductor.start_in_order(_op, tensors, *args)


_op_info.declare(
    "batch_isend_irecv",
    "batch_p2p_ops",
    "isend",
    "irecv",
    pattern=Pattern.MESSAGE,
    wire=lambda n, given, _: given,
)
