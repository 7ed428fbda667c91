"""The scheduler by itself, on random problems: valid, within its budget, near the optimum, fast."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from torch_c10d_ext.optimizer._bounds import lower_bound
from torch_c10d_ext.optimizer._memory import Budget, peak_of
from torch_c10d_ext.optimizer._plan import _flat, _needed, choose_plan
from torch_c10d_ext.optimizer._problem import Problem
from torch_c10d_ext.optimizer._schedule import Policy, Scheduler, _Run, longest_paths
from torch_c10d_ext.optimizer._search import Search
from torch_c10d_ext.optimizer._simulate import simulate


class _Node:
    """Stands for a node of a graph, and for the collective that it starts."""


def random_problem(
    rng: random.Random, steps: int, lanes: int = 1, *, busy: bool = False
) -> Problem:
    """Computations with results of random sizes, collectives and waits, as a graph would have.

    ``busy``: calls take something of the rank.
    """
    p = Problem(lanes={str(k): k for k in range(lanes)})
    results: list[tuple[int, int]] = []  # node, storage
    flying: list[tuple[int, int]] = []

    def add(follows: list[int], uses: list[int], size: int | None, idle: bool = False) -> int:
        i = len(p.nodes)
        p.nodes.append(_Node())  # type: ignore[arg-type]
        p.follows.append(sorted(set(follows)))
        p.seconds.append(0.0)
        p.idle.append(idle)
        p.made.append([])
        p.used.append(sorted(set(uses)))
        if size is not None:
            s = len(p.size)
            p.size.append(size)
            p.maker.append(i)
            p.users.append([])
            p.made[i].append(s)
            p.used[i].append(s)
        for s in p.used[i]:
            p.users[s].append(i)
        return i

    def land() -> None:
        start, s = flying.pop(rng.randrange(len(flying)))
        i = add([start], [*p.used[start]], None, idle=True)
        p.started_by[i] = start
        results.append((i, s))

    for _ in range(steps):
        kind = rng.random()
        picked = rng.sample(results[-8:], min(len(results[-8:]), rng.randint(0, 2)))
        nodes, storages = [n for n, _ in picked], [s for _, s in picked]
        if kind < 0.5 or not picked:
            i = add(nodes, storages, rng.choice([1, 2, 8, 64]))
            p.seconds[i] = rng.choice([0.5, 1.0, 2.0, 5.0])
            results.append((i, p.made[i][0]))
        elif kind < 0.8:
            i = add(nodes[:1], storages[:1], rng.choice([1, 8, 32]))
            p.collectives[i] = _Node()  # type: ignore[assignment]
            p.latency[i] = 0.5
            p.overhead[i] = rng.choice([0.2, 0.4]) if busy else 0.0
            p.seconds[i] = rng.choice([0.0, 0.1, 1.0]) if busy else 0.0
            p.sent[i] = 0.5 + rng.choice([0.5, 1.0, 4.0])
            p.lane[i] = rng.randrange(lanes)
            flying.append((i, p.made[i][0]))
        elif flying:
            land()
    while flying:
        land()
    add([*range(len(p.nodes))], [s for _, s in results[-3:]], None, idle=True)
    return p


def _valid(p: Problem, flat: list[int]) -> bool:
    place = {i: k for k, i in enumerate(flat)}
    return sorted(flat) == list(range(len(p.nodes))) and all(
        place[j] < place[i] for i, follows in enumerate(p.follows) for j in follows
    )


def _scheduler(p: Problem, keys: dict[int, Any]) -> Scheduler:
    after: list[list[int]] = [[] for _ in p.nodes]
    for i, follows in enumerate(p.follows):
        for j in follows:
            after[j].append(i)
    sizes = dict.fromkeys(keys, 1.0)
    return Scheduler(p, after, keys, sizes, 8.0, longest_paths(p), _needed(p, after))


@pytest.mark.parametrize("busy", [False, True])
def test_schedules_are_valid_and_within_their_budget(busy: bool) -> None:
    rng = random.Random(1)
    faster = 0
    for k in range(2_000):
        p = random_problem(rng, rng.randint(3, 40), lanes=1 + k % 2, busy=busy)
        keys = {i: p.lane[i] for i in p.collectives if rng.random() < 0.7}
        own = list(range(len(p.nodes)))
        limit = peak_of(p, own) * rng.choice([1.0, 1.0, 1.1, 1.5])
        policy = Policy(bool(k % 3), rng.choice([0.0, 2.0, 8.0]), rng.choice([0, k]))
        for budget in (None, Budget(p, limit)):
            order = _scheduler(p, keys).run(policy, budget)
            flat = _flat(order, len(p.nodes))
            assert _valid(p, flat), k
            for step in order:
                if isinstance(step, tuple):
                    assert len({keys[i] for i in step}) == 1
                    assert len(step) <= 8
            if budget is not None:
                assert peak_of(p, flat) <= limit, k
                faster += simulate(p, order).total < simulate(p, own[:-1]).total
    assert faster > 500


@pytest.mark.parametrize("busy", [False, True])
def test_the_schedulers_clock_is_not_behind_the_simulators(busy: bool) -> None:
    """It may be ahead where calls take time, which the simulator lets a stall hide."""
    rng = random.Random(8)
    for k in range(200):
        p = random_problem(rng, rng.randint(3, 40), lanes=1 + k % 2, busy=busy)
        keys = {i: p.lane[i] for i in p.collectives if rng.random() < 0.7}
        run = _Run(_scheduler(p, keys), Policy(bool(k % 3), rng.choice([0.0, 2.0])), None)
        order = run.go()
        clock, total = max(run.now, *run.free), simulate(p, order).total
        assert clock >= total * (1 - 1e-9), k
        assert busy or clock == pytest.approx(total), k


@pytest.mark.parametrize("busy", [False, True])
def test_plans_never_lose(busy: bool) -> None:
    rng = random.Random(2)
    for _ in range(60):
        p = random_problem(rng, rng.randint(3, 40), busy=busy)
        plan = choose_plan(p, {}, {}, cap=8.0, memory=None)
        assert plan.timing.total <= plan.before.total
        assert plan.peak <= plan.peak_before
        assert plan.timing.total >= lower_bound(p) * (1 - 1e-9)
        assert simulate(p, plan.order).total == plan.timing.total


def _random_search(
    rng: random.Random, lanes: int, busy: bool
) -> tuple[Problem, dict[int, int], list[int], float]:
    """A problem, what its buckets have in common, its own order, and the bytes it may hold."""
    p = random_problem(rng, rng.randint(6, 40), lanes, busy=busy)
    keys = {i: p.lane[i] for i in p.collectives if rng.random() < 0.7}
    own = list(range(len(p.nodes) - 1))
    return p, keys, own, peak_of(p, [*own, len(own)]) * rng.choice([1.0, 1.1, 1.5])


@pytest.mark.parametrize("busy", [False, True])
def test_search_keeps_dependencies_buckets_and_the_budget(busy: bool) -> None:
    rng = random.Random(4)
    better = 0
    for k in range(150):
        p, keys, own, limit = _random_search(rng, lanes=1 + k % 2, busy=busy)
        search = Search(p, keys, dict.fromkeys(keys, 1.0), 4.0, limit)
        found: list[list[Any]] = []
        known = simulate(p, own).total
        search.improve(own, known, 0.0, 4_000, found.append)
        for order in found:
            flat = _flat(order, len(p.nodes))
            assert _valid(p, flat), k
            assert peak_of(p, flat) <= limit, k
            for step in order:
                if isinstance(step, tuple):
                    assert len({keys[i] for i in step}) == 1
                    assert len(step) <= 4
            # Each that it hands over is faster than the one before.
            took = simulate(p, order).total
            assert took < known, k
            known = took
        better += bool(found)
    assert better > 75, better


@pytest.mark.parametrize("busy", [False, True])
def test_launches_are_merged_where_that_takes_no_time(busy: bool) -> None:
    rng = random.Random(6)
    fewer = 0
    for k in range(150):
        p, keys, own, limit = _random_search(rng, lanes=1 + k % 2, busy=busy)
        search = Search(p, keys, dict.fromkeys(keys, 1.0), 4.0, limit)
        before = simulate(p, own)
        ceiling = before.total * rng.choice([1.0, 1.1])
        found: list[list[Any]] = []
        search.fewer(own, ceiling, 4_000, found.append)
        for launches, order in enumerate(found, 1):
            flat = _flat(order, len(p.nodes))
            assert _valid(p, flat), k
            assert peak_of(p, flat) <= limit, k
            took = simulate(p, order)
            assert took.total <= ceiling * (1 + 1e-9), k
            assert took.launches == before.launches - launches, k
        fewer += bool(found)
    assert fewer > 40, fewer


@pytest.mark.parametrize("busy", [False, True])
def test_no_order_beats_the_bound(busy: bool) -> None:
    rng = random.Random(5)
    tight = checked = 0
    while checked < 40:
        p = random_problem(rng, 6, lanes=1 + checked % 2, busy=busy)
        if not p.collectives or len(p.nodes) > 9:
            continue
        checked += 1
        least = _optimum(p)
        assert lower_bound(p, ()) <= least * (1 + 1e-9)
        assert lower_bound(p) <= lower_bound(p, ()) * (1 + 1e-9)
        tight += lower_bound(p, ()) >= least * 0.95
    assert tight > 20, tight


def _optimum(p: Problem) -> float:
    """The shortest of all orders."""
    best = [simulate(p, list(range(len(p.nodes) - 1))).total]

    def extend(order: list[int], left: set[int]) -> None:
        if not left:
            best[0] = min(best[0], simulate(p, order).total)
            return
        for i in sorted(left):
            if not any(j in left for j in p.follows[i]):
                extend([*order, i], left - {i})

    extend([], set(range(len(p.nodes) - 1)))
    return best[0]


@pytest.mark.parametrize("busy", [False, True])
def test_small_problems_come_near_the_optimum(busy: bool) -> None:
    rng = random.Random(3)
    ratios: list[float] = []
    while len(ratios) < 40:
        p = random_problem(rng, 6, busy=busy)
        if not p.collectives or len(p.nodes) > 9:
            continue
        plan = choose_plan(p, {}, {}, cap=8.0, memory=1e9)
        ratios.append(plan.timing.total / _optimum(p))
    # Within 5 % of what enumeration finds, each of them.
    assert max(ratios) <= 1.05, sorted(ratios)[-5:]


def _chain(layers: int) -> Problem:
    """Fully sharded layers: a gather per layer, of which several fit into the budget."""
    p = Problem(lanes={"0": 0})
    previous = None
    for _ in range(layers):
        gather = len(p.nodes)
        wait, compute = gather + 1, gather + 2
        p.nodes += [_Node(), _Node(), _Node()]  # type: ignore[list-item]
        p.follows += [[], [gather], [wait] if previous is None else [wait, previous]]
        p.seconds += [0.0, 0.0, 1.0]
        p.idle += [False, True, False]
        full, out = len(p.size), len(p.size) + 1
        p.size += [64, 1]
        p.maker += [gather, compute]
        p.users += [[gather, wait, compute], [compute]]
        if previous is not None:
            p.users[full - 1].append(compute)
        p.made += [[full], [], [out]]
        p.used += [[full], [full], [full, out] if previous is None else [full, out, full - 1]]
        p.collectives[gather] = _Node()  # type: ignore[assignment]
        p.started_by[wait] = gather
        p.sent[gather], p.latency[gather], p.lane[gather], p.overhead[gather] = 0.9, 0.1, 0, 0
        previous = compute
    p.nodes.append(_Node())  # type: ignore[arg-type]
    p.follows.append(list(range(len(p.nodes) - 1)))
    p.seconds.append(0.0)
    p.idle.append(True)
    p.made.append([])
    p.used.append([])
    return p


@pytest.mark.parametrize("memory", [1e9, 140.0])
def test_steps_grow_no_faster_than_n_log_n(memory: float) -> None:
    counts = []
    for layers in (200, 400, 800):
        p = _chain(layers)
        scheduler = _scheduler(p, {})
        budget = Budget(p, memory)
        order = scheduler.run(Policy(), budget)
        assert peak_of(p, _flat(order, len(p.nodes))) <= memory
        counts.append(scheduler.steps + budget.steps)
    for small, large in itertools.pairwise(counts):
        assert large <= 2.4 * small, counts


def test_gathers_of_a_chain_are_hidden_within_two_weights() -> None:
    p = _chain(50)
    plan = choose_plan(p, {}, {}, cap=1.0, memory=140.0)
    assert plan.peak <= 140.0
    assert plan.timing.total <= lower_bound(p) * 1.02
