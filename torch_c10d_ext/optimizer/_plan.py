"""Chooses a schedule: several are made, all are timed, the best that fits into memory is taken."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch_c10d_ext.optimizer._bounds import lower_bound
from torch_c10d_ext.optimizer._memory import Budget, peak_of
from torch_c10d_ext.optimizer._problem import Problem
from torch_c10d_ext.optimizer._schedule import Policy, Scheduler, Step, longest_paths
from torch_c10d_ext.optimizer._search import Search
from torch_c10d_ext.optimizer._simulate import Timing, simulate

# What is less of a gain is none, and what is within it of the best time is as good.
TOLERANCE = 0.002

# Nodes that are placed, over all schedules that are tried; a search goes on up to there.
_WORK = 24_000

_SEEDS = 8

# Nodes of the largest graph that local search is tried on, and nodes that it places.
_SEARCHED = 4_000
_IMPROVING = 600_000
_PER_NODE = 3_000

# And that are placed while launches are merged.
_MERGING = 300_000

# Nodes that are placed without a search.
_MUCH = 80_000
_HEAVY = 3

# A launch is of use up to where its bytes take this many times its latency.
_MULTIPLES = (2.0, 8.0, 32.0, 128.0)


@dataclass(frozen=True)
class Plan:
    """An order of a graph's nodes, and what the cost model says of it.

    Attributes:
        order: the nodes by number, but for the output; a tuple is a bucket of starts.
        timing: what it takes.
        peak: the most bytes it holds at once.
        before: what the graph's own order takes.
        peak_before: what that holds.
        policy: what it was made by; None for the graph's own order.
        tried: how many schedules were made.
        work: how many steps making them took, whatever the machine.
    """

    order: tuple[Step, ...]
    timing: Timing
    peak: float
    before: Timing
    peak_before: float
    policy: Policy | None
    tried: int
    work: int

    @property
    def changed(self) -> bool:
        return self.policy is not None


def choose_plan(
    p: Problem,
    keys: Mapping[int, Hashable],
    sizes: Mapping[int, float],
    *,
    cap: float,
    memory: float | None,
    overlap: bool = True,
) -> Plan:
    """The best schedule of a graph that keeps to a budget.

    Args:
        p: the graph.
        keys: by start, what the members of its bucket must have in common.
        sizes: by start, its bytes.
        cap: bytes of a bucket.
        memory: the budget in bytes; None for the peak of the graph's own order. Below that, the
            graph's order stays.
        overlap: whether nodes may be moved at all.
    """
    own: list[Step] = list(range(len(p.nodes) - 1))
    before = simulate(p, own)
    peak_before = peak_of(p, list(range(len(p.nodes))))
    limit = peak_before if memory is None else float(memory)
    best = Plan(tuple(own), before, peak_before, before, peak_before, None, 0, 0)
    if not p.collectives or not overlap or limit < peak_before:
        return best
    after: list[list[int]] = [[] for _ in p.nodes]
    for i, follows in enumerate(p.follows):
        for j in follows:
            after[j].append(i)
    if p.fixed_order:
        keys = {}
    scheduler = Scheduler(p, after, keys, sizes, cap, longest_paths(p), _needed(p, after))
    search = _Search(p, scheduler, limit, best)
    buckets = _bucket_sizes(p, keys, sizes, cap)
    policies = [Policy(by_path, b) for b in (0.0, *buckets) for by_path in (False, True)]
    if len(p.nodes) * len(policies) > _MUCH:
        # On large graphs, where each schedule takes long, the middle of the range alone.
        policies = [
            Policy(False, 0.0),
            *(Policy(False, b) for b in buckets[len(buckets) // 2 :][:1]),
        ]
        policies += [Policy(True, policies[-1].bucket)] * (len(p.nodes) < _MUCH // 4)
    search.consider(policies)
    seed = 0
    while search.work + len(p.nodes) < _WORK and seed < _SEEDS:
        seed += 1
        base = search.best.policy or Policy()
        search.consider([Policy(base.by_path, base.bucket, seed)])
    if len(p.nodes) <= _SEARCHED:
        search.improve(keys, sizes, cap)
    return replace(search.best, tried=search.tried, work=search.work)


class _Search:
    """The best of the schedules so far."""

    def __init__(self, p: Problem, scheduler: Scheduler, limit: float, best: Plan) -> None:
        self.p, self.scheduler, self.limit, self.best = p, scheduler, limit, best
        self.work = self.tried = 0

    def consider(self, policies: Sequence[Policy]) -> None:
        """Makes a schedule by each policy; memory is kept to by the most promising alone.

        What memory costs in time differs little between policies, and keeping to it takes long.
        """
        heavy = []
        for policy in policies:
            order = self._run(policy, None)
            peak = peak_of(self.p, _flat(order, len(self.p.nodes)))
            timing = simulate(self.p, order)
            if peak <= self.limit:
                self._take(policy, order, timing, peak)
            else:
                heavy.append((timing.total, timing.launches, policy))
        heavy.sort(key=lambda entry: entry[:2])
        for k, (total, _, policy) in enumerate(heavy):
            if k >= _HEAVY and self.work > _WORK:
                return
            if total >= self.best.timing.total * (1 - TOLERANCE) and self.best.changed:
                return
            budget = Budget(self.p, self.limit)
            order = self._run(policy, budget)
            self.work += budget.steps // 4
            peak = peak_of(self.p, _flat(order, len(self.p.nodes)))
            if peak <= self.limit:  # a bucket may take more than its members
                self._take(policy, order, simulate(self.p, order), peak)

    def improve(self, keys: Mapping[int, Hashable], sizes: Mapping[int, float], cap: float) -> None:
        """Local search from the best schedule, and then launches that cost no time to merge."""
        search = Search(self.p, keys, sizes, cap, self.limit)
        policy = self.best.policy or Policy()

        def take(order: list[Step]) -> None:
            peak = peak_of(self.p, _flat(order, len(self.p.nodes)))
            self._take(policy, order, simulate(self.p, order), peak)

        enough = lower_bound(self.p, keys) * (1 + TOLERANCE)
        if self.best.timing.total > enough:
            work = min(_IMPROVING, _PER_NODE * len(self.p.nodes))
            search.improve(self.best.order, self.best.timing.total, enough, work, take)
        if self.best.changed:
            self._merge(search)
        self.work += search.work

    def _merge(self, search: Search) -> None:
        ceiling = self.best.timing.total * (1 + TOLERANCE)

        def take(order: list[Step]) -> None:
            peak = peak_of(self.p, _flat(order, len(self.p.nodes)))
            timing = simulate(self.p, order)
            if timing.total <= ceiling and peak <= self.limit:
                self.best = replace(self.best, order=tuple(order), timing=timing, peak=peak)

        search.fewer(self.best.order, ceiling, _MERGING, take)

    def _run(self, policy: Policy, budget: Budget | None) -> list[Step]:
        self.tried += 1
        self.work += len(self.p.nodes)
        return self.scheduler.run(policy, budget)

    def _take(self, policy: Policy, order: list[Step], timing: Timing, peak: float) -> None:
        if _better(timing, peak, self.best):
            self.best = replace(
                self.best, order=tuple(order), timing=timing, peak=peak, policy=policy
            )


def _better(timing: Timing, peak: float, best: Plan) -> bool:
    """Whether a schedule is faster, or as fast with fewer launches, or those and less memory."""
    if timing.total < best.timing.total * (1 - TOLERANCE):
        return True
    if best.policy is None:
        # No gain in time: the graph stays.
        return False
    if timing.total > best.timing.total * (1 + TOLERANCE):
        return False
    return (timing.launches, timing.total, peak) < (
        best.timing.launches,
        best.timing.total,
        best.peak,
    )


def _bucket_sizes(
    p: Problem, keys: Mapping[int, Hashable], sizes: Mapping[int, float], cap: float
) -> list[float]:
    """Sizes to try: multiples of what a link sends in the time of its latency."""
    members: dict[Hashable, int] = {}
    for key in keys.values():
        members[key] = members.get(key, 0) + 1
    starts = [i for i, key in keys.items() if members[key] > 1]
    if not starts:
        return []
    latency = max(p.latency[i] + p.overhead[i] for i in starts)
    rates = [sizes[i] / (p.sent[i] - p.latency[i]) for i in starts if p.sent[i] > p.latency[i]]
    if not rates:
        return [cap]
    unit = latency * sorted(rates)[len(rates) // 2]
    whole = sum(sizes[i] for i in starts)
    found = [min(unit * m, cap) for m in _MULTIPLES if 0 < unit * m < whole]
    return sorted({*found, min(cap, whole)})


def _needed(p: Problem, after: list[list[int]]) -> dict[int, int]:
    """By start, the first node in the graph that needs its result and takes time."""
    first = [len(p.nodes)] * len(p.nodes)
    for i in range(len(p.nodes) - 1, -1, -1):
        for j in after[i]:
            first[i] = min(first[i], first[j] if p.idle[j] else j)
    return {
        start: min((first[w] for w in waits), default=len(p.nodes))
        for start, waits in p.waits().items()
    }


def _flat(order: Sequence[Step], count: int) -> list[int]:
    flat = [i for step in order for i in (step if isinstance(step, tuple) else (step,))]
    flat.append(count - 1)
    return flat
