"""Groups made of a part of another group's ranks, on backends where torch has no way to."""

from __future__ import annotations

import datetime as dt
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as distributed_c10d

from torch_c10d_ext._groups import (
    Group,
    cpu_backend,
    device_of,
    group_name,
    process_group,
    reconnects,
    refuse_in_a_graph,
    shrunk,
    split_off,
    where,
)
from torch_c10d_ext.errors import InvalidArgument


def split_group(
    parent_pg: Group = None,
    split_ranks: list[list[int]] | None = None,
    timeout: dt.timedelta | None = None,
    pg_options: Any | None = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> dist.ProcessGroup | None:
    """Makes a group of each list of a group's ranks; every rank of the group calls it.

    torch's own where the group is bound to an accelerator. Elsewhere, where torch refuses, the
    group is made as ``new_group`` makes one, by the ranks of the group that is split alone.

    Args:
        parent_pg: the group to split, see :data:`torch_c10d_ext.functional.Group`.
        split_ranks: the ranks, counted in the group, of each new one; no rank twice.
        timeout, pg_options, group_desc: as for ``new_group``.
        backend: some of the group's devices with their backends, ``"cpu:gloo"``; None: all.

    Returns:
        The group that this rank is in; None on ranks that no list names.

    Raises:
        ValueError: no lists, an empty one, a rank that is named twice or not in the group, a
            backend that the group does not have.

    Example, 4 ranks::

        half = split_group(split_ranks=[[0, 1], [2, 3]])
        all_reduce(x, group=half)  # among 0 and 1, among 2 and 3

    Source: torch.distributed.distributed_c10d.split_group
    """
    refuse_in_a_graph("split_group")
    name = group_name(parent_pg)
    parent = process_group(name)
    if dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None:
        more = {} if backend is None else {"backend": backend}
        return dist.split_group(parent, split_ranks, timeout, pg_options, group_desc, **more)
    if not split_ranks:
        raise InvalidArgument(
            f"split_group: split_ranks must hold at least one list of ranks, got {split_ranks} "
            f"{where(name)}"
        )
    every = [rank for ranks in split_ranks for rank in ranks]
    inside = all(isinstance(rank, int) and 0 <= rank < parent.size() for rank in every)
    if not all(split_ranks) or len(set(every)) != len(every) or not inside:
        raise InvalidArgument(
            f"split_group: split_ranks must be lists of different ranks of the group, 0 to "
            f"{parent.size() - 1}, none empty, got {split_ranks} {where(name)}"
        )
    config = dist.get_backend_config(parent)
    have = dict(part.split(":") for part in config.split(","))
    if backend is not None:
        wanted = [part.split(":") for part in str(backend).split(",")]
        if any(len(pair) != 2 or have.get(pair[0]) != pair[1] for pair in wanted):
            raise InvalidArgument(
                f"split_group: backend must be some of the group's own, '{config}', got "
                f"'{backend}' {where(name)}"
            )
    mine = next((ranks for ranks in split_ranks if parent.rank() in ranks), [])
    named = backend or dist.get_backend(parent)  # as the user named it, where they did
    of_part = config if named == "undefined" else str(named)
    return split_off(parent, sorted(mine), of_part, timeout, pg_options, group_desc)


def shrink_group(
    ranks_to_exclude: list[int],
    group: Group = None,
    shrink_flags: int = 0,
    pg_options: Any | None = None,
) -> dist.ProcessGroup:
    """Replaces a group by one of the ranks that are left; those alone call it.

    torch's own where the backend can shrink (nccl, shm); on gloo, where torch refuses, the ranks
    that are left connect anew, through the group's store, which must still be there. A group for
    several devices that is bound to none, as one with ``"cpu:shm,cuda:nccl"``, is left with the
    CPU's.

    Args:
        ranks_to_exclude: ranks in the group that are gone, or are to go.
        group: see :data:`torch_c10d_ext.functional.Group`; it is destroyed. The default group is
            replaced by the new one, and all other groups are destroyed with it.
        shrink_flags: ``SHRINK_ABORT`` ends what is still in flight first.
        pg_options: as for ``new_group``.

    Returns:
        The group of the ranks that are left.

    Raises:
        TypeError: ``ranks_to_exclude`` is no list of integers; the backend cannot.
        ValueError: no rank, all ranks, a rank twice or not in the group; a group of one rank.
        RuntimeError: called on a rank that is excluded.

    Example, 3 ranks::

        if rank != 1:
            rest = shrink_group([1], group)  # of ranks 0 and 2

    Source: torch.distributed.distributed_c10d.shrink_group
    """
    refuse_in_a_graph("shrink_group")
    pg = process_group(group_name(group))
    # Of several backends torch would ask the GPU's, and make what it returns that of the CPU.
    is_mixed = len(pg._device_types) > 1 and pg.bound_device_id is None
    is_ours = is_mixed or reconnects(cpu_backend(pg))
    if device_of(pg.group_name) != "cpu" or not is_ours:
        return distributed_c10d.shrink_group(ranks_to_exclude, pg, shrink_flags, pg_options)
    return shrunk(pg, ranks_to_exclude, shrink_flags, pg_options)
