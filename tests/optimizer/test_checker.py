"""The checker finds what a wrong pass would do: each kind of damage, in graphs of all kinds."""

from __future__ import annotations

import operator
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from tests.harness.crew import crew
from tests.optimizer.graphs import Builder, aten, join_fake_world, random_graph
from tests.optimizer.test_optimize import RANKS, WORLD, _settings
from torch_c10d_ext.optimizer import CheckFailed, check_rewrite, optimize_and_report

ext = torch.ops.c10d_ext

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def fake_world() -> Iterator[Call]:
    with crew(1, "gloo") as made:
        made.run(join_fake_world, RANKS)
        yield lambda fn, *args: made.run(fn, *args)[0]


def _check(before: Graph, after: Graph, budget: float = 2**40, in_order: bool = True) -> None:
    check_rewrite(before, after, budget, lambda group: in_order)


def _is(node: Any, *parts: str) -> bool:
    return node.op == "call_function" and any(part in str(node.target) for part in parts)


class _OneRank(torch.fx.Interpreter):
    """Runs a graph with something else in place of each collective: an oracle of its own."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = str(target)
        if "wait_tensor" in name:
            return args[0]
        if "c10d" not in name:
            return super().call_function(target, args, kwargs)
        if "coalesced" in name:
            return [self._collective(name, x, args[1:]) for x in args[0]]
        return self._collective(name, args[0], args[1:])

    def _collective(self, name: str, x: Tensor, rest: Any) -> Tensor:
        if "all_reduce" in name:
            return x * (2 + len(rest[0])) + ord(rest[0][1])
        if "all_gather" in name:
            return torch.cat([x + k for k in range(RANKS)])
        return torch.stack(x.chunk(RANKS)).sum(0)


def _outputs(graph: Graph) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(n.meta["val"].shape, generator=generator)
        for n in graph.find_nodes(op="placeholder")
    ]
    results = _OneRank(GraphModule(torch.nn.Module(), graph)).run(*inputs)
    return [*results, *inputs]


def _differ(a: Graph, b: Graph) -> bool:
    pairs = zip(_outputs(a), _outputs(b), strict=True)
    return not all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs)


# Each damages a graph, or says that it cannot.


def _swap_results(graph: Graph, rng: random.Random) -> bool:
    """One result of a launch of several in place of another."""
    items = [n for n in graph.nodes if n.target is operator.getitem]
    pairs = [
        (a, b)
        for a in items
        for b in items
        if a.args[0] is b.args[0]
        and a.args[1] != b.args[1]
        and a.args[0].args[0][a.args[1]] is not b.args[0].args[0][b.args[1]]
    ]
    if not pairs:
        return False
    a, b = rng.choice(pairs)
    a.args = (a.args[0], b.args[1])
    return True


def _wait_too_late(graph: Graph, rng: random.Random) -> bool:
    """A computation with what is still in flight."""
    waits = [
        n
        for n in graph.nodes
        if _is(n, "wait_tensor") and any(_is(u, "aten.mm.", "aten.add.") for u in n.users)
    ]
    if not waits:
        return False
    wait = rng.choice(waits)
    wait.replace_all_uses_with(wait.args[0], delete_user_cb=lambda u: u.op != "output")
    graph.output_node().prepend(wait)
    return True


def _other_operand(graph: Graph, rng: random.Random) -> bool:
    nodes = [n for n in graph.nodes if _is(n, "aten.mm.", "aten.add.")]
    inputs = list(graph.find_nodes(op="placeholder"))
    if not nodes:
        return False
    node = rng.choice(nodes)
    other = rng.choice(inputs)
    if node.args[0] is other:
        return False
    node.args = (other, *node.args[1:])
    return True


def _other_reduction(graph: Graph, rng: random.Random) -> bool:
    nodes = [n for n in graph.nodes if _is(n, "all_reduce") and n.users]
    if not nodes:
        return False
    node = rng.choice(nodes)
    node.args = (node.args[0], "min", *node.args[2:])
    return True


def _lost_collective(graph: Graph, rng: random.Random) -> bool:
    """Nobody uses it here, and other ranks count on it."""
    for node in graph.nodes:
        if _is(node, "all_reduce.default") and all(
            _is(u, "wait_tensor") and not u.users for u in node.users
        ):
            for user in list(node.users):
                graph.erase_node(user)
            graph.erase_node(node)
            return True
    return False


def _extra_collective(graph: Graph, rng: random.Random) -> bool:
    first = next(n for n in graph.nodes if n.op == "placeholder")
    last = graph.output_node()
    with graph.inserting_before(last):
        node = graph.call_function(ext.all_reduce.default, (first, "bxor", WORLD))
    node.meta["val"] = torch.empty_like(first.meta["val"])
    return True


def _write_moved(graph: Graph, rng: random.Random) -> bool:
    """A write before, or behind, a computation that reads what it changes."""
    for node in graph.nodes:
        if _is(node, "mul_"):
            target = node.args[0]
            readers = [u for u in target.users if _is(u, "aten.mm.", "aten.add.", "aten.relu")]
            if not readers:
                continue
            reader = rng.choice(readers)
            order = {n: k for k, n in enumerate(graph.nodes)}
            if order[reader] < order[node]:
                reader.prepend(node)
            elif not node.users:
                reader.append(node)
            else:
                continue
            return True
    return False


_DAMAGES = [
    _swap_results,
    _wait_too_late,
    _other_operand,
    _other_reduction,
    _lost_collective,
    _extra_collective,
    _write_moved,
]
_OF_VALUES = [_swap_results, _other_operand, _other_reduction, _write_moved]


def _copied(module: GraphModule) -> Graph:
    graph = Graph()
    value, old = graph.graph_copy(module.graph, {}, return_output_node=True)  # type: ignore[misc]
    graph.output(value).meta = dict(old.meta)
    return graph


def _damage_is_found() -> dict[str, int]:
    counted: Counter[str] = Counter()
    for seed in range(40):
        before = random_graph(seed, WORLD, RANKS, nodes=20 + seed % 20)
        after, _ = optimize_and_report(before, _settings(memory_budget=2**30))
        _check(before.graph, after.graph)
        rng = random.Random(seed)
        for damage in _DAMAGES:
            graph = _copied(after)
            if not damage(graph, rng):
                continue
            if damage in _OF_VALUES and not _differ(after.graph, graph):
                continue
            with pytest.raises(CheckFailed):
                _check(before.graph, graph)
            counted[damage.__name__] += 1
    return dict(counted)


def test_every_kind_of_damage_is_found(fake_world: Call) -> None:
    counted = fake_world(_damage_is_found)
    assert set(counted) == {damage.__name__ for damage in _DAMAGES}, counted
    assert all(count >= 3 for count in counted.values()), counted


def _order_of_definitions() -> None:
    b = Builder()
    x = b.input("x", 8, 8)
    y = b.call(aten.relu.default, x)
    z = b.call(aten.mm.default, y, y)
    module = b.done(z)
    graph = _copied(module)
    relu, mm = [n for n in graph.nodes if n.op == "call_function"]
    relu.prepend(mm)
    with pytest.raises(CheckFailed, match="comes before"):
        _check(module.graph, graph)


def test_uses_come_after_definitions(fake_world: Call) -> None:
    fake_world(_order_of_definitions)


def _in_flight() -> None:
    """What a collective in flight reads must stay, and what it writes is not there yet."""

    def graph(late: bool) -> GraphModule:
        b = Builder()
        x = b.call(aten.relu.default, b.input("x", 8, 8))
        y = b.call(ext.all_reduce.default, x, "sum", WORLD)
        if late:
            b.call(aten.mul_.Tensor, x, 2.0)
        z = b.call(ext.wait_tensor.default, y)
        if not late:
            b.call(aten.mul_.Tensor, x, 2.0)
        return b.done(z, x)

    good, bad = graph(False), graph(True)
    _check(good.graph, good.graph)
    with pytest.raises(CheckFailed, match="writes what all_reduce_default reads in flight"):
        _check(good.graph, bad.graph)


def test_memory_in_flight_is_left_alone(fake_world: Call) -> None:
    fake_world(_in_flight)


def _budget_and_backends() -> None:
    b = Builder()
    xs = [b.call(aten.relu.default, b.input(f"x{k}", 8, 8)) for k in range(2)]
    separate = [b.call(ext.all_reduce.default, x, "sum", WORLD) for x in xs]
    before = b.done(*[b.call(ext.wait_tensor.default, y) for y in separate])
    b = Builder()
    xs = [b.call(aten.relu.default, b.input(f"x{k}", 8, 8)) for k in range(2)]
    launch = b.call(ext.all_reduce_coalesced.default, xs, "sum", WORLD)
    items = [b.call(operator.getitem, launch, k) for k in range(2)]
    after = b.done(*[b.call(ext.wait_tensor.default, y) for y in items])
    _check(before.graph, after.graph)
    with pytest.raises(CheckFailed, match="whose sums depend on an element's place"):
        _check(before.graph, after.graph, in_order=False)
    with pytest.raises(CheckFailed, match="it holds 1,024 bytes, more than the budget of 1,000"):
        _check(before.graph, after.graph, budget=1000)


def test_budgets_and_backends_are_side_conditions(fake_world: Call) -> None:
    fake_world(_budget_and_backends)
