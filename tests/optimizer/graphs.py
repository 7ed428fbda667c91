"""Graphs for the tests of the optimizer: random ones, of real ops, that any rank can run."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

import torch_c10d_ext  # noqa: F401

aten = torch.ops.aten


def join_fake_world(size: int, rank: int = 0) -> None:
    """Makes this process a rank of a fake world."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


class Builder:
    """Adds nodes to a graph, with the fake tensors that they stand for."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.mode = FakeTensorMode()

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(op, args, kwargs)
        given = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = op(*given[0], **given[1])
        return node

    def done(self, *outputs: Node) -> GraphModule:
        self.graph.output(tuple(outputs))
        return GraphModule(torch.nn.Module(), self.graph)


SIZE = 8


def random_graph(
    seed: int, group: str, ranks: int, nodes: int = 24, moves: bool = False
) -> GraphModule:
    """A graph of one to three inputs, computations, views, writes and collectives.

    Some results are waited for late, some collectives occur twice, some results are written.
    ``moves`` adds all_to_alls, and gathers and broadcasts of several dtypes.
    """
    rng = random.Random(seed)
    b = Builder()
    spaces = [torch.ops.c10d_ext, torch.ops._c10d_functional]
    ready = [b.input(f"x{k}", SIZE, SIZE) for k in range(rng.randint(1, 3))]
    owned: list[Node] = []  # fresh memory, which may be written
    flying: list[Node] = []

    def storages(*nodes: Any) -> set[int]:
        return {n.meta["val"].untyped_storage()._cdata for n in nodes if isinstance(n, Node)}

    def in_flight() -> set[int]:
        return set().union(*(storages(*node.args) for node in flying))

    def take() -> Node:
        return rng.choice(ready[-6:])

    def add(node: Node, fresh: bool = True) -> None:
        ready.append(node)
        if fresh:
            owned.append(node)

    for _ in range(nodes):
        kind = rng.choice(
            ["mm", "add", "mul", "relu", "view", "write", "start", "start", "start", "wait", "wait"]
        )
        if kind == "mm":
            add(b.call(aten.mm.default, take(), take()))
        elif kind == "add":
            add(b.call(aten.add.Tensor, take(), take()))
        elif kind == "mul":
            add(b.call(aten.mul.Tensor, take(), rng.choice([0.5, -1.0, 2.0])))
        elif kind == "relu":
            add(b.call(aten.relu.default, take()))
        elif kind == "view":
            add(b.call(aten.t.default, take()), fresh=False)
        elif kind == "write" and owned:
            target = rng.choice(owned[-4:])
            if not storages(target) & in_flight():
                b.call(aten.mul_.Tensor, target, rng.choice([0.5, -1.0, 3.0]))
        elif kind == "start":
            space = rng.choice(spaces)
            name = rng.choice(["all_reduce", "all_reduce", "all_gather", "reduce_scatter", "cast"])
            x = take()
            if moves and rng.random() < 0.6:
                flying.append(_moving(b, x, group, ranks, rng))
            elif name == "all_reduce":
                op = rng.choice(["sum", "sum", "max", "avg"])
                flying.append(b.call(space.all_reduce.default, x, op, group))
            elif name == "all_gather":
                flying.append(b.call(space.all_gather_into_tensor.default, x, ranks, group))
            elif name == "reduce_scatter":
                wide = b.call(aten.repeat.default, x, [ranks, 1])
                op = space.reduce_scatter_tensor.default
                flying.append(b.call(op, wide, "sum", ranks, group))
            else:
                half = b.call(aten._to_copy.default, x, dtype=torch.float64)
                flying.append(b.call(space.all_reduce.default, half, "sum", group))
        elif kind == "wait" and flying:
            _land(b, flying.pop(rng.randrange(len(flying))), add, rng)
    for node in flying:
        _land(b, node, add, rng)
    return b.done(*ready[-4:])


def _moving(b: Builder, x: Node, group: str, ranks: int, rng: random.Random) -> Node:
    """The start of a collective that only moves, of one of several dtypes."""
    dtype = rng.choice([torch.float32, torch.float64, torch.bfloat16])
    if dtype != torch.float32:
        x = b.call(aten._to_copy.default, x, dtype=dtype)
    space = rng.choice([torch.ops.c10d_ext, torch.ops._c10d_functional])
    kind = rng.choice(["gather", "broadcast", "exchange", "exchange"])
    if kind == "gather":
        return b.call(space.all_gather_into_tensor.default, x, ranks, group)
    if kind == "broadcast":
        return b.call(space.broadcast.default, x, 0, group)
    wide = b.call(aten.repeat.default, x, [ranks, 1])
    even = [SIZE] * ranks
    return b.call(space.all_to_all_single.default, wide, even, even, group)


def _land(b: Builder, start: Node, add: Any, rng: random.Random) -> None:
    space = rng.choice([torch.ops.c10d_ext, torch.ops._c10d_functional])
    node = b.call(space.wait_tensor.default, start)
    value = node.meta["val"]
    if value.dtype != torch.float32:
        node = b.call(aten._to_copy.default, node, dtype=torch.float32)
        if value.shape[0] == SIZE:
            add(node)
            return
    if value.shape[0] != SIZE:
        add(b.call(aten.slice.Tensor, node, 0, 0, SIZE), fresh=False)
    else:
        add(node)


def odd_values(seed: int, count: int) -> list[Tensor]:
    """Inputs with what sums and products treat specially: NaN, infinities, −0, denormals."""
    generator = torch.Generator().manual_seed(seed)
    special = torch.tensor(
        [float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 1e-40, -1e-42, 1e38, 3e-39]
    )
    found = []
    for _ in range(count):
        x = torch.randn(SIZE, SIZE, generator=generator)
        at = torch.randint(0, SIZE * SIZE, (9,), generator=generator)
        x.view(-1)[at] = special[torch.randint(0, 9, (9,), generator=generator)]
        found.append(x)
    return found


def bits(tensors: Any) -> list[bytes]:
    return [t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]
