"""The object collectives of ``torch.distributed``, which may refuse to unpickle code.

By default they are torch's: objects travel as pickles, and a pickle runs what it likes where it is
read. With ``weights_only=True`` they travel as ``torch.save`` writes them and are read as
``torch.load(weights_only=True)`` does: tensors and plain Python values, and what
``torch.serialization.add_safe_globals`` allows.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_c10d_ext._groups import (
    Group,
    device_of,
    group_rank,
    group_size,
    member,
    process_group,
    refuse_in_a_graph,
    root_of,
    where,
)
from torch_c10d_ext.distributed import _collectives
from torch_c10d_ext.errors import InvalidArgument


def all_gather_object(
    object_list: list[Any], obj: Any, group: Group = None, *, weights_only: bool = False
) -> None:
    """Fills ``object_list`` on every rank with the objects of all ranks.

    Args:
        object_list: one slot per rank.
        obj: what this rank sends.
        group: as for :func:`torch_c10d_ext.distributed.all_reduce`.
        weights_only: read nothing but tensors and plain values; the same on every rank.

    Raises:
        ValueError: ``object_list`` has not one slot per rank.
        pickle.UnpicklingError: with ``weights_only``, a rank sent something else; raised on each
            rank that received it, when all is received.
        RuntimeError: called in compiled code, as all object collectives.

    Example, 2 ranks::

        objects = [None, None]
        all_gather_object(objects, {"rank": rank}, weights_only=True)
        # [{"rank": 0}, {"rank": 1}] on both

    Source: torch.load, https://docs.pytorch.org/docs/stable/notes/serialization.html
    """
    function = "all_gather_object"
    refuse_in_a_graph(function)
    name = member(function, group)
    if name is None:
        return
    if not weights_only:
        dist.all_gather_object(object_list, obj, process_group(name))
        return
    _check_slots(function, "object_list", object_list, name)
    payload = _dump(obj, device_of(name))
    parts = [payload.new_empty(size) for size in _sizes(payload, name)]
    _collectives.all_gather(parts, payload, name)
    for rank, part in enumerate(parts):
        object_list[rank] = _load(function, part, rank, name)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
    *,
    weights_only: bool = False,
) -> None:
    """Fills ``object_gather_list`` on one rank with the objects of all ranks.

    Args:
        obj: what this rank sends.
        object_gather_list: on the destination one slot per rank; None elsewhere.
        dst, group_dst: the destination by its rank in the world, 0 by default, or in the group.
        group, weights_only: as for :func:`all_gather_object`.

    Raises:
        ValueError: ``object_gather_list`` missing on the destination or given elsewhere.
        pickle.UnpicklingError: as :func:`all_gather_object`, on the destination.

    Example, 2 ranks::

        objects = [None, None] if rank == 0 else None
        gather_object(rank, objects, weights_only=True)  # [0, 1] on rank 0

    Source: torch.load
    """
    function = "gather_object"
    refuse_in_a_graph(function)
    name = member(function, group)
    if name is None:
        return
    if not weights_only:
        pg = process_group(name)
        dist.gather_object(obj, object_gather_list, dst, pg, group_dst)
        return
    if dst is None and group_dst is None:
        dst = 0
    root = root_of(function, "dst", name, dst, group_dst)
    here = group_rank(name) == root
    if here:
        _check_slots(function, "object_gather_list", object_gather_list, name)
    elif object_gather_list:
        raise InvalidArgument(
            f"{function}: object_gather_list must be given on the destination alone, got a list of "
            f"{len(object_gather_list)} {where(name)}"
        )
    payload = _dump(obj, device_of(name))
    sizes = _sizes(payload, name)
    # Rows of one length, as a gather needs them.
    row = payload.new_zeros(max(sizes))
    row[: payload.numel()] = payload
    rows = [torch.empty_like(row) for _ in sizes] if here else None
    _collectives.gather(row, rows, group=name, group_dst=root)
    if rows is not None and object_gather_list is not None:
        for rank, size in enumerate(sizes):
            object_gather_list[rank] = _load(function, rows[rank][:size], rank, name)


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    *,
    weights_only: bool = False,
) -> None:
    """Replaces the objects of a list on every rank by those of one rank.

    Args:
        object_list: what the source sends, and as many slots on every other rank.
        src, group_src: the source by its rank in the world, 0 by default, or in the group.
        device: where the bytes travel from; None: where the group communicates.
        group, weights_only: as for :func:`all_gather_object`.

    Raises:
        ValueError: an empty list; both of the source's ranks, or one that is not in the group.
        pickle.UnpicklingError: as :func:`all_gather_object`, on every rank but the source.

    Example, 2 ranks::

        objects = ["a", 1] if rank == 0 else [None, None]
        broadcast_object_list(objects, weights_only=True)  # ["a", 1] on both

    Source: torch.load
    """
    function = "broadcast_object_list"
    refuse_in_a_graph(function)
    name = member(function, group)
    if name is None:
        return
    if not weights_only:
        pg = process_group(name)
        dist.broadcast_object_list(object_list, src, pg, device, group_src)
        return
    _check_list(function, "object_list", object_list, name)
    if src is None and group_src is None:
        src = 0
    root = root_of(function, "src", name, src, group_src)
    at = device or torch.device(device_of(name))
    here = group_rank(name) == root
    parts = [_dump(obj, at) for obj in object_list] if here else []
    sizes = torch.tensor([p.numel() for p in parts] if here else [0] * len(object_list), device=at)
    _collectives.broadcast(sizes, group=name, group_src=root)
    counts = sizes.tolist()
    whole = torch.cat(parts) if here else torch.empty(sum(counts), dtype=torch.uint8, device=at)
    _collectives.broadcast(whole, group=name, group_src=root)
    if not here:
        for slot, part in enumerate(whole.split(counts)):
            object_list[slot] = _load(function, part, root, name)


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
    *,
    weights_only: bool = False,
) -> None:
    """Gives rank r the r-th object of one rank, in the first slot of its list.

    Args:
        scatter_object_output_list: at least one slot.
        scatter_object_input_list: on the source one object per rank; elsewhere not looked at.
        src, group_src: as for :func:`broadcast_object_list`.
        group, weights_only: as for :func:`all_gather_object`.

    Raises:
        ValueError: no slot, or not one object per rank on the source.
        pickle.UnpicklingError: as :func:`all_gather_object`, on the rank whose object it is.

    Example, 2 ranks::

        mine = [None]
        scatter_object_list(mine, ["a", "b"] if rank == 0 else None, weights_only=True)
        # ["a"] on rank 0, ["b"] on rank 1

    Source: torch.load
    """
    function = "scatter_object_list"
    refuse_in_a_graph(function)
    name = member(function, group)
    if name is None:
        return
    if not weights_only:
        pg = process_group(name)
        dist.scatter_object_list(
            scatter_object_output_list, scatter_object_input_list, src, pg, group_src
        )
        return
    _check_list(function, "scatter_object_output_list", scatter_object_output_list, name)
    if src is None and group_src is None:
        src = 0
    root = root_of(function, "src", name, src, group_src)
    at = torch.device(device_of(name))
    rows: list[Tensor] | None = None
    sizes = torch.zeros(group_size(name), dtype=torch.int64, device=at)
    if group_rank(name) == root:
        given = scatter_object_input_list
        _check_slots(function, "scatter_object_input_list", given, name)
        parts = [_dump(obj, at) for obj in given or ()]
        sizes = torch.tensor([part.numel() for part in parts], device=at)
        rows = [part.new_zeros(int(sizes.max())) for part in parts]
        for row, part in zip(rows, parts, strict=True):
            row[: part.numel()] = part
    _collectives.broadcast(sizes, group=name, group_src=root)
    mine = torch.empty(int(sizes.max()), dtype=torch.uint8, device=at)
    _collectives.scatter(mine, rows, group=name, group_src=root)
    size = int(sizes[group_rank(name)])
    scatter_object_output_list[0] = _load(function, mine[:size], root, name)


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Group = None,
    device: torch.device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    *,
    weights_only: bool = False,
) -> None:
    """Sends the objects of a list to one rank, which calls :func:`recv_object_list`.

    Args:
        object_list: what to send.
        dst, group_dst: the destination by its rank in the world or in the group.
        device: as for :func:`broadcast_object_list`.
        use_batch: send in a batch, as torch has it.
        group, weights_only: as for :func:`all_gather_object`.

    Raises:
        ValueError: an empty list; not one rank that is another one of the group.

    Example, 2 ranks::

        if rank == 0:
            send_object_list(["a", 1], dst=1, weights_only=True)
        else:
            objects = [None, None]
            recv_object_list(objects, src=0, weights_only=True)  # ["a", 1]

    Source: torch.load
    """
    function = "send_object_list"
    refuse_in_a_graph(function)
    name = member(function, group)
    if name is None:
        return
    pg = process_group(name)
    if not weights_only:
        dist.send_object_list(object_list, dst, pg, device, group_dst, use_batch)
        return
    _check_list(function, "object_list", object_list, name)
    root = root_of(function, "dst", name, dst, group_dst)
    at = device or torch.device(device_of(name))
    parts = [_dump(obj, at) for obj in object_list]
    for tensor in (torch.tensor([part.numel() for part in parts], device=at), torch.cat(parts)):
        _exchange(dist.isend, tensor, root, pg, use_batch)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
    *,
    weights_only: bool = False,
) -> int:
    """Fills a list with the objects that a rank sends by :func:`send_object_list`.

    Args:
        object_list: as many slots as the sender's list has objects.
        src, group_src: the source by its rank in the world or in the group; neither: any rank.
        device: as for :func:`broadcast_object_list`.
        use_batch: receive in a batch, as torch has it.
        group, weights_only: as for :func:`all_gather_object`.

    Returns:
        The sender's rank in the world; -1 on ranks that are not in the group.

    Raises:
        ValueError: an empty list; a rank that is not another one of the group.
        pickle.UnpicklingError: as :func:`all_gather_object`.

    Example, 2 ranks: see :func:`send_object_list`.

    Source: torch.load
    """
    function = "recv_object_list"
    refuse_in_a_graph(function)
    name = member(function, group)
    if name is None:
        return -1
    pg = process_group(name)
    if not weights_only:
        return dist.recv_object_list(object_list, src, pg, device, group_src, use_batch)
    _check_list(function, "object_list", object_list, name)
    root = None
    if src is not None or group_src is not None:
        root = root_of(function, "src", name, src, group_src)
    at = device or torch.device(device_of(name))
    sizes = torch.empty(len(object_list), dtype=torch.int64, device=at)
    sender = _exchange(dist.irecv, sizes, root, pg, use_batch)
    whole = torch.empty(int(sizes.sum()), dtype=torch.uint8, device=at)
    _exchange(dist.irecv, whole, dist.get_group_rank(pg, sender), pg, use_batch)
    for slot, part in enumerate(whole.split(sizes.tolist())):
        object_list[slot] = _load(function, part, dist.get_group_rank(pg, sender), name)
    return sender


def _check_list(function: str, what: str, values: Any, group: str) -> None:
    if not isinstance(values, list) or not values:
        raise InvalidArgument(
            f"{function}: {what} must be a list of at least one object, got {values!r} "
            f"{where(group)}"
        )


def _check_slots(function: str, what: str, values: Any, group: str) -> None:
    if not isinstance(values, list) or len(values) != group_size(group):
        got = len(values) if isinstance(values, list) else values
        raise InvalidArgument(
            f"{function}: {what} must hold one object per rank, {group_size(group)}, got {got} "
            f"{where(group)}"
        )


def _exchange(
    function: Any, tensor: Tensor, peer: int | None, pg: dist.ProcessGroup, batch: bool
) -> int:
    """Sends or receives; the world's rank of the other side."""
    if batch:
        dist.batch_isend_irecv(
            [dist.P2POp(function, tensor, group=pg, group_peer=peer)]
        ).pop().wait()
    elif function is dist.isend:
        dist.send(tensor, group=pg, group_dst=peer)
    else:
        return dist.recv(tensor, group=pg, group_src=peer)
    return -1 if peer is None else dist.get_global_rank(pg, peer)


def _sizes(payload: Tensor, group: str) -> list[int]:
    """The lengths of all ranks' payloads."""
    size = torch.tensor([payload.numel()], device=payload.device)
    sizes = size.new_empty(group_size(group))
    _collectives.all_gather_into_tensor(sizes, size, group)
    return sizes.tolist()


def _dump(obj: Any, device: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8).to(device, copy=True)


def _load(function: str, data: Tensor, rank: int, group: str) -> Any:
    try:
        return torch.load(io.BytesIO(data.cpu().numpy().tobytes()), weights_only=True)
    except Exception as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        got = f"'{named[1]}'" if named else "something else"
        raise pickle.UnpicklingError(
            f"{function}: with weights_only=True an object must be made of tensors and plain "
            f"Python values, on every rank, got {got} from rank {rank} {where(group)}"
        ) from error
