"""Graphs give the same bits before and after, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import torch_c10d_ext
from tests.harness import run
from tests.optimizer.graphs import bits, odd_values, random_graph
from torch_c10d_ext import Compute, Link
from torch_c10d_ext.optimizer import Settings, optimize_and_report

LINK = Link(latency=10e-6, bandwidth=5e9, shared="wire")
COMPUTE = Compute(memory_bandwidth=1e10, flops=1e11)


def _group() -> str:
    return str(dist.group.WORLD.group_name)  # type: ignore[union-attr]


def _settings(**changes: Any) -> Settings:
    return Settings.of(None, None, **{"link": LINK, "compute": COMPUTE, **changes})


def _bits(tensors: Any) -> list[bytes]:
    """Bits; on gloo without those of NaNs and signs of zeros.

    gloo adds two ranks' values in either order, by where in a message an element is. That decides
    which of two NaNs a sum is, and which of two zeros a maximum.
    """
    if dist.get_backend() == "gloo":
        tensors = [torch.where(t.isnan(), torch.nan, t) + 0.0 for t in tensors]
    return bits(tensors)


def _random_graphs(first: int, count: int, numerics: str, moves: bool = False) -> tuple[int, int]:
    changed = merged = 0
    ranks = dist.get_world_size()
    for seed in range(first, first + count):
        graph = random_graph(seed, _group(), ranks, 12 + seed % 30, moves)
        new, about = optimize_and_report(graph, _settings(memory_budget=2**30, numerics=numerics))
        n = len(graph.graph.find_nodes(op="placeholder"))
        inputs = odd_values(100 * seed + dist.get_rank(), n)
        given = [[x.clone() for x in inputs] for _ in range(2)]
        old = graph(*given[0])
        got = new(*given[1])
        for a, b, what in ((old, got, "results"), (*given, "inputs")):
            assert _bits(a) == _bits(b), f"seed {seed}, other {what}\n{about}"
        changed += about.changed
        merged += about.launches < about.launches_before
    assert torch_c10d_ext.pending_count() < 64
    return changed, merged


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_random_graphs_keep_their_bits_on_shm(ranks: int) -> None:
    (changed, merged), *_ = run(ranks, _random_graphs, 1000, 40, "bitwise", backend="shm")
    assert changed > 20
    assert merged > 6


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_random_moves_keep_their_bits_on_shm(ranks: int) -> None:
    (changed, merged), *_ = run(ranks, _random_graphs, 3000, 25, "bitwise", True, backend="shm")
    assert changed > 10
    assert merged > 6


def test_random_graphs_keep_their_bits_on_gloo() -> None:
    (changed, merged), *_ = run(2, _random_graphs, 2000, 25, "bitwise", backend="gloo")
    assert changed > 10
    assert merged > 3


def _training_step() -> None:
    """A step with its backward: gradients are among the results."""
    ext = torch.ops.c10d_ext
    n, group = dist.get_world_size(), _group()

    def step(x: Tensor, shards: list[Tensor]) -> list[Tensor]:
        shards = [s.detach().requires_grad_() for s in shards]
        h = x
        for shard in shards:
            w = ext.wait_tensor(ext.all_gather_into_tensor(shard, n, group))
            h = torch.relu(h @ w) + h
        loss = ext.wait_tensor(ext.all_reduce(h.sum(), "sum", group))
        return [loss, *torch.autograd.grad(loss, shards)]

    shards = [torch.randn(16 // n, 16) for _ in range(6)]
    graph = make_fx(step)(torch.randn(32, 16), shards)
    new, about = optimize_and_report(graph, _settings(memory_budget=2**30))
    assert about.changed
    assert about.launches < about.launches_before
    x = torch.randn(32, 16)
    for special in (1.0, -0.0, 1e-41, float("inf"), float("nan")):
        x.view(-1)[dist.get_rank()] = special
        assert bits(graph(x, shards)) == bits(new(x, shards))


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_training_step_keeps_its_bits(backend: str) -> None:
    run(2, _training_step, backend=backend)


def _sums_are_merged(numerics: str) -> int:
    ext, group = torch.ops.c10d_ext, _group()

    def step(xs: list[Tensor]) -> list[Tensor]:
        return [ext.wait_tensor(ext.all_reduce(x * 2, "sum", group)) for x in xs]

    graph = make_fx(step)([torch.randn(50) for _ in range(8)])
    _, about = optimize_and_report(graph, _settings(memory_budget=2**30, numerics=numerics))
    return int(about.launches_before - about.launches)


def test_sums_share_launches_where_their_bits_stay() -> None:
    # gloo's rings add in an order that depends on an element's place; two ranks have one order.
    assert run(3, _sums_are_merged, "bitwise", backend="shm")[0] > 0
    assert run(2, _sums_are_merged, "bitwise", backend="gloo")[0] > 0
    assert run(3, _sums_are_merged, "bitwise", backend="gloo")[0] == 0
    assert run(3, _sums_are_merged, "rounding", backend="gloo")[0] > 0
