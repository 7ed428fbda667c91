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
from torch_c10d_ext.optimizer._moves import Moves, members_of
from torch_c10d_ext.optimizer._problem import Problem
from torch_c10d_ext.optimizer._schedule import Step

# What is accepted at first: so much longer than the schedule at hand, as a share of its time.
_THRESHOLD = 0.004

# What it costs to hold too much at all, as a share of the time.
_EXCESS = 0.003


class Search(Moves):
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
        super().__init__(p, keys, sizes, cap)
        self.limit = limit
        self.calls_take_time = any(p.overhead.values())
        self.writer = _Writer(p)
        self.state = 2463534242

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
        steps = [s for s in order if isinstance(s, tuple) or self.is_step(s)]
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

    def fewer(
        self,
        order: Sequence[Step],
        ceiling: float,
        work: int,
        take: Callable[[list[Step]], None],
    ) -> None:
        """Merges launches that follow one another, while that takes no more than a ceiling.

        Args:
            order: a schedule that keeps to the limit.
            ceiling: seconds.
            work: nodes whose time is worked out.
            take: is given the schedule after each merge.
        """
        steps = [s for s in order if isinstance(s, tuple) or self.is_step(s)]
        end = self.work + work
        at = 0
        while at < len(steps) and self.work < end:
            merged = None
            if members_of(steps[at])[0] in self.p.collectives:
                for early in (True, False):
                    merged = self.merge(steps, at, early)
                    if merged is None or self._timeline(merged)[0] > ceiling:
                        continue
                    written, peak = self.written(merged)
                    if peak <= self.limit:
                        take(written)
                        break
                else:
                    merged = None
            if merged is None:
                at += 1
            else:
                steps = merged

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
            sent = latency = overhead = 0.0
            for i in members:
                if p.latency[i] > latency:
                    latency = p.latency[i]
                if p.overhead[i] > overhead:
                    overhead = p.overhead[i]
                now += seconds[i]
                sent += p.sent[i] - p.latency[i]
            now += overhead
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
            return self.earlier(steps, last + 1 + self._random(window), first)
        at = first + self._random(last - first + 1)
        is_launch = members_of(steps[at])[0] in self.p.collectives
        if self.calls_take_time and is_launch and self._random(2):
            return self.merge(steps, at)
        if self._random(2):
            return self.later(steps, at, last + 1)
        return self.earlier(steps, at, first)

    def _move_launch(self, steps: list[Step], first: int, last: int) -> list[Step] | None:
        pick = self._random(4)
        at = last if pick else first + self._random(last - first + 1)
        if pick == 1:  # the one that is waited for comes before those that it queues behind
            return self.earlier(steps, at, first + self._random(last - first + 1))
        if pick == 2:  # or one of these comes later
            at = first + self._random(last - first + 1)
            return self.later(steps, at, min(len(steps) - 1, last + self._random(8)))
        if pick == 3:  # or what it is made of comes earlier
            return self.earlier(steps, first, max(0, first - 1 - self._random(16)))
        if not self._random(2):
            return self.merge(steps, at)
        count = len(members_of(steps[at]))
        return self.split(steps, at, 1 + self._random(count - 1)) if count > 1 else None

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
            flat = [i for step in order for i in members_of(step)]
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
            members = members_of(step)
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
            now += p.busy(members)
            lane = p.lane[members[0]]
            free[lane] = max(now, free[lane]) + p.on_link(members)
            for i in members:
                lands[i] = free[lane]
                for wait in self.waits[i]:
                    heapq.heappush(landing, (free[lane], wait))
        for i in range(self.count):
            if not out[i]:
                emit(i)
        return order
