"""optimize: what it does with graphs, what it leaves alone, and that nothing else changes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import torch_c10d_ext
from tests.harness.crew import crew
from tests.optimizer.graphs import Builder, aten, join_fake_world, random_graph
from torch_c10d_ext import Compute, Link, communication_report
from torch_c10d_ext.optimizer import Settings, find_deadlock, optimize_and_report

WORLD = "0"
RANKS = 4
LINK = Link(latency=10e-6, bandwidth=5e9, shared="wire")
COMPUTE = Compute(memory_bandwidth=1e10, flops=1e11)

ext, native = torch.ops.c10d_ext, torch.ops._c10d_functional

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def fake_world() -> Iterator[Call]:
    """Calls a function of this module in a process that is rank 0 of 4."""
    with crew(1, "gloo") as made:
        made.run(join_fake_world, RANKS)
        yield lambda fn, *args: made.run(fn, *args)[0]


def _settings(**changes: Any) -> Settings:
    given = {"link": LINK, "compute": COMPUTE, "agree": "never", **changes}
    return Settings.of(given.pop("links", None), given.pop("sizes", None), **given)


def _optimized(graph: GraphModule, **changes: Any) -> tuple[GraphModule, Any]:
    return optimize_and_report(graph, _settings(**changes))


def _names(graph: GraphModule) -> list[str]:
    return [
        str(n.target).split("::")[-1].split(".")[-2]
        for n in graph.graph.nodes
        if n.op == "call_function" and hasattr(n.target, "_schema")
    ]


def _counted(graph: GraphModule) -> Counter[str]:
    return Counter(_names(graph))


def _trace(fn: Call, *inputs: Any) -> GraphModule:
    return make_fx(fn, tracing_mode="fake")(*inputs)


# --- programs ------------------------------------------------------------------------------------


def _mlp_gradients(layers: int, width: int = 256, ops: Any = ext) -> GraphModule:
    """Data parallel: each gradient is averaged at the end, by a collective of its own."""

    def step(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
        weights = [w.detach().requires_grad_() for w in weights]
        h = x
        for w in weights:
            h = torch.relu(h @ w)
        gradients = torch.autograd.grad(h.sum(), weights)
        return [ops.wait_tensor(ops.all_reduce(g, "avg", WORLD)) for g in gradients]

    weights = [torch.empty(width, width) for _ in range(layers)]
    return _trace(step, torch.empty(1024, width), weights)


def _sharded_forward(layers: int, width: int = 256, ops: Any = ext) -> GraphModule:
    """Fully sharded: each layer's weight is gathered just before it is used."""

    def forward(x: Tensor, shards: list[Tensor]) -> Tensor:
        for shard in shards:
            w = ops.wait_tensor(ops.all_gather_into_tensor(shard, RANKS, WORLD))
            x = torch.relu(x @ w)
        return x

    shards = [torch.empty(width // RANKS, width) for _ in range(layers)]
    return _trace(forward, torch.empty(1024, width), shards)


def _many_gradients_share_few_launches() -> None:
    for ops in (ext, native):
        graph = _mlp_gradients(64, width=64, ops=ops)
        new, about = _optimized(graph, memory_budget=2**30, link=Link(50e-6, 5e9, shared="w"))
        assert about.launches_before == 64
        assert about.launches * 8 <= 64, about
        assert about.seconds < about.seconds_before
        assert _counted(new)["all_reduce_coalesced"] == about.launches - _counted(new)["all_reduce"]
        assert _counted(new)["wait_tensor"] == 64


def test_many_gradients_share_few_launches(fake_world: Call) -> None:
    fake_world(_many_gradients_share_few_launches)


def _calls_that_keep_the_rank_busy_are_fewer() -> None:
    graph = _mlp_gradients(24)
    launches, seconds = [], []
    for overhead in (0.0, 1e-3):
        link = Link(10e-6, 1e9, shared="wire", overhead=overhead)
        new, about = _optimized(graph, memory_budget=2**30, link=link)
        report = communication_report(new, link=link, compute=COMPUTE)
        assert report.seconds == pytest.approx(about.seconds)
        launches.append(about.launches)
        seconds.append(about.seconds)
    # A launch more gains less than the time that it takes of the rank.
    assert launches[1] < launches[0], launches
    assert seconds[0] + launches[1] * 1e-3 * 0.9 < seconds[1], seconds


def test_calls_that_keep_the_rank_busy_are_fewer(fake_world: Call) -> None:
    fake_world(_calls_that_keep_the_rank_busy_are_fewer)


def _gathers_are_prefetched() -> None:
    for ops in (ext, native):
        graph = _sharded_forward(8, ops=ops)
        assert _names(graph)[:3] == ["all_gather_into_tensor", "wait_tensor", "mm"]
        new, about = _optimized(graph, bucket=False)
        assert about.hidden_before < 0.01
        assert about.hidden > 0.85, about
        report = communication_report(new, link=LINK, compute=COMPUTE)
        assert report.seconds == pytest.approx(about.seconds)
        assert sum(call.overlapped for call in report.calls) >= 7


def test_gathers_are_prefetched(fake_world: Call) -> None:
    fake_world(_gathers_are_prefetched)


def _reports_agree_with_the_plan() -> None:
    """The simulator of communication_report and the planner's are two; they see the same."""
    for seed in range(40):
        graph = random_graph(seed, WORLD, RANKS)
        busy = seed % 2
        link = replace(LINK, overhead=busy * 3e-6, overhead_per_byte=busy * 1e-11)
        before = communication_report(graph, link=link, compute=COMPUTE)
        new, about = _optimized(graph, bucket=False, algebra=False, link=link)
        if not about.changed:
            continue
        assert about.seconds_before == pytest.approx(before.seconds)
        after = communication_report(new, link=link, compute=COMPUTE)
        assert about.seconds == pytest.approx(after.seconds)
        assert after.seconds < before.seconds


def test_reports_agree_with_the_plan(fake_world: Call) -> None:
    fake_world(_reports_agree_with_the_plan)


# --- what stays ----------------------------------------------------------------------------------


def _reason(graph: GraphModule, **changes: Any) -> str:
    text = str(graph.graph)
    new, about = _optimized(graph, **changes)
    assert new is graph
    assert str(graph.graph) == text
    assert not about.changed
    return about.reason


def _graphs_that_stay() -> None:
    b = Builder()
    x = b.input("x", 8, 8)
    assert "no collectives" in _reason(b.done(b.call(aten.relu.default, x)))

    b = Builder()
    x = b.input("x", 8, 8)
    y = b.call(ext.wait_tensor.default, b.call(ext.all_reduce.default, x, "sum", WORLD))
    alone = b.done(y)
    assert "no schedule is faster" in _reason(alone)

    b = Builder()
    x = b.input("x", 8, 8)
    y = b.call(ext.all_reduce.default, x, "sum", WORLD)
    z = b.call(aten.relu.default, y)
    unwaited = b.done(z)
    assert "must be waited for before it is used, got relu" in _reason(unwaited)

    b = Builder()
    x = b.input("x", 8, 8)
    y = b.call(ext.all_reduce.default, x, "sum", WORLD)
    y.args = (x, "sum", "elsewhere")
    unknown = b.done(b.call(ext.wait_tensor.default, y))
    assert "elsewhere" in _reason(unknown)

    b = Builder()
    x = b.input("x", 8, 8)
    g = b.graph.placeholder("g")
    y = b.call(ext.all_reduce.default, x, "sum", WORLD)
    y.args = (x, "sum", g)
    nameless = b.done(b.call(ext.wait_tensor.default, y))
    assert "must be a name" in _reason(nameless)

    graph = _sharded_forward(4)
    assert "more than the budget of 10" in _reason(graph, memory_budget=10)
    graph.graph.find_nodes(op="call_function", target=aten.mm.default)[0].meta.clear()
    assert "must carry fake tensors, got mm" in _reason(graph)

    symbolic = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
    assert "no collectives" in _reason(symbolic)


def test_graphs_that_stay(fake_world: Call) -> None:
    fake_world(_graphs_that_stay)


def _reason_is_logged() -> str:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign, assignment]
    log = logging.getLogger("torch_c10d_ext")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        b = Builder()
        torch_c10d_ext.optimize(b.done(b.input("x", 8, 8)))
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    return " ".join(r.getMessage() for r in records)


def test_the_reason_is_logged(fake_world: Call) -> None:
    assert "stays as it is, as it has no collectives" in fake_world(_reason_is_logged)


def _bad_settings() -> None:
    graph = Builder()
    module = graph.done(graph.input("x", 2))
    for changes, text in {
        ("numerics", "fast"): "numerics must be 'bitwise' or 'rounding', got 'fast'",
        ("bucket_bytes", -1): "bucket_bytes must be positive, got -1",
        ("agree", "often"): "agree must be 'every', 'first' or 'never', got 'often'",
        ("memory_budget", -1): "memory_budget must be 0 or more, got -1",
    }.items():
        with pytest.raises(ValueError, match=text):
            torch_c10d_ext.optimize(module, **{changes[0]: changes[1]})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nowhere"):
        torch_c10d_ext.optimize(module, links={"nowhere": Link()})
    with pytest.raises(TypeError, match="program must be a torch.fx.GraphModule or Exported"):
        torch_c10d_ext.optimize(torch.nn.Linear(2, 2))  # type: ignore[type-var]


def test_bad_settings_are_refused(fake_world: Call) -> None:
    fake_world(_bad_settings)


def _explained() -> str:
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        torch_c10d_ext.optimize(
            _mlp_gradients(16), link=LINK, compute=COMPUTE, memory_budget=2**30, explain=True
        )
    return out.getvalue()


def test_explain_says_what_was_done(fake_world: Call) -> None:
    text = fake_world(_explained)
    assert "launches 16 -> " in text
    assert "done: " in text


# --- order ---------------------------------------------------------------------------------------


def _messages_and_barriers_are_fences() -> None:
    """What is started, and waited for, before a barrier still is."""
    b = Builder()
    x = b.input("x", 64, 64)
    first = b.call(ext.all_reduce.default, x, "sum", WORLD)
    landed = b.call(ext.wait_tensor.default, first)
    fence = b.call(ext.wait_tensor.default, b.call(ext.barrier.default, x, WORLD))
    a = b.call(aten.mm.default, x, x)
    c = b.call(aten.mm.default, a, x)
    second = b.call(ext.all_reduce.default, x, "max", WORLD)
    d = b.call(aten.add.Tensor, c, b.call(ext.wait_tensor.default, second))
    graph = b.done(landed, fence, d)
    new, about = _optimized(graph)
    assert about.changed
    names = [n.name for n in new.graph.nodes]
    assert names.index("wait_tensor_default") < names.index("barrier_default")
    assert names.index("barrier_default") < names.index("all_reduce_default_1")
    assert names.index("all_reduce_default_1") < names.index("mm_default_1")


def test_messages_and_barriers_are_fences(fake_world: Call) -> None:
    fake_world(_messages_and_barriers_are_fences)


def _uneven_sizes_keep_the_order() -> None:
    b = Builder()
    x = b.input("x", 256, 256)
    kept = []
    for k in range(6):
        sent = [64, 96, 64 - k % 2, 32 + k % 2]
        y = b.call(ext.all_to_all_single.default, x, [64] * 4, sent, WORLD)
        y = b.call(ext.wait_tensor.default, y)
        m = b.call(aten.mm.default, y, y)
        r = b.call(ext.all_reduce.default, m, "sum", WORLD)
        kept.append(b.call(ext.wait_tensor.default, r))
        kept.append(b.call(aten.mm.default, x, x))
    new, about = _optimized(b.done(*kept), memory_budget=2**30)
    assert about.changed
    order = [n for n in _names(new) if n.startswith("all_")]
    assert order == ["all_to_all_single", "all_reduce"] * 6


def test_uneven_sizes_keep_the_order(fake_world: Call) -> None:
    fake_world(_uneven_sizes_keep_the_order)


def _one_decision_on_all_ranks() -> None:
    for seed in range(6):
        plans, orders = [], []
        # What only moves, and rows at rank 0's place, must not be read otherwise on rank 0.
        moves = seed % 2 == 1
        for rank in range(RANKS):
            join_fake_world(RANKS, rank)
            _, about = _optimized(random_graph(seed, WORLD, RANKS, 40, moves))
            assert "checker" not in about.reason
            plans.append(about.plan)
            orders.append(about.order)
        assert all(plan == plans[0] for plan in plans)
        assert find_deadlock(orders) is None
    join_fake_world(RANKS)


def test_one_decision_on_all_ranks(fake_world: Call) -> None:
    fake_world(_one_decision_on_all_ranks)


# --- memory and validity -------------------------------------------------------------------------


def _random_graphs_keep_their_budget() -> tuple[int, int]:
    """The checker has passed each; here the budget is compared once more, at the old peak."""
    changed = hidden = 0
    for seed in range(20):
        graph = random_graph(seed, WORLD, RANKS, 10 + seed % 40, moves=seed % 3 == 2)
        new, about = _optimized(graph)
        again = _optimized(graph, memory_budget=int(about.peak_before))[1]
        assert again.peak <= again.peak_before or not again.changed
        assert "differ" not in about.reason + again.reason
        if about.changed:
            assert about.peak <= about.peak_before * 1.1
            new.graph.lint()
            changed += 1
            hidden += about.hidden > about.hidden_before
    return changed, hidden


def test_random_graphs_keep_their_budget(fake_world: Call) -> None:
    changed, hidden = fake_world(_random_graphs_keep_their_budget)
    assert changed > 10
    assert hidden > 6


def _exported() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shards = torch.nn.ParameterList(torch.zeros(64, 256) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            for shard in self.shards:
                w = ext.wait_tensor(ext.all_gather_into_tensor(shard, RANKS, WORLD))
                x = torch.relu(x @ w)
            return x

    with torch.no_grad():
        program = torch.export.export(Layer(), (torch.randn(512, 256),))
    new = torch_c10d_ext.optimize(program, link=LINK, compute=COMPUTE)
    assert new is not program
    assert type(new) is torch.export.ExportedProgram
    x = torch.randn(512, 256)
    assert torch.equal(new.module()(x), program.module()(x))


def test_exported_programs_are_optimized(fake_world: Call) -> None:
    fake_world(_exported)


def _costs_of_out() -> None:
    costs = []
    for into in (False, True):
        b = Builder()
        x = b.input("x", 64, 64)
        if into:
            out = b.call(aten.empty.memory_format, [RANKS * 64, 64], device="cpu")
            y = b.call(native.all_gather_into_tensor_out.default, x, RANKS, WORLD, out=out)
        else:
            y = b.call(native.all_gather_into_tensor.default, x, RANKS, WORLD)
        graph = b.done(b.call(native.wait_tensor.default, y))
        costs.append(_optimized(graph)[1].seconds_before)
    assert costs[0] == costs[1]


def test_where_a_gather_is_written_to_sends_nothing(fake_world: Call) -> None:
    fake_world(_costs_of_out)
