"""Moves from one order of a graph's steps to another that keeps every dependency."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from torch_c10d_ext.optimizer._problem import Problem
from torch_c10d_ext.optimizer._schedule import Step


def members_of(step: Step) -> tuple[int, ...]:
    """The nodes of a step, which a bucket has several of."""
    return step if isinstance(step, tuple) else (step,)


class Moves:
    """Orders that differ from a given one in the place of a step, or in a launch.

    Args:
        p: the graph.
        keys: by start, what the members of its bucket must have in common.
        sizes: by start, its bytes.
        cap: bytes of a bucket.
    """

    def __init__(
        self, p: Problem, keys: Mapping[int, Hashable], sizes: Mapping[int, float], cap: float
    ) -> None:
        self.p, self.keys, self.sizes, self.cap = p, keys, sizes, cap
        self.count = len(p.nodes) - 1
        self.work = 0
        # By node: the nodes of the search that it follows, through those that are none.
        self.behind: list[tuple[int, ...]] = []
        for i in range(self.count):
            behind: dict[int, None] = {}
            for j in p.follows[i]:
                if self.is_step(j):
                    behind[j] = None
                else:
                    behind.update(dict.fromkeys(self.behind[j]))
            self.behind.append(tuple(behind))

    def is_step(self, i: int) -> bool:
        """Whether a node has a place of its own: views and the like have none."""
        return not self.p.idle[i] or i in self.p.started_by

    def earlier(self, steps: list[Step], at: int, to: int) -> list[Step] | None:
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

    def later(self, steps: list[Step], at: int, to: int) -> list[Step] | None:
        """Moves a step, with what follows it, behind a place after it."""
        if to >= len(steps) or to <= at:
            return None
        self.work += (to - at) // 4
        taken = set(members_of(steps[at]))
        moved: list[Step] = [steps[at]]
        stay: list[Step] = []
        for k in range(at + 1, to + 1):
            step = steps[k]
            if any(j in taken for j in self._behind(step)):
                taken.update(members_of(step))
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

    def merge(self, steps: list[Step], at: int, early: bool = False) -> list[Step] | None:
        """One launch of a launch and the next one that may go with it.

        At the place of the second, or of the first, if what lies between can follow there.
        """
        members = members_of(steps[at])
        key = self.keys.get(members[0])
        if key is None or members[0] not in self.p.collectives:
            return None
        size = sum(self.sizes[i] for i in members)
        for k in range(at + 1, len(steps)):
            other = members_of(steps[k])
            if self.keys.get(other[0]) != key:
                continue
            if size + sum(self.sizes[i] for i in other) > self.cap:
                return None
            both = tuple(sorted((*members, *other)))
            moved = self.earlier(steps, k, at) if early else self.later(steps, at, k)
            if moved is None:
                return None
            place = moved.index(steps[k])
            if moved[place + 1] != steps[at]:
                return None
            return [*moved[:place], both, *moved[place + 2 :]]
        return None

    def split(self, steps: list[Step], at: int, cut: int) -> list[Step]:
        """Two launches of one of several, the first with so many."""
        members = members_of(steps[at])
        parts = [p if len(p) > 1 else p[0] for p in (members[:cut], members[cut:])]
        return [*steps[:at], *parts, *steps[at + 1 :]]
