"""Groups of shm on several hosts: shared memory inside each, another engine between them."""

from __future__ import annotations

import datetime as dt
import json
import logging
import os
from typing import Any

import torch.distributed as dist

from torch_c10d_ext import _C, _engines

_log = logging.getLogger("torch_c10d_ext")

# A name that makes ranks of one machine hosts of their own.
NAME = "TORCH_C10D_EXT_SHM_HOST"

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
) -> tuple[Any, str]:
    """What moves the data of a group whose ranks cannot all share memory, and its engine's name.

    The same on all ranks. It is the engine alone where all ranks are on one host, or each on its
    own, and where some cannot share memory though they are on one host: one that must not, or has
    too little.

    Args:
        session: a name of this meeting, the same on all ranks.
        settings: of the shared memory.
    """
    expected = _C.Rendezvous(store, rank, size, name, global_ranks)
    prefix = f"{session}/hosts/"
    meeting = expected.watched_store(prefix)
    wanted = _engines.own_engine()
    own = {"host": own_host(), "engine": wanted, "problem": _engines.problem_of(wanted)}
    said = _all_say(meeting, "host", rank, size, timeout, own)
    _check_engines(said, rank, size, name)
    host_names = [each["host"] for each in said]
    engine = said[0]["engine"]
    _engines.prepare(engine, store, rank, size, timeout, name, global_ranks)

    def engine_alone() -> tuple[Any, str]:
        return (
            _engines.connect(engine, store, session, rank, size, timeout, name, global_ranks),
            engine,
        )

    by_name: dict[str, list[int]] = {}
    for other, host in enumerate(host_names):
        by_name.setdefault(host, []).append(other)
    hosts = list(by_name.values())
    if "" in by_name or len(hosts) == 1 or len(hosts) == size:
        return engine_alone()
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
        return engine_alone()
    is_even = len({len(ranks) for ranks in hosts}) == 1
    everyone = list(range(size))
    parts = {"flat": everyone}
    for i in range(len(here) if is_even else 1):
        parts[f"rail{i}"] = [ranks[i] for ranks in hosts]
    made = {}
    for part, ranks in parts.items():
        if rank in ranks:
            made["flat" if part == "flat" else "rail"] = _engines.connect(
                engine,
                dist.PrefixStore(f"{prefix}{part}/", store),
                session,
                ranks.index(rank),
                len(ranks),
                timeout,
                name,
                _C.part_of_global_ranks(global_ranks, ranks),
                # Messages and exchanges between hosts need it, and not of all pairs.
                is_lazy=part == "flat",
            )
    if rank == 0:
        counts = ", ".join(str(len(ranks)) for ranks in hosts)
        text = f"{len(hosts)} hosts of {counts} ranks"
        if text not in _told:
            _told.add(text)
            _log.warning(
                "shm: the ranks of group '%s' are on %s; those of one host share memory, "
                "and %s carries data between hosts",
                name,
                text,
                engine,
            )
    whole = _C.HierarchicalBackend(rank, size, name, hosts, local, made.get("rail"), made["flat"])
    return whole, engine


def _check_engines(said: list[dict[str, str]], rank: int, size: int, name: str) -> None:
    where = f"(rank {rank}/{size}, group '{name}')"
    for other, each in enumerate(said):
        if each["problem"]:
            raise ValueError(f"{_engines.NAME}: {each['problem']} on rank {other} {where}")
        if each["engine"] != said[0]["engine"]:
            raise dist.DistBackendError(
                f"shm: {_engines.NAME} must be the same on all ranks, got {said[0]['engine']!r} on "
                f"rank 0, {each['engine']!r} on rank {other} {where}"
            )


def _all_say(
    meeting: Any, key: str, rank: int, size: int, timeout: dt.timedelta, own: Any
) -> list[Any]:
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
