"""The clock of the cost model: how long a schedule takes, and what it hides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_c10d_ext.optimizer._problem import Problem
from torch_c10d_ext.optimizer._schedule import Step


@dataclass(frozen=True)
class Timing:
    """What a schedule takes, in seconds.

    Attributes:
        total: from the first node to the last.
        computing: of it, computing, and busy with calls.
        sent: of all links together.
        launches: how many collectives are started, a bucket counting once.
    """

    total: float
    computing: float
    sent: float
    launches: int


def simulate(p: Problem, order: Sequence[Step], stalls: dict[int, float] | None = None) -> Timing:
    """Runs a schedule: nodes in order on one stream, launches in order on each link.

    ``stalls`` gets the seconds that the stream stands still for each start that it does so for.
    """
    now = computing = sent = 0.0
    launches = 0
    free = [0.0] * len(p.lanes)
    lands: dict[int, float] = {}
    packed: set[int] = set()
    for step in order:
        if type(step) is int and step not in p.collectives:
            start = p.started_by.get(step)
            if start is not None:
                if stalls is not None and lands[start] > now:
                    stalls[start] = stalls.get(start, 0.0) + lands[start] - now
                now = max(now, lands[start])
                if start in packed:
                    now += p.copying[start]
                    computing += p.copying[start]
            now += p.seconds[step]
            computing += p.seconds[step]
            continue
        members = step if isinstance(step, tuple) else (step,)
        first = members[0]
        seconds, busy, lane = p.on_link(members), p.busy(members), p.lane[first]
        if len(members) > 1 and first in p.copying:
            packed.update(members)
        now += busy
        computing += busy
        free[lane] = max(now, free[lane]) + seconds
        sent += seconds
        launches += 1
        for i in members:
            lands[i] = free[lane]
    return Timing(max(now, *free) if free else now, computing, sent, launches)


def serial_seconds(p: Problem) -> float:
    """How long the graph takes where nothing runs beside anything else."""
    return sum(p.seconds) + sum(p.overhead.values()) + sum(p.sent.values())


def hidden_share(p: Problem, total: float, bound: float) -> float:
    """The share of what can be hidden that is: (serial - total) / (serial - bound)."""
    hideable = serial_seconds(p) - bound
    return 1.0 if hideable <= 1e-12 * bound else (serial_seconds(p) - total) / hideable
