"""Launches of several collectives that no op takes as they are: of other dtypes, of all_to_alls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import torch_c10d_ext
from tests.harness import run
from tests.harness.crew import crew
from tests.optimizer.graphs import Builder, aten, bits, join_fake_world, odd_values
from tests.optimizer.test_optimize import RANKS, WORLD, _settings
from torch_c10d_ext import Link
from torch_c10d_ext.optimizer import CheckFailed, check_rewrite, optimize_and_report

ext, native = torch.ops.c10d_ext, torch.ops._c10d_functional

Call = Callable[..., Any]

SLOW = Link(1e-3, 1e9, shared="wire")
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float32]


@pytest.fixture(scope="module")
def fake_world() -> Iterator[Call]:
    with crew(1, "gloo") as made:
        made.run(join_fake_world, RANKS)
        yield lambda fn, *args: made.run(fn, *args)[0]


def _group() -> str:
    return str(dist.group.WORLD.group_name)  # type: ignore[union-attr]


def _start(kind: str, space: Any, x: Tensor) -> Tensor:
    n, group = dist.get_world_size(), _group()
    if kind == "broadcast":
        return space.broadcast(x, n - 1, group)  # type: ignore[no-any-return]
    if kind == "all_gather":
        return space.all_gather_into_tensor(x, n, group)  # type: ignore[no-any-return]
    even = [x.shape[0] // n] * n
    return space.all_to_all_single(x, even, even, group)  # type: ignore[no-any-return]


KINDS = ["broadcast", "all_gather", "all_to_all"]


def _moves(kind: str, space: Any) -> Callable[..., list[Tensor]]:
    def step(xs: list[Tensor]) -> list[Tensor]:
        moved = [_start(kind, space, x) for x in xs]
        return [space.wait_tensor(y).clone() for y in moved]

    return step


def _inputs(n: int, seed: int = 0) -> list[Tensor]:
    """Of all dtypes, with what numbers treat specially, and of other shapes."""
    made = []
    for k, dtype in enumerate(DTYPES):
        (x,) = odd_values(seed * 100 + k, 1)
        x = x.repeat(n, k + 1).reshape(n * 4, 2, -1).contiguous()
        if dtype == torch.complex64:
            made.append(torch.complex(x, -x))
        elif dtype.is_floating_point:
            made.append(x.to(dtype))
        else:
            made.append(x.nan_to_num(1.0, 2.0, 3.0).clamp(-9, 9).to(dtype))
    return made


def _count(graph: Graph, part: str) -> int:
    return sum(part in str(n.target) for n in graph.nodes if n.op == "call_function")


def _one_launch(kind: str) -> None:
    for space in (ext, native):
        graph = make_fx(_moves(kind, space), tracing_mode="fake")(_inputs(RANKS))
        new, about = optimize_and_report(graph, _settings(link=SLOW, memory_budget=2**30))
        assert about.launches_before == len(DTYPES)
        assert about.launches == 1, str(about)
        assert _count(new.graph, "wait_tensor") == (1 if kind == "all_to_all" else len(DTYPES))
        # Only all_to_alls are copied into a message.
        assert _count(new.graph, "aten.cat") == (kind == "all_to_all")


@pytest.mark.parametrize("kind", KINDS)
def test_collectives_of_all_dtypes_share_a_launch(fake_world: Call, kind: str) -> None:
    fake_world(_one_launch, kind)


def _uneven_stay() -> None:
    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        splits = [1, 2, 3, 2]
        a = ext.all_to_all_single(x, splits, splits, WORLD)
        b = ext.all_to_all_single(y, [2] * 4, [2] * 4, WORLD)
        return [ext.wait_tensor(a) * 2, ext.wait_tensor(b) * 2]

    graph = make_fx(step, tracing_mode="fake")(torch.empty(8, 4), torch.empty(8, 4))
    _, about = optimize_and_report(graph, _settings(link=SLOW, memory_budget=2**30))
    assert about.launches == 2


def test_uneven_all_to_alls_share_no_launch(fake_world: Call) -> None:
    fake_world(_uneven_stay)


def _strided_stay() -> None:
    b = Builder()
    x, y = b.input("x", 8, 4), b.input("y", 8, 4, dtype=torch.float64)
    turned = b.call(aten.t.default, x)
    a = b.call(ext.broadcast.default, turned, 0, WORLD)
    c = b.call(ext.broadcast.default, y, 0, WORLD)
    graph = b.done(*[b.call(aten.relu.default, b.call(ext.wait_tensor.default, v)) for v in (a, c)])
    _, about = optimize_and_report(graph, _settings(link=SLOW, memory_budget=2**30))
    assert about.launches == 2


def test_bytes_of_strided_memory_are_not_taken(fake_world: Call) -> None:
    fake_world(_strided_stay)


def _memory_of_copies() -> None:
    """A message for all takes memory of its own, which the budget must hold."""
    graph = make_fx(_moves("all_to_all", ext), tracing_mode="fake")(_inputs(RANKS))
    wide = optimize_and_report(graph, _settings(link=SLOW, memory_budget=2**30))[1]
    assert wide.launches == 1
    assert wide.peak > wide.peak_before
    exact = optimize_and_report(graph, _settings(link=SLOW, memory_budget=int(wide.peak)))[1]
    assert exact.launches == 1
    short = optimize_and_report(graph, _settings(link=SLOW, memory_budget=int(wide.peak) - 1))[1]
    assert short.launches == len(DTYPES)
    assert any("takes more memory than there is" in line for line in short.missed)
    assert "checker" not in short.reason


def test_copies_count_towards_the_budget(fake_world: Call) -> None:
    fake_world(_memory_of_copies)


def _costs_of_copies() -> None:
    """Where a launch costs nothing, copies are a loss, and the graph stays."""
    graph = make_fx(_moves("all_to_all", ext), tracing_mode="fake")(_inputs(RANKS))
    quick = Link(0.0, 1e9, shared="wire")
    _, about = optimize_and_report(graph, _settings(link=quick, memory_budget=2**30))
    assert about.launches == len(DTYPES)


def test_copies_count_towards_the_time(fake_world: Call) -> None:
    fake_world(_costs_of_copies)


def _is_refused(before: Graph, after: Graph) -> bool:
    try:
        check_rewrite(before, after, 2**40, lambda group: True)
    except CheckFailed:
        return True
    return False


def _damaged() -> int:
    """A message whose parts are mistaken is found out, whatever is mistaken."""
    found = 0
    for kind in KINDS:
        xs = [torch.empty(8, 2), torch.empty(8, 2, dtype=torch.int32), torch.empty(8, 2)]
        graph = make_fx(_moves(kind, ext), tracing_mode="fake")(xs)

        def optimized(graph: GraphModule = graph) -> Graph:
            return optimize_and_report(graph, _settings(link=SLOW, memory_budget=2**30))[0].graph

        def targets(new: Graph, op: Any) -> list[Node]:
            return list(new.find_nodes(op="call_function", target=op))

        def swap_dtypes(new: Graph) -> bool:
            # One dtype for another of its size: the bits are the same, their meaning is not.
            back = [n for n in targets(new, aten.view.dtype) if n.args[1] == torch.int32]
            for n in back:
                n.args = (n.args[0], torch.float32)
                with n.meta["val"].fake_mode:
                    n.meta["val"] = torch.empty(n.meta["val"].shape, dtype=torch.float32)
            return bool(back)

        def swap_columns(new: Graph) -> bool:
            slices = targets(new, aten.slice.Tensor)
            if len(slices) < 2:
                return False
            slices[0].args, slices[1].args = slices[1].args, slices[0].args
            return True

        def shift_columns(new: Graph) -> bool:
            slices = targets(new, aten.slice.Tensor)
            for n in slices[:1]:
                begin, end = n.args[2:]
                n.args = (*n.args[:2], begin + 1, end + 1)  # type: ignore[operator]
            return bool(slices)

        def swap_rows(new: Graph) -> bool:
            cats = targets(new, aten.cat.default)
            for n in cats:
                rows = list(n.args[0])  # type: ignore[arg-type]
                n.args = ([rows[1], rows[0], *rows[2:]], 1)
            return bool(cats)

        def along_rows(new: Graph) -> bool:
            cats = targets(new, aten.cat.default)
            for n in cats:
                n.args = (n.args[0], 0)
            return bool(cats)

        def other_inputs(new: Graph) -> bool:
            views = targets(new, aten.view.default)
            given = list(new.find_nodes(op="placeholder"))
            views = [v for v in views if v.args[0] in given]
            for v in views[:1]:
                v.args = (given[2], *v.args[1:])
            return bool(views)

        assert not _is_refused(graph.graph, optimized())
        damages = (swap_dtypes, swap_columns, shift_columns, swap_rows, along_rows, other_inputs)
        for damage in damages:
            new = optimized()
            if damage(new):
                assert _is_refused(graph.graph, new), (kind, damage.__name__)
                found += 1
    return found


def test_the_checker_finds_mistaken_parts(fake_world: Call) -> None:
    # Dtypes and inputs of all three kinds; columns and rows of messages of all_to_alls.
    assert fake_world(_damaged) == 10


def _bits_stay() -> None:
    n = dist.get_world_size()
    for kind in KINDS:
        for space in (ext, native):
            inputs = _inputs(n, seed=dist.get_rank() + 1)
            if space is native and dist.get_backend() == "gloo":
                # torch's ops on gloo know few dtypes.
                inputs = [x for x in inputs if x.dtype in (torch.float32, torch.int64)]
            graph = make_fx(_moves(kind, space))(inputs)
            settings = _settings(link=SLOW, memory_budget=2**30, agree="every")
            new, about = optimize_and_report(graph, settings)
            assert about.launches == 1, str(about)
            assert bits(graph(inputs)) == bits(new(inputs)), (kind, space)
    assert torch_c10d_ext.pending_count() == 0


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_bits_stay(ranks: int, backend: str) -> None:
    run(ranks, _bits_stay, backend=backend)


def _compiled() -> None:
    n = dist.get_world_size()
    for kind in KINDS:
        inputs = _inputs(n, seed=dist.get_rank() + 1)
        # Complex numbers have kernels in eager alone.
        inputs = [x for x in inputs if not x.is_complex()]
        step = _moves(kind, ext)
        options = torch_c10d_ext.communication_options(link=SLOW, memory_budget=2**30)
        torch._dynamo.reset()
        compiled = torch.compile(step, fullgraph=True, options=options)
        assert bits(compiled(inputs)) == bits(step(inputs)), kind


def test_bits_stay_under_inductor() -> None:
    run(2, _compiled, backend="shm", deadline=240)
