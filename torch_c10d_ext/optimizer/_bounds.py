"""A time that no order of a graph can beat, whatever launches are merged."""

from __future__ import annotations

import heapq
from collections.abc import Collection

import torch
from torch import Tensor

from torch_c10d_ext._dynamo import real_tensors
from torch_c10d_ext.optimizer._problem import Problem

# Nodes of the largest graph whose ancestors are all looked at: a matrix of so many squared.
_ALL_ANCESTORS = 1_500

_PIECE = 16_384


def lower_bound(p: Problem, mergeable: Collection[int] | None = None) -> float:
    """No order takes less, whatever launches are merged.

    The computation is one machine, and each link is one. A node's head is when it can start: behind
    its longest path from the start, and behind what each machine must have done of its ancestors;
    its tail likewise to the end. A machine then takes at least what the best preemptive schedule of
    its nodes takes (Jackson's schedule; Carlier 1982).

    Args:
        p: the graph.
        mergeable: the starts that may share a launch with another one, by default all. Their
            latency counts on paths, and on a link not at all, as a launch may have any number of
            collectives; so does what a launch takes of the rank.
    """
    count = len(p.nodes)
    took = list(p.seconds)
    for i in p.collectives:
        took[i] += p.overhead[i] + p.sent[i]
    load, machine = list(p.seconds), [0] * count
    for i in p.collectives:
        machine[i] = 1 + p.lane[i]
        alone = mergeable is not None and i not in mergeable
        load[i] = p.sent[i] if alone else p.sent[i] - p.latency[i]
    # What must be done, not merely started, before a node starts.
    done: list[list[int]] = []
    started: list[list[int]] = []
    for i, follows in enumerate(p.follows):
        ends = [j for j in follows if _ends(p, i, j)]
        done.append(ends)
        started.append([j for j in follows if j not in ends] if len(ends) < len(follows) else [])
    heads = [0.0] * count
    for i in range(count):
        for j in done[i]:
            heads[i] = max(heads[i], heads[j] + took[j])
        for j in started[i]:
            heads[i] = max(heads[i], heads[j])
    tails = [0.0] * count
    for i in range(count - 1, -1, -1):
        for j in done[i]:
            tails[j] = max(tails[j], tails[i] + took[i])
    if count <= _ALL_ANCESTORS:
        with real_tensors(), torch.device("cpu"):
            before = _ancestors(done, started)
            loads = torch.tensor(load, dtype=torch.float64)
            machines = torch.tensor(machine)
            for _ in range(2):
                heads = _behind(heads, took, before, loads, machines, done)
                tails = _ahead(tails, took, before, loads, machines, done)
    tasks: list[list[tuple[float, float, float]]] = [[] for _ in range(1 + len(p.lanes))]
    longest = 0.0
    for i in range(count):
        longest = max(longest, heads[i] + took[i] + tails[i])
        if load[i]:
            # A latency that does not count on the link is over before the link is taken.
            tasks[machine[i]].append((heads[i] + took[i] - load[i], load[i], tails[i]))
        if i in p.collectives:
            # What a call takes of the rank is over before its link is taken.
            alone = mergeable is not None and i not in mergeable
            busy = p.seconds[i] + (p.overhead[i] if alone else 0.0)
            if busy:
                begins = heads[i] + p.overhead[i] + p.seconds[i] - busy
                tasks[0].append((begins, busy, p.sent[i] + tails[i]))
    return max([longest, *(_one_machine(each) for each in tasks)])


def _ends(p: Problem, i: int, j: int) -> bool:
    """Whether j is over before i starts; a collective is over at its wait, and at the end."""
    return j not in p.collectives or p.started_by.get(i) == j or i == len(p.nodes) - 1


def _ancestors(done: list[list[int]], started: list[list[int]]) -> Tensor:
    """By row, what is over before a node starts."""
    count = len(done)
    before = torch.zeros(count, count, dtype=torch.bool)
    rows = list(before)
    for i in range(count):
        row = rows[i]
        for j in (*done[i], *started[i]):
            torch.logical_or(row, rows[j], out=row)
        if done[i]:
            row[torch.tensor(done[i])] = True
    return before


def _behind(
    heads: list[float],
    took: list[float],
    before: Tensor,
    loads: Tensor,
    machines: Tensor,
    done: list[list[int]],
) -> list[float]:
    """Heads that count what each machine must do of a node's ancestors, one after another."""
    found = _worked_off(heads, before, loads, machines)
    for i, ends in enumerate(done):
        for j in ends:
            found[i] = max(found[i], found[j] + took[j])
    return found


def _ahead(
    tails: list[float],
    took: list[float],
    before: Tensor,
    loads: Tensor,
    machines: Tensor,
    done: list[list[int]],
) -> list[float]:
    """The same of tails and what comes behind."""
    found = _worked_off(tails, before.t(), loads, machines)
    for i in range(len(done) - 1, -1, -1):
        for j in done[i]:
            found[j] = max(found[j], found[i] + took[i])
    return found


def _worked_off(known: list[float], others: Tensor, loads: Tensor, machines: Tensor) -> list[float]:
    """By node, when each machine has at the earliest done those of the others in a node's row.

    Of those that can come last: when the first of them can, and then all of them.
    """
    heads = torch.tensor(known, dtype=torch.float64)
    best = heads.clone()
    order = torch.argsort(heads, descending=True, stable=True)
    for number in range(int(machines.max()) + 1):
        mine = order[(machines[order] == number) & (loads[order] > 0)]
        if mine.numel() == 0:
            continue
        # In pieces that torch works on in one thread: others would be waited for on a busy machine.
        rows = max(1, _PIECE // mine.numel())
        for at in range(0, len(known), rows):
            these = others[at : at + rows, mine]
            work = torch.cumsum(these * loads[mine], 1) + heads[mine]
            latest = torch.where(these, work, 0.0).amax(1)
            torch.maximum(best[at : at + rows], latest, out=best[at : at + rows])
    return best.tolist()  # type: ignore[no-any-return]


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
