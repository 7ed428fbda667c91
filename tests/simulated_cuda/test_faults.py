"""What goes wrong: nccl's errors, ranks that do not come, communicators that are made late.

torch's watchdog ends a process whose nccl has failed, unless it is told to raise from the wait
(TORCH_NCCL_BLOCKING_WAIT): that is how most of these ranks run.
"""

from __future__ import annotations

import ctypes
import datetime as dt
import time

import pytest
import torch
import torch.distributed as dist

import torch_c10d_ext
import torch_c10d_ext.distributed as ext
import torch_c10d_ext.functional as F
from tests.contract import group, wait
from tests.simulated_cuda.on_cuda import ALONE, device, run_on_devices
from torch_c10d_ext import errors

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("own_processes")]


@pytest.fixture
def _raising(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "0")


def _fault(text: str) -> None:
    """Of this rank's nccl, counted from its next call."""
    ctypes.CDLL("libnccl.so.2").simulated_cuda_nccl_fault(text.encode())


def _group_of(seconds: int) -> dist.ProcessGroup:
    made = dist.new_group(timeout=dt.timedelta(seconds=seconds), backend="nccl")
    assert made is not None
    return made


def _one(x: torch.Tensor, name: str) -> torch.Tensor:
    return torch.ops.c10d_ext.all_reduce(x, "sum", name)


def _error_after(calls: int, waits: bool) -> tuple[str, str]:
    """The first error, and what a later call of the group says."""
    x, mine = torch.ones(1000, device=device()), _group_of(60)
    assert bool((wait(_one(x, mine.group_name)) == dist.get_world_size()).all())
    torch.cuda.synchronize()
    _fault(f"error:{calls}" if dist.get_rank() == 0 else "none")
    for _ in range(calls):
        assert bool((wait(_one(x, mine.group_name)) == dist.get_world_size()).all())
    y = _one(x, mine.group_name)
    if not waits:
        time.sleep(2)
    texts = []
    with pytest.raises(errors.RankLost) as first:
        wait(y)
    texts.append(str(first.value))
    assert (first.value.op, first.value.group) == ("all_reduce", mine.group_name)
    assert first.value.seq == calls + 2  # one before, counted from 1
    assert first.value.ranks == []  # which nccl does not tell
    with pytest.raises(dist.DistBackendError) as second:
        wait(_one(x, mine.group_name))
    texts.append(str(second.value))
    _fault("none")
    mine._get_backend(torch.device("cuda")).abort()
    return texts[0], texts[1]


@pytest.mark.usefixtures("_raising")
@pytest.mark.parametrize("calls", [0, 3])
@pytest.mark.parametrize("waits", [True, False])
def test_an_error_of_nccl_is_raised_by_the_wait(calls: int, waits: bool) -> None:
    both = run_on_devices(2, _error_after, calls, waits, backend=ALONE)
    for rank, (first, second) in enumerate(both):
        assert first.startswith("all_reduce: the collective must complete, got")
        assert "remote process exited or there was a network error" in first
        assert f"(rank {rank}/2, group '" in first
        # nccl's own, when the call starts.
        assert f"NCCL communicator was aborted on rank {rank}" in second


def _absent(in_place: bool) -> tuple[str, float]:
    """Rank 1 does not take part from its second call on, and hears nothing of rank 0."""
    rank = dist.get_rank()
    # Rank 1's comes later: rank 0 would hear that rank 1 is gone.
    x, mine = torch.ones(1000, device=device()), _group_of(6 * (rank + 1))
    assert bool((wait(_one(x, mine.group_name)) == 2).all())
    torch.cuda.synchronize()
    _fault("absent:0" if rank else "none")

    def call() -> None:
        if in_place:
            ext.all_reduce(x, group=mine)
        else:
            wait(_one(x, mine.group_name))

    begun = time.monotonic()
    with pytest.raises(errors.CollectiveTimeout) as error:
        call()
    took = time.monotonic() - begun
    assert (error.value.op, error.value.group) == ("all_reduce", mine.group_name)
    _fault("none")
    mine._get_backend(torch.device("cuda")).abort()
    return str(error.value), took


@pytest.mark.usefixtures("_raising")
@pytest.mark.parametrize("in_place", [False, True])
def test_a_rank_that_never_comes_ends_at_the_timeout(in_place: bool) -> None:
    for rank, (text, took) in enumerate(run_on_devices(2, _absent, in_place, backend=ALONE)):
        limit = 6 * (rank + 1)
        assert "all_reduce: the collective must complete, got" in text
        assert f"Timeout(ms)={limit}000" in text and f"(rank {rank}/2, group '" in text
        assert limit - 1 < took < limit + 34


def _aborted() -> bool:
    """A group aborted while its collective is in flight: nothing hangs, others go on."""
    x, mine = torch.ones(1000, device=device()), _group_of(60)
    wait(_one(x, mine.group_name))
    torch.cuda.synchronize()
    _fault("absent:0" if dist.get_rank() == 1 else "none")
    y = _one(x, mine.group_name)
    mine._get_backend(torch.device("cuda")).abort()
    wait(y)  # nccl's work does not tell that it was ended
    _fault("none")
    return bool((wait(_one(x, group())) == 2).all()) and torch_c10d_ext.pending_count() == 0


@pytest.mark.usefixtures("_raising")
def test_an_abort_ends_what_is_in_flight() -> None:
    assert all(run_on_devices(2, _aborted, backend=ALONE))


def _nonblocking() -> bool:
    """Every group's communicator is made by its first call, which does not wait for it."""
    x, n, good = torch.ones(1000, device=device()), dist.get_world_size(), True
    for _ in range(3):
        mine = _group_of(60)
        for _ in range(3):
            y = F.all_reduce(F.all_gather_single(x, 0, mine), "sum", mine)
            good = good and bool((y + 0 == n).all())
        half = dist.new_group([0])
        if dist.get_rank() == 0:
            good = good and bool((F.wait_tensor(F.all_reduce(x, "sum", half)) == 1).all())
        dist.destroy_process_group(mine)
    torch.cuda.synchronize()
    return good and torch_c10d_ext.pending_count() == 0


def test_communicators_that_are_made_without_blocking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_USE_COMM_NONBLOCKING", "1")
    assert all(run_on_devices(2, _nonblocking, backend=ALONE))
