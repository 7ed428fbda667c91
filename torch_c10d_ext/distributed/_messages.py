"""Point to point of ``torch.distributed``, over an op that a tracer walks into.

In eager the backend reads and writes the caller's tensors. In a graph the start copies what is sent
and the wait gives what is received, which is copied into the caller's tensor. Starts and waits keep
their order in a graph, so that what runs in eager does not hang when compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from torch_c10d_ext import _C
from torch_c10d_ext._async import captures_numbers
from torch_c10d_ext._groups import (
    Group,
    group_name,
    group_rank,
    group_size,
    member,
    place_in,
    root_of,
    where,
    world_ranks,
)
from torch_c10d_ext.distributed import _coalescing, _delivery
from torch_c10d_ext.distributed._collectives import _check_tensor
from torch_c10d_ext.errors import InvalidArgument

if TYPE_CHECKING:
    from typing_extensions import Self

_ANY = -1
_is_compiling = torch.compiler.is_compiling


def _peer_of(op: str, role: str, name: str, rank: Any, rank_in_group: Any) -> int:
    """The other end of a message, within the group."""
    peer = root_of(op, role, name, rank, rank_in_group)
    if not isinstance(peer, int):
        raise TypeError(
            f"{op}: group_{role} must be an int, got {type(peer).__name__} {where(name)}"
        )
    if not 0 <= peer < group_size(name):
        raise InvalidArgument(
            f"{op}: group_{role} must be a rank of the group, 0 to {group_size(name) - 1}, got "
            f"{peer} {where(name)}"
        )
    return peer


def _source_of(op: str, name: str, src: Any, group_src: Any) -> int:
    return _ANY if src is None and group_src is None else _peer_of(op, "src", name, src, group_src)


def _check(op: str, name: str, tensor: Any, peer: int, tag: Any) -> None:
    _check_tensor(op, "tensor", tensor, name)
    if not isinstance(tag, int):
        raise TypeError(f"{op}: tag must be an int, got {type(tag).__name__} {where(name)}")
    if not 0 <= tag < 2**31:
        raise InvalidArgument(f"{op}: tag must be between 0 and 2**31 - 1, got {tag} {where(name)}")
    if peer == group_rank(name) and (tensor.device.type == "cpu" or op in ("send", "recv")):
        raise InvalidArgument(
            f"{op}: the other end of a message must be another rank, got {peer} {where(name)}"
        )


def _start(name: str, tensor: Tensor, sends: bool, peer: int, tag: int) -> Any:
    return _start_all(name, [_delivery.Message(tensor, sends, peer, tag)])[0]


def _start_all(name: str, messages: list[_delivery.Message]) -> list[Any]:
    block = _coalescing.open_blocks.get(name)
    return block.hold_messages(messages) if block else _delivery.start_messages(messages, name)


def _passed_directly(
    tensor: Tensor, peer: Any, group: Group, tag: Any, peer_in_group: Any, sends: bool
) -> bool:
    """Sends or receives by a short way; False, and nothing has happened, where none is open."""
    if peer_in_group is not None or _is_compiling() or _coalescing.open_blocks:
        return False
    pg = c10d._world.default_pg if group is None else group
    place = place_in(pg, peer)
    return place is not None and _C.pass_message(tensor, place, pg, tag, sends)


def _pass(name: str, tensor: Tensor, sends: bool, peer: int, tag: int) -> Any:
    if name in _coalescing.open_blocks:
        _coalescing.open_blocks[name].release_messages()
    (work,) = _delivery.start_messages([_delivery.Message(tensor, sends, peer, tag)], name)
    work.wait()
    return work


@torch.no_grad()
def isend(
    tensor: Tensor,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Any:
    """Starts to send ``tensor`` to another rank.

    Args:
        tensor: any shape, strides and dtype; must not be written before the work's wait, in eager.
        dst: the receiver by its rank in the world; or
        group_dst: by its rank in the group.
        group: None is the default group; see :data:`torch_c10d_ext.functional.Group`.
        tag: 0 or more; the message is received by a call with the same one. Between two ranks,
            messages with one tag arrive in the order they are sent. NCCL knows no tags.

    Returns:
        A Work, whose ``wait()`` ends when the message has left; None on ranks that are not in the
        group.

    Raises:
        TypeError: no tensor; a tag or rank that is no int.
        ValueError: both or neither of the receiver's ranks, one that is not in the group or, but
            for NCCL, this rank; a negative tag.

    Gradient:
        None: see :mod:`torch_c10d_ext.distributed`.

    Example, 2 ranks::

        x, y = torch.tensor([1.0 + rank]), torch.empty(1)
        works = [isend(x, 1 - rank), irecv(y, 1 - rank)]
        for work in works:
            work.wait()  # y is [2.] on rank 0, [1.] on rank 1

    Source: csrc/ops/batch_isend_irecv.cpp
    """
    name = member("isend", group)
    if name is None:
        return None
    peer = _peer_of("isend", "dst", name, dst, group_dst)
    _check("isend", name, tensor, peer, tag)
    return _start(name, tensor, True, peer, tag)


@torch.no_grad()
def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Any:
    """Starts to receive ``tensor`` from another rank.

    Args:
        tensor: what is written, of the shape and dtype that are sent, any strides.
        src: the sender by its rank in the world; or
        group_src: by its rank in the group; neither: whoever sends first.
        group, tag: as for :func:`isend`.

    Returns:
        A Work, whose ``wait()`` ends when ``tensor`` is there and whose ``_source_rank()`` is then
        the sender's rank in the group; None on ranks that are not in the group.

    Raises:
        TypeError, ValueError: as :func:`isend`; both of the sender's ranks, elements of ``tensor``
            that share a place.

    Gradient:
        None: see :mod:`torch_c10d_ext.distributed`.

    Example, 2 ranks:
        See :func:`isend`.

    Source: csrc/ops/batch_isend_irecv.cpp
    """
    name = member("irecv", group)
    if name is None:
        return None
    peer = _source_of("irecv", name, src, group_src)
    _check("irecv", name, tensor, peer, tag)
    return _start(name, tensor, False, peer, tag)


def send(
    tensor: Tensor,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Sends ``tensor`` to another rank, and waits until it has left.

    Args:
        tensor, dst, group, tag, group_dst: as for :func:`isend`.

    Returns:
        None.

    Raises:
        TypeError, ValueError: as :func:`isend`.

    Gradient:
        None: see :mod:`torch_c10d_ext.distributed`.

    Example, 2 ranks::

        x = torch.tensor([1.0 + rank])
        send(x, 1) if rank == 0 else recv(x, 0)  # x is [1.] on both; recv returns 0

    Source: csrc/ops/batch_isend_irecv.cpp
    """
    if _passed_directly(tensor, dst, group, tag, group_dst, True):
        return
    name = member("send", group)
    if name is None:
        return
    peer = _peer_of("send", "dst", name, dst, group_dst)
    _check("send", name, tensor, peer, tag)
    with torch.no_grad():
        _pass(name, tensor, True, peer, tag)


def recv(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receives ``tensor`` from another rank.

    Args:
        tensor, src, group, tag, group_src: as for :func:`irecv`.

    Returns:
        The sender's rank in the world; -1 on ranks that are not in the group. In a compiled graph
        that of any source is a number known at run time, which Dynamo traces where
        ``torch._dynamo.config.capture_scalar_outputs`` is set.

    Raises:
        TypeError, ValueError: as :func:`irecv`.
        RuntimeError: in a compiled graph, from any source, without that setting.

    Gradient:
        None: see :mod:`torch_c10d_ext.distributed`.

    Example, 2 ranks:
        See :func:`send`.

    Source: csrc/ops/batch_isend_irecv.cpp
    """
    if src is not None and _passed_directly(tensor, src, group, tag, group_src, False):
        return src
    name = member("recv", group)
    if name is None:
        return -1
    peer = _source_of("recv", name, src, group_src)
    _check("recv", name, tensor, peer, tag)
    if peer == _ANY and torch.compiler.is_dynamo_compiling() and not captures_numbers():
        raise RuntimeError(
            "recv: in a compiled graph the rank of any source, a number known at run time, must be "
            "traceable: set torch._dynamo.config.capture_scalar_outputs = True, name a source, or "
            f"call irecv(...).wait(), which returns no rank; got src=None {where(name)}"
        )
    with torch.no_grad():
        work = _pass(name, tensor, False, peer, tag)
    members = world_ranks(name)
    if peer != _ANY:
        return members[peer]
    if isinstance(work, _delivery.TracedMessage):
        at = work.source().view(1)
        return torch.tensor(members).index_select(0, at).item()  # type: ignore[return-value]
    return members[work._source_rank()]


class P2POp(dist.P2POp):
    """One message of a batch.

    Args:
        op: :func:`isend` or :func:`irecv`, this module's or torch's.
        tensor: what is sent or received into, see there.
        peer: the other rank, in the world; or
        group_peer: in the group.
        group, tag: as for :func:`isend`.

    Raises:
        ValueError: another ``op``, or as :func:`isend`.
        TypeError: no tensor.

    Example, 2 ranks:
        See :func:`batch_isend_irecv`.
    """

    def __new__(
        cls,
        op: Callable[..., Any],
        tensor: Tensor,
        peer: int | None = None,
        group: Group = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> Self:
        """An instance, without torch's checks."""
        return object.__new__(cls)

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: Tensor,
        peer: int | None = None,
        group: Group = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        name = group_name(group)
        _sends(op, name)
        _check_tensor("P2POp", "tensor", tensor, name)
        self.op = op
        self.tensor = tensor
        self.group = dist.group.WORLD if group is None else group
        self.group_peer = _peer_of("P2POp", "peer", name, peer, group_peer)
        self.peer = world_ranks(name)[self.group_peer]
        self.tag = tag

    def __repr__(self) -> str:
        function = "isend" if _sends(self.op, group_name(self.group)) else "irecv"
        return (
            f"P2POp({function}, peer {self.peer}, tag {self.tag}, {tuple(self.tensor.shape)}, "
            f"{self.tensor.dtype}, group '{group_name(self.group)}')"
        )


def _sends(op: Any, name: str) -> bool:
    if op is isend:
        return True
    if op is irecv:
        return False
    if op is dist.isend:
        return True
    if op is dist.irecv:
        return False
    raise InvalidArgument(f"P2POp: op must be isend or irecv, got {op} {where(name)}")


@torch.no_grad()
def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[Any]:
    """Starts messages that have no order among each other, but for those between the same ranks.

    Args:
        p2p_op_list: messages of one group and device.

    Returns:
        A Work per message, in their order, as :func:`isend` and :func:`irecv` return it.

    Raises:
        ValueError: no list of :class:`P2POp`; several groups or devices; or as :func:`isend`.
        IndexError: an empty list.

    Gradient:
        None: see :mod:`torch_c10d_ext.distributed`.

    Example, N ranks::

        x, y = torch.tensor([1.0 + rank]), torch.empty(1)
        ops = [P2POp(isend, x, (rank + 1) % N), P2POp(irecv, y, (rank - 1) % N)]
        for work in batch_isend_irecv(ops):
            work.wait()  # y is [N] on rank 0, [rank] on the others

    Source: csrc/ops/batch_isend_irecv.cpp
    """
    function = "batch_isend_irecv"
    if not isinstance(p2p_op_list, list) or not all(isinstance(p, dist.P2POp) for p in p2p_op_list):
        raise InvalidArgument(f"{function}: p2p_op_list must be a list of P2POp, got {p2p_op_list}")
    if not p2p_op_list:
        raise IndexError(f"{function}: p2p_op_list must hold at least one P2POp, got none")
    name = group_name(p2p_op_list[0].group)
    messages = []
    for p2p in p2p_op_list:
        if group_name(p2p.group) != name:
            raise InvalidArgument(
                f"{function}: all messages must be of one group, got one of group "
                f"'{group_name(p2p.group)}' {where(name)}"
            )
        _check(function, name, p2p.tensor, p2p.group_peer, p2p.tag)
        if p2p.tensor.device != p2p_op_list[0].tensor.device:
            raise InvalidArgument(
                f"{function}: all tensors must be on one device, {p2p_op_list[0].tensor.device}, "
                f"got {p2p.tensor.device} {where(name)}"
            )
        messages.append(
            _delivery.Message(p2p.tensor, _sends(p2p.op, name), p2p.group_peer, p2p.tag)
        )
    return _start_all(name, messages)
