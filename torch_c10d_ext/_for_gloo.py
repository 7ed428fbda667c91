"""shm in gloo's place: groups that say gloo, served by shm where their ranks share a machine."""

from __future__ import annotations

import datetime as dt
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from torch_c10d_ext import _C, _backends, _engines, _mpi
from torch_c10d_ext._groups import Group, device_of, group_name, process_group, unwrapped
from torch_c10d_ext._meeting import Meeting
from torch_c10d_ext.errors import InvalidArgument
from torch_c10d_ext_autoload import SHM, SWITCH

_log = logging.getLogger("torch_c10d_ext")

_CPU = torch.device("cpu")
# What each rank says in the group's store of its switch: _ON, or what is wrong with it.
_KEY = "c10d_ext/for_gloo"
_ON = "1"
# How often the meeting looks whether the others have said so, in seconds.
_LOOK = 0.005

# What use_shm_for_gloo() was called with last.
_asked: bool | None = None
_told: set[str] = set()


def use_shm_for_gloo(enabled: bool = True) -> None:
    """From now on, serves CPU groups that say gloo by shm where their ranks share a machine.

    The same as ``TORCH_C10D_EXT_SHM_FOR_GLOO=1`` in the environment, which needs no call. It is
    about groups made later, whoever makes them: ``init_process_group``, ``new_group``, meshes and
    libraries; ``"gloo"``, ``"cpu:gloo,cuda:nccl"`` and no backend at all, which on a machine
    without an accelerator means gloo. They still call themselves gloo (``get_backend`` and so on);
    :func:`backend_of` tells what serves them. Where the ranks cannot share memory, gloo serves the
    group as before, and one rank logs why.

    Every rank must call it before the group is made. A rank that has neither called it nor has the
    variable set uses gloo, and the others of the group then do so, too.

    Args:
        enabled: False takes it back for groups made later, also where the environment asks for it.
            ``TORCH_C10D_EXT_SHM_FOR_GLOO=0`` outweighs True: who runs a program can forbid it.

    Example:
        Two ranks of one machine::

            torch_c10d_ext.use_shm_for_gloo()
            dist.init_process_group("gloo")
            dist.get_backend()              # "gloo" on both ranks
            torch_c10d_ext.backend_of()     # "shm" on both ranks
    """
    global _asked
    if not isinstance(enabled, bool):
        raise TypeError(
            f"use_shm_for_gloo: enabled must be True or False, got {type(enabled).__name__}"
        )
    _asked = enabled


def backend_of(group: Group = None, device: str | torch.device | None = None) -> str:
    """The backend that serves a group: ``"shm"``, ``"gloo"``, ``"mpi"``, ``"nccl"``.

    What ``torch.distributed.get_backend`` says is the name that the group was made with.

    Args:
        group: a ``ProcessGroup``, a one-dimensional ``DeviceMesh``, ``(mesh, dim)``, a name, a list
            of ranks, or None for the default group.
        device: for tensors of which device; None: of the CPU where the group serves that.

    Raises:
        ValueError: ``group`` is no group of this rank, or serves no such device.

    Example:
        A group of ``"shm"`` on two machines, whose ranks cannot share memory::

            dist.get_backend()              # "shm" on all ranks
            torch_c10d_ext.backend_of()     # "gloo" on all ranks
    """
    name = group_name(group)
    pg = process_group(name)
    if type(pg) is not dist.ProcessGroup:
        return pg.name()
    kind = torch.device(device_of(name) if device is None else device).type
    if kind not in {d.type for d in pg._device_types}:
        served = ", ".join(sorted(d.type for d in pg._device_types)) or "none"
        raise InvalidArgument(
            f"backend_of: device must be one that the group serves, {served}, got {kind} "
            f"{_C.where(name)}"
        )
    backend = unwrapped(pg._get_backend(torch.device(kind)))
    if not isinstance(backend, _C.CheckedBackend):
        return backend.name()
    inner = backend.inner
    if isinstance(inner, _C.HierarchicalBackend):
        return str(inner.title)
    return _engine_name(inner)


def _engine_name(backend: Any) -> str:
    return _mpi.NAME if isinstance(backend, _C.MpiBackend) else backend.name()


def make_group(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What ``make``, torch's own function that makes a group, returns for these arguments.

    The arguments are those of ``torch.distributed.distributed_c10d._new_process_group_helper``,
    the first four of them by position.
    """
    size, rank, ranks, backend, *rest = args
    devices = _devices(backend)
    if _mpi.is_named(devices):
        return _mpi.make_group(make, devices, *args, **kwargs)
    verdict = _verdict() if devices.get("cpu") == "gloo" else None
    if verdict is None:
        pg, store = make(*args, **kwargs)
        _give_default_backend(pg, backend)
        return pg, store

    known = set(c10d._world.pg_map)
    kinds = dist.ProcessGroup.BackendType
    apart = {device for device in devices if device != "cpu" and _is_there(device)}
    others = {d: n for d, n in devices.items() if d != "cpu" and (d in apart or n != "gloo")}
    served: list[Any] = []

    def create(options: Any) -> Any:
        served.append(_connect(options, verdict))
        return served[-1]

    # The CPU last: of two backends of type CUSTOM a group keeps the first one.
    config = ",".join([*(f"{device}:{name}" for device, name in others.items()), "cpu:shm"])
    with _backends.creating_shm_with(create):
        pg, store = make(size, rank, ranks, config, *rest, **kwargs)
    if pg is c10d.GroupMember.NON_GROUP_MEMBER or pg in known:
        return pg, store
    # To everyone who asks it is the group of gloo's that it was asked for as.
    c10d._world.pg_map[pg] = (backend, store)
    c10d._world.pg_backend_config[pg] = str(c10d.BackendConfig(backend))
    if type(pg) is not dist.ProcessGroup:
        return pg, store  # another device's, which serves all of them
    types = {c10d.Backend.backend_type_map.get(name) for name in others.values()}
    if kinds.CUSTOM in types:
        description = pg.group_desc
        pg._register_backend(_CPU, kinds.GLOO, served[0])
        pg._set_group_name(c10d._world.pg_names[pg])
        pg._set_group_desc(description)
    if kinds.GLOO not in types:
        # Devices that this machine has none of are served, as by gloo, in name only.
        for device, name in devices.items():
            if name == "gloo" and device != "cpu":
                pg._register_backend(torch.device(device), kinds.CUSTOM, pg._get_backend(_CPU))
    if kinds.NCCL not in types:
        # Not GLOO for shm: DDP's logger takes a backend of that type for a ProcessGroupGloo.
        pg._set_default_backend(kinds.GLOO if kinds.GLOO in types else kinds.CUSTOM)
    return pg, store


def install() -> None:
    """What torch's functions ask of gloo by name, they ask of this package's backends, too."""
    c10d._set_pg_timeout = _setting_timeout(c10d._set_pg_timeout)
    ddp = torch.nn.parallel.DistributedDataParallel
    ddp._get_ddp_logging_data = _naming_backend(ddp._get_ddp_logging_data)


def _setting_timeout(torchs: Callable[..., None]) -> Callable[..., None]:
    def _set_pg_timeout(timeout: dt.timedelta, group: Any = None) -> None:
        pg = c10d._get_default_group() if group is None else group
        if type(pg) is not dist.ProcessGroup or c10d._rank_not_in_group(pg):
            return torchs(timeout, group)
        backends = [pg._get_backend(device) for device in pg._device_types]
        ours = [b for b in backends if isinstance(b, _C.SplittableBackend)]
        for backend in ours:
            backend._set_default_timeout(timeout)
        if len(ours) < len(backends) or not ours:
            torchs(timeout, group)
        return None

    return _set_pg_timeout


def _naming_backend(torchs: Callable[..., Any]) -> Callable[..., Any]:
    def _get_ddp_logging_data(self: Any) -> Any:
        data = torchs(self)
        if data.get("backend_name") == "custom":  # what torch calls any that is not its own
            data["backend_name"] = dist.get_backend(self.process_group)
        return data

    return _get_ddp_logging_data


def _devices(backend: Any) -> dict[str, str]:
    """Which backend serves which type of device, of what a group is made with."""
    if c10d._use_torchcomms_enabled() if hasattr(c10d, "_use_torchcomms_enabled") else False:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a name that it does not know: once is enough
        try:
            return {
                device: str(name)
                for device, name in c10d.BackendConfig(c10d.Backend(backend))
                .get_device_backend_map()
                .items()
            }
        except ValueError:
            return {}  # which torch says itself


def _is_there(device: str) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device


def _verdict() -> str | None:
    """What this rank says of the switch: _ON, what is wrong with it, or None where it is off."""
    text = os.environ.get(SWITCH, "")
    if text not in ("", "0", "1"):
        return f"{SWITCH}: must be 0 or 1, got {text!r}"
    if _asked and text == "0":
        _tell(f"use_shm_for_gloo: {SWITCH}=0 forbids it, groups stay on gloo", reason="forbidden")
        return None
    return _ON if _asked or (_asked is None and text == "1") else None


def _tell(text: str, reason: str) -> None:
    if reason not in _told:
        _told.add(reason)
        _log.warning("%s", text)


def _connect(options: Any, verdict: str) -> Any:
    """The CPU's backend of a group that says gloo: shm, or gloo itself on all ranks."""
    meeting = Meeting.of(options)
    store, rank, size, timeout, name, _ = meeting
    without = _ranks_without(meeting, verdict)
    if without:
        if rank == min(set(range(size)) - set(without)):
            _tell(
                f"shm: the ranks of group '{name}' use gloo, every rank must have {SWITCH}=1 or "
                f"call use_shm_for_gloo(), got neither on {_listed(without)}",
                reason=f"without: {without}",
            )
        # Where those ranks expect it.
        gloo = c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
        gloo._set_sequence_number_for_group()
        return _named(gloo, options)
    backend, session, why_not = _backends.share_memory(meeting)
    if backend is not None:
        return backend
    _backends.tell_fallback(meeting, why_not, "gloo")
    gloo, _ = _engines.meet_over_gloo(meeting, session)
    return _named(gloo, options)


def _named(gloo: Any, options: Any) -> Any:
    gloo.options.global_ranks_in_group = options.global_ranks_in_group
    gloo.options.group_name = options.group_id
    return gloo


def _ranks_without(meeting: Meeting, verdict: str) -> list[int]:
    """The ranks that have no switch and so make a group of gloo's; the same on all that have it.

    Raises:
        ValueError: a rank's switch has no meaning.
        torch.distributed.DistBackendError: a rank has not come in time.
    """
    store, rank, size, timeout, *_ = meeting
    expected = meeting.rendezvous(SHM)
    # gloo's own, which a rank leaves there when it connects. Where this rank has left one, in an
    # earlier group of this name, the others' may be old as well.
    has_gloo_keys = not store.check([f"0/{rank}"])
    store.set(f"{_KEY}/{rank}", verdict)
    said = {rank: verdict}
    without: set[int] = set()

    def look(peer: int) -> None:
        key = f"{_KEY}/{peer}"
        if not store.check([key]):
            if not (has_gloo_keys and store.check([f"0/{peer}"])):
                return
            # It may have said so, and gone on to gloo with everyone, between the two looks.
            if not store.check([key]):
                without.add(peer)
                return
        said[peer] = store.get(key).decode(errors="replace")

    deadline = time.monotonic() + timeout.total_seconds()
    while missing := [r for r in range(size) if r not in said and r not in without]:
        for peer in missing:
            look(peer)
        if len(said) + len(without) == size:
            break
        expected.check()
        if time.monotonic() > deadline:
            raise dist.DistBackendError(
                f"shm: every rank must join the group, got no {_listed(missing)} within "
                f"{timeout.total_seconds():g} s {meeting.where}"
            )
        time.sleep(_LOOK)
    for peer in sorted(said):
        if said[peer] != _ON:
            raise InvalidArgument(f"{said[peer]} on rank {peer} {meeting.where}")
    return sorted(without)


def _listed(ranks: Iterable[int]) -> str:
    listed = list(ranks)
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"


def _give_default_backend(pg: Any, backend: Any) -> None:
    """Of "cpu:shm" and "cpu:gloo": torch gives such a group none once it knows any plug-in."""
    if type(pg) is not dist.ProcessGroup or pg._get_backend_name() != "undefined":
        return
    names = list(_devices(backend).values())
    if names:
        pg._set_default_backend(c10d.Backend.backend_type_map[names[0]])
