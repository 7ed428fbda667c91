"""Calls that have waited when they return: in the order of their stream, as any kernel."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

import torch_c10d_ext.distributed as ext
import torch_c10d_ext.functional as F
from tests.backends.dist_ops import all_gather_single, reduce_scatter_single
from tests.contract import wait
from tests.harness import pool
from tests.harness.flight import single_rank_shortcut
from tests.simulated_cuda.on_cuda import ALONE, device, run_on_devices

pytestmark = pytest.mark.cuda

NCCL, GLOO = "cpu:shm,cuda:nccl", "cpu:shm,cuda:gloo"
COUNT = 1 << 14


def _block(api: Any, rows: Tensor, x: Tensor) -> None:
    """Of each half of the values an all_gather, both in a coalescing block."""
    with api._coalescing_manager(device=x.device):
        for into, half in zip(rows.chunk(2), x.chunk(2), strict=True):
            all_gather_single(into, half, api=dist if api is c10d else api)


def _calls(
    x: Tensor, rows: Tensor | None = None, part: Tensor | None = None
) -> dict[str, Callable[[], object]]:
    """Into tensors that are there. `x` is summed up."""
    n = dist.get_world_size()
    rows = x.new_empty(n * COUNT) if rows is None else rows
    part = x.new_empty(COUNT // n) if part is None else part
    return {
        "all_reduce_inplace": lambda: F.all_reduce_inplace(x, "sum", None),
        "all_reduce": lambda: ext.all_reduce(x),
        "broadcast": lambda: ext.broadcast(x, 0),
        "all_gather": lambda: F.all_gather_tensor_inplace(rows, x, None),
        "reduce_scatter": lambda: F.reduce_scatter_tensor_inplace(part, x, "sum", None),
        "all_gather, block": lambda: _block(ext, rows, x),
    }


def _events() -> int:
    """How many more events there are after calls of one rank."""
    x = torch.zeros(COUNT, device=device())
    live = ctypes.CDLL("libcudart.so.13").simulated_cuda_live_events
    torch.cuda.synchronize()
    before = live()
    for call in _calls(x).values():
        call()
    return int(live()) - before


def test_calls_of_one_rank_make_no_event() -> None:
    assert run_on_devices(1, _events, backend=NCCL) == [0]


def _more_records() -> dict[str, int]:
    """By call: how many more events it records than torch's own."""
    n = dist.get_world_size()
    recorded = ctypes.CDLL("libcudart.so.13").simulated_cuda_recorded_events
    x = torch.zeros(COUNT, device=device())
    rows, part = x.new_empty(n * COUNT), x.new_empty(COUNT // n)
    torchs: dict[str, Callable[[], object]] = {
        "all_reduce_inplace": lambda: dist.all_reduce(x),
        "all_reduce": lambda: dist.all_reduce(x),
        "broadcast": lambda: dist.broadcast(x, 0),
        "all_gather": lambda: all_gather_single(rows, x),
        "reduce_scatter": lambda: reduce_scatter_single(part, x),
        "all_gather, block": lambda: _block(c10d, rows, x),
    }
    more = {}
    for name, theirs in torchs.items():
        ours = _calls(torch.zeros(COUNT, device=device()))[name]
        torch.cuda.synchronize()
        before = recorded()
        theirs()
        between = recorded()
        ours()
        more[name] = int(recorded() - between) - int(between - before)
    return more


# Where torch's nccl is told to have waits block, calls have works, and nccl's stream follows that
# of the caller by an event. None comes after.
@pytest.mark.parametrize(("blocking", "want"), [("0", 0), ("1", 1)])
def test_calls_that_wait_record_no_event_but_where_they_have_works(
    blocking: str, want: int
) -> None:
    pool.stop(ALONE)  # in whose memory no result of an earlier test was
    try:
        with mock.patch.dict(os.environ, TORCH_NCCL_BLOCKING_WAIT=blocking):
            for more in run_on_devices(2, _more_records, backend=ALONE):
                block = more.pop("all_gather, block")  # torch's has one for itself
                assert (set(more.values()), block) == ({want}, want - 1), more
    finally:
        pool.stop(ALONE)


def test_other_backends_do_not_read_nccls_variables() -> None:
    backend = "cuda:gloo"
    pool.stop(backend)
    try:
        with mock.patch.dict(os.environ, TORCH_NCCL_BLOCKING_WAIT="maybe"):  # nccl would refuse it
            run_on_devices(2, _events, backend=backend)
    finally:
        pool.stop(backend)


def _after_a_wait(shortcut: bool) -> list[str]:
    """A wait on another stream follows calls that write a result after its first wait."""
    n = dist.get_world_size()
    first, second = (torch.cuda.Stream(device()) for _ in range(2))
    failures = []
    with single_rank_shortcut(shortcut):
        for name in ("all_reduce_inplace", "all_reduce"):
            x = torch.ones(COUNT, device=device())
            torch.cuda.synchronize()
            with torch.cuda.stream(first):
                y = F.wait_tensor(F.all_reduce(x, "sum", None))
                torch.cuda._sleep(5_000_000)
                y.add_(1)
                _calls(y)[name]()
            with torch.cuda.stream(second):
                seen = wait(y) + 0
            torch.cuda.synchronize()
            if not torch.equal(seen, torch.full_like(seen, n * (n + 1))):
                failures.append(f"{name}: {seen[:2].tolist()}")
    return failures


# nccl runs them on the caller's stream and has no work of them, gloo has one.
@pytest.mark.parametrize(
    ("size", "shortcut", "backend"), [(1, True, NCCL), (2, False, NCCL), (2, False, GLOO)]
)
def test_a_wait_elsewhere_follows_what_was_written_last(
    size: int, shortcut: bool, backend: str
) -> None:
    for failures in run_on_devices(size, _after_a_wait, shortcut, backend=backend):
        assert not failures


def _on_own_stream() -> list[str]:
    """What the stream of the call does next comes after it; so does what follows that stream."""
    n, rank = dist.get_world_size(), dist.get_rank()
    mine, other = (torch.cuda.Stream(device()) for _ in range(2))
    failures = []
    for turn in range(3):
        with torch.cuda.stream(mine):
            x = torch.zeros(COUNT, device=device())
            torch.cuda._sleep(3_000_000)
            x.fill_(rank + 1.0)
            F.all_reduce_inplace(x, "sum", None)
            y = x + 0
        other.wait_stream(mine)
        with torch.cuda.stream(other):
            z = x + 0
        torch.cuda.synchronize()
        want = torch.full_like(y, n * (n + 1) / 2)
        failures += [
            f"{turn}: {name}" for name, t in (("y", y), ("z", z)) if not torch.equal(t, want)
        ]
    return failures


@pytest.mark.parametrize("size", [1, 2])
def test_what_comes_next_comes_after(size: int) -> None:
    for failures in run_on_devices(size, _on_own_stream, backend=NCCL):
        assert not failures


def _memory_elsewhere(keeps_results: bool) -> list[str]:
    """Calls on another stream than their memory is from, which is then used again at once."""
    n, rank = dist.get_world_size(), dist.get_rank()
    owner, caller = (torch.cuda.Stream(device()) for _ in range(2))
    total = n * (n + 1) / 2
    want = {
        "all_gather": torch.arange(1.0, n + 1).repeat_interleave(COUNT),
        "reduce_scatter": torch.full((COUNT // n,), total),
    }
    failures = []
    with single_rank_shortcut(False):
        for name in want if keeps_results else _calls(torch.zeros(COUNT, device=device())):
            torch.cuda.synchronize()
            with torch.cuda.stream(owner):
                x = torch.full((COUNT,), rank + 1.0, device=device())
                rows, part = x.new_zeros(n * COUNT), x.new_zeros(COUNT // n)
                call = _calls(x, rows, part)[name]
            caller.wait_stream(owner)
            with torch.cuda.stream(caller):
                torch.cuda._sleep(5_000_000)
                call()
            results = {"all_gather": rows, "reduce_scatter": part} if keeps_results else {}
            del x, rows, part, call
            with torch.cuda.stream(owner):
                sizes = [COUNT * k for k in (1, 1, 2, 4)] + [COUNT // k for k in (1, 1, 2, 4)]
                junk = [
                    torch.full((size,), 100.0 * (rank + 1) + i, device=device())
                    for i, size in enumerate(sizes)
                ]
            torch.cuda.synchronize()
            if not all(bool((j == 100.0 * (rank + 1) + i).all()) for i, j in enumerate(junk)):
                failures.append(f"{name} wrote memory of others")
            if results and not torch.equal(results[name].cpu(), want[name]):
                failures.append(f"{name} read memory of others: {results[name][:2].tolist()}")
    return failures


@pytest.mark.parametrize("keeps_results", [False, True])
@pytest.mark.parametrize(("size", "backend"), [(1, NCCL), (2, NCCL), (2, GLOO)])
def test_memory_is_kept_for_the_stream_of_the_call(
    size: int, backend: str, keeps_results: bool
) -> None:
    for failures in run_on_devices(size, _memory_elsewhere, keeps_results, backend=backend):
        assert not failures
