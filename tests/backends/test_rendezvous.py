"""How the ranks of a group meet, and what ends the wait for one that does not come."""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.backends.failures import Report, check_works, report
from tests.harness import run
from tests.harness.crew import crew, mark
from tests.harness.script import torchrun
from tests.harness.worker import FALLBACK
from torch_c10d_ext import _C, _backends, _hosts, _mpi
from torch_c10d_ext._engines import away
from torch_c10d_ext._meeting import other_build

BACKEND = "shm"

# --- ranks that are gone -------------------------------------------------------------------------

# What makes a group of ranks 0 and 1, or of all, given another of all but rank 3.
MAKES_A_GROUP: dict[str, Callable[[Any], Any]] = {
    "new_group": lambda three: dist.new_group(backend=BACKEND),
    "new_group of two": lambda three: dist.new_group([1, 0], backend=BACKEND),
    "split_group": lambda three: dist.group.WORLD.split_group([0, 1], group_name="two"),
    "a part's split_group": lambda three: three.split_group([0, 1], group_name="two of three"),
    "shrink_group": lambda three: dist.shrink_group([2], three),
}


def _make_a_group(name: str, scratch: Path) -> Report:
    three = dist.new_group([0, 1, 2])
    check_works()
    mark(scratch, f"rank {dist.get_rank()}")
    return report(lambda: MAKES_A_GROUP[name](three))


# Where rank 1's process ends, or stays, in the making of a group.
PLACES = {
    "gloo": (dist, "ProcessGroupGloo"),
    "gloo, which knows its address": (dist, "ProcessGroupGloo"),
    "agreement": (_C, "CheckedBackend"),
}


class _Told(dist.Store):
    """Tells the others what it is told, and them alone."""

    def __init__(self, store: dist.Store, stay: Callable[[], None]) -> None:
        super().__init__()
        self._store, self._stay = store, stay

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, _key: str) -> bytes:
        self._stay()
        return b""

    def wait(self, _keys: list[str], _timeout: dt.timedelta | None = None) -> None:
        self._stay()


def _stay_at(place: str, scratch: Path) -> None:
    gloo = dist.ProcessGroupGloo

    def stay(*_args: Any, **_kwargs: Any) -> None:
        mark(scratch, "rank 1")
        if place.startswith("gloo,") and _args:
            store, rank, size = _args
            told = _Told(store, lambda: time.sleep(120))
            gloo(told, rank, size, timeout=dt.timedelta(seconds=120))
        time.sleep(120)

    dist.new_group([0, 1, 2])
    check_works()
    if place:
        setattr(*PLACES[place], stay)
        dist.new_group(backend=BACKEND)
    stay()


@pytest.mark.parametrize(
    ("name", "backend", "place"),
    [(name, backend, "") for backend in (BACKEND, FALLBACK) for name in MAKES_A_GROUP]
    + [("new_group", FALLBACK, place) for place in PLACES],
)
def test_a_rank_killed_before_it_joins_a_group_is_named(
    name: str, backend: str, place: str
) -> None:
    called = "mpi" if backend.endswith("mpi") else "shm"
    waiting = [0, 2, 3] if name == "new_group" else [0]
    with crew(4, backend) as ranks:
        ranks.start(1, _stay_at, place, ranks.scratch)
        for rank in (0, 2, 3):
            if rank in waiting:
                ranks.start(rank, _make_a_group, name, ranks.scratch)
            else:
                ranks.start(rank, _make_no_group, name)
        for rank in (1, *waiting):
            ranks.await_mark(f"rank {rank}")
        killed = ranks.signal(1, signal.SIGKILL)
        for rank in waiting:
            failure = ranks.result(rank)
            assert (failure.kind, failure.ranks) == ("RankLost", [1]), failure
            pattern = (
                rf"{called}: every rank must join the group, "
                rf"got: rank 1 \(pid {ranks.pid(1)}, gone\) "
                rf"\(rank {rank}/[24], group '.*'\)"
            )
            assert re.fullmatch(pattern, failure.text), failure.text
            print(f"kill() to exception: {(failure.at - killed) * 1e3:.1f} ms")
        if 2 not in waiting:
            ranks.result(2)
            ranks.result(3)


def _make_a_group_of_all() -> Report:
    return report(lambda: dist.new_group(backend=BACKEND))


@pytest.mark.parametrize("backend", [BACKEND, FALLBACK])
def test_all_ranks_that_are_gone_are_named(backend: str) -> None:
    with crew(4, backend) as ranks:
        ranks.run(check_works)
        for rank in (1, 2):
            ranks.signal(rank, signal.SIGKILL)
        assert ranks.has_ended(1)
        assert ranks.has_ended(2)
        for rank in (0, 3):
            ranks.start(rank, _make_a_group_of_all)
        for rank in (0, 3):
            failure = ranks.result(rank)
            assert (failure.kind, failure.ranks) == ("RankLost", [1, 2]), failure
            gone = ", ".join(rf"rank {r} \(pid {ranks.pid(r)}, gone\)" for r in (1, 2))
            what = "shm: every rank must join the group, got:"
            assert re.fullmatch(rf"{what} {gone} \(rank {rank}/4, group '.*'\)", failure.text), (
                failure
            )


def _make_no_group(name: str) -> None:
    dist.new_group([0, 1, 2])
    check_works()
    if name == "new_group of two":
        dist.new_group([1, 0], backend=BACKEND)


def _be_interrupted_at(scratch: Path) -> Report:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return _make_a_group("new_group", scratch)


@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_ends_the_making_of_a_group_over_gloo(place: str) -> None:
    with crew(3, FALLBACK) as ranks:
        ranks.start(0, _be_interrupted_at, ranks.scratch)
        ranks.start(1, _stay_at, place, ranks.scratch)
        ranks.start(2, _make_a_group, "new_group", ranks.scratch)
        ranks.await_mark("rank 1")
        time.sleep(0.2)
        sent = ranks.signal(0, signal.SIGINT)
        failure = ranks.result(0)
        assert failure.kind == "KeyboardInterrupt", failure
        print(f"KeyboardInterrupt {(failure.at - sent) * 1e3:.0f} ms after the signal")


def _make_a_group_alone(scratch: Path) -> tuple[Report, Report]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    late = report(lambda: dist.new_group(backend=BACKEND, timeout=dt.timedelta(seconds=1)))
    mark(scratch, "waiting")
    interrupted = report(lambda: dist.new_group(backend=BACKEND))
    check_works()
    return late, interrupted


def test_making_a_group_ends_at_the_timeout_or_an_interrupt() -> None:
    with crew(2, BACKEND) as ranks:
        ranks.start(0, _make_a_group_alone, ranks.scratch)
        ranks.await_mark("waiting")
        time.sleep(0.2)
        ranks.signal(0, signal.SIGINT)
        ranks.start(1, check_works)
        late, interrupted = ranks.result(0)
        ranks.result(1)
        what = (
            "shm: every rank must join the group, got: rank 1 did not join within 1 s (rank 0/2, "
        )
        assert late.text.startswith(what), late
        assert interrupted.kind == "KeyboardInterrupt", interrupted


def test_connecting_over_gloo_ends_at_its_timeout() -> None:
    looks, release = [0], threading.Event()

    def look() -> None:
        looks[0] += 1

    try:
        with pytest.raises(RuntimeError, match=r"gloo did not connect within 0\.2 s"):
            away(lambda: release.wait(60), look, dt.timedelta(seconds=0.2))
    finally:
        release.set()
    assert looks[0] > 1
    with pytest.raises(TimeoutError, match="of its own"):
        away(_raises, look, dt.timedelta(seconds=60))
    assert away(lambda: 3, look, dt.timedelta(seconds=60)) == 3


def _raises() -> None:
    raise TimeoutError("of its own")


# --- ranks that cannot share memory --------------------------------------------------------------


def _fall_back(odd: int) -> None:
    rank = dist.get_rank()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch_c10d_ext")
    logger.addHandler(handler)
    if rank == odd:
        os.environ["TORCH_C10D_EXT_SHM_DISABLE"] = "1"
    try:
        group = dist.new_group(backend=BACKEND)
    finally:
        os.environ.pop("TORCH_C10D_EXT_SHM_DISABLE", None)
        logger.removeHandler(handler)
    assert isinstance(group._get_backend(torch.device("cpu")), _C.CheckedBackend)
    assert len(said) == (1 if rank == 0 else 0), said
    assert all(f"rank {odd}: TORCH_C10D_EXT_SHM_DISABLE=1" in line for line in said)
    check_works(group)
    dist.destroy_process_group(group)
    other = dist.new_group(backend=BACKEND)
    assert not isinstance(other._get_backend(torch.device("cpu")), _C.CheckedBackend)
    check_works(other)
    dist.destroy_process_group(other)


@pytest.mark.parametrize("odd", [0, 2])
def test_all_ranks_use_gloo_where_one_cannot_share_memory(odd: int) -> None:
    run(3, _fall_back, odd, backend=BACKEND)


def check_builds(odd: int, backend: str) -> None:
    """All ranks hear of one that runs another build, and make a group where none does."""
    rank = dist.get_rank()
    build = "2 (c0ffee)" if rank == odd else "1 (facade)"
    with contextlib.ExitStack() as patches:
        for module in (_backends, _hosts, _mpi):
            patches.enter_context(mock.patch.object(module, "own_build", return_value=build))
        with pytest.raises(dist.DistBackendError) as error:
            dist.new_group(backend=backend)
    first, other = ("2 (c0ffee)", "1 (facade)") if odd == 0 else ("1 (facade)", "2 (c0ffee)")
    assert (
        f"all ranks must run the same build of torch_c10d_ext, got {first} on rank 0, {other} on "
        f"rank {odd or 1} (rank {rank}/{dist.get_world_size()}, group '"
    ) in str(error.value)
    check_works(dist.new_group(backend=backend))


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("backend", [BACKEND, FALLBACK])
def test_ranks_of_different_builds_are_refused_on_all_ranks(backend: str, odd: int) -> None:
    run(3, check_builds, odd, BACKEND, backend=backend)


def test_a_record_without_a_build_is_of_an_earlier_one() -> None:
    assert other_build([{"build": "1"}, {"build": "1"}]) == ""
    assert "got an earlier one on rank 0, 1 on rank 1" in other_build([{}, {"build": "1"}])
    assert "got 1 on rank 0, an earlier one on rank 2" in other_build([{"build": "1"}] * 2 + [{}])


# Rank 0 has the store, which ends with it, and nothing else to do; rank 1 takes its time to read.
STORE_THAT_ENDS = """
import json, os, time, types
import torch.distributed as dist
import torch_c10d_ext
from torch_c10d_ext import _backends, _hosts

rank = int(os.environ["RANK"])
agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent.set("port", str(store.port))
else:
    store = dist.TCPStore("127.0.0.1", int(agent.get("port")))
_backends.own_build = _hosts.own_build = lambda: f"build {rank}"

def slowly(text):
    time.sleep(0.3)
    return json.loads(text)

if rank == 1:
    _hosts.json = types.SimpleNamespace(dumps=json.dumps, loads=slowly)
try:
    dist.init_process_group("shm", store=store, rank=rank, world_size=2)
except dist.DistBackendError as error:
    print(error, flush=True)
"""


def test_all_hear_why_they_are_no_group_though_the_store_ends_with_rank_0(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(STORE_THAT_ENDS)
    said = torchrun(2, program, [], deadline=60)
    assert said.count("got build 0 on rank 0, build 1 on rank 1 (rank ") == 2, said


def _part_again() -> None:
    """Parts of the same ranks have the same name, under which earlier ones have left addresses."""
    n, rank, world = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    kept = []
    for turn in range(6):
        part = world.split_group(list(range(n)), timeout=dt.timedelta(seconds=20))
        x = torch.tensor([rank + turn])
        part.allreduce([x]).wait()
        assert x == sum(range(n)) + n * turn
        if turn % 2:
            kept.append(part)
    for part in kept:
        part.barrier().wait()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("backend", [BACKEND, FALLBACK])
def test_the_same_ranks_can_part_again(backend: str, size: int) -> None:
    run(size, _part_again, backend=backend)
