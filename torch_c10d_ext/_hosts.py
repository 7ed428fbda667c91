"""Groups of shm on several hosts: shared memory inside each, another engine between them."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

import torch.distributed as dist

from torch_c10d_ext import _C, _engines
from torch_c10d_ext._meeting import Meeting, let_all_hear, other_build, own_build
from torch_c10d_ext_autoload import SHM

_log = logging.getLogger("torch_c10d_ext")

# A name that makes ranks of one machine hosts of their own.
NAME = "TORCH_C10D_EXT_SHM_HOST"

_told: set[str] = set()


def own_host() -> str:
    """The same text on ranks that may share memory; empty for one that must not."""
    if os.environ.get("TORCH_C10D_EXT_SHM_DISABLE") == "1":
        return ""
    return f"{_C.this_host()} {os.environ.get(NAME, '')}"


def connect(meeting: Meeting, session: str, settings: dict[str, Any]) -> tuple[Any, str]:
    """What moves the data of a group whose ranks cannot all share memory, and its engine's name.

    The same on all ranks. It is the engine alone where all ranks are on one host, or each on its
    own, and where some cannot share memory though they are on one host: one that must not, or has
    too little.

    Args:
        session: a name of this meeting, the same on all ranks.
        settings: of the shared memory.
    """
    rank, size, name = meeting.rank, meeting.size, meeting.name
    prefix = f"{session}/hosts/"
    watched = meeting.rendezvous(SHM).watched_store(prefix)
    wanted = _engines.own_engine()
    # Where ranks of different builds, this one's and later ones, say which: the first thing in the
    # store when they cannot share memory.
    own = {
        "build": own_build(),
        "host": own_host(),
        "engine": wanted,
        "problem": _engines.problem_of(wanted),
        "memory": _problem_of_memory(),
    }
    said = _all_say(watched, "host", meeting, own)
    if error := _why_not(said, meeting):
        let_all_hear(watched, rank, size)
        raise error
    host_names = [each["host"] for each in said]
    engine = said[0]["engine"]
    _engines.prepare(engine, meeting)

    def engine_alone() -> tuple[Any, str]:
        return _engines.connect(engine, meeting, session), engine

    by_name: dict[str, list[int]] = {}
    for other, host in enumerate(host_names):
        by_name.setdefault(host, []).append(other)
    hosts = list(by_name.values())
    if "" in by_name or len(hosts) == 1 or len(hosts) == size:
        return engine_alone()
    here = by_name[host_names[rank]]
    number = hosts.index(here)
    local, why_not = None, ""
    if len(here) > 1:
        inside = meeting.of_part(here).below(f"{prefix}{number}/")
        inside = inside._replace(name=f"{name}:host{number}")
        local, why_not, _ = _C.connect_shm(*inside, **settings)
    if any(_all_say(watched, SHM, meeting, why_not)):
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
                meeting.of_part(ranks).below(f"{prefix}{part}/"),
                session,
                # Messages and exchanges between hosts need it, and not of all pairs.
                is_lazy=part == "flat",
                part=_engines.Part(ranks, size),
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
    whole = _C.HierarchicalBackend(
        rank, size, name, hosts, local, made.get("rail"), made["flat"], f"shm+{engine}"
    )
    return whole, engine


def _problem_of_memory() -> str:
    """What is wrong with the setting of how much is kept of it; empty: nothing."""
    try:
        _C.most_kept()
    except ValueError as error:
        return str(error)
    return ""


def _why_not(said: list[dict[str, str]], meeting: Meeting) -> Exception | None:
    """What keeps ranks that say this of themselves from being a group; the same on all of them."""
    where = meeting.where
    if problem := other_build(said):
        return dist.DistBackendError(f"shm: {problem} {where}")
    for other, each in enumerate(said):
        if each["problem"]:
            return ValueError(f"{_engines.NAME}: {each['problem']} on rank {other} {where}")
        if each["memory"]:
            return ValueError(f"{each['memory']} on rank {other} {where}")
        if each["engine"] != said[0]["engine"]:
            return dist.DistBackendError(
                f"shm: {_engines.NAME} must be the same on all ranks, got {said[0]['engine']!r} on "
                f"rank 0, {each['engine']!r} on rank {other} {where}"
            )
    return None


def _all_say(watched: Any, key: str, meeting: Meeting, own: Any) -> list[Any]:
    """What every rank says under a key."""
    rank, size, timeout = meeting.rank, meeting.size, meeting.timeout
    watched.set(f"{key}/{rank}", json.dumps(own))
    said = []
    for other in range(size):
        try:
            watched.wait([f"{key}/{other}"], timeout)
        except dist.DistStoreError as error:
            raise dist.DistBackendError(
                f"shm: every rank must join the group within {timeout.total_seconds():g} s, got "
                f"none of rank {other} (rank {rank}/{size})"
            ) from error
        said.append(json.loads(watched.get(f"{key}/{other}")))
    return said
