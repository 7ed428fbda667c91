"""Ranks whose plans differ: named at the first run, or without a run, and never a hang."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness import run
from tests.optimizer.graphs import Builder, aten
from torch_c10d_ext import Compute, Link
from torch_c10d_ext.errors import CollectiveMismatch, CollectiveTimeout
from torch_c10d_ext.optimizer import Settings, find_deadlock, optimize_and_report
from torch_c10d_ext.optimizer._agreement import (
    _WINDOW,
    Register,
    compare,
    pack_plan,
    unpack_plan,
)

DEADLINE = 20.0

KINDS = ["all_reduce(reduce_op=sum)", "all_gather_into_tensor(group_size=2)", "broadcast(src=0)"]


class Meeting:
    """What ranks exchange, one after the other in one thread: each rank is a replay."""

    def __init__(self, plans: Sequence[Sequence[str]]) -> None:
        self.plans = plans

    def outcomes(self) -> list[CollectiveMismatch | None]:
        """What each rank's comparison raises."""
        rounds: list[list[bytes]] = []
        while True:
            given: list[bytes] = []
            results: list[CollectiveMismatch | None] = []
            for rank, plan in enumerate(self.plans):
                at = iter(rounds)

                def exchange(data: bytes, at: Any = at, asked: Any = given) -> list[bytes]:
                    known: list[bytes] | None = next(at, None)
                    if known is None:
                        asked.append(data)
                        raise _NextRound
                    return known

                try:
                    compare(plan, rank, exchange)
                    results.append(None)
                except CollectiveMismatch as error:
                    results.append(error)
                except _NextRound:
                    pass
            if not given:
                return results
            assert len(given) == len(self.plans), "the ranks exchange different numbers of times"
            assert len({len(data) for data in given}) == 1, "the ranks exchange different lengths"
            rounds.append(given)


class _NextRound(Exception):
    pass


def _random_plan(rng: random.Random) -> list[str]:
    return [
        f"{rng.choice(KINDS)} float32[{rng.choice([8, 16, 1024])}] on group #0 of 2"
        for _ in range(rng.randint(1, 12))
    ]


def _diverged(rng: random.Random, plan: list[str]) -> tuple[list[str], int]:
    """Another plan, and the number of the first launch that differs."""
    other = list(plan)
    at = rng.randrange(len(plan))
    kind = rng.choice(["swap", "change", "drop", "add"])
    if kind == "swap" and at + 1 < len(plan) and plan[at] != plan[at + 1]:
        other[at], other[at + 1] = plan[at + 1], plan[at]
    elif kind == "drop":
        del other[at]
    elif kind == "add":
        other.insert(at, "reduce(dst=1) int64[3] on group #0 of 2")
    else:
        other[at] = "scatter(src=0) int8[5] on group #0 of 2"
    first = 0
    while first < min(len(plan), len(other)) and plan[first] == other[first]:
        first += 1
    return other, first


def test_every_divergence_is_named_on_every_rank() -> None:
    rng = random.Random(7)
    for _ in range(10_000):
        plan = _random_plan(rng)
        other, first = _diverged(rng, plan)
        if other == plan:
            continue
        ranks = rng.randint(2, 4)
        odd = rng.randrange(ranks)
        plans = [other if rank == odd else plan for rank in range(ranks)]
        for error in Meeting(plans).outcomes():
            assert error is not None
            assert error.seq == first
            assert f"as number {first} of the graph" in str(error)
            named = [p[first] if first < len(p) else "nothing more" for p in (plan, other)]
            assert all(text in str(error) for text in named), (named, str(error))
            # Those that disagree with rank 0.
            assert error.ranks == ([odd] if odd else list(range(1, ranks)))


def test_equal_plans_agree() -> None:
    rng = random.Random(8)
    for _ in range(200):
        plan = _random_plan(rng)
        assert Meeting([plan] * 3).outcomes() == [None] * 3


def test_plans_are_packed_alike() -> None:
    plan = {"b": ["x", "y"], "a": ["z"]}
    assert unpack_plan(pack_plan(plan)) == plan
    assert pack_plan(plan) == pack_plan(dict(reversed(plan.items())))


def _in_threads(size: int, fn: Callable[[int], Any]) -> list[Any]:
    results: list[Any] = [None] * size

    def call(rank: int) -> None:
        try:
            results[rank] = fn(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    return results


def test_stores_carry_the_comparison() -> None:
    store = dist.HashStore()
    plans = [["a", "b"], ["a", "b"], ["a", "c"]]

    def meet(rank: int) -> None:
        Register(store, rank, 3, "plan").run(plans[rank], True, DEADLINE, "(here)", "g")

    began = time.monotonic()
    errors = _in_threads(3, meet)
    assert all(isinstance(error, CollectiveMismatch) for error in errors)
    assert "as number 1 of the graph: ranks 0, 1: b; rank 2: c (here)" in str(errors[0])
    assert errors[0].ranks == [2] and errors[0].seq == 1 and errors[0].group == "g"
    assert time.monotonic() - began < DEADLINE / 2


def test_a_rank_whose_graph_is_new_hears_of_ranks_that_do_not_wait() -> None:
    store = dist.HashStore()
    new, old = (Register(store, rank, 2, "plan") for rank in range(2))
    for register in (old, new):
        register.run(["a"], False, DEADLINE)
    # The other rank is a few runs ahead, as collectives may return before all have come to them.
    for lines in (["b"], ["c"], ["b"]):
        old.run(lines, False, DEADLINE)
    new.run(["b"], True, DEADLINE)
    with pytest.raises(CollectiveMismatch, match="number 0 of the graph: rank 0: b; rank 1: c"):
        new.run(["b"], True, DEADLINE)
    with pytest.raises(CollectiveMismatch, match="rank 0: b, b; rank 1: nothing more") as caught:
        new.run(["b", "b, b"], True, DEADLINE)
    assert caught.value.seq == 1


STORES: dict[str, Callable[[Path], dist.Store]] = {
    "hash": lambda folder: dist.HashStore(),
    "tcp": lambda folder: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    "file": lambda folder: dist.PrefixStore("g", dist.FileStore(str(folder / "store"), 2)),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dist.Store:
    return STORES[request.param](tmp_path)


@pytest.mark.parametrize("ahead", [16, 17, 40, _WINDOW - 2])
def test_a_divergence_is_named_however_far_the_other_rank_is(store: Any, ahead: int) -> None:
    # The records go round twice, so that older ones stand where this run's would.
    new, old = (Register(store, rank, 2, "plan") for rank in range(2))
    for _ in range(2 * _WINDOW):
        old.run(["a"], False, DEADLINE)
        new.run(["a"], False, DEADLINE)
    for lines in [["b"], ["c"], *[["a"]] * ahead][: _WINDOW - 1]:
        old.run(lines, False, DEADLINE)
    new.run(["b"], True, DEADLINE)
    with pytest.raises(CollectiveMismatch, match="number 0 of the graph: rank 0: b; rank 1: c"):
        new.run(["b"], True, DEADLINE)


def test_no_rank_gets_a_window_ahead(store: Any) -> None:
    late, early = (Register(store, rank, 2, "plan") for rank in range(2))
    for k in range(_WINDOW // 2 - 1):
        late.run([str(k)], False, DEADLINE)
    for k in range(_WINDOW - 1):
        early.run([str(k)], False, DEADLINE)
    for _ in range(2):
        with pytest.raises(CollectiveTimeout, match="rank 0 for run 256 \\(here\\)") as caught:
            early.run(["x"], False, 0.05, "(here)")
        assert caught.value.ranks == [0]
    # The same run once more, as nothing was sent of it.
    late.run([str(_WINDOW // 2 - 1)], True, DEADLINE)
    early.run(["x"], False, DEADLINE)
    for k in range(_WINDOW // 2, _WINDOW - 1):
        late.run([str(k)], True, DEADLINE)
    with pytest.raises(CollectiveMismatch, match="rank 0: y; rank 1: x"):
        late.run(["y"], True, DEADLINE)


def test_a_rank_that_waits_for_a_late_one_goes_on_when_it_comes(store: Any) -> None:
    def meet(rank: int) -> int:
        register = Register(store, rank, 2, "plan")
        for k in range(4 * _WINDOW):
            # The second rank alone compares, now and then.
            register.run([str(k % 3)], bool(rank) and k % 100 == 0, DEADLINE)
        return register.runs

    assert _in_threads(2, meet) == [4 * _WINDOW] * 2


def test_what_is_stored_does_not_grow(tmp_path: Path) -> None:
    store = dist.PrefixStore("g", dist.FileStore(str(tmp_path / "store"), 2))
    registers = [Register(store, rank, 2, "plan") for rank in range(2)]

    def stored() -> list[int]:
        return sorted(path.stat().st_size for path in tmp_path.iterdir())

    def runs(count: int) -> None:
        for k in range(count):
            for register in registers:
                register.run([str(k % 3)], register.rank == 1, DEADLINE)

    runs(_WINDOW)
    before = stored()
    assert len(before) == 3
    runs(2 * _WINDOW)
    assert stored() == before
    memory = dist.HashStore()
    registers = [Register(memory, rank, 2, "plan") for rank in range(2)]
    runs(_WINDOW)
    keys = memory.num_keys()
    runs(2 * _WINDOW)
    assert memory.num_keys() == keys


def test_files_go_with_the_last_rank(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    late, early = (Register(store, rank, 2, "plan") for rank in range(2))
    early.run(["a"], False, DEADLINE)
    del early
    with pytest.raises(CollectiveMismatch, match="rank 0: b; rank 1: a"):
        late.run(["b"], True, DEADLINE)
    del late
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_every_divergence_is_named_by_the_store() -> None:
    rng = random.Random(9)
    store = dist.HashStore()
    for number in range(200):
        plan = _random_plan(rng)
        other, first = _diverged(rng, plan)
        odd = rng.randrange(3)
        plans = [other if rank == odd else plan for rank in range(3)]
        registers = [Register(store, rank, 3, str(number)) for rank in range(3)]
        for register, lines in zip(registers[1:], plans[1:], strict=True):
            register.run(lines, False, DEADLINE)
        if other == plan:
            registers[0].run(plans[0], True, DEADLINE)
            continue
        with pytest.raises(CollectiveMismatch, match=f"as number {first} of the graph") as caught:
            registers[0].run(plans[0], True, DEADLINE)
        assert caught.value.ranks == ([odd] if odd else [1, 2])


def test_a_rank_that_never_comes_is_named() -> None:
    register = Register(dist.HashStore(), 0, 2, "plan")
    with pytest.raises(
        CollectiveTimeout, match="nothing of rank 1 for run 1 \\(rank 0/2, group 'g'\\)"
    ):
        register.run(["a"], True, 0.2, "(rank 0/2, group 'g')")


# --- offline -------------------------------------------------------------------------------------


def test_orders_that_meet_have_no_deadlock() -> None:
    a = [("start", "g", "x"), ("start", "h", "y"), ("wait", "g", "0"), ("wait", "h", "0")]
    b = [("start", "h", "y"), ("start", "g", "x"), ("wait", "h", "0"), ("wait", "g", "0")]
    assert find_deadlock([a, b]) is None


def test_crossed_waits_are_a_deadlock() -> None:
    a = [("start", "g", "x"), ("wait", "g", "0"), ("start", "h", "y"), ("wait", "h", "0")]
    b = [("start", "h", "y"), ("wait", "h", "0"), ("start", "g", "x"), ("wait", "g", "0")]
    text = find_deadlock([a, b])
    assert (
        text == "rank 0 waits for collective 0 of group 'g', which ranks [1] do not come to start"
    )


def test_other_orders_in_a_group_are_named() -> None:
    a = [("start", "g", "x"), ("start", "g", "y")]
    b = [("start", "g", "y"), ("start", "g", "x")]
    text = find_deadlock([a, b])
    assert text == "collective 0 of group 'g' is y on rank 1 and x on rank 0"
    assert find_deadlock([a, a[:1]]) == "the ranks of group 'g' start {0: 2, 1: 1} collectives"


# --- on real ranks -------------------------------------------------------------------------------


def _graph(order: Sequence[str], group: str) -> Any:
    b = Builder()
    x = b.input("x", 64, 64)
    results = []
    for op in order:
        m = b.call(aten.mm.default, x, x)
        y = b.call(torch.ops.c10d_ext.all_reduce.default, m, op, group)
        results.append(b.call(torch.ops.c10d_ext.wait_tensor.default, y))
    return b.done(*results)


def _diverge() -> tuple[str, float]:
    group = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    settings = Settings.of(
        None, None, link=Link(5e-6, 1e9, shared="w"), compute=Compute(1e10, 1e10), bucket=False
    )
    x = torch.ones(64, 64)
    same, about = optimize_and_report(_graph(["sum", "max", "min"], group), settings)
    assert about.changed
    same(x)
    same(x)
    # The first rank knows its plan, as if the other one alone had been compiled again.
    order = ["sum", "max", "min"] if dist.get_rank() == 0 else ["sum", "min", "max"]
    other, about = optimize_and_report(_graph(order, group), settings)
    assert about.changed
    dist.barrier()
    began = time.monotonic()
    try:
        other(x)
    except CollectiveMismatch as error:
        return str(error), time.monotonic() - began
    raise AssertionError("the ranks' orders differ, and nobody says so")


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_the_first_difference_is_named_also_to_ranks_that_know_their_plan(backend: str) -> None:
    for rank, (text, _) in enumerate(run(2, _diverge, backend=backend)):
        assert "as number 1 of the graph" in text
        assert "reduce_op=max" in text and "reduce_op=min" in text
        assert f"(rank {rank}/2, group '" in text


def _alone(agree: str, understood: bool) -> str:
    """One rank's graph gains by another order, the other rank's does not, or is not understood."""
    group = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    settings = Settings.of(
        None, None, link=Link(5e-6, 1e9, shared="w"), compute=Compute(1e10, 1e10), agree=agree
    )
    x = torch.ones(64, 64)
    b = Builder()
    given = b.input("x", 64, 64)
    results = []
    for op in ["sum", "max", "min"] if dist.get_rank() == 0 else ["sum"]:
        m = b.call(aten.mm.default, given, given)
        y = b.call(torch.ops.c10d_ext.all_reduce.default, m, op, group)
        results.append(b.call(torch.ops.c10d_ext.wait_tensor.default, y))
    if dist.get_rank() and not understood:
        results[-1].meta.clear()
        results.append(b.graph.call_function(aten.neg.default, (results[-1],)))
    program, about = optimize_and_report(b.done(*results), settings)
    assert about.changed == (dist.get_rank() == 0), str(about)
    with pytest.raises(CollectiveMismatch) as caught:
        program(x)
    # Ranks whose graphs all stay as they are find nothing.
    b = Builder()
    y = b.call(torch.ops.c10d_ext.all_reduce.default, b.input("x", 64, 64), "sum", group)
    program, about = optimize_and_report(
        b.done(b.call(torch.ops.c10d_ext.wait_tensor.default, y)), settings
    )
    assert not about.changed
    for _ in range(2):
        assert torch.equal(program(x)[0], 2 * x)
    return str(caught.value)


@pytest.mark.parametrize("agree", ["every", "first"])
@pytest.mark.parametrize("understood", [True, False], ids=["read", "unread"])
def test_a_rank_whose_graph_stays_takes_part(agree: str, understood: bool) -> None:
    for text in run(2, _alone, agree, understood, backend="gloo"):
        if understood:
            assert "as number 1 of the graph" in text and "nothing more" in text
        else:
            assert "as number 0 of the graph" in text and "left as it is" in text


def _recompiled() -> list[str]:
    """A rank compiles a graph again that the others know; then one of other collectives."""
    group = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    settings = Settings.of(
        None,
        None,
        link=Link(5e-6, 1e9, shared="w"),
        compute=Compute(1e10, 1e10),
        agree="first",
        bucket=False,
    )
    x = torch.ones(64, 64)
    found = []
    program, about = optimize_and_report(_graph(["sum", "max", "min"], group), settings)
    assert about.changed
    for _ in range(3):
        program(x)
    if dist.get_rank() == 1:
        program, about = optimize_and_report(_graph(["sum", "max", "min"], group), settings)
    found.append(str(program(x)[0][0, 0].item()))
    # Both ranks have something new, which one of them has seen in another graph.
    order = ["sum", "max", "min"] if dist.get_rank() == 0 else ["sum", "min", "max"]
    program, about = optimize_and_report(_graph(order, group), settings)
    try:
        program(x)
    except CollectiveMismatch as error:
        found.append(str(error))
    return found


def test_a_rank_that_was_recompiled_alone_goes_on() -> None:
    for rank, (value, text) in enumerate(run(2, _recompiled, backend="gloo")):
        assert value == str(2 * 64.0)
        assert "as number 1 of the graph" in text and f"(rank {rank}/2, group '" in text
