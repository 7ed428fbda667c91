"""What carries data between ranks that share no memory: gloo, mpi, or a registered backend."""

from __future__ import annotations

import datetime as dt
import os
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import torch.distributed as dist

from torch_c10d_ext import _C

# Names it; the same on all ranks.
NAME = "TORCH_C10D_EXT_SHM_BETWEEN_HOSTS"
DEFAULT = "gloo"
_MPI = "mpi"

# What clocks can count.
_LONGEST = dt.timedelta(days=365)
# How often a wait for gloo looks around, in seconds.
_LOOK = 0.01


def own_engine() -> str:
    """What this rank's environment asks for."""
    return os.environ.get(NAME) or DEFAULT


def problem_of(engine: str) -> str:
    """Why it cannot carry CPU tensors between hosts, or nothing."""
    if engine in (DEFAULT, _MPI):
        return ""
    known = dist.Backend._plugins
    if engine.upper() in known and engine != "shm":
        devices = dist.Backend.backend_capability.get(engine.lower(), [])
        return "" if "cpu" in devices else f"must serve cpu, got {engine!r}, of {devices}"
    names = sorted({DEFAULT, _MPI} | {name.lower() for name in known} - {"shm", "c10d_ext_mpi"})
    return f"must be one of {', '.join(names)}, got {engine!r}"


def prepare(
    engine: str,
    store: Any,
    rank: int,
    size: int,
    timeout: dt.timedelta,
    name: str,
    global_ranks: Any,
) -> None:
    """What the ranks of a group do together before any of its parts is connected."""
    if engine == _MPI:
        # Its first group is the MPI_COMM_WORLD, of which the parts are groups.
        from torch_c10d_ext import _mpi

        _mpi.meet(store, rank, size, timeout, name, global_ranks)


def connect(
    engine: str,
    store: Any,
    session: str,
    rank: int,
    size: int,
    timeout: dt.timedelta,
    name: str,
    global_ranks: Any,
    is_lazy: bool = False,
) -> Any:
    """The backend of some ranks, which all call it.

    Args:
        session: a name of this meeting, the same on all of them.
        is_lazy: two ranks connect when the first data goes between them, where the engine can.
    """
    if engine == DEFAULT:
        return meet_over_gloo(
            store, session, rank, size, timeout, name, global_ranks, is_lazy=is_lazy
        )[0]
    store = dist.PrefixStore(f"{session}/", store)
    if engine == _MPI:
        from torch_c10d_ext import _mpi

        return _mpi.connect_part(store, rank, size, timeout, name, global_ranks)
    expected = _C.Rendezvous(store, rank, size, name, global_ranks)
    plugin = dist.Backend._plugins[engine.upper()]
    options = dist.distributed_c10d._DistributedBackendOptions()
    options.store = expected.watched_store(f"{engine}/")
    options.group_rank = rank
    options.group_size = size
    options.timeout = min(timeout, _LONGEST)
    options.group_id = name
    options.global_ranks_in_group = list(range(size))
    try:
        if plugin.extended_api:
            return plugin.creator_fn(options, None)
        return plugin.creator_fn(options.store, rank, size, options.timeout)
    except RuntimeError as error:
        expected.look()
        raise dist.DistBackendError(
            f"shm: every rank must join the group, got, by {engine!r} between hosts: {error} "
            f"(rank {rank}/{size}, group '{name}')"
        ) from error


def meet_over_gloo(
    store: Any,
    session: str,
    rank: int,
    size: int,
    timeout: dt.timedelta,
    name: str,
    global_ranks: Any,
    is_lazy: bool = False,
) -> tuple[Any, Any]:
    """A gloo backend of the group whose ranks cannot share memory, and the store it met at."""
    timeout = min(timeout, _LONGEST)
    # Under a key of its own: a group of this name may have left its addresses there.
    store = dist.PrefixStore(f"{session}/", store)
    expected = _C.Rendezvous(store, rank, size, name, global_ranks)

    def make() -> Any:
        meeting = expected.watched_store("gloo/")
        if not is_lazy:
            return dist.ProcessGroupGloo(meeting, rank, size, timeout=timeout)
        options = dist.ProcessGroupGloo._Options()
        options._devices = _lazy_devices()
        options._threads = 2 * len(options._devices)
        options._timeout = timeout
        return dist.ProcessGroupGloo(meeting, rank, size, options)

    def connect() -> Any:
        made = make()
        made._set_sequence_number_for_group()
        return made

    try:
        gloo = away(connect, expected.check, timeout)
    except RuntimeError as error:
        expected.look()
        raise dist.DistBackendError(
            f"shm: every rank must join the group, got: {error} "
            f"(rank {rank}/{size}, group '{name}')"
        ) from error
    return gloo, store


def _lazy_devices() -> list[Any]:
    """The devices of gloo, as torch makes them, but for when they connect."""
    gloo = dist.ProcessGroupGloo
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not interfaces:
        return [gloo.create_default_device(lazy_init=True)]
    return [gloo.create_device(interface=one, lazy_init=True) for one in interfaces.split(",")]


def away(call: Callable[[], Any], check: Callable[[], None], timeout: dt.timedelta) -> Any:
    """What ``call`` returns, on a thread that is left to itself where ``check`` raises.

    gloo hears of nothing while it connects, and waits five timeouts for a rank that is gone.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    result: futures.Future[Any] = futures.Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="c10d_ext_gloo", daemon=True).start()
    while not futures.wait([result], _LOOK).done:
        check()
        if time.monotonic() > deadline:
            raise RuntimeError(f"gloo did not connect within {timeout.total_seconds():g} s")
    return result.result()
