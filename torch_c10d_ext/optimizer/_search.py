"""Local search: moves along the critical path of a schedule, within a budget of memory and work.

List scheduling never lets the rank idle while something could run, and never looks ahead; the best
schedules do both. The search starts from its result. What takes the time of a schedule is a path:
runs of computations, launches that queue for a link, and stalls until one has landed. Only a move
that breaks such a run can help, so these alone are tried (Grabowski's blocks; Nowicki and
Smutnicki 1996), and a worse schedule is taken now and then, less and less (threshold accepting;
Dueck and Scheuer 1990). The same numbers decide on all ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Mapping, Sequence

from torch_c10d_ext.optimizer._memory import peak_of
from torch_c10d_ext.optimizer._problem import Problem
from torch_c10d_ext.optimizer._schedule import Step

# What is accepted at first: so much longer than the schedule at hand, as a share of its time.
_THRESHOLD = 0.004

# What it costs to hold too much at all, as a share of the time.
_EXCESS = 0.003


class Search:
    """Neighbours of a schedule.

    Views and the like are left out, and put before the first node that needs them when an order is
    written.

    Args:
        p: the graph.
        keys: by start, what the members of its bucket must have in common.
        sizes: by start, its bytes.
        cap: bytes of a bucket.
        limit: bytes that may be held at once.
    """

    def __init__(
        self,
        p: Problem,
        keys: Mapping[int, Hashable],
        sizes: Mapping[int, float],
        cap: float,
        limit: float,
    ) -> None:
        self.p, self.keys, self.sizes, self.cap, self.limit = p, keys, sizes, cap, limit
        self.count = len(p.nodes) - 1
        self.writer = _Writer(p)
        self.work = 0
        self.state = 2463534242
        # By node: the nodes of the search that it follows, through those that are none.
        self.behind: list[tuple[int, ...]] = []
        for i in range(self.count):
            behind: dict[int, None] = {}
            for j in p.follows[i]:
                if self._is_step(j):
                    behind[j] = None
                else:
                    behind.update(dict.fromkeys(self.behind[j]))
            self.behind.append(tuple(behind))

    def _is_step(self, i: int) -> bool:
        return not self.p.idle[i] or i in self.p.started_by

    # --- the search ----------------------------------------------------------------------------

    def improve(
        self,
        order: Sequence[Step],
        known: float,
        enough: float,
        work: int,
        take: Callable[[list[Step]], None],
    ) -> None:
        """Tries neighbours, and theirs, for so much work.

        Args:
            order: a schedule that keeps to the limit.
            known: the seconds that it takes.
            enough: seconds at which the search ends.
            work: nodes whose time is worked out.
            take: is given each better schedule within the limit.
        """
        steps = [s for s in order if isinstance(s, tuple) or self._is_step(s)]
        total, path = self._timeline(steps)
        # What too much memory costs, which rises while there is too much.
        weight = 1.0
        cost, best = total, known
        _, peak = self.written(steps)
        if peak > self.limit:  # as it waits later than the schedule did
            cost *= 1 + weight * (_EXCESS + peak / self.limit - 1.0)
        began, end = self.work, self.work + work
        while self.work < end and best > enough:
            moved = self._neighbour(steps, path)
            if moved is None:
                self.work += 20
                continue
            longer, its_path = self._timeline(moved)
            cooled = 1.0 - (self.work - began) / work
            accepted = cost * (1 + _THRESHOLD * cooled * cooled)
            if longer > accepted:
                continue
            written, peak = self.written(moved)
            excess = max(0.0, peak / self.limit - 1.0) if self.limit else 0.0
            if excess > 0.0:
                more = longer * (1 + weight * (_EXCESS + excess))
                if more > accepted:
                    continue
                weight *= 1.02
            else:
                more = longer
                weight /= 1.02
                if longer < best * (1 - 1e-6):
                    best = longer
                    take(written)
            steps, cost, path = moved, more, its_path

    def _random(self, below: int) -> int:
        # Of our own: the same numbers on every rank and every version of Python.
        x = self.state
        x ^= x << 13 & 0xFFFFFFFF
        x ^= x >> 17
        x ^= x << 5 & 0xFFFFFFFF
        self.state = x & 0xFFFFFFFF
        return self.state % below

    def _timeline(self, steps: Sequence[Step]) -> tuple[float, list[tuple[int, int, int]]]:
        """How long steps take, and the runs of the path that takes it, the last one first.

        A run is (kind, from, to), by places: kind 0 is computations, behind a stall and before a
        launch, both excluded; kind 1 is launches that queue for a link.
        """
        p, started_by = self.p, self.p.started_by
        collectives, seconds = p.collectives, p.seconds
        now = 0.0
        free = [0.0] * len(p.lanes)
        last = [-1] * len(p.lanes)
        lands: dict[int, float] = {}
        where: dict[int, int] = {}
        stalled: list[int] = [-1] * len(steps)  # by place: the launch that it waits for
        queued: list[int] = [-1] * len(steps)  # by place: the launch that it queues behind
        self.work += len(steps)
        for at, step in enumerate(steps):
            if type(step) is int and step not in collectives:
                start = started_by.get(step)
                if start is None:
                    now += seconds[step]
                elif lands[start] > now:
                    now = lands[start]
                    stalled[at] = where[start]
                continue
            members = step if isinstance(step, tuple) else (step,)
            sent = latency = 0.0
            for i in members:
                if p.latency[i] > latency:
                    latency = p.latency[i]
                sent += p.sent[i] - p.latency[i]
            if len(members) > 1 and members[0] in p.copying:
                now += sum(p.copying[i] for i in members)
            lane = p.lane[members[0]]
            if free[lane] > now:
                queued[at] = last[lane]
                free[lane] += sent + latency
            else:
                free[lane] = now + sent + latency
            last[lane] = at
            for i in members:
                lands[i] = free[lane]
                where[i] = at
        total = max(now, *free)
        path: list[tuple[int, int, int]] = []
        at = len(steps) - 1
        on_link = -1
        if total > now:
            on_link = last[free.index(total)]
        while True:
            if on_link >= 0:
                first = on_link
                while queued[first] >= 0:
                    first = queued[first]
                path.append((1, first, on_link))
                at = first
                at -= 1
            first = at
            while first >= 0 and stalled[first] < 0:
                first -= 1
            if at >= 0:
                path.append((0, max(first, 0), at))
            if first < 0:
                return total, path
            on_link = stalled[first]

    # --- moves ---------------------------------------------------------------------------------

    def _neighbour(self, steps: list[Step], path: list[tuple[int, int, int]]) -> list[Step] | None:
        kind, first, last = path[self._random(len(path))]
        if kind == 1:
            return self._move_launch(steps, first, last)
        if self._random(3) == 0 and last + 1 < len(steps):
            # Something from behind the run, before it: it fills the stall there.
            window = 1 + self._random(min(96, len(steps) - last - 1))
            return self._earlier(steps, last + 1 + self._random(window), first)
        at = first + self._random(last - first + 1)
        if self._random(2):
            return self._later(steps, at, last + 1)
        return self._earlier(steps, at, first)

    def _move_launch(self, steps: list[Step], first: int, last: int) -> list[Step] | None:
        pick = self._random(4)
        at = last if pick else first + self._random(last - first + 1)
        if pick == 1:  # the one that is waited for comes before those that it queues behind
            return self._earlier(steps, at, first + self._random(last - first + 1))
        if pick == 2:  # or one of these comes later
            at = first + self._random(last - first + 1)
            return self._later(steps, at, min(len(steps) - 1, last + self._random(8)))
        if pick == 3:  # or what it is made of comes earlier
            return self._earlier(steps, first, max(0, first - 1 - self._random(16)))
        return self._split(steps, at) if self._random(2) else self._merge(steps, at)

    def _earlier(self, steps: list[Step], at: int, to: int) -> list[Step] | None:
        """Moves a step, with what it follows, to a place before it."""
        if to >= at:
            return None
        self.work += (at - to) // 4
        needed = set(self._behind(steps[at]))
        moved: list[Step] = [steps[at]]
        stay: list[Step] = []
        for k in range(at - 1, to - 1, -1):
            step = steps[k]
            if any(i in needed for i in ((step,) if isinstance(step, int) else step)):
                needed.update(self._behind(step))
                moved.append(step)
            else:
                stay.append(step)
        if not stay:
            return None
        return [*steps[:to], *reversed(moved), *reversed(stay), *steps[at + 1 :]]

    def _later(self, steps: list[Step], at: int, to: int) -> list[Step] | None:
        """Moves a step, with what follows it, behind a place after it."""
        if to >= len(steps) or to <= at:
            return None
        self.work += (to - at) // 4
        taken = set(_members(steps[at]))
        moved: list[Step] = [steps[at]]
        stay: list[Step] = []
        for k in range(at + 1, to + 1):
            step = steps[k]
            if any(j in taken for j in self._behind(step)):
                taken.update(_members(step))
                moved.append(step)
            else:
                stay.append(step)
        if not stay:
            return None
        return [*steps[:at], *stay, *moved, *steps[to + 1 :]]

    def _behind(self, step: Step) -> tuple[int, ...]:
        if type(step) is int:
            return self.behind[step]
        return tuple(j for i in step for j in self.behind[i])  # type: ignore[union-attr]

    def _merge(self, steps: list[Step], at: int) -> list[Step] | None:
        """One launch of a launch and the next one that may go with it, at either's place."""
        members = _members(steps[at])
        key = self.keys.get(members[0])
        if key is None or members[0] not in self.p.collectives:
            return None
        size = sum(self.sizes[i] for i in members)
        for k in range(at + 1, len(steps)):
            other = _members(steps[k])
            if self.keys.get(other[0]) != key:
                continue
            if size + sum(self.sizes[i] for i in other) > self.cap:
                return None
            both = tuple(sorted((*members, *other)))
            # At the place of the second, when what follows the first alone can follow there.
            late = self._later(steps, at, k)
            if late is None:
                return None
            place = late.index(steps[k])
            if late[place + 1] != steps[at]:
                return None
            return [*late[:place], both, *late[place + 2 :]]
        return None

    def _split(self, steps: list[Step], at: int) -> list[Step] | None:
        """Two launches of one."""
        members = _members(steps[at])
        if len(members) < 2:
            return None
        cut = 1 + self._random(len(members) - 1)
        parts = [p if len(p) > 1 else p[0] for p in (members[:cut], members[cut:])]
        return [*steps[:at], *parts, *steps[at + 1 :]]

    def written(self, steps: Sequence[Step]) -> tuple[list[Step], float]:
        """The order of all nodes, and the most bytes that it holds at once."""
        order, peak, passes = self.writer.write(steps, self.limit)
        self.work += passes * self.count
        return order, peak


class _Writer:
    """Writes the order of all nodes from that of the search's steps."""

    def __init__(self, p: Problem) -> None:
        self.p, self.count = p, len(p.nodes) - 1
        # Waits that need nothing but their launch: those may come early.
        self.waits = {
            start: [w for w in waits if p.follows[w] == [start]]
            for start, waits in p.waits().items()
        }

    def write(self, steps: Sequence[Step], limit: float) -> tuple[list[Step], float, int]:
        """The order, the most bytes that it holds at once, and how many passes that took.

        Waits come as late as they may; where that takes too much memory, as soon as they take no
        time, since what has landed frees what it was made of.
        """
        order: list[Step] = []
        peak, passes = float("inf"), 0
        for early in (False, True):
            passes += 1
            order = self._expand(steps, early)
            flat = [i for step in order for i in _members(step)]
            flat.append(self.count)
            peak = peak_of(self.p, flat)
            if peak <= limit:
                break
        return order, peak, passes

    def _expand(self, steps: Sequence[Step], early: bool) -> list[Step]:
        p = self.p
        out = [False] * self.count
        order: list[Step] = []
        now = 0.0
        free = [0.0] * len(p.lanes)
        lands: dict[int, float] = {}
        landing: list[tuple[float, int]] = []

        def emit(i: int) -> None:
            stack = [i]
            while stack:
                k = stack[-1]
                missing = [j for j in p.follows[k] if not out[j]]
                if missing:
                    stack.extend(missing)
                    continue
                stack.pop()
                if not out[k]:
                    out[k] = True
                    order.append(k)

        for step in steps:
            members = _members(step)
            if early:
                if members[0] in p.started_by:
                    now = max(now, lands[p.started_by[members[0]]])
                while landing and landing[0][0] <= now:
                    emit(heapq.heappop(landing)[1])
                if out[members[0]]:
                    continue
            for i in members:
                for j in p.follows[i]:
                    if not out[j]:
                        emit(j)
            for i in members:
                out[i] = True
            order.append(step)
            if not early:
                continue
            if members[0] not in p.collectives:
                now += p.seconds[members[0]]
                continue
            sent = max(p.latency[i] for i in members)
            sent += sum(p.sent[i] - p.latency[i] for i in members)
            lane = p.lane[members[0]]
            free[lane] = max(now, free[lane]) + sent
            for i in members:
                lands[i] = free[lane]
                for wait in self.waits[i]:
                    heapq.heappush(landing, (free[lane], wait))
        for i in range(self.count):
            if not out[i]:
                emit(i)
        return order


def _members(step: Step) -> tuple[int, ...]:
    return step if isinstance(step, tuple) else (step,)
