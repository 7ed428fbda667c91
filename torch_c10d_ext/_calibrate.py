"""What the links of a running group cost, by measurement."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
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
# A smaller difference cannot be told from noise.
_LEAST = 1e-6


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
    bandwidth. The hops of the group's size are in the latency.

    The same calls are then made beside a computation on all ranks that takes twice as long as they
    do. What it takes longer than alone is :attr:`Link.overhead` and :attr:`Link.overhead_per_byte`,
    which are not counted in latency and bandwidth again. Differences below 1 us cannot be told from
    noise, and count as 1 us. It takes 2 to 3 seconds where 16 MiB take 20 ms, and twice the memory
    of the largest size.

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
        link.latency, link.overhead  # 2.1e-05 and 4.0e-06 on every rank, say
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
    wire = [2 * (ranks - 1) / ranks * size for size in sizes]

    def line(
        measure: Callable[[int], float], least: float = 0.0
    ) -> tuple[list[float], tuple[float, float]]:
        blocks = [[measure(k) for k in range(len(sizes))] for _ in range(rounds)]
        slowest = _slowest(pg, device, [took for block in blocks for took in block])
        columns = [slowest[k :: len(sizes)] for k in range(len(sizes))]
        medians = [max(least, sorted(column)[len(column) // 2]) for column in columns]
        return medians, fit(wire, medians)

    seconds, (latency, per_byte) = line(lambda k: _block(buffers[k], counts[k], pg))
    product = _Product(device)
    _, (overhead, overhead_per_byte) = line(
        lambda k: _beside(buffers[k], counts[k], product, 2 * seconds[k], pg), _LEAST
    )
    per_byte -= overhead_per_byte
    return Link(
        max(0.0, latency - overhead),
        1 / per_byte if per_byte > 0 else math.inf,
        shared=shared,
        overhead=overhead,
        overhead_per_byte=overhead_per_byte,
    )


class _Product:
    """A computation that lasts as long as is asked for: products of matrices that fit a cache."""

    def __init__(self, device: torch.device | str) -> None:
        on_host = torch.device(device).type == "cpu"
        side = 64 if on_host else 1024
        self.a, self.b, self.c = (torch.zeros(side, side, device=device) for _ in range(3))
        self.run(8)
        self.each = sorted(self._timed(8) / 8 for _ in range(9))[4]

    def _timed(self, times: int) -> float:
        _synchronize(self.c)
        began = time.perf_counter()
        self.run(times)
        _synchronize(self.c)
        return time.perf_counter() - began

    def times(self, seconds: float) -> int:
        return max(5, math.ceil(seconds / self.each))

    def run(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self.a, self.b, out=self.c)


def _block(buffer: torch.Tensor, count: int, pg: Any) -> float:
    """Seconds per call of so many all_reduces, from a moment when all ranks are there."""
    dist.barrier(pg)
    _synchronize(buffer)
    began = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(buffer, group=pg)
    _synchronize(buffer)
    return (time.perf_counter() - began) / count


def _beside(buffer: torch.Tensor, count: int, product: _Product, seconds: float, pg: Any) -> float:
    """Seconds per call that so many all_reduces add to a computation beside them."""
    times = product.times(seconds)
    took = []
    for communicates in (False, True):
        dist.barrier(pg)
        _synchronize(buffer)
        began = time.perf_counter()
        for _ in range(count):
            work = dist.all_reduce(buffer, group=pg, async_op=True) if communicates else None
            product.run(times)
            if work is not None:
                work.wait()
        _synchronize(buffer)
        took.append(time.perf_counter() - began)
    return (took[1] - took[0]) / count


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
