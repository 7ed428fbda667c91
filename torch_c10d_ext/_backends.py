"""The backends of this package, as ``torch.distributed`` finds them."""

from __future__ import annotations

import atexit
import contextlib
import datetime as dt
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist

import torch_c10d_ext_autoload
from torch_c10d_ext import _C, _exit, _hosts
from torch_c10d_ext._meeting import Meeting, own_build
from torch_c10d_ext_autoload import SHM

_log = logging.getLogger("torch_c10d_ext")

_PREFIX = "TORCH_C10D_EXT_SHM_"
# Per rank: 8 ranks take 16 MiB.
_DEFAULT_ARENA = (2 << 20) - (4 << 10)
_MAX_ARENA = 1 << 30
_MAX_US = 10**9
# How long the end of the process waits for collectives and messages that nobody waited for.
_GRACE = dt.timedelta(seconds=1)

# How often this process has made a group of a name, at whose store older ones may have met.
_meetings: dict[str, int] = {}
# Why groups of this process fell back: each reason is logged once.
_told: set[str] = set()


def register() -> None:
    """Makes the backends known to ``torch.distributed``; the defaults stay as they are."""
    dist.Backend.register_backend(SHM, _create_shm, extended_api=True, devices=["cpu"])
    torch_c10d_ext_autoload.register()  # where torch has not called it
    atexit.register(_close)


def shm_settings(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The settings of the shm backend, from the environment (docs/shm.md lists them).

    Args:
        environment: by default this process' own.

    Raises:
        ValueError: a variable holds something else than it must.
    """

    def text(name: str) -> str:
        return environment.get(f"TORCH_C10D_EXT_SHM_{name}", "")

    def microseconds(name: str, default: int) -> dt.timedelta:
        return dt.timedelta(microseconds=_number(name, text(name), default, at_most=_MAX_US))

    _flag("DISABLE", text("DISABLE"), False)  # the rendezvous reads it
    piggyback_bytes(environment)  # before anybody waits
    return {
        "arena": _number(
            "ARENA", text("ARENA"), _DEFAULT_ARENA, _C.SHM_MIN_ARENA, at_most=_MAX_ARENA
        ),
        "spin_time": microseconds("SPIN_US", 100),
        "inline_time": microseconds("INLINE_US", 20),
        "progress_thread": _flag("THREAD", text("THREAD"), True),
        "strict": _number("STRICT", text("STRICT"), 0, at_most=2),
        # Parsed by connect_shm(), which raises a ValueError as well.
        "algorithms": text("ALGORITHMS"),
        "build": own_build(),
    }


def piggyback_bytes(environment: Mapping[str, str] = os.environ) -> int | None:
    """Up to so many bytes of all ranks together travel with the calls that ranks agree on.

    None: as many as is usual for a group of its size.
    """
    text = environment.get(f"{_PREFIX}PIGGYBACK", "")
    return _number("PIGGYBACK", text, 0, at_most=_C.MOST_PIGGYBACK) if text else None


def _number(name: str, text: str, default: int, at_least: int = 0, *, at_most: int) -> int:
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or not at_least <= int(text) <= at_most:
        raise ValueError(
            f"{_PREFIX}{name}: must be a whole number from {at_least} to {at_most}, got {text!r}"
        )
    return int(text)


def _flag(name: str, text: str, default: bool) -> bool:
    if text not in ("", "0", "1"):
        raise ValueError(f"{_PREFIX}{name}: must be 0 or 1, got {text!r}")
    return text == "1" if text else default


class _Creating(threading.local):
    create: Callable[[Any], Any] | None = None


_creating = _Creating()


@contextlib.contextmanager
def creating_shm_with(create: Callable[[Any], Any]) -> Iterator[None]:
    """Has the groups of "shm" that this thread makes meanwhile made by ``create``."""
    before, _creating.create = _creating.create, create
    try:
        yield
    finally:
        _creating.create = before


def _create_shm(options: Any, _pg_options: Any) -> Any:
    if _creating.create is not None:
        return _creating.create(options)
    return _connect(Meeting.of(options))


def _connect(meeting: Meeting) -> Any:
    """A group's backend: shm, or what does the same where not all ranks can share memory.

    Those are over one engine alone, gloo where nothing else is asked for, or over shared memory
    inside each of several hosts and that engine between them.
    """
    settings = shm_settings()
    why_not = ""
    if _hosts.NAME in os.environ:
        turn = _meetings[meeting.name] = _meetings.get(meeting.name, 0) + 1
        backend, session = None, f"named_hosts/{turn}"
    else:
        backend, session, why_not = share_memory(meeting)
    if backend is not None:
        return backend
    meeting = meeting.bounded()
    inner, engine = _hosts.connect(meeting, session, settings)
    if not isinstance(inner, _C.HierarchicalBackend):
        tell_fallback(meeting, why_not, engine)
    return _C.CheckedBackend(
        inner,
        meeting.below(f"{session}/").store,
        meeting.timeout,
        meeting.name,
        meeting.global_ranks,
        settings["strict"],
        SHM,
        connect=lambda *part: _connect(Meeting(*part)),
        counted_as=inner.title if isinstance(inner, _C.HierarchicalBackend) else engine,
        piggyback=piggyback_bytes(),
    )


def share_memory(meeting: Meeting) -> tuple[Any, str, str]:
    """A group's backend on shared memory, or None on all ranks, a name of this meeting, and why."""
    settings = shm_settings()
    backend, why_not, session = _C.connect_shm(*meeting.checked(SHM), **settings)
    return backend, session, "" if backend is not None else why_not


def tell_fallback(meeting: Meeting, why_not: str, engine: str) -> None:
    """Rank 0 logs, once, why a group's data does not go by shared memory."""
    if meeting.rank == 0 and why_not and why_not not in _told:
        _told.add(why_not)
        _log.warning(
            "shm: the ranks of group '%s' cannot share memory, they use %s (%s)",
            meeting.name,
            engine,
            why_not,
        )


def _close() -> None:
    # A rank that ends by an exception tells the others at once.
    grace = dt.timedelta() if hasattr(sys, "last_value") else _GRACE
    _C.close_checked_groups(grace)  # some have groups of shm inside
    _C.close_shm_groups(grace)
    _C.end_service_of_checked_groups(grace)
    if threading.active_count() > 1:
        _exit.let_threads_rest()  # those that waited
