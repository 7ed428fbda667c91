"""List scheduling of one compute stream and of links, with buckets formed where launches queue.

A launch is a tuple of collectives of one kind that are started together. Whatever the policy, the
result is an order of the graph's nodes that keeps every dependency; policies differ in speed alone.
Ties are broken by the order of the graph, so ranks that run one program make one schedule.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from torch_c10d_ext.optimizer._memory import Budget
from torch_c10d_ext.optimizer._problem import Problem

# A node, or the starts of a bucket.
Step = int | tuple[int, ...]

# How many nodes that do not fit into memory are passed over before the graph's order goes on.
_TRIES = 6


@dataclass(frozen=True)
class Policy:
    """What to prefer where several nodes could run.

    Attributes:
        by_path: the node with the longest path behind it; else the first in the graph.
        bucket: bytes that a launch waits for, while there is something to compute; 0 for launches
            of one collective.
        seed: of the tie-breaking noise that a search adds; 0 for none.
    """

    by_path: bool = False
    bucket: float = 0.0
    seed: int = 0


def longest_paths(p: Problem) -> list[float]:
    """Seconds from the start of each node to the end of the graph, if nothing had to queue."""
    path = [0.0] * len(p.nodes)
    for i in range(len(p.nodes) - 1, -1, -1):
        path[i] += p.seconds[i] + p.sent.get(i, 0.0) + p.overhead.get(i, 0.0)
        for j in p.follows[i]:
            if path[j] < path[i]:
                path[j] = path[i]
    return path


class Scheduler:
    """One run of list scheduling.

    Args:
        problem: the graph.
        after: the nodes behind each node: the reverse of ``problem.follows``.
        keys: by start, what its bucket's members must have in common.
        sizes: by start, the bytes that count towards the size of a bucket.
        cap: bytes of a bucket.
        paths: see :func:`longest_paths`.
        needed: by start, the first node that computes with its result.
    """

    def __init__(
        self,
        problem: Problem,
        after: list[list[int]],
        keys: Mapping[int, Hashable],
        sizes: Mapping[int, float],
        cap: float,
        paths: list[float],
        needed: Mapping[int, int],
    ) -> None:
        self.p, self.after, self.keys, self.sizes = problem, after, keys, sizes
        self.cap, self.paths, self.needed = cap, paths, needed
        self.steps = 0  # of work

    def run(self, policy: Policy, budget: Budget | None) -> list[Step]:
        """The order of all nodes but the output."""
        return _Run(self, policy, budget).go()


class _Run:
    def __init__(self, made_by: Scheduler, policy: Policy, budget: Budget | None) -> None:
        self.by, self.policy, self.budget = made_by, policy, budget
        p = self.p = made_by.p
        self.count = len(p.nodes) - 1  # the output has its place
        self.missing = [len(f) for f in p.follows]
        self.ready_at = [0.0] * len(p.nodes)
        self.out = [False] * len(p.nodes)  # whether a node has its place in the order
        self.order: list[Step] = []
        self.now = 0.0
        self.free = [0.0] * len(p.lanes)  # when a link has done what it was given
        self.lands: dict[int, float] = {}  # when a collective is done
        self.landing: list[tuple[float, int]] = []  # waits, by the time that they are over
        self.head = 0  # the first node of the graph without a place
        self.todo = sum(not p.idle[i] for i in range(self.count))
        self.runnable: list[tuple[float, int]] = []
        self.later: list[tuple[float, int]] = []  # by the time that they can run at
        self.queues: list[list[tuple[float, int]]] = [[] for _ in p.lanes]
        self.waiting: dict[Hashable, list[tuple[float, int]]] = {}  # by key
        self.weight: dict[Hashable, float] = {}  # bytes in `waiting`
        self.unready: dict[Hashable, int] = {}  # how many are not in `waiting` yet
        self.counted: set[int] = set()  # those that are in `waiting`, or were
        self.keys = made_by.keys if policy.bucket else {}
        self.limit = min(policy.bucket, made_by.cap)
        self.buckets: list[list[Hashable]] = [[] for _ in p.lanes]  # the keys of each link
        for i, key in self.keys.items():
            if key not in self.unready:
                self.unready[key] = 0
                self.weight[key] = 0.0
                self.waiting[key] = []
                self.buckets[p.lane[i]].append(key)
            self.unready[key] += 1
        self.priority = self._priorities()

    def _priorities(self) -> list[float]:
        p, by = self.p, self.by
        if self.policy.by_path:
            priority = [-path for path in by.paths]
        else:
            priority = [float(i) for i in range(len(p.nodes))]
            for i, node in by.needed.items():
                priority[i] = float(node)
        if self.policy.seed:
            # A generator of our own: the same numbers on every rank and every version of Python.
            state, scale = self.policy.seed * 2654435761 % 2**32, max(map(abs, priority), default=1)
            for i in range(len(priority)):
                state = (state * 1664525 + 1013904223) % 2**32
                priority[i] += (state / 2**32 - 0.5) * 0.3 * scale
        return priority

    def go(self) -> list[Step]:
        for i in range(self.count):
            if not self.p.follows[i]:
                self._release(i)
        while self.todo:
            self.by.steps += 1
            self._settle()
            chosen = self._choose()
            if chosen is not None:
                self._fill(self.now + self.p.seconds[chosen], flush=False)
                if not self._compute():
                    self._go_on()
            elif not self._fill(self.later[0][0] if self.later else float("inf"), flush=True):
                if self.later:
                    self.now = max(self.now, self.later[0][0])
                else:
                    self._go_on()
        for i in range(self.count):
            if not self.out[i]:
                self._emit(i)
        return self.order

    # --- what can run --------------------------------------------------------------------------

    def _release(self, first: int) -> None:
        """Node ``first`` has all that it must follow; nodes without duration pass that on."""
        p = self.p
        stack = [first]
        while stack:
            i = stack.pop()
            if i >= self.count:
                continue
            if not p.idle[i]:
                heapq.heappush(self.later, (self.ready_at[i], i))
                continue
            start = p.started_by.get(i)
            if start is not None:
                self.ready_at[i] = max(self.ready_at[i], self.lands[start])
                heapq.heappush(self.landing, (self.ready_at[i], i))
            stack.extend(self._pass_on(i, self.ready_at[i]))

    def _pass_on(self, i: int, time: float) -> list[int]:
        released = []
        for j in self.by.after[i]:
            self.missing[j] -= 1
            if self.ready_at[j] < time:
                self.ready_at[j] = time
            if self.missing[j] == 0:
                released.append(j)
        return released

    def _settle(self) -> None:
        """Sorts what can run by now into the queues that it is taken from."""
        while self.later and self.later[0][0] <= self.now:
            _, i = heapq.heappop(self.later)
            if self.out[i]:
                continue
            entry = (self.priority[i], i)
            if i not in self.p.collectives:
                heapq.heappush(self.runnable, entry)
                continue
            key = self.keys.get(i)
            if key is None:
                heapq.heappush(self.queues[self.p.lane[i]], entry)
            else:
                heapq.heappush(self.waiting[key], entry)
                self.weight[key] += self.by.sizes[i]
                self.unready[key] -= 1
                self.counted.add(i)

    def _choose(self) -> int | None:
        """The computation that is next if it fits into memory; it stays where it is."""
        while self.runnable and self.out[self.runnable[0][1]]:
            heapq.heappop(self.runnable)
        return self.runnable[0][1] if self.runnable else None

    # --- places in the order -------------------------------------------------------------------

    def _emit(self, i: int) -> None:
        """Gives a node without duration its place, behind those that it must follow."""
        stack = [i]
        while stack:
            k = stack[-1]
            if self.out[k]:
                stack.pop()
                continue
            missing = [j for j in self.p.follows[k] if not self.out[j]]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            self.out[k] = True
            self.order.append(k)
            if self.budget is not None:
                self.budget.run(k)

    def _fits(self, i: int) -> bool:
        """Puts the waits and views that i follows before it, and takes the memory that it makes."""
        for j in self.p.follows[i]:
            if not self.out[j]:
                self._emit(j)
        if self.budget is None or self.budget.run(i):
            self.out[i] = True
            return True
        # What has arrived frees what it was made of.
        if not self._wait_for_landed() or not self.budget.run(i):
            return False
        self.out[i] = True
        return True

    def _wait_for_landed(self) -> bool:
        """Puts the waits whose collectives are done into the order; whether there are any."""
        waited = False
        while self.landing and self.landing[0][0] <= self.now:
            _, wait = heapq.heappop(self.landing)
            if not self.out[wait]:
                self._emit(wait)
                waited = True
        return waited

    def _compute(self) -> bool:
        """Runs the best computation that fits into memory, if one of the first few does."""
        passed: list[tuple[float, int]] = []
        found = False
        while self.runnable and len(passed) < _TRIES and not found:
            entry = heapq.heappop(self.runnable)
            i = entry[1]
            if self.out[i]:
                continue
            found = self._fits(i)
            if found:
                self.order.append(i)
                self._finish(i)
            else:
                passed.append(entry)
        for entry in passed:
            heapq.heappush(self.runnable, entry)
        return found

    def _finish(self, i: int) -> None:
        self.now = max(self.now, self.ready_at[i]) + self.p.seconds[i]
        self.todo -= 1
        for j in self._pass_on(i, self.now):
            self._release(j)

    def _go_on(self) -> None:
        """Runs the next node in the graph's order, which always fits."""
        while self.head < self.count and self.out[self.head]:
            self.head += 1
        i = self.head
        if i >= self.count:
            return
        self.now = max(self.now, self.ready_at[i])
        if self.p.idle[i]:
            self._emit(i)
            return
        while not self._fits(i):
            # What is in flight frees what it was made of.
            self.now = max(self.now, self.landing[0][0])
        if i in self.p.collectives:
            self._launch([i])
        else:
            self.order.append(i)
            self._finish(i)

    # --- launches ------------------------------------------------------------------------------

    def _fill(self, until: float, flush: bool) -> bool:
        """Gives the links work up to a time; whether there was any."""
        given = False
        for lane in range(len(self.queues)):
            misfits: list[tuple[tuple[float, int], list[tuple[float, int]]]] = []
            while self.free[lane] <= self.now or self.free[lane] < until:
                queue = self._next_queue(lane, flush)
                if queue is None:
                    break
                entry = heapq.heappop(queue)
                if self._start(entry[1]):
                    given = True
                else:
                    misfits.append((entry, queue))
                    if len(misfits) == _TRIES:
                        break
            for entry, queue in misfits:
                heapq.heappush(queue, entry)
        return given

    def _next_queue(self, lane: int, flush: bool) -> list[tuple[float, int]] | None:
        """Where the best collective is that a link can be given now."""
        best = None
        for key in (None, *self.buckets[lane]):
            queue = self.queues[lane] if key is None else self.waiting[key]
            while queue and self.out[queue[0][1]]:
                heapq.heappop(queue)
            if not queue or (best is not None and best[0] < queue[0]):
                continue
            # A launch waits for others to go with it, while there is something to compute.
            holds = key is not None and self.unready[key] and self.weight[key] < self.limit
            if holds and not flush:
                continue
            best = queue
        return best

    def _start(self, i: int) -> bool:
        """Starts collective i, with what is ready to go with it; whether that fits."""
        if not self._fits(i):
            return False
        members = [i]
        key = self.keys.get(i)
        if key is not None:
            size = self.by.sizes[i]
            queue = self.waiting[key]
            passed: list[tuple[float, int]] = []
            while queue and size < self.limit and len(passed) < _TRIES:
                entry = heapq.heappop(queue)
                j = entry[1]
                if self.out[j]:
                    continue
                if size + self.by.sizes[j] <= self.by.cap and self._fits(j):
                    members.append(j)
                    size += self.by.sizes[j]
                else:
                    passed.append(entry)
            for entry in passed:
                heapq.heappush(queue, entry)
        self._launch(members)
        return True

    def _launch(self, members: list[int]) -> None:
        """Gives collectives that are `out` one place, and the link their bytes."""
        p = self.p
        members.sort()
        first = members[0]
        self.order.append(first if len(members) == 1 else tuple(members))
        lane = p.lane[first]
        packed = len(members) > 1 and first in p.copying
        self.now += p.busy(members)
        self.free[lane] = max(self.now, self.free[lane]) + p.on_link(members)
        for i in members:
            key = self.keys.get(i)
            if key is not None and i in self.counted:
                self.weight[key] -= self.by.sizes[i]
            elif key is not None:
                self.unready[key] -= 1
            self.lands[i] = self.free[lane] + (p.copying[i] if packed else 0.0)
            self.todo -= 1
        for i in members:
            for j in self._pass_on(i, self.now):
                self._release(j)
