"""What carries data between ranks that share no memory: gloo, mpi, or a registered backend."""

from __future__ import annotations

import datetime as dt
import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from torch_c10d_ext._meeting import Meeting
from torch_c10d_ext_autoload import SHM

# Names it; the same on all ranks.
NAME = "TORCH_C10D_EXT_SHM_BETWEEN_HOSTS"
DEFAULT = "gloo"
_MPI = "mpi"

# How often a wait for gloo looks around, in seconds.
_LOOK = 0.01


# What gloo itself reads: the interfaces to use.
_INTERFACES = "GLOO_SOCKET_IFNAME"
# Of an interface, its IPv4 address: linux/sockios.h.
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Part:
    """Some ranks of a group: their numbers in it, and how many it has."""

    ranks: Sequence[int]
    size: int


def own_engine() -> str:
    """What this rank's environment asks for."""
    return os.environ.get(NAME) or DEFAULT


def problem_of(engine: str) -> str:
    """Why it cannot carry CPU tensors between hosts, or nothing."""
    if engine in (DEFAULT, _MPI):
        return ""
    known = dist.Backend._plugins
    others = {name.lower() for name, plugin in known.items() if not _is_ours(plugin)}
    if engine.lower() in others:
        devices = dist.Backend.backend_capability.get(engine.lower(), [])
        return "" if "cpu" in devices else f"must serve cpu, got {engine!r}, of {devices}"
    return f"must be one of {', '.join(sorted({DEFAULT, _MPI} | others))}, got {engine!r}"


def _is_ours(plugin: Any) -> bool:
    """Whether a plug-in of ``torch.distributed`` is one that this package has registered."""
    return str(getattr(plugin.creator_fn, "__module__", "")).startswith(f"{__package__}.")


def prepare(engine: str, meeting: Meeting) -> None:
    """What the ranks of a group do together before any of its parts is connected."""
    if engine == _MPI:
        # Its first group is the MPI_COMM_WORLD, of which the parts are groups.
        from torch_c10d_ext import _mpi

        _mpi.meet(meeting)


def connect(
    engine: str, meeting: Meeting, session: str, is_lazy: bool = False, part: Part | None = None
) -> Any:
    """The backend of some ranks, which all call it.

    Args:
        session: a name of this meeting, the same on all of them.
        is_lazy: two ranks connect when the first data goes between them, where the engine can.
        part: what they are of a larger group, for texts.
    """
    if engine == DEFAULT:
        return meet_over_gloo(meeting, session, is_lazy=is_lazy, part=part)[0]
    meeting = meeting.below(f"{session}/")
    if engine == _MPI:
        from torch_c10d_ext import _mpi

        return _mpi.connect_part(meeting)
    meeting = meeting.bounded()
    expected = meeting.rendezvous(SHM)
    plugin = dist.Backend._plugins[engine.upper()]
    options = dist.distributed_c10d._DistributedBackendOptions()
    options.store = expected.watched_store(f"{engine}/")
    options.group_rank = meeting.rank
    options.group_size = meeting.size
    options.timeout = meeting.timeout
    options.group_id = meeting.name
    options.global_ranks_in_group = list(range(meeting.size))
    try:
        if plugin.extended_api:
            return plugin.creator_fn(options, None)
        return plugin.creator_fn(options.store, meeting.rank, meeting.size, meeting.timeout)
    except RuntimeError as error:
        expected.look()
        raise dist.DistBackendError(
            f"shm: every rank must join the group, got, by {engine!r} between hosts: {error} "
            f"{meeting.where}"
        ) from error


def meet_over_gloo(
    meeting: Meeting, session: str, is_lazy: bool = False, part: Part | None = None
) -> tuple[Any, Any]:
    """A gloo backend of the group whose ranks cannot share memory, and the store it met at."""
    # Under a key of its own: a group of this name may have left its addresses there.
    meeting = meeting.bounded().below(f"{session}/")
    store, rank, size, timeout, *_ = meeting
    expected = meeting.rendezvous(SHM)

    def make() -> Any:
        watched = expected.watched_store("gloo/")
        if not is_lazy:
            return dist.ProcessGroupGloo(watched, rank, size, timeout=timeout)
        options = dist.ProcessGroupGloo._Options()
        options._devices = _lazy_devices()
        options._threads = 2 * len(options._devices)
        options._timeout = timeout
        return dist.ProcessGroupGloo(watched, rank, size, options)

    store.set(f"address/{rank}", _own_address())

    def connect() -> Any:
        made = make()
        made._set_sequence_number_for_group()
        return made

    try:
        gloo = away(connect, expected.check, timeout)
    except RuntimeError as error:
        expected.look()
        part = part or Part(list(range(size)), size)
        said = str(error).splitlines()[0]
        raise dist.DistBackendError(
            f"shm: every rank must join the group, got: {said}; tried "
            f"{_tried(store, rank, part.ranks)} (rank {part.ranks[rank]}/{part.size}, "
            f"group '{meeting.name}')"
        ) from error
    return gloo, store


def _own_address() -> str:
    """Where gloo of this rank is reached."""
    interface = os.environ.get(_INTERFACES, "").split(",")[0]
    try:
        if not interface:
            return str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("256s", interface.encode()[:15])
            answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
        return socket.inet_ntoa(answer[20:24])
    except OSError:
        return "an address that it does not know"


def _tried(store: Any, rank: int, ranks: Sequence[int]) -> str:
    """Where the others are, and whether there is a way to there."""
    tried = []
    for other, number in enumerate(ranks):
        if other == rank:
            continue
        if not store.check([f"address/{other}"]):
            tried.append(f"rank {number} (which has not said where it is)")
            continue
        address = store.get(f"address/{other}").decode()
        tried.append(f"rank {number} at {address}{_no_way_to(address)}")
    return ", ".join(tried)


def _no_way_to(address: str) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing: asks for a route
    except OSError as error:
        return f" ({error.strerror or error})"
    return ""


def _lazy_devices() -> list[Any]:
    """The devices of gloo, as torch makes them, but for when they connect."""
    gloo = dist.ProcessGroupGloo
    interfaces = os.environ.get(_INTERFACES, "")
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
