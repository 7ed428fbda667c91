"""Groups of shm on several hosts: shared memory inside each, gloo between them."""

from __future__ import annotations

import datetime as dt
import json
import logging
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from torch_c10d_ext import _C

_log = logging.getLogger("torch_c10d_ext")

# A name that makes ranks of one machine hosts of their own.
NAME = "TORCH_C10D_EXT_SHM_HOST"
# Makes a part's backend over gloo: store, session, rank, size, timeout, name, global ranks.
OverGloo = Callable[[Any, str, int, int, dt.timedelta, str, Any], tuple[Any, Any]]

_told: set[str] = set()


def own_host() -> str:
    """The same text on ranks that may share memory; empty for one that must not."""
    if os.environ.get("TORCH_C10D_EXT_SHM_DISABLE") == "1":
        return ""
    return f"{_C.this_host()} {os.environ.get(NAME, '')}"


def connect(
    store: Any,
    rank: int,
    size: int,
    timeout: dt.timedelta,
    name: str,
    global_ranks: Any,
    session: str,
    settings: dict[str, Any],
    over_gloo: OverGloo,
) -> Any:
    """What moves the data of a group whose ranks cannot all share memory; None: gloo alone.

    The same on all ranks. It is None where all ranks are on one host, or each on its own, and where
    some cannot share memory though they are on one host: one that must not, or has too little.

    Args:
        session: a name of this meeting, the same on all ranks.
        settings: of the shared memory.
        over_gloo: makes the backends between hosts.
    """
    expected = _C.Rendezvous(store, rank, size, name, global_ranks)
    prefix = f"{session}/hosts/"
    meeting = expected.watched_store(prefix)
    host_names = _all_say(meeting, "host", rank, size, timeout, own_host())
    by_name: dict[str, list[int]] = {}
    for other, host in enumerate(host_names):
        by_name.setdefault(host, []).append(other)
    hosts = list(by_name.values())
    if "" in by_name or len(hosts) == 1 or len(hosts) == size:
        return None
    here = by_name[host_names[rank]]
    number, place = hosts.index(here), here.index(rank)
    local, why_not = None, ""
    if len(here) > 1:
        local, why_not, _ = _C.connect_shm(
            dist.PrefixStore(f"{prefix}{number}/", store),
            place,
            len(here),
            timeout,
            f"{name}:host{number}",
            _C.part_of_global_ranks(global_ranks, here),
            **settings,
        )
    if any(_all_say(meeting, "shm", rank, size, timeout, why_not)):
        return None
    is_even = len({len(ranks) for ranks in hosts}) == 1
    everyone = list(range(size))
    parts = {"flat": everyone}
    for i in range(len(here) if is_even else 1):
        parts[f"rail{i}"] = [ranks[i] for ranks in hosts]
    made = {}
    for part, ranks in parts.items():
        if rank in ranks:
            made["flat" if part == "flat" else "rail"], _ = over_gloo(
                dist.PrefixStore(f"{prefix}{part}/", store),
                session,
                ranks.index(rank),
                len(ranks),
                timeout,
                name,
                _C.part_of_global_ranks(global_ranks, ranks),
            )
    if rank == 0:
        counts = ", ".join(str(len(ranks)) for ranks in hosts)
        text = f"{len(hosts)} hosts of {counts} ranks"
        if text not in _told:
            _told.add(text)
            _log.warning(
                "shm: the ranks of group '%s' are on %s; those of one host share memory", name, text
            )
    return _C.HierarchicalBackend(rank, size, name, hosts, local, made.get("rail"), made["flat"])


def _all_say(
    meeting: Any, key: str, rank: int, size: int, timeout: dt.timedelta, own: str
) -> list[str]:
    """What every rank says under a key."""
    meeting.set(f"{key}/{rank}", json.dumps(own))
    said = []
    for other in range(size):
        try:
            meeting.wait([f"{key}/{other}"], timeout)
        except dist.DistStoreError as error:
            raise dist.DistBackendError(
                f"shm: every rank must join the group within {timeout.total_seconds():g} s, got "
                f"none of rank {other} (rank {rank}/{size})"
            ) from error
        said.append(json.loads(meeting.get(f"{key}/{other}")))
    return said
