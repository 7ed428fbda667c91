"""The clock of the cost model: how long a schedule takes, and what it hides."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from torch_c10d_ext.optimizer._problem import Problem
from torch_c10d_ext.optimizer._schedule import Step, longest_paths


@dataclass(frozen=True)
class Timing:
    """What a schedule takes, in seconds.

    Attributes:
        total: from the first node to the last.
        computing: of it, computing.
        sent: of all links together.
        launches: how many collectives are started, a bucket counting once.
    """

    total: float
    computing: float
    sent: float
    launches: int


def simulate(p: Problem, order: Sequence[Step]) -> Timing:
    """Runs a schedule: nodes in order on one stream, launches in order on each link."""
    now = computing = sent = 0.0
    launches = 0
    free = [0.0] * len(p.lanes)
    lands: dict[int, float] = {}
    packed: set[int] = set()
    for step in order:
        if type(step) is int and step not in p.collectives:
            start = p.started_by.get(step)
            if start is not None:
                now = max(now, lands[start])
                if start in packed:
                    now += p.copying[start]
                    computing += p.copying[start]
            now += p.seconds[step]
            computing += p.seconds[step]
            continue
        members = step if isinstance(step, tuple) else (step,)
        first = members[0]
        seconds = max(p.latency[i] for i in members)
        seconds += sum(p.sent[i] - p.latency[i] for i in members)
        lane = p.lane[first]
        if len(members) > 1 and first in p.copying:
            packed.update(members)
            copied = sum(p.copying[i] for i in members)
            now += copied
            computing += copied
        free[lane] = max(now, free[lane]) + seconds
        sent += seconds
        launches += 1
        for i in members:
            lands[i] = free[lane]
    return Timing(max(now, *free) if free else now, computing, sent, launches)


def serial_seconds(p: Problem) -> float:
    """How long the graph takes where nothing runs beside anything else."""
    return sum(p.seconds) + sum(p.sent.values())


def lower_bound(p: Problem) -> float:
    """No order takes less, whatever launches are merged.

    The longest path; and for the computation, and each link, what the best preemptive schedule of
    its nodes alone takes, each of them coming when its longest path from the start allows, and
    followed by its longest path to the end (Jackson's schedule; Carlier 1982). A latency counts on
    paths, and on a link not at all, as a launch may have any number of collectives.
    """
    tails = longest_paths(p)
    heads = [0.0] * len(p.nodes)
    for i, follows in enumerate(p.follows):
        for j in follows:
            done = heads[j] + p.sent.get(j, p.seconds[j])
            if heads[i] < done:
                heads[i] = done
    machines: list[list[tuple[float, float, float]]] = [[] for _ in range(1 + len(p.lanes))]
    for i in range(len(p.nodes)):
        if i in p.collectives:
            moved = p.sent[i] - p.latency[i]
            machines[1 + p.lane[i]].append((heads[i], moved, tails[i] - moved))
        elif p.seconds[i]:
            machines[0].append((heads[i], p.seconds[i], tails[i] - p.seconds[i]))
    return max([max(tails, default=0.0), *(_one_machine(tasks) for tasks in machines)])


def _one_machine(tasks: list[tuple[float, float, float]]) -> float:
    """The least time of tasks (head, duration, tail) on one machine, if they may be interrupted."""
    tasks.sort()
    waiting: list[list[float]] = []  # by the longest tail: [-tail, what is left]
    now = end = 0.0
    k = 0
    while k < len(tasks) or waiting:
        if not waiting:
            now = max(now, tasks[k][0])
        while k < len(tasks) and tasks[k][0] <= now:
            heapq.heappush(waiting, [-tasks[k][2], tasks[k][1]])
            k += 1
        tail, left = waiting[0]
        until = tasks[k][0] if k < len(tasks) else float("inf")
        if now + left <= until:
            heapq.heappop(waiting)
            now += left
            end = max(end, now - tail)
        else:
            waiting[0][1] -= until - now
            now = until
    return end


def hidden_share(p: Problem, total: float, bound: float) -> float:
    """The share of what can be hidden that is: (serial - total) / (serial - bound)."""
    hideable = serial_seconds(p) - bound
    return 1.0 if hideable <= 1e-12 * bound else (serial_seconds(p) - total) / hideable
