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


def test_the_checker_knows_each_rules_conditions(fake_world: Call) -> None:
    fake_world(_refused)


def _bits_stay() -> None:
    for k, program in enumerate(_CASES):
        (x,) = odd_values(k * 10 + dist.get_rank(), 1)
        graph = make_fx(program)(x)
        new, _ = optimize_and_report(graph, _settings(memory_budget=2**30, agree="every"))
        assert bits([graph(x.clone())]) == bits([new(x.clone())]), program.__name__


@pytest.mark.parametrize("ranks", [2, 3])
def test_bits_stay_on_shm(ranks: int) -> None:
    run(ranks, _bits_stay, backend="shm")
