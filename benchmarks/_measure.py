"""Peers measured in alternation, in many short rounds, and what the rounds say.

On every rank, :func:`measure` goes over its cases again and again; each time it runs a short block
of calls of every peer of a case, one right after the other and in changing order, so that whatever
else the machine does hits all of them alike. Peers are compared round by round.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

BLOCK_SECONDS = 4e-3
MIN_ROUNDS = 5
MAX_CALLS = 5000
# Of the normal distribution, for intervals that hold the true median in 99 of 100 runs.
Z_99 = 2.576


@dataclass
class Case:
    """The same thing done by several peers: calls that return when their result is there."""

    name: str
    peers: dict[str, Callable[[], Any]]
    size: str = ""
    same_results: bool = True


@dataclass
class Timings:
    """Seconds per call of every peer of a case, one entry per round."""

    name: str
    size: str
    peers: list[str]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    # On CUDA: how long the calls took to return, their results still being computed.
    issuing: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The peers that were measured, in the order of the case."""
        return [peer for peer in self.peers if peer in self.seconds]


def measure(cases: Sequence[Case], seconds: float, device: str = "cpu") -> list[Timings]:
    """Measures all cases for about ``seconds``; to be called on every rank with equal cases.

    A peer that raises, or whose result differs from that of the first peer, is left out, and its
    error stands in the timings.
    """
    rank0 = dist.get_rank() == 0
    timings = [Timings(case.name, case.size, list(case.peers)) for case in cases]
    blocks: list[list[_Block]] = []
    for case, timing in zip(cases, timings, strict=True):
        timing.errors = _agreed(_errors_of(case))
        blocks.append([_Block(n, c) for n, c in case.peers.items() if n not in timing.errors])
    clock = _clock(device)
    gc.collect()
    gc.disable()
    try:
        for block in itertools.chain.from_iterable(blocks):
            block.calibrate(clock)
        ends = time.monotonic() + seconds
        for turn in itertools.count():
            if not _shared(turn < MIN_ROUNDS or (rank0 and time.monotonic() < ends)):
                break
            for group, timing in zip(blocks, timings, strict=True):
                for block in group if turn % 2 else reversed(group):
                    done, issued = block.time(clock)
                    timing.seconds.setdefault(block.name, []).append(done)
                    if issued is not None:
                        timing.issuing.setdefault(block.name, []).append(issued)
    finally:
        gc.enable()
    return timings


def slowest(by_rank: Sequence[list[Timings]]) -> list[Timings]:
    """One set of timings from all ranks': a round took as long as it took the slowest rank."""
    merged = []
    for same in zip(*by_rank, strict=True):
        first = same[0]
        timing = Timings(first.name, first.size, first.peers, errors=first.errors)
        for kind in ("seconds", "issuing"):
            for peer in getattr(first, kind):
                rounds = zip(*(getattr(each, kind)[peer] for each in same), strict=True)
                getattr(timing, kind)[peer] = [max(times) for times in rounds]
        merged.append(timing)
    return merged


@dataclass(frozen=True)
class Median:
    """A median over rounds, and the interval that holds the true one with 99 % confidence."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Median:
        """The median of ``values``, and the order statistics that bound it."""
        ordered = sorted(values)
        k = max(0, math.floor((len(ordered) - Z_99 * math.sqrt(len(ordered))) / 2))
        return cls(statistics.median(ordered), ordered[k], ordered[-1 - k])


def ratio(times: Sequence[float], base: Sequence[float]) -> Median:
    """How many times as long as ``base``, round by round."""
    return Median.of([a / b for a, b in zip(times, base, strict=True)])


def difference(times: Sequence[float], base: Sequence[float]) -> Median:
    """How much longer than ``base``, round by round."""
    return Median.of([a - b for a, b in zip(times, base, strict=True)])


class _Clock:
    """Seconds until a block of calls was done; on CUDA also until all had returned."""

    def time(self, call: Callable[[], Any], count: int) -> tuple[float, float | None]:
        repeat = itertools.repeat(None, count)
        began = time.perf_counter()
        for _ in repeat:
            call()
        return time.perf_counter() - began, None


class _ThreadClock(_Clock):
    """CPU time of this thread: where nothing waits, what the machine does besides is left out."""

    def time(self, call: Callable[[], Any], count: int) -> tuple[float, float | None]:
        repeat = itertools.repeat(None, count)
        began = time.thread_time()
        for _ in repeat:
            call()
        return time.thread_time() - began, None


class _CudaClock(_Clock):
    """By CUDA events on the current stream, which waits have ordered after the collectives."""

    def time(self, call: Callable[[], Any], count: int) -> tuple[float, float | None]:
        first = torch.cuda.Event(enable_timing=True)
        last = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        first.record()
        issued, _ = super().time(call, count)
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) * 1e-3, issued


class _Block:
    """As many calls of one peer as fill a few milliseconds, the same number on every rank."""

    def __init__(self, name: str, call: Callable[[], Any]) -> None:
        self.name, self.call, self.count = name, call, 2

    def calibrate(self, clock: _Clock) -> None:
        """Chooses the number of calls; the fastest of some tries says least about other load."""
        fastest = math.inf
        for _ in range(3):
            fastest = min(fastest, max(self.time(clock)[0], 1e-9))
            self.count = int(_shared(min(max(1, round(BLOCK_SECONDS / fastest)), MAX_CALLS)))

    def time(self, clock: _Clock) -> tuple[float, float | None]:
        """Seconds per call, by one block of calls that all ranks start together."""
        _align()
        done, issued = clock.time(self.call, self.count)
        return done / self.count, None if issued is None else issued / self.count


def _clock(device: str) -> _Clock:
    if device == "cuda":
        return _CudaClock()
    return _ThreadClock() if dist.get_backend() == "fake" else _Clock()


def _alone() -> bool:
    return dist.get_world_size() == 1 or dist.get_backend() == "fake"


def _align() -> None:
    """No rank passes before all have come."""
    if not _alone():
        dist.all_reduce(torch.zeros(1))


def _shared(value: float) -> float:
    """Rank 0's value, on every rank."""
    if _alone():
        return value
    holder = torch.tensor([float(value)], dtype=torch.float64)
    dist.broadcast(holder, 0)
    return holder.item()


def _agreed(errors: dict[str, str]) -> dict[str, str]:
    """The errors of all ranks: what failed on one is left out on all."""
    if _alone():
        return errors
    all_errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_errors, errors)
    return {peer: text for one in reversed(all_errors) for peer, text in one.items()}


def _errors_of(case: Case) -> dict[str, str]:
    """Calls every peer of a case once, which also warms it up."""
    errors: dict[str, str] = {}
    expected = None
    for peer, call in case.peers.items():
        try:
            result = _tensors_of(call())
        except Exception as error:
            errors[peer] = str(error).strip().split("\n")[0] or repr(error)
            continue
        if expected is None:
            expected = result
        elif case.same_results and not _same(result, expected):
            errors[peer] = f"differs from what {next(iter(case.peers))} gives"
    return errors


def _tensors_of(result: Any) -> list[torch.Tensor]:
    tensors = result if isinstance(result, (list, tuple)) else [result]
    return [torch.clone(t).detach() for t in tensors if isinstance(t, torch.Tensor)]


def _same(result: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(result) == len(expected) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-4, atol=1e-6)
        for a, b in zip(result, expected, strict=True)
    )
