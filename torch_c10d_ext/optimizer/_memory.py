"""The memory that a schedule holds, against a budget, while the schedule is made.

The state is always safe: once what is in flight has been waited for, the nodes that are left stay
within the budget if they run in the order of the graph. A node that would run before its turn is
tried against that, as in Dijkstra's banker's algorithm, in O(log n).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch_c10d_ext.optimizer._problem import Problem

_NEVER = float("-inf")


class Budget:
    """Live bytes of a schedule under construction, and of its continuation in the graph's order.

    Args:
        problem: the graph.
        limit: bytes, at least the peak of the graph's own order.
    """

    def __init__(self, problem: Problem, limit: float) -> None:
        self.problem, self.limit = problem, limit
        n = len(problem.nodes)
        self.live = 0.0  # now
        self.steps = 0  # of work, for those who count
        self.waits = problem.waits()
        # The users of a storage that are left: how many, and in the continuation, the last on top.
        self.uses = [len(users) for users in problem.users]
        self.left = [list(users) for users in problem.users]
        self.done = [False] * n  # in the continuation, where waits follow their starts at once
        self.head = 0  # the first node that is not
        # What is live while node i runs is the sum of `delta` from i on. A tree keeps each range's
        # sum and the greatest sum of an end of the range.
        self.leaves = 1
        while self.leaves < n:
            self.leaves *= 2
        total, best = [0.0] * (2 * self.leaves), [_NEVER] * (2 * self.leaves)
        for s, users in enumerate(problem.users):
            if users:
                total[self.leaves + users[-1]] += problem.size[s]
                if problem.maker[s] > 0:
                    total[self.leaves + problem.maker[s] - 1] -= problem.size[s]
        for i in range(n):
            best[self.leaves + i] = total[self.leaves + i]
        for k in range(self.leaves - 1, 0, -1):
            total[k] = total[2 * k] + total[2 * k + 1]
            best[k] = max(best[2 * k + 1], best[2 * k] + total[2 * k + 1])
        self.total, self.best = total, best

    def run(self, i: int) -> bool:
        """Runs node i now; False, and nothing has changed, where that might pass the limit."""
        p = self.problem
        size = p.size
        made = 0.0
        for s in p.made[i]:
            made += size[s]
        if self.live + made > self.limit:
            return False
        if not self.done[i] and not self._place(i, made):
            return False
        self.live += made
        for s in p.used[i]:
            self.uses[s] -= 1
            if self.uses[s] == 0:
                self.live -= size[s]
        return True

    def _place(self, i: int, made: float) -> bool:
        """Makes i the next node of the continuation, and a collective's waits those behind it."""
        p = self.problem
        moved = [i]
        self.done[i] = True
        for wait in self.waits.get(i, ()):
            # Where memory gets short, what is in flight is waited for first.
            if not self.done[wait] and all(self.done[j] for j in p.follows[wait]):
                self.done[wait] = True
                moved.append(wait)
        if i != self.head or len(moved) > 1:
            changes = [(i - 1, made)] if made and i else []
            for s in dict.fromkeys(s for k in moved for s in p.used[k]):
                users = self.left[s]
                k = len(users) - 1
                while k >= 0 and self.done[users[k]]:
                    k -= 1
                if k < len(users) - 1:
                    changes.append((users[-1], -float(p.size[s])))
                    if k >= 0:
                        changes.append((users[k], float(p.size[s])))
            were = [self.best[self.leaves + k] for k in moved]
            self._change(moved, changes, gone=True)
            if i != self.head and self._peak() > self.limit:
                for k, was in zip(moved, were, strict=True):
                    self.done[k] = False
                    self.best[self.leaves + k] = was
                self._change(moved, [(at, -amount) for at, amount in changes], gone=False)
                return False
        for s in {s for k in moved for s in p.used[k]}:
            users = self.left[s]
            while users and self.done[users[-1]]:
                users.pop()
        while self.head < len(self.done) and self.done[self.head]:
            self.head += 1
        return True

    def _change(
        self, moved: Iterable[int], changes: Iterable[tuple[int, float]], gone: bool
    ) -> None:
        total, best, leaves = self.total, self.best, self.leaves
        touched = {leaves + i for i in moved}
        if gone:
            for k in touched:
                best[k] = _NEVER
        for at, amount in changes:
            # What lies before the head has run, and asks for nothing.
            if at >= self.head:
                total[leaves + at] += amount
                touched.add(leaves + at)
        for k in touched:
            if best[k] != _NEVER:
                best[k] = total[k]
        while touched:
            touched = {k >> 1 for k in touched}
            touched.discard(0)
            self.steps += len(touched)
            for k in touched:
                a, b = 2 * k, 2 * k + 1
                rest = total[b]
                total[k] = total[a] + rest
                first, second = best[a] + rest, best[b]
                best[k] = first if first > second else second

    def _peak(self) -> float:
        """The most that is live from the head on, in the order of the graph."""
        total, best = self.total, self.best
        low, high = self.leaves + self.head, 2 * self.leaves
        # Ranges from the left: each one's best gets the sums of those behind it.
        left: list[int] = []
        right: list[int] = []
        while low < high:
            if low & 1:
                left.append(low)
                low += 1
            if high & 1:
                high -= 1
                right.append(high)
            low >>= 1
            high >>= 1
        behind, peak = 0.0, _NEVER
        for k in (*right, *reversed(left)):
            peak = max(peak, best[k] + behind)
            behind += total[k]
        return peak


def peak_of(problem: Problem, order: list[int]) -> float:
    """The most bytes that an order of all nodes holds at once."""
    at = [0] * len(order)
    for position, i in enumerate(order):
        at[i] = position
    freed = [0.0] * (len(order) + 1)
    for s, users in enumerate(problem.users):
        if users:
            freed[max([at[i] for i in users])] += problem.size[s]
    live = peak = 0.0
    for position, i in enumerate(order):
        for s in problem.made[i]:
            live += problem.size[s]
        if live > peak:
            peak = live
        live -= freed[position]
    return peak
