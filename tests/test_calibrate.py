"""torch_c10d_ext.calibrate(): the cost model's numbers by measurement."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import torch_c10d_ext
from tests.harness import run
from torch_c10d_ext import Link, _calibrate, pending_count
from torch_c10d_ext._calibrate import fit

# --- the line -------------------------------------------------------------------------------------


def test_the_line_goes_through_points_on_it() -> None:
    wire = [8.0, 1e3, 1e6, 1e8]
    latency, per_byte = fit(wire, [20e-6 + n / 5e9 for n in wire])
    assert latency == pytest.approx(20e-6)
    assert 1 / per_byte == pytest.approx(5e9)


def test_small_messages_count_as_much_as_large_ones() -> None:
    # The large one is off by 10 %, 100 us, which would make nothing of a latency of 10 us.
    latency, per_byte = fit([0.0, 1e6, 1e7], [10e-6, 110e-6, 1.1e-3])
    assert latency == pytest.approx(10e-6, rel=0.1)
    assert per_byte == pytest.approx(1.05e-10, rel=0.06)


def test_neither_is_negative() -> None:
    latency, per_byte = fit([1e3, 1e6], [1e-6, 2e-3])
    assert latency == 0
    assert 1e-9 < per_byte < 2e-9
    latency, per_byte = fit([1e3, 1e6], [2e-6, 1e-6])
    assert 1e-6 < latency < 2e-6
    assert per_byte == 0


# --- a group --------------------------------------------------------------------------------------


def _calibrated(backend: str, size: int) -> Any:
    group = dist.new_group(backend=backend)
    link = torch_c10d_ext.calibrate(group, sizes=(8, 4096, 1 << 20), rounds=3, shared="wire")
    assert pending_count() == 0
    x = torch.full((5,), float(dist.get_rank()))
    dist.all_reduce(x, group=group)  # the group goes on
    assert x.tolist() == [size * (size - 1) / 2] * 5
    dist.destroy_process_group(group)
    return link


@pytest.mark.parametrize("backend", ("shm", "gloo"))
@pytest.mark.parametrize("size", (2, 3, 4))
def test_all_ranks_get_the_same_link(backend: str, size: int) -> None:
    links = run(size, _calibrated, backend, size)
    assert links == [links[0]] * size
    link = links[0]
    assert (link.hop, link.shared) == (0.0, "wire")
    assert 0 <= link.latency < 10
    assert link.bandwidth > 1e3
    assert 0 <= link.overhead < 10
    assert 0 <= link.overhead_per_byte < 1
    assert link.overhead + link.overhead_per_byte > 0


def _costs_what_the_slowest_rank_takes() -> Link:
    rank, size = dist.get_rank(), dist.get_world_size()
    calls = {"rounds": 0}

    def block(buffer: torch.Tensor, count: int, pg: Any) -> float:
        assert count >= 1
        calls["rounds"] += 1
        wire = 2 * (size - 1) / size * 4 * buffer.numel()
        # One round in seven is disturbed, on one rank.
        disturbed = 1.0 if rank == 1 and calls["rounds"] % 21 == 0 else 0.0
        return (rank + 1) * 10e-6 + wire / (4e9 / (rank + 1)) + disturbed

    def beside(buffer: torch.Tensor, count: int, product: Any, seconds: float, pg: Any) -> float:
        wire = 2 * (size - 1) / size * 4 * buffer.numel()
        # The computation is twice as long as the collective.
        assert seconds == pytest.approx(2 * (size * 10e-6 + wire / (4e9 / size)), rel=1e-3)
        return (rank + 1) * 2e-6 + wire / 40e9

    with (
        mock.patch.object(_calibrate, "_block", block),
        mock.patch.object(_calibrate, "_beside", beside),
    ):
        return torch_c10d_ext.calibrate(sizes=(8, 4096, 1 << 20), rounds=9)


@pytest.mark.parametrize("size", (2, 3))
def test_costs_what_the_slowest_rank_takes(size: int) -> None:
    for link in run(size, _costs_what_the_slowest_rank_takes):
        # What the rank is busy with is not on the link again.
        assert link.overhead == pytest.approx(size * 2e-6, rel=1e-3)
        assert link.overhead_per_byte == pytest.approx(1 / 40e9, rel=1e-3)
        assert link.latency == pytest.approx(size * 8e-6, rel=1e-3)
        assert 1 / link.bandwidth == pytest.approx(size / 4e9 - 1 / 40e9, rel=1e-3)


def _refusals() -> None:
    for arguments, message in (
        ({"sizes": (8,)}, r"sizes must be two or more different .*, got \(8,\) \(rank \d/2"),
        ({"sizes": (8, 8)}, r"got \(8, 8\)"),
        ({"sizes": (0, 8)}, r"got \(0, 8\)"),
        ({"sizes": (8, 9)}, r"multiples of 4, got \(8, 9\)"),
        ({"sizes": (8, 16.0)}, r"got \(8, 16.0\)"),
        ({"rounds": 0}, "rounds must be 1 or more, got 0"),
        ({"group": "nope"}, "got 'nope'"),
    ):
        with pytest.raises(ValueError, match=message):
            torch_c10d_ext.calibrate(**arguments)
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with pytest.raises(ValueError, match="must have two ranks or more, got one"):
        torch_c10d_ext.calibrate(alone)


def test_refusals() -> None:
    run(2, _refusals)


def _free() -> float:
    with (
        mock.patch.object(_calibrate, "_block", return_value=5e-6),
        mock.patch.object(_calibrate, "_beside", return_value=-1e-6),
    ):
        link = torch_c10d_ext.calibrate()
        # Less than nothing is noise.
        assert link.overhead == pytest.approx(1e-6)
        assert link.overhead_per_byte == pytest.approx(0.0, abs=1e-18)
        assert link.latency == pytest.approx(4e-6)
        return link.bandwidth


def test_bytes_that_cost_nothing() -> None:
    assert run(2, _free) == [math.inf] * 2
