"""What the links of a running group cost, by measurement."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_c10d_ext._groups import Group, group_name, process_group
from torch_c10d_ext.errors import InvalidArgument
from torch_c10d_ext.report import Link

_SIZES = (8, 4 << 10, 256 << 10, 4 << 20, 16 << 20)
# Calls back to back, timed together, so that the clock and the barrier do not count.
_BLOCK_SECONDS = 2e-3
_LONGEST_BLOCK = 200


def calibrate(
    group: Group = None,
    *,
    sizes: Sequence[int] = _SIZES,
    rounds: int = 9,
    device: torch.device | str = "cpu",
    shared: str = "",
) -> Link:
    """Measures all_reduces on a running group, and gives the :class:`Link` that costs as much.

    All ranks of the group call it, with the same arguments, and get the same link: so they come to
    the same plans. The times of a size are those of the slowest rank, their median over the rounds
    counts, and the line through these that is the best in relative terms gives latency and
    bandwidth. The hops of the group's size are in the latency. It takes 1 to 2 seconds where 16 MiB
    take 20 ms, and twice the memory of the largest size.

    Args:
        group: see :data:`torch_c10d_ext.functional.Group`; of two ranks or more.
        sizes: bytes of each all_reduce of float32, two different ones at least: from the smallest
            to the largest that the program sends.
        rounds: how often each is measured; the sizes take turns.
        device: where the tensors are.
        shared: as :attr:`Link.shared`.

    Returns:
        A link for ``communication_report``, ``optimize`` and ``communication_options``. Its
        bandwidth is infinite where larger messages take no longer.

    Raises:
        ValueError: a group of one rank or none, sizes or rounds without meaning; before anything is
            sent.

    Example, on each of 4 ranks::

        link = torch_c10d_ext.calibrate(sizes=(8, 1 << 20))
        link.latency  # 2.1e-05 on every rank, say
        step = torch.compile(step, options=torch_c10d_ext.communication_options(link=link))
    """
    name = group_name(group)
    pg = process_group(name)
    ranks, where = pg.size(), f"(rank {pg.rank()}/{pg.size()}, group '{name}')"
    if ranks < 2:
        raise InvalidArgument(f"calibrate: the group must have two ranks or more, got one {where}")
    valid = all(type(size) is int and size > 0 and size % 4 == 0 for size in sizes)
    if len(set(sizes)) < 2 or not valid:
        raise InvalidArgument(
            "calibrate: sizes must be two or more different numbers of bytes, multiples of 4, got "
            f"{tuple(sizes)} {where}"
        )
    if rounds < 1:
        raise InvalidArgument(f"calibrate: rounds must be 1 or more, got {rounds} {where}")
    sizes = sorted(set(sizes))
    buffers = [torch.zeros(size // 4, device=device, dtype=torch.float32) for size in sizes]
    for buffer in buffers:
        _block(buffer, 1, pg)  # connects
    counts = [
        max(1, min(_LONGEST_BLOCK, int(_BLOCK_SECONDS / one)))
        for one in _slowest(pg, device, [_block(buffer, 1, pg) for buffer in buffers])
    ]
    blocks = [
        [_block(b, count, pg) for b, count in zip(buffers, counts, strict=True)]
        for _ in range(rounds)
    ]
    slowest = _slowest(pg, device, [took for block in blocks for took in block])
    columns = [slowest[i :: len(sizes)] for i in range(len(sizes))]
    seconds = [sorted(column)[len(column) // 2] for column in columns]
    wire = [2 * (ranks - 1) / ranks * size for size in sizes]
    latency, per_byte = fit(wire, seconds)
    return Link(latency, 1 / per_byte if per_byte > 0 else math.inf, shared=shared)


def _block(buffer: torch.Tensor, count: int, pg: Any) -> float:
    """Seconds per call of so many all_reduces, from a moment when all ranks are there."""
    dist.barrier(pg)
    _synchronize(buffer)
    began = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(buffer, group=pg)
    _synchronize(buffer)
    return (time.perf_counter() - began) / count


def _synchronize(buffer: torch.Tensor) -> None:
    if buffer.device.type != "cpu":
        torch.accelerator.synchronize(buffer.device)


def _slowest(pg: Any, device: torch.device | str, seconds: list[float]) -> list[float]:
    """Of each time, the slowest rank's; the same on all ranks."""
    # In float32, which every device has: whole nanoseconds up to 16 ms, 6 digits beyond.
    times = torch.tensor(seconds, dtype=torch.float32, device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=pg)
    return [max(t, 1e-9) for t in times.tolist()]


def fit(wire: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(latency, seconds per byte), 0 or more, with the least sum of squared relative errors."""
    # Each equation latency + bytes * x = seconds is divided by its seconds.
    a = [1 / t for t in seconds]
    b = [n / t for n, t in zip(wire, seconds, strict=True)]
    aa, ab, bb = (
        sum(p * q for p, q in zip(one, two, strict=True)) for one, two in ((a, a), (a, b), (b, b))
    )
    determinant = aa * bb - ab * ab
    latency = (sum(a) * bb - sum(b) * ab) / determinant
    per_byte = (sum(b) * aa - sum(a) * ab) / determinant
    if latency < 0:
        latency, per_byte = 0.0, sum(b) / bb
    elif per_byte < 0:
        latency, per_byte = sum(a) / aa, 0.0
    return latency, per_byte
