"""The rules by which collectives are replaced: what they make of a graph, where they do not act."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import torch_c10d_ext
from tests.harness import run
from tests.harness.crew import crew
from tests.optimizer.graphs import bits, join_fake_world, odd_values
from tests.optimizer.test_optimize import RANKS, _counted, _settings
from torch_c10d_ext.errors import CollectiveMismatch
from torch_c10d_ext.optimizer import CheckFailed, check_rewrite, optimize_and_report

ext, native, aten = torch.ops.c10d_ext, torch.ops._c10d_functional, torch.ops.aten

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def fake_world() -> Iterator[Call]:
    with crew(1, "gloo") as made:
        made.run(join_fake_world, RANKS)
        yield lambda fn, *args: made.run(fn, *args)[0]


def _group() -> str:
    return str(dist.group.WORLD.group_name)  # type: ignore[union-attr]


def _reduced(x: Tensor, op: str = "sum", ops: Any = ext) -> Tensor:
    return ops.wait_tensor(ops.all_reduce(x, op, _group()))  # type: ignore[no-any-return]


def _gathered(x: Tensor) -> Tensor:
    gathered: Tensor = ext.all_gather_into_tensor(x, dist.get_world_size(), _group())
    return torch_c10d_ext.functional.wait_tensor(gathered)


def _scattered(x: Tensor) -> Tensor:
    n = dist.get_world_size()
    part: Tensor = ext.reduce_scatter_tensor(x, "sum", n, _group())
    return torch_c10d_ext.functional.wait_tensor(part)


def _twice(x: Tensor) -> Tensor:
    return _reduced(x) * 2 + _reduced(x) * 3


def _twice_written(x: Tensor) -> Tensor:
    y = x * 1
    a = _reduced(y)
    b = a * 2
    y.mul_(2.0)
    return b + _reduced(y)


def _repeated(x: Tensor) -> Tensor:
    return _reduced(_reduced(x, "max"), "max") * 2


def _repeated_sum(x: Tensor) -> Tensor:
    return _reduced(_reduced(x, "sum"), "sum") * 2


def _cast(x: Tensor) -> Tensor:
    return _gathered(x).to(torch.bfloat16) * 2


def _upcast(x: Tensor) -> Tensor:
    return _gathered(x).to(torch.float64) * 2


def _gather_of_scatter(x: Tensor) -> Tensor:
    return _gathered(_scattered(x.repeat(dist.get_world_size(), 1))) * 2


def _rows(x: Tensor, rank: int) -> Tensor:
    each = x.shape[0] // dist.get_world_size()
    return x[rank * each : (rank + 1) * each]


def _own_part(x: Tensor) -> Tensor:
    return _rows(_gathered(x * 3), dist.get_rank()) * 2


def _own_part_alone(x: Tensor) -> Tensor:
    whole = _gathered(x * 3)
    return _rows(whole, dist.get_rank()).mul_(2) + whole.sum()


def _first_part(x: Tensor) -> Tensor:
    return _rows(_gathered(x * 3), 0) * 2


def _part_of_sum(x: Tensor) -> Tensor:
    return _rows(_reduced(x.repeat(dist.get_world_size(), 1)), dist.get_rank()) * 2


def _part_and_sum(x: Tensor) -> Tensor:
    total = _reduced(x.repeat(dist.get_world_size(), 1))
    return _rows(total, dist.get_rank()) * total.sum()


def _constant(x: Tensor) -> Tensor:
    return _reduced(torch.full((8,), 1.5)) * _reduced(x).sum()


def _rounded_constant(x: Tensor) -> Tensor:
    return _reduced(torch.full((8,), 1e38)) * _reduced(x).sum()


def _elementwise(x: Tensor) -> Tensor:
    return torch.relu(_gathered(x) * 0.5) @ x[0]


def _root(x: Tensor) -> Tensor:
    return _gathered(x).tanh() @ x[0]


def _sum_of_sums(x: Tensor) -> Tensor:
    return (_reduced(x) + _reduced(x * 3)) * 2


# By program: what is left of collectives, bitwise and with rounding.
_CASES: dict[Any, tuple[dict[str, int], dict[str, int]]] = {
    _twice: ({"all_reduce": 1}, {"all_reduce": 1}),
    _twice_written: ({"all_reduce": 2}, {"all_reduce": 2}),
    _repeated: ({"all_reduce": 1}, {"all_reduce": 1}),
    _repeated_sum: ({"all_reduce": 2}, {"all_reduce": 2}),
    _cast: ({"all_gather_into_tensor": 1}, {"all_gather_into_tensor": 1}),
    _upcast: ({"all_gather_into_tensor": 1}, {"all_gather_into_tensor": 1}),
    _gather_of_scatter: ({"all_reduce": 1}, {"all_reduce": 1}),
    _sum_of_sums: ({"all_reduce": 2}, {"all_reduce": 1}),
    _own_part: ({"all_gather_into_tensor": 1}, {"all_gather_into_tensor": 1}),
    _part_of_sum: ({"all_reduce": 1}, {"all_reduce": 1}),
    _constant: ({"all_reduce": 2}, {"all_reduce": 2}),
    _elementwise: ({"all_gather_into_tensor": 1}, {"all_gather_into_tensor": 1}),
}
# By program that needs a promise of one program: what is left of collectives with it.
_PROMISED: dict[Any, dict[str, int]] = {
    _own_part: {"all_gather_into_tensor": 1},
    _own_part_alone: {"all_gather_into_tensor": 1},
    _first_part: {"all_gather_into_tensor": 1},
    _part_of_sum: {"reduce_scatter_tensor": 1},
    _part_and_sum: {"all_reduce": 1},
    _constant: {"all_reduce": 1},
    _rounded_constant: {"all_reduce": 2},
}


def _left(graph: GraphModule) -> dict[str, int]:
    counted = _counted(graph)
    names = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
    return {name: counted[name] for name in names if counted[name]}


def _rules_act() -> None:
    for program, (bitwise, rounding) in _CASES.items():
        graph = make_fx(program, tracing_mode="fake")(torch.empty(64, 64))
        for numerics, want in (("bitwise", bitwise), ("rounding", rounding)):
            changes = dict(numerics=numerics, bucket=False, memory_budget=2**30)
            new, about = optimize_and_report(graph, _settings(**changes))
            assert _left(new) == want, (program.__name__, numerics, str(about))


def test_rules_act_where_they_may(fake_world: Call) -> None:
    fake_world(_rules_act)


def _promises() -> None:
    for rank in range(RANKS):
        join_fake_world(RANKS, rank)
        for program, want in _PROMISED.items():
            graph = make_fx(program, tracing_mode="fake")(torch.empty(64, 64))
            changes: dict[str, Any] = dict(bucket=False, memory_budget=2**30)
            new, about = optimize_and_report(graph, _settings(spmd=True, **changes))
            assert _left(new) == want, (program.__name__, rank, str(about))
            without, about = optimize_and_report(graph, _settings(**changes))
            assert sum(_left(without).values()) == sum(_left(graph).values())
            promised = program in (_own_part, _part_of_sum, _constant)
            # Rank 0's graph tells own parts from first parts no more than a reader does.
            promised |= program is _first_part and rank == 0
            text = "spmd does not promise that other ranks do alike"
            assert (text in str(about)) == promised, (program.__name__, rank, str(about))
    join_fake_world(RANKS)


def test_rules_that_say_something_of_other_ranks_need_a_promise(fake_world: Call) -> None:
    fake_world(_promises)


def _own_part_is_not_waited_for() -> None:
    graph = make_fx(_own_part, tracing_mode="fake")(torch.empty(64, 64))
    new, _ = optimize_and_report(graph, _settings(spmd=True, memory_budget=2**30))
    assert not new.graph.find_nodes(op="call_function", target=aten.slice.Tensor)
    (wait,) = new.graph.find_nodes(op="call_function", target=ext.wait_tensor.default)
    assert not wait.users


def test_an_own_part_is_not_waited_for(fake_world: Call) -> None:
    fake_world(_own_part_is_not_waited_for)


def _elementwise_moves() -> None:
    def rows(program: Any, op: Any) -> list[int]:
        graph = make_fx(program, tracing_mode="fake")(torch.empty(64, 64))
        new, _ = optimize_and_report(graph, _settings(memory_budget=2**30))
        return [n.meta["val"].shape[0] for n in new.graph.find_nodes(op="call_function", target=op)]

    assert rows(_elementwise, aten.mul.Tensor) == [64]
    assert rows(_elementwise, aten.relu.default) == [64]
    # What another kernel may round otherwise stays behind the gather.
    assert rows(_root, aten.tanh.default) == [64 * RANKS]


def test_exact_ops_come_before_a_gather(fake_world: Call) -> None:
    fake_world(_elementwise_moves)


def _casts_move() -> None:
    def dtypes(program: Any) -> list[torch.dtype]:
        graph = make_fx(program, tracing_mode="fake")(torch.empty(64, 64))
        new, _ = optimize_and_report(graph, _settings(memory_budget=2**30))
        op = ext.all_gather_into_tensor.default
        return [n.meta["val"].dtype for n in new.graph.find_nodes(op="call_function", target=op)]

    assert dtypes(_cast) == [torch.bfloat16]
    assert dtypes(_upcast) == [torch.float32]


def test_casts_to_fewer_bytes_come_before_a_gather(fake_world: Call) -> None:
    fake_world(_casts_move)


def _refused() -> None:
    """What a rule may not do, the checker refuses."""

    def graph(program: Any) -> Any:
        return make_fx(program, tracing_mode="fake")(torch.empty(64, 64)).graph

    def one_sum(x: Tensor) -> Tensor:
        return _reduced(x + x * 3) * 2

    def whole(x: Tensor) -> Tensor:
        return _reduced(x.repeat(RANKS, 1)) * 2

    def twice_at_once(x: Tensor) -> Tensor:
        return _reduced(x) * 5

    yes, no = (lambda group: True), (lambda group: False)
    check_rewrite(graph(_sum_of_sums), graph(one_sum), 2**40, no, rounding=True)
    with pytest.raises(CheckFailed, match="the outputs differ"):
        check_rewrite(graph(_sum_of_sums), graph(one_sum), 2**40, yes)
    check_rewrite(graph(_gather_of_scatter), graph(whole), 2**40, yes)
    with pytest.raises(CheckFailed):
        check_rewrite(graph(_gather_of_scatter), graph(whole), 2**40, no)
    with pytest.raises(CheckFailed, match="the outputs differ"):
        check_rewrite(graph(_twice), graph(twice_at_once), 2**40, yes, rounding=True)
    with pytest.raises(CheckFailed):
        check_rewrite(graph(_repeated_sum), graph(_repeated), 2**40, yes, rounding=True)


def _refused_promises() -> None:
    def graph(program: Any) -> Any:
        return make_fx(program, tracing_mode="fake")(torch.empty(64, 64)).graph

    def scattered(x: Tensor) -> Tensor:
        return _scattered(x.repeat(RANKS, 1)) * 2

    def kept(x: Tensor) -> Tensor:
        _gathered(x * 3)
        return (x * 3) * 2

    def lost(x: Tensor) -> Tensor:
        return (x * 3) * 2

    def constant(number: float) -> Call:
        def step(x: Tensor) -> Tensor:
            return torch.full((8,), number) * _reduced(x).sum()

        return step

    yes, no = (lambda group: True), (lambda group: False)

    def check(a: Any, b: Any, order: Any = yes, rank: int = 0, spmd: bool = True) -> bool:
        try:
            check_rewrite(
                graph(a), graph(b), 2**40, order, place=lambda group: (rank, RANKS), spmd=spmd
            )
        except CheckFailed:
            return False
        return True

    assert check(_part_of_sum, scattered)
    assert not check(_part_of_sum, scattered, spmd=False)
    assert not check(_part_of_sum, scattered, order=no)
    assert not check(_part_of_sum, scattered, rank=1)  # whose part is another one
    assert check(_own_part, kept)
    assert not check(_own_part, kept, rank=1)
    assert not check(_own_part, lost)  # other ranks may count on it
    assert check(_constant, constant(1.5 * RANKS))
    assert not check(_constant, constant(1.5 * RANKS), spmd=False)
    assert not check(_constant, constant(1.5))
    assert not check(_rounded_constant, constant(float("inf")))


def test_the_checker_knows_what_was_promised(fake_world: Call) -> None:
    fake_world(_refused_promises)


def test_the_checker_knows_each_rules_conditions(fake_world: Call) -> None:
    fake_world(_refused)


def _bits_stay() -> None:
    for k, program in enumerate(_CASES):
        (x,) = odd_values(k * 10 + dist.get_rank(), 1)
        graph = make_fx(program)(x)
        new, _ = optimize_and_report(graph, _settings(memory_budget=2**30, agree="every"))
        assert bits([graph(x.clone())]) == bits([new(x.clone())]), program.__name__

    for k, program in enumerate(_PROMISED):
        if program is _first_part:
            continue
        (x,) = odd_values(k * 10 + dist.get_rank(), 1)
        x = x.repeat(dist.get_world_size(), 1)
        graph = make_fx(program)(x)
        settings = _settings(memory_budget=2**30, agree="every", spmd=True)
        new, _ = optimize_and_report(graph, settings)
        assert bits([graph(x.clone())]) == bits([new(x.clone())]), program.__name__


def _broken_promise() -> None:
    """A constant that is each rank's own, and a part that is everybody's."""

    def own_constant(x: Tensor) -> Tensor:
        # No two alike, of which one would be enough.
        own = [_reduced(torch.full((k,), float(dist.get_rank() + k))).sum() for k in range(1, 9)]
        return torch.stack(own) * _reduced(x).sum()

    def first_part(x: Tensor) -> Tensor:
        return torch.stack([_rows(_reduced(x * k), 0) * 2 for k in range(1, 9)])

    for program in (own_constant, first_part):
        x = torch.ones(4 * dist.get_world_size())
        graph = make_fx(program)(x)
        right = graph(x)
        changes = dict(agree="every", memory_budget=2**30)
        new, about = optimize_and_report(graph, _settings(**changes))
        assert about.changed
        assert torch.equal(new(x), right)
        new, about = optimize_and_report(graph, _settings(spmd=True, **changes))
        assert about.changed
        with pytest.raises(CollectiveMismatch, match="collective"):
            new(x)


def test_a_broken_promise_is_found() -> None:
    run(2, _broken_promise, backend="shm")
    run(2, _broken_promise, backend="gloo")


@pytest.mark.parametrize("ranks", [2, 3])
def test_bits_stay_on_shm(ranks: int) -> None:
    run(ranks, _bits_stay, backend="shm")
