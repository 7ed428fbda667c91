"""What communication_report says of graphs traced for 1,000 ranks in one process.

One file, for its parts trace in one fake world, which is made once.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as torch_functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import torch_c10d_ext.distributed as ours
import torch_c10d_ext.functional as F
from tests.harness.crew import crew
from torch_c10d_ext import Compute, Link, Topology, communication_report
from torch_c10d_ext.report import CollectiveCall, CommunicationReport

WORLD = "0"  # the default group's name
RING = [1, 2, 3, 4, 5, 6, 7, 0]

# Round numbers: 5 us and 1 byte per ns.
LINK = Link(latency=5e-6, bandwidth=1e9)

Call = Callable[..., Any]


def _join_big_world() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1000)
    _mesh()


@functools.cache
def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (125, 8), mesh_dim_names=("dp", "tp"))


def _tp() -> str:
    return str(_mesh().get_group("tp").group_name)


def _dp() -> str:
    return str(_mesh().get_group("dp").group_name)


@pytest.fixture(scope="module")
def big_world() -> Iterator[Call]:
    """Calls a function of this module in a process that is rank 0 of 1,000."""
    with crew(1, "gloo") as made:
        made.run(_join_big_world)
        yield lambda fn, *args: made.run(fn, *args)[0]


def _report(f: Call, *inputs: Tensor, mode: str = "fake", **options: Any) -> CommunicationReport:
    # Fake tensors: nothing runs. The fake process group cannot run every collective.
    graph = make_fx(f, tracing_mode=mode)(*inputs)
    return communication_report(graph, **{"link": LINK, **options})


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 6)


# --- bytes ---------------------------------------------------------------------------------------


def _expected_bytes() -> dict[str, tuple[Call, float]]:
    """By op: a call on x of 128 bytes, shape (8, 4), and the bytes on 8 ranks, computed by hand."""
    ops, tp = torch.ops.c10d_ext, _tp()
    even, send, receive = [1] * 8, [1, 7, 0, 0, 0, 0, 0, 0], [1, 2, 3, 4, 0, 0, 0, 0]
    out = torch.empty
    return {
        "all_reduce": (lambda x: ops.all_reduce(x, "sum", tp), 224),
        "all_reduce_": (lambda x: ops.all_reduce_(x, "sum", tp), 224),
        "all_reduce_out": (lambda x: ops.all_reduce_out(x, "sum", tp, out=out(8, 4)), 224),
        "all_reduce_coalesced": (lambda x: ops.all_reduce_coalesced([x, x[:2]], "sum", tp), 280),
        "all_reduce_coalesced_": (lambda x: ops.all_reduce_coalesced_([x], "sum", tp), 224),
        "all_gather_into_tensor": (lambda x: ops.all_gather_into_tensor(x, 8, tp), 896),
        "all_gather_into_tensor_out": (
            lambda x: ops.all_gather_into_tensor_out(x, 8, tp, out=out(64, 4)),
            896,
        ),
        "all_gather_into_tensor_coalesced": (
            lambda x: ops.all_gather_into_tensor_coalesced([x, x[:2]], 8, tp),
            1120,
        ),
        # Of 16 rows, 8 are this rank's.
        "all_gather": (lambda x: ops.all_gather(x, [8, 1, 2, 3, 0, 0, 0, 2], tp), 128),
        "reduce_scatter_tensor": (lambda x: ops.reduce_scatter_tensor(x, "sum", 8, tp), 112),
        "reduce_scatter_tensor_out": (
            lambda x: ops.reduce_scatter_tensor_out(x, "sum", 8, tp, out=out(1, 4)),
            112,
        ),
        "reduce_scatter_tensor_coalesced": (
            lambda x: ops.reduce_scatter_tensor_coalesced([x, x], "sum", 8, tp),
            224,
        ),
        # Of 8 rows, 3 are this rank's.
        "reduce_scatter": (
            lambda x: ops.reduce_scatter(x, "sum", [3, 5, 0, 0, 0, 0, 0, 0], tp),
            80,
        ),
        # 7 rows leave, 9 arrive.
        "all_to_all_single": (lambda x: ops.all_to_all_single(x, receive, send, tp), 144),
        "all_to_all_single_out": (
            lambda x: ops.all_to_all_single_out(x, even, even, tp, out=out(8, 4)),
            112,
        ),
        "broadcast": (lambda x: ops.broadcast(x, 1, tp), 128),
        "broadcast_": (lambda x: ops.broadcast_(x, 1, tp), 128),
        "broadcast_coalesced": (lambda x: ops.broadcast_coalesced([x, x[:2]], 1, tp), 160),
        "broadcast_coalesced_": (lambda x: ops.broadcast_coalesced_([x], 1, tp), 128),
        "reduce": (lambda x: ops.reduce(x, "sum", 1, tp), 128),
        "reduce_": (lambda x: ops.reduce_(x, "sum", 1, tp), 128),
        "gather": (lambda x: ops.gather(x, 1, tp), 896),
        "scatter": (lambda x: ops.scatter(x[:0], 1, tp, size=2), 224),
        "permute_tensor": (lambda x: ops.permute_tensor(x, RING, tp), 128),
        "barrier": (lambda x: ops.barrier(x, tp), 0),
        # 160 bytes leave, 128 arrive.
        "batch_isend_irecv": (
            lambda x: ops.batch_isend_irecv(
                [x, x, x[:2]], [1, 2, 3], [False, True, True], [0, 0, 0], tp
            ),
            160,
        ),
    }


def _bytes_of_every_op() -> None:
    cases = _expected_bytes()
    names = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
    ours = {name for space, name in names if space == "c10d_ext"}
    silent = {"wait_tensor", "wait_message", "copy_to_group", "reduce_from_group"}
    assert ours - set(cases) == silent
    for name in sorted(ours & set(cases)):
        call, wire_bytes = cases[name]
        (row,) = _report(call, torch.zeros(8, 4)).calls
        got = (row.op, row.group, row.ranks, row.wire_bytes, row.dtype)
        assert got == (name, _tp(), 8, wire_bytes, "float32"), name
        assert _us(row.seconds) == 5 + wire_bytes / 1e3, name


def test_bytes_of_every_op(big_world: Call) -> None:
    big_world(_bytes_of_every_op)


def _bytes_of_torchs_ops() -> None:
    ops, tp = torch.ops._c10d_functional, _tp()
    even = [1] * 8
    cases: list[tuple[Call, float]] = [
        (lambda x: ops.all_reduce(x, "sum", tp), 224),
        (lambda x: ops.all_reduce_(x, "sum", tp), 224),
        (lambda x: ops.all_reduce_coalesced([x, x[:2]], "sum", tp), 280),
        (lambda x: ops.all_gather_into_tensor(x, 8, tp), 896),
        (lambda x: ops.all_gather_into_tensor_out(x, 8, tp, out=torch.empty(64, 4)), 896),
        (lambda x: ops.all_gather_into_tensor_coalesced([x, x[:2]], 8, tp), 1120),
        (lambda x: ops.reduce_scatter_tensor(x, "sum", 8, tp), 112),
        (lambda x: ops.reduce_scatter_tensor_coalesced([x, x], "sum", 8, tp), 224),
        (lambda x: ops.all_to_all_single(x, even, even, tp), 112),
        (lambda x: ops.broadcast(x, 1, tp), 128),
    ]
    if hasattr(ops, "batch_p2p_ops"):  # torch 2.13
        ways, peers = ["irecv", "isend", "isend"], [1, 2, 3]
        cases += [
            (lambda x: ops.isend(x, 1, 0, tp), 128),
            (lambda x: ops.irecv(x, 1, 0, tp), 128),
            (lambda x: ops.batch_p2p_ops(ways, peers, [0, 0, 0], [x, x, x[:2]], tp), 160),
        ]
    for call, wire_bytes in cases:
        (row,) = _report(call, torch.zeros(8, 4)).calls
        assert (row.group, row.wire_bytes) == (tp, wire_bytes), row


def test_bytes_of_torchs_ops(big_world: Call) -> None:
    big_world(_bytes_of_torchs_ops)


def _bytes_depend_on_the_group_and_the_dtype() -> None:
    ops, x = torch.ops.c10d_ext, torch.zeros(500, dtype=torch.bfloat16)
    (row,) = _report(lambda x: ops.all_reduce(x, "sum", WORLD), x).calls
    assert (row.label, row.ranks, row.wire_bytes) == (WORLD, 1000, 1998)
    assert (row.dtype, row.shape) == ("bfloat16", "(500,)")
    alone = str(dist.new_group([0]).group_name)
    (row,) = _report(lambda x: ops.broadcast(x, 0, alone), x).calls
    assert (row.ranks, row.wire_bytes) == (1, 0)
    (row,) = _report(lambda x: ops.permute_tensor(x, list(range(8)), _tp()), x).calls
    assert (row.label, row.wire_bytes) == (f"{_tp()} mesh_tp", 0)


def test_bytes_depend_on_the_group_and_the_dtype(big_world: Call) -> None:
    big_world(_bytes_depend_on_the_group_and_the_dtype)


# --- every way to trace --------------------------------------------------------------------------


class _Block(torch.nn.Module):
    """A tensor-parallel block that calls every functional collective."""

    def __init__(self) -> None:
        super().__init__()
        self.tp, self.dp = _mesh()["tp"], _mesh()["dp"]
        self.columns = torch.nn.Parameter(torch.ones(4, 4))
        self.rows = torch.nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        tp, dp = self.tp, self.dp
        uneven = [16] + [1] * 7
        h = F.all_gather_single(x, 0, tp)
        h = torch.relu(h @ self.columns) @ self.rows
        h = F.reduce_scatter_single(h, "sum", 0, tp)
        h = F.all_to_all_single(h, None, None, tp)
        h = F.reduce_from_group(F.copy_to_group(h, tp).sin(), tp)
        h = F.broadcast(h, 0, tp)
        h = F.permute_tensor(h, RING, tp)
        h = F.all_reduce(h, "avg", dp)
        h = F.reduce(h, "sum", 0, dp)
        h = F.scatter(F.gather(h, 0, tp), 0, tp)
        h = F.reduce_scatter(F.all_gather(h, uneven, tp), "sum", uneven, tp)
        hs = F.all_reduce_coalesced([h, h.sum(0)], "sum", dp)
        hs = F.broadcast_coalesced(hs, 0, dp)
        hs = F.all_gather_single_coalesced(hs, tp)
        hs = F.reduce_scatter_single_coalesced(hs, "sum", [0, 0], tp)
        return (hs[0] * hs[1]).sum()


# What the block moves for x of 256 bytes, shape (16, 4), by hand.
_FORWARD = [
    ("all_gather_into_tensor", "tp", 1792),
    ("reduce_scatter_tensor", "tp", 1792),
    ("all_to_all_single", "tp", 224),
    ("all_reduce", "tp", 448),  # reduce_from_group
    ("broadcast", "tp", 256),
    ("permute_tensor", "tp", 256),
    ("all_reduce", "dp", 507.904),
    ("reduce", "dp", 256),
    ("gather", "tp", 1792),
    ("scatter", "tp", 1792),
    ("all_gather", "tp", 112),
    ("reduce_scatter", "tp", 112),
    ("all_reduce_coalesced", "dp", 539.648),
    ("broadcast_coalesced", "dp", 272),
    ("all_gather_into_tensor_coalesced", "tp", 1904),
    ("reduce_scatter_tensor_coalesced", "tp", 1904),
]
# Its gradient: the adjoints, last first.
_BACKWARD = [
    ("all_gather_into_tensor_coalesced", "tp", 1904),
    ("reduce_scatter_tensor_coalesced", "tp", 1904),
    ("reduce", "dp", 272),  # broadcast_coalesced
    ("all_reduce_coalesced", "dp", 539.648),
    ("all_gather", "tp", 112),
    ("reduce_scatter", "tp", 112),
    ("gather", "tp", 1792),
    ("scatter", "tp", 1792),
    ("broadcast", "dp", 256),
    ("all_reduce", "dp", 507.904),
    ("permute_tensor", "tp", 256),
    ("reduce", "tp", 256),
    ("all_reduce", "tp", 448),  # copy_to_group
    ("all_to_all_single", "tp", 224),
    ("all_gather_into_tensor", "tp", 1792),
    ("reduce_scatter_tensor", "tp", 1792),
]


def _table(report: CommunicationReport) -> list[tuple[str, str, float]]:
    groups = {_tp(): "tp", _dp(): "dp"}
    # Where tracers stop above autograd, the Megatron pair is still in one piece.
    alike = {"reduce_from_group": "all_reduce"}
    return [(alike.get(c.op, c.op), groups[c.group], c.wire_bytes) for c in report.calls]


def _every_way_to_trace() -> None:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    block, x = _Block(), torch.ones(16, 4, requires_grad=True)
    parameters = dict(block.named_parameters())

    def step(x: Tensor, parameters: dict[str, Tensor]) -> Any:
        loss = torch.func.functional_call(block, parameters, (x,))
        return torch.autograd.grad(loss, [x, *parameters.values()])

    joint = make_fx(step, tracing_mode="fake")(x, parameters)
    exported = torch.export.export(block, (x,), strict=True)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file)
    captured: list[GraphModule] = []

    def keep(gm: GraphModule, _: Any) -> Any:
        captured.append(gm)
        results = [node.meta["val"] for node in gm.graph.output_node().args[0]]
        return make_boxed_func(lambda *_: [torch.zeros_like(r, device="cpu") for r in results])

    def keep_dynamos(gm: GraphModule, _: Any) -> Any:
        captured.append(gm)
        return lambda *_: [torch.zeros(())]

    torch.compile(block, backend=keep_dynamos, fullgraph=True)(x)
    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )
    torch.compile(block, backend=backend, fullgraph=True)(x).backward()
    dynamo, forward, backward = captured

    for graph in (exported, loaded, dynamo, dynamo.graph, forward):
        report = communication_report(graph)
        assert _table(report) == _FORWARD
        assert all(call.waited and not call.overlapped for call in report.calls)
    assert _table(communication_report(backward)) == _BACKWARD
    assert Counter(_table(communication_report(joint))) == Counter(_FORWARD + _BACKWARD)


def test_every_way_to_trace(big_world: Call) -> None:
    big_world(_every_way_to_trace)


class _Exchanging(torch.nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        sent, received = ours.isend(x, 1), ours.irecv(y, 2)
        z = x @ x
        sent.wait()
        received.wait()  # type: ignore[union-attr]
        return y + z


def _messages() -> None:
    """The start and the wait of a message, under tokens and in nested graphs."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    x, y, captured = torch.ones(4, 4), torch.ones(4, 4), []

    def keep(gm: GraphModule, _: Any) -> Any:
        captured.append(gm)
        return make_boxed_func(gm.forward)

    backend = aot_autograd(fw_compiler=keep)
    torch.compile(_Exchanging(), backend=backend, fullgraph=True)(x, y)
    captured.append(make_fx(_Exchanging(), tracing_mode="fake")(x, y))
    captured.append(torch.export.export(_Exchanging(), (x, y)))
    for graph in captured:
        calls = communication_report(graph).calls
        assert [call.op for call in calls] == ["batch_isend_irecv"] * 2, calls
        assert all(call.waited and call.overlapped for call in calls), calls


def test_messages_are_waited_for(big_world: Call) -> None:
    big_world(_messages)


def _dynamos_graphs() -> None:
    """Methods, functions, in-place calls and nested graphs, none of which have schemas."""
    ops, tp, captured = torch.ops.c10d_ext, _tp(), []

    def keep(gm: GraphModule, _: Any) -> Any:
        captured.append(gm)
        return lambda *_: [torch.zeros(())]

    def inner(y: Tensor) -> Tensor:
        return F.all_reduce(y, "sum", tp).exp()

    def step(x: Tensor) -> Tensor:
        y = x * 2
        ops.broadcast_(y, 0, tp)
        z = torch.sin(x.view(4, 8).t()[1:])  # one computation
        z.mul_(2)  # another
        ops.wait_tensor(y)
        y = torch.utils.checkpoint.checkpoint(inner, y, use_reentrant=False)
        return y.sum() + torch.nn.functional.linear(z, z).sum()

    x = torch.zeros(8, 4, requires_grad=True)
    with torch.no_grad():
        torch.compile(step, backend=keep, fullgraph=True)(x)
    calls = communication_report(captured[0]).calls
    assert [(c.op, c.compute_ops, c.waited) for c in calls] == [
        ("broadcast_", 2, True),
        ("all_reduce", 0, True),
    ]


def test_dynamos_graphs(big_world: Call) -> None:
    big_world(_dynamos_graphs)


def _torchs_functional_collectives() -> None:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch_functional.all_reduce(x, "sum", (_mesh(), 1))
        z = x.sin()
        return y + 1, z

    (call,) = _report(step, torch.zeros(8, 4)).calls
    assert (call.op, call.wire_bytes, call.waited) == ("all_reduce", 224, True)


def test_torchs_functional_collectives(big_world: Call) -> None:
    big_world(_torchs_functional_collectives)


# --- overlap -------------------------------------------------------------------------------------


def _timed(f: Call, **options: Any) -> CommunicationReport:
    """Of `f` on 5000 bytes, which a broadcast moves in 10 us; each computation takes 3 us."""
    return _report(f, torch.zeros(1250), compute=lambda _: 3e-6, **options)


def _overlap_is_what_stands_between_start_and_wait() -> None:
    ops, tp = torch.ops.c10d_ext, _tp()

    def hidden_in_part(x: Tensor) -> Tensor:
        y = ops.broadcast(x, 0, tp)
        z = x.sin().view(25, 50).t().cos()
        torch.empty_like(z)
        return ops.wait_tensor(y.view(25, 50)).t() + z

    report = _timed(hidden_in_part)
    (call,) = report.calls
    assert (call.compute_ops, call.overlapped, call.waited) == (2, True, True)
    assert (_us(call.start), _us(call.seconds), _us(call.hidden)) == (0, 10, 6)
    assert [(_us(start), _us(end)) for start, end in report.busy] == [(0, 6), (10, 13)]
    assert _us(report.seconds) == 13

    def not_hidden(x: Tensor) -> Tensor:
        y = ops.wait_tensor(ops.broadcast(x.sin(), 0, tp))
        return y + x.cos()

    (call,) = _timed(not_hidden).calls
    assert (call.compute_ops, call.overlapped) == (0, False)
    assert (_us(call.start), _us(call.hidden)) == (3, 0)

    def hidden(x: Tensor) -> Tensor:
        y = ops.broadcast(x, 0, tp)
        z = x.sin().cos().sin().cos()
        return ops.wait_tensor(y) + z

    report = _timed(hidden)
    assert (report.calls[0].compute_ops, _us(report.calls[0].hidden)) == (4, 10)
    assert _us(report.seconds) == 15


def test_overlap_is_what_stands_between_start_and_wait(big_world: Call) -> None:
    big_world(_overlap_is_what_stands_between_start_and_wait)


def _a_group_does_one_collective_at_a_time() -> None:
    ops, tp, dp = torch.ops.c10d_ext, _tp(), _dp()

    def step(x: Tensor) -> list[Tensor]:
        in_flight = [ops.broadcast(x, 0, tp), ops.broadcast(x, 1, tp), ops.broadcast(x, 0, dp)]
        z = x.sin()
        return [z, *map(ops.wait_tensor, in_flight)]

    report = _timed(step)
    assert [_us(call.start) for call in report.calls] == [0, 10, 0]
    assert [_us(call.hidden) for call in report.calls] == [3, 0, 3]
    assert _us(report.seconds) == 20
    # A cheaper link for one group, by any name of it.
    for group in (tp, _mesh()["tp"], _mesh().get_group("tp")):
        report = _timed(step, links={group: Link(latency=1e-6, bandwidth=5e9)})
        assert [_us(call.seconds) for call in report.calls] == [2, 2, 10]


def test_a_group_does_one_collective_at_a_time(big_world: Call) -> None:
    big_world(_a_group_does_one_collective_at_a_time)


def _waits_are_found() -> None:
    """In place by way of a view, into `out`, of a list's first result, and none at all."""
    ops, tp = torch.ops.c10d_ext, _tp()

    def step(x: Tensor) -> Any:
        y, out = x * 2, torch.empty_like(x)
        ops.broadcast_(y.view(25, 50), 0, tp)
        y.sin()
        ops.wait_tensor(y)
        ops.all_reduce_out(x, "sum", tp, out=out)
        ops.wait_tensor(out)
        first, second = ops.broadcast_coalesced([x, x], 0, tp)
        y.sin()
        first = ops.wait_tensor(first)
        y.sin()
        return first, ops.wait_tensor(second), ops.broadcast(x, 0, tp), y.sin()

    for mode in ("fake", "real", "symbolic"):
        report = _timed(step, mode=mode)
        assert [(call.op, call.compute_ops, call.waited) for call in report.calls] == [
            ("broadcast_", 1, True),
            ("all_reduce_out", 0, True),
            ("broadcast_coalesced", 1, True),
            ("broadcast", 1, False),
        ]
        assert _us(report.seconds) == _us(report.calls[-1].start + report.calls[-1].seconds)


def test_waits_are_found(big_world: Call) -> None:
    big_world(_waits_are_found)


def _computation_costs_its_bytes_or_its_flops() -> None:
    def seconds(f: Call, *inputs: Tensor, flops: float = 1e10) -> float:
        compute = Compute(memory_bandwidth=1e9, flops=flops)
        return _us(_report(f, *inputs, compute=compute).seconds)

    a, b, row = torch.zeros(64, 64), torch.zeros(64, 64), torch.zeros(64)
    assert seconds(torch.sin, a) == 32.768  # 2 x 16384 bytes
    assert seconds(torch.mm, a, b) == 52.4288  # 2 x 64 x 64 x 64 flops
    assert seconds(torch.mm, a, b, flops=1e12) == 49.152  # 3 x 16384 bytes
    assert seconds(torch.addmm, row, a[:, :32], b[:32]) == 33.024
    assert seconds(torch.addmm, row, a[:, :32], b[:32], flops=1e9) == 262.144
    assert seconds(torch.bmm, a[None], b[None]) == 52.4288


def test_computation_costs_its_bytes_or_its_flops(big_world: Call) -> None:
    big_world(_computation_costs_its_bytes_or_its_flops)


# --- symbolic shapes -----------------------------------------------------------------------------


class _Symbolic(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.all_reduce(x.sin(), "sum", _tp())


def _symbolic_shapes() -> None:
    x = torch.zeros(8, 4)
    rows = torch.export.Dim("rows", min=2)
    exported = torch.export.export(_Symbolic(), (x,), dynamic_shapes=({0: rows},))
    traced = make_fx(lambda x: F.all_reduce(x.sin(), "sum", _tp()), tracing_mode="symbolic")(x)
    for graph, column in ((exported, "4"), (traced, r"s\d+")):
        report = communication_report(graph, link=LINK)
        (call,) = report.calls
        names = re.fullmatch(rf"\((s\d+), ({column})\)", call.shape)
        assert names, call.shape
        assert names[1] in call.wire
        assert (call.wire_bytes, _us(call.seconds)) == (224, 5.224)
        assert f"{call.wire} = 224  " in str(report)
        (call,) = communication_report(graph, link=LINK, sizes={names[1]: 1000}).calls
        assert (call.wire_bytes, _us(call.seconds)) == (28000, 33)
        with pytest.raises(ValueError, match=f"got nope; there is {names[1]}"):
            communication_report(graph, sizes={"nope": 1})


def test_symbolic_shapes(big_world: Call) -> None:
    big_world(_symbolic_shapes)


class _Routing(torch.nn.Module):
    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        rows: list[int] = counts.tolist()
        for count in rows:
            torch._check(count >= 0)
        return F.all_to_all_single(x, rows, rows, _tp())


def _sizes_that_depend_on_data() -> None:
    graph = torch.export.export(_Routing(), (torch.zeros(8, 4), torch.ones(8, dtype=torch.int64)))
    needs = "sizes must hold a value for every size that depends on data, got none for u"
    with pytest.raises(ValueError, match=needs) as caught:
        communication_report(graph)
    names = re.findall(r"u\d+", str(caught.value).split(";")[0])
    # The row that stays is not on the wire.
    sizes = dict.fromkeys(names, 2)
    (call,) = communication_report(graph, sizes=sizes).calls
    assert (len(names), call.wire_bytes) == (7, 7 * 2 * 16)
    # But it takes memory.
    report = communication_report(graph, sizes=sizes)
    assert report.memory == ()
    (node,) = (n for n in _chakra_nodes(report.chakra()) if n["type"] == 7)
    assert node["comm_size"] == 128
    graph = make_fx(lambda x: x.nonzero().sin(), tracing_mode="symbolic")(torch.ones(4))
    report = communication_report(graph, compute=lambda node: 1e-6)
    assert (_us(report.seconds), report.memory) == (2, ())
    with pytest.raises(ValueError, match="got sizes that depend on data at nonzero, sin; pass"):
        report.chakra()


def test_sizes_that_depend_on_data(big_world: Call) -> None:
    big_world(_sizes_that_depend_on_data)


# --- errors --------------------------------------------------------------------------------------


def _refuses_graphs_it_cannot_read() -> None:
    traced = make_fx(lambda x: torch.ops.c10d_ext.all_reduce(x, "sum", _tp()))(torch.zeros(4))
    start = traced.graph.find_nodes(
        op="call_function", target=torch.ops.c10d_ext.all_reduce.default
    )[0]
    start.args = (*start.args[:2], "nope")
    with pytest.raises(ValueError, match="got 'nope'") as caught:
        communication_report(traced)
    assert _tp() in str(caught.value)
    start.args = (*start.args[:2], _tp())
    with pytest.raises(ValueError, match="got 'nope'"):
        communication_report(traced, links={"nope": Link()})
    del start.args[0].meta["val"]
    with pytest.raises(ValueError, match=r'meta\["val"\] .*, got x_1 without, of all_reduce'):
        communication_report(traced)


def test_refuses_graphs_it_cannot_read(big_world: Call) -> None:
    big_world(_refuses_graphs_it_cannot_read)


def test_refuses_graphs_without_tensors() -> None:
    graph = torch.fx.symbolic_trace(lambda x: x + 1)
    with pytest.raises(ValueError, match=r'tensors in meta\["val"\] or .*, got 3 nodes without'):
        communication_report(graph)


def test_refuses_what_is_no_graph() -> None:
    text = "graph must be a torch.fx.GraphModule, torch.fx.Graph or ExportedProgram, got function"
    with pytest.raises(TypeError, match=text):
        communication_report(lambda x: x)


def test_refuses_costs_without_meaning() -> None:
    with pytest.raises(ValueError, match="got latency -1 and bandwidth 1"):
        Link(latency=-1, bandwidth=1)
    with pytest.raises(ValueError, match="got latency 0 and bandwidth 0"):
        Link(latency=0, bandwidth=0)
    with pytest.raises(ValueError, match="got memory_bandwidth 1 and flops 0"):
        Compute(memory_bandwidth=1, flops=0)


# --- the table and the picture -------------------------------------------------------------------


def _call(**fields: Any) -> CollectiveCall:
    values: dict[str, Any] = dict(
        node="all_reduce", op="all_reduce", group="9", label="9 tp", ranks=8
    )
    values |= dict(shape="(8, 4)", dtype="float32", wire="224", wire_bytes=224.0)
    values |= dict(start=0.0, seconds=10e-6, compute_ops=2, hidden=6e-6, waited=True)
    return CollectiveCall(**(values | fields))


def _two_groups() -> CommunicationReport:
    gather = _call(
        node="gather",
        op="gather",
        group="0",
        label="0 a<b&c",
        ranks=1000,
        shape="(s7, 4)",
        wire="16*s7",
        wire_bytes=128.0,
        start=10e-6,
        seconds=30e-6,
        compute_ops=0,
        hidden=0.0,
        waited=False,
    )
    again = _call(node="all_reduce_1", start=20e-6, seconds=5e-6, compute_ops=1, hidden=0.0)
    return CommunicationReport((_call(), gather, again), ((0.0, 6e-6), (25e-6, 28e-6)), 40e-6)


TABLE = """\
op          group    ranks  input             wire bytes  comm us  hidden us  overlapped
all_reduce  9 tp         8  float32 (8, 4)           224     10.0        6.0  2 ops
gather      0 a<b&c   1000  float32 (s7, 4)  16*s7 = 128     30.0        0.0  no, never waited
all_reduce  9 tp         8  float32 (8, 4)           224      5.0        0.0  1 op

total op    group    calls  wire bytes  comm us  hidden us
all_reduce  9 tp         2         448     15.0        6.0
gather      0 a<b&c      1         128     30.0        0.0

step 40.0 us: 9.0 computing, 31.0 waiting
communication 45.0 us: 6.0 hidden by computation
"""


def test_table() -> None:
    assert f"{_two_groups()}\n" == TABLE


def test_table_without_collectives() -> None:
    report = CommunicationReport((), (), 0.0)
    assert str(report).startswith("op  group  ranks")
    assert not _rects(report, "collective")


def _rects(report: CommunicationReport, kind: str) -> list[ET.Element]:
    root = ET.fromstring(report.svg())
    return [r for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.get("class") == kind]


def test_picture_has_a_bar_for_each_collective() -> None:
    report = _two_groups()
    bars = [tuple(float(r.attrib[k]) for k in ("x", "width")) for r in _rects(report, "collective")]
    # 40 us are 1000 wide.
    assert bars == [(140, 250), (390, 750), (640, 125)]
    rows = [float(r.attrib["y"]) for r in _rects(report, "collective")]
    assert rows[0] == rows[2] < rows[1]
    waits = [(float(r.attrib["x"]), float(r.attrib["width"])) for r in _rects(report, "wait")]
    assert waits == [(290, 475), (840, 300)]
    assert len(_rects(report, "compute")) == 2
    texts = "".join(ET.fromstring(report.svg()).itertext())
    for text in ("0 a<b&c", "9 tp", "collectives: 3, step: 40.0 us", "16*s7 = 128"):
        assert text in texts


def test_save(tmp_path: Path) -> None:
    report = _two_groups()
    report.save(tmp_path / "step.svg")
    report.save(str(tmp_path / "step.txt"))
    assert (tmp_path / "step.svg").read_text(encoding="utf-8") == report.svg()
    assert (tmp_path / "step.txt").read_text(encoding="utf-8") == f"{report}\n"
    report.save(tmp_path / "step.json")
    assert (tmp_path / "step.json").read_text(encoding="utf-8") == report.trace()
    with pytest.raises(ValueError, match="path must end in .svg, .txt, .json or .et"):
        report.save(tmp_path / "step.png")


def test_trace_holds_every_call_and_computation() -> None:
    report = _two_groups()
    events = json.loads(report.trace())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(report.calls) + len(report.busy)
    calls = [e for e in spans if names[e["tid"]] != "compute"]
    for event, call in zip(calls, report.calls, strict=True):
        assert names[event["tid"]] == call.label
        assert event["name"] == call.op
        assert event["ts"] == pytest.approx(call.start * 1e6)
        assert event["dur"] == pytest.approx(call.seconds * 1e6)
        assert event["args"]["wire bytes"] == call.wire_bytes


def _links_of_a_ring() -> None:
    def step(x: Tensor) -> list[Tensor]:
        tp, dp = (torch.ops.c10d_ext.all_reduce(x, "sum", group) for group in (_tp(), _dp()))
        return [F.wait_tensor(tp), F.wait_tensor(dp)]

    x = torch.zeros(8, 4)
    ring, tree = (Link(1e-6, 1e9, hop=1e-6, algorithm=name) for name in ("ring", "tree"))
    seconds = [
        [call.seconds for call in _report(step, x, link=link).calls] for link in (ring, tree)
    ]
    # 224 bytes of 8 ranks: 14 hops as a ring, 6 as a tree; of 125 ranks 248 and 14.
    assert [_us(s) for s in seconds[0]] == [15.224, 249.253952]
    assert [_us(s) for s in seconds[1]] == [7.224, 15.253952]
    apart = _report(step, x, link=Link(1e-6, 1e9))
    shared = _report(step, x, link=Link(1e-6, 1e9, shared="wire"))
    assert apart.calls[1].start == 0
    assert shared.calls[1].start == pytest.approx(shared.calls[0].seconds)


def test_links_have_hops_and_may_be_shared(big_world: Call) -> None:
    big_world(_links_of_a_ring)


def _calls_keep_the_rank_busy() -> None:
    def step(x: Tensor) -> Tensor:
        flying = torch.ops.c10d_ext.all_reduce(x, "sum", _tp())
        y = x + 1
        return F.wait_tensor(flying) + y

    x = torch.zeros(8, 4)
    link = Link(20e-6, 1e9, overhead=3e-6, overhead_per_byte=1e-8)
    report = _report(step, x, link=link)
    (call,) = report.calls
    # 224 bytes on the wire: the rank makes the call for 3 + 2.24 us, and then computes beside it.
    assert _us(call.start) == 5.24
    assert _us(call.seconds) == 20.224
    assert report.busy[0][0] == pytest.approx(5.24e-6)
    free = _report(step, x, link=Link(20e-6, 1e9))
    assert report.seconds == pytest.approx(free.seconds + 5.24e-6)
    hosts = Topology(4, inside=Link(1e-6, 1e12, overhead=7e-6), between=link)
    assert _us(_report(step, x, link=hosts).calls[0].start) == 7.0


def test_calls_keep_the_rank_busy(big_world: Call) -> None:
    big_world(_calls_keep_the_rank_busy)


def test_links_are_checked() -> None:
    with pytest.raises(ValueError, match="got overhead -1 and overhead_per_byte 0.0"):
        Link(overhead=-1)
    with pytest.raises(ValueError, match="got overhead 0.0 and overhead_per_byte nan"):
        Link(overhead_per_byte=float("nan"))
    with pytest.raises(ValueError, match="hop must be 0 or more, got -1"):
        Link(hop=-1)
    with pytest.raises(ValueError, match="algorithm must be 'ring' or 'tree', got 'star'"):
        Link(algorithm="star")


HOSTS = Topology(4, inside=Link(1e-6, 1e12), between=Link(10e-6, 1e9, hop=1e-6))


def _told(size: float, bandwidth: float = 1e12) -> float:
    """Seconds that 3 ranks and their leader copy so many bytes for."""
    return 2 * 3 * size / bandwidth


def _links_of_hosts() -> None:
    def step(x: Tensor) -> Tensor:
        return F.wait_tensor(torch.ops.c10d_ext.all_reduce(x, "sum", _tp()))

    x = torch.zeros(1 << 20)
    (call,) = _report(step, x, link=HOSTS).calls
    assert call.seconds == pytest.approx(min(HOSTS.times("all_reduce", 8, 4 << 20).values()))
    flat = dataclasses.replace(HOSTS, algorithm="flat")
    (call,) = _report(step, x, link=flat).calls
    # The agreement, and a ring of 8: 14 hops, and 2 * 7/8 of 4 MiB over a host's link.
    assert call.seconds == pytest.approx(20e-6 + 10e-6 + 14e-6 + 1.75 * (4 << 20) / 1e9)


def test_links_of_hosts(big_world: Call) -> None:
    big_world(_links_of_hosts)


def test_times_of_algorithms_between_hosts() -> None:
    large = 64 << 20
    times = HOSTS.times("all_reduce", 8, large)
    # Rails carry between two hosts what the bound says, and a flat ring 1.75 times that.
    assert times["rails"] == pytest.approx(large / 1e9, rel=0.01)
    assert times["flat"] == pytest.approx(1.75 * large / 1e9, rel=0.01)
    assert times["whole"] == pytest.approx(4 * large / 1e9, rel=0.01)
    # Small: as many steps as hosts need, and not as ranks do.
    small = HOSTS.times("all_reduce", 8, 8)
    assert small["whole"] < small["rails"] + 1e-6 and small["whole"] < small["flat"]
    # Smaller still: no steps behind the agreement. From host to host goes the sum of 4 ranks.
    assert min(small, key=small.__getitem__) == "piggyback"
    assert small["piggyback"] == pytest.approx(10e-6 + 8 / 1e9 + _told(8 + 8))
    # With more hosts a round trip to rank 0, which sends what 128 ranks have to 124 of them.
    on_16 = HOSTS.times("all_reduce", 64, 8)["piggyback"]
    assert on_16 == pytest.approx(10e-6 + 15 * 8 / 1e9 + _told(8 + 8))
    many = HOSTS.times("all_reduce", 128, 8)["piggyback"]
    assert many == pytest.approx(2 * 10e-6 + 124 * 128 * 8 / 1e9)
    # Rank 0 hears from each of the others before.
    busy = dataclasses.replace(HOSTS, per_rank=1e-6).times("all_reduce", 8, 8)
    assert all(busy[name] == pytest.approx(small[name] + 7e-6) for name in small)
    # Up to 256 KiB of all hosts.
    assert "piggyback" in HOSTS.times("all_reduce", 8, 128 << 10)
    assert "piggyback" not in HOSTS.times("all_reduce", 8, (128 << 10) + 1)
    assert "piggyback" in HOSTS.times("all_reduce", 64, 16 << 10)
    assert "piggyback" not in HOSTS.times("all_reduce", 64, (16 << 10) + 1)
    # Rank 0 would send 127 times 2 KiB.
    assert "piggyback" in HOSTS.times("all_reduce", 128, 16)
    assert "piggyback" not in HOSTS.times("all_reduce", 128, 17)
    # Of a broadcast the root's alone counts, and goes from its host to each other one.
    assert "piggyback" not in HOSTS.times("broadcast", 16, (256 << 10) + 1)
    told = HOSTS.times("broadcast", 16, 256 << 10)["piggyback"]
    assert told == pytest.approx(10e-6 + 3 * (256 << 10) / 1e9 + _told(256 << 10))
    # Of an all_gather the larger buffer has what all ranks give.
    assert "piggyback" in HOSTS.times("all_gather_into_tensor", 8, 256 << 10)
    # Of what each rank has a part of, half crosses each of two links, and more is little; reduced
    # before, a quarter of that.
    for op, most, crosses, out in (
        ("all_to_all_single", 64 << 10, 2 * (64 << 10), 64 << 10),
        ("reduce_scatter_tensor", 256 << 10, 128 << 10, 32 << 10),
    ):
        told = HOSTS.times(op, 8, most)["piggyback"]
        assert told == pytest.approx(10e-6 + crosses / 1e9 + _told(most + out)), op
        assert "piggyback" not in HOSTS.times(op, 8, most + 8), op
        rank_0 = HOSTS.times(op, 128, 16)["piggyback"]
        assert rank_0 == pytest.approx(2 * 10e-6 + 124 * 16 / 1e9), op
        assert "piggyback" not in HOSTS.times(op, 128, 17), op
    assert HOSTS.times("scatter", 8, 512 << 10)["piggyback"] == pytest.approx(
        10e-6 + (256 << 10) / 1e9 + _told(64 << 10)
    )
    assert "piggyback" not in HOSTS.times("scatter", 8, (512 << 10) + 1)
    # No rank gets more than is little otherwise, as with one on each host it would.
    alone = Topology(1, HOSTS.inside, HOSTS.between)
    most = 256 << 10
    for op in ("all_to_all_single", "reduce_scatter_tensor"):
        assert "piggyback" in alone.times(op, 4, most), op
        assert "piggyback" not in alone.times(op, 4, most + 4), op
    assert "piggyback" in alone.times("scatter", 4, 1 << 20)
    assert "piggyback" not in alone.times("scatter", 4, (1 << 20) + 4)
    # An exchange sends each byte once, whoever does it: half of it stays here.
    exchange = HOSTS.times("all_to_all_single", 8, large)
    assert exchange["flat"] == pytest.approx(4 * large / 2 / 1e9, rel=0.01)
    for op in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        assert HOSTS.times(op, 8, large)["rails"] == pytest.approx(large / 2 / 1e9, rel=0.01)
    assert HOSTS.times("all_reduce", 4, large) == {
        "flat": Link(1e-6, 1e12).seconds("all_reduce", 4, 1.5 * large)
    }
    for ranks in (8, 64, 512, 4096):
        at_scale = HOSTS.times("all_reduce", ranks, large)
        assert at_scale["rails"] == min(at_scale.values())
        # Towards twice the size over the link of a host, and a hop for each other host.
        hosts = ranks // 4
        bound = 2 * (hosts - 1) / hosts * large / 1e9 + 2 * (hosts - 1) * 1e-6
        assert at_scale["rails"] == pytest.approx(bound, rel=0.01)


@pytest.mark.parametrize(("hosts", "parts"), [(2, 8), (3, 4), (16, 4)])
def test_an_all_reduce_goes_in_parts_by_the_hosts(hosts: int, parts: int) -> None:
    size = 8 << 20
    slow_inside = Topology(4, inside=Link(0.0, 1e9), between=Link(0.0, 1e9))
    between, inside = 2 * (hosts - 1) / hosts * size / 1e9, 2 * 3 / 4 * size / 1e9
    expected = max(between, inside) + min(between, inside) / parts
    times = slow_inside.times("all_reduce", 4 * hosts, size)
    assert times["rails"] == pytest.approx(expected, rel=0.01)


def test_what_a_host_moves_may_take_longer_than_its_link() -> None:
    size = 64 << 20
    busy = dataclasses.replace(HOSTS, host_bandwidth=1e9)
    for op, moved in (
        ("all_reduce", 2 * 1.5 * size),  # in and out; of 4 hosts
        ("all_gather_into_tensor", 2 * 0.75 * size),
        ("all_to_all_single", 2 * 4 * 0.75 * size),
        ("broadcast", 2 * size),
    ):
        free, slow = HOSTS.times(op, 16, size), busy.times(op, 16, size)
        assert slow["rails"] == pytest.approx(moved / 1e9, rel=0.01), op
        assert free["rails"] < 0.6 * slow["rails"], op
    assert busy.times("all_reduce", 4, size) == HOSTS.times("all_reduce", 4, size)  # one host


def test_leaders_move_little_data() -> None:
    busy = dataclasses.replace(HOSTS, inside=Link(1e-6, 1e6), host_bandwidth=1e6)
    # Of 16 ranks with 1 KiB each: of 3 hosts and to them.
    moved = (3 * 4 + 3 * 4) * 1024
    slow = busy.times("all_gather_into_tensor", 16, 16 * 1024)["piggyback"]
    assert slow == pytest.approx(10e-6 + moved / 1e6 + _told(17 * 1024, 1e6))
    # Reduced they are 1 KiB of each host, and of all.
    moved = (3 + 3) * 1024
    reduced = busy.times("all_reduce", 16, 1024)["piggyback"]
    assert reduced == pytest.approx(10e-6 + moved / 1e6 + _told(2 * 1024, 1e6))
    # Of each rank's 1 KiB three quarters go to other hosts, and as much comes.
    exchanged = busy.times("all_to_all_single", 16, 1024)["piggyback"]
    assert exchanged == pytest.approx(10e-6 + moved / 1e6 + _told(2 * 1024, 1e6))
    # The root's own, to 3 hosts.
    told = busy.times("broadcast", 16, 1024)["piggyback"]
    assert told == pytest.approx(10e-6 + 3 * 1024 / 1e6 + _told(1024, 1e6))


def test_steps_take_time_beside_their_data() -> None:
    slow = dataclasses.replace(HOSTS, per_step=1.0)
    for op, by_rails, flat in (  # of 4 hosts of 4 ranks
        ("all_reduce", 2 + 2, 2 * 15),  # inside before and after; to all and back, or around a ring
        ("all_gather_into_tensor", 1 + 1, 15),
        ("reduce_scatter_tensor", 1 + 1, 15),
        ("all_to_all_single", 1 + 1, 1),
        ("broadcast", 1 + 2, 4),  # along a tree
    ):
        before, after = HOSTS.times(op, 16, 1 << 20), slow.times(op, 16, 1 << 20)
        assert after["rails"] == pytest.approx(before["rails"] + by_rails), op
        assert after["flat"] == pytest.approx(before["flat"] + flat), op
    assert slow.times("all_reduce", 16, 8)["whole"] == pytest.approx(1 + 6, rel=0.01)
    # By leaders inside, before and after, and between hosts: of so little all goes to all at once.
    for size, steps, sent in ((64 << 10, 1, 3 * 64 << 10), (128 << 10, 2, 1.5 * (128 << 10))):
        before, after = HOSTS.times("all_reduce", 16, size), slow.times("all_reduce", 16, size)
        assert after["leaders"] == pytest.approx(before["leaders"] + 2 + steps), size
        # Latencies: a round trip to agree, 2 inside, and between hosts with 6 hops.
        assert before["leaders"] == pytest.approx(38e-6 + sent / 1e9, rel=0.01), size
    # All_reduces of several parts, and all with more hosts, go around a ring of hosts.
    for op, ranks, size, ring in (
        ("all_reduce", 16, 2 << 20, 2 + 2 * 3),
        ("all_reduce", 68, 1 << 20, 2 + 2 * 16),
        ("all_gather_into_tensor", 68, 1 << 20, 1 + 16),
    ):
        before, after = HOSTS.times(op, ranks, size), slow.times(op, ranks, size)
        assert after["rails"] == pytest.approx(before["rails"] + ring), op
    little = "piggyback"
    assert slow.times("all_reduce", 8, 8)[little] == HOSTS.times("all_reduce", 8, 8)[little]


def test_large_broadcasts_go_from_host_to_host() -> None:
    def wire(hosts: int, size: int) -> float:
        free = dataclasses.replace(HOSTS, between=Link(0, 1e9))
        return free.times("broadcast", 4 * hosts, size)["rails"] * 1e9 / size

    assert wire(2, 64 << 20) == pytest.approx(1, rel=0.01)
    assert wire(4, 64 << 20) == pytest.approx(1 + 2 / 64, rel=0.01)
    assert wire(4, 1 << 20) == pytest.approx(1 + 2 / 8, rel=0.01)
    assert wire(4, 300 << 10) == pytest.approx(2, rel=0.01)  # one part: a tree
    assert wire(128, 64 << 20) == pytest.approx(1 + 126 / 64, rel=0.01)
    assert wire(600, 64 << 20) == pytest.approx(10, rel=0.01)


@pytest.mark.parametrize("op", ["all_gather_into_tensor", "reduce_scatter_tensor"])
def test_what_is_much_of_each_rank_goes_round_the_hosts(op: str) -> None:
    """Inside a host a part is what nothing goes between hosts meanwhile."""
    slow = dataclasses.replace(HOSTS, inside=Link(0, 1e9), between=Link(0, 1e8))
    for hosts, mib, parts in ((4, 8, 4 * 2), (4, 12, 4 * 3), (16, 128, 16 * 4), (3, 48, 3 * 4)):
        size = mib << 20
        between = (hosts - 1) / hosts * size / 1e8
        seconds = slow.times(op, 4 * hosts, size)["rails"] - between
        assert seconds * 1e9 / (size * 3 / 4) == pytest.approx(1 / parts), (hosts, mib)


def test_a_reduce_scatter_sends_while_it_reduces_for_the_next_host() -> None:
    def inside(hosts: int, size: int) -> float:
        """The part of it that nothing goes between hosts meanwhile."""
        slow = dataclasses.replace(HOSTS, inside=Link(0, 1e9), between=Link(0, 1e8))
        between = (hosts - 1) / hosts * size / 1e8
        seconds = slow.times("reduce_scatter_tensor", 4 * hosts, size)["rails"] - between
        return seconds * 1e9 / (size * 3 / 4)

    assert inside(4, 4 << 20) == pytest.approx(1 / 3)
    assert inside(16, 64 << 20) == pytest.approx(1 / (8 * 15))  # 1 MiB of each: not round
    assert inside(2, 16 << 20) == pytest.approx(1 / 4)  # in 4 parts
    assert inside(4, 512 << 10) == pytest.approx(1)  # less than 256 KiB for each host
    assert inside(17, 16 << 20) == pytest.approx(1 / 4)  # not by messages


def test_topologies_are_checked() -> None:
    with pytest.raises(ValueError, match="host_bandwidth must be positive, got 0"):
        Topology(2, host_bandwidth=0)
    with pytest.raises(ValueError, match="ranks_per_host must be 1 or more, got 0"):
        Topology(0)
    with pytest.raises(ValueError, match="per_rank must be 0 or more, got -1"):
        Topology(2, per_rank=-1)
    with pytest.raises(ValueError, match="per_step must be 0 or more, got -1"):
        Topology(2, per_step=-1)
    with pytest.raises(ValueError, match="algorithm must be 'flat', .* got 'star'"):
        Topology(2, algorithm="star")


# --- memory, operations, traces for simulators ----------------------------------------------------


def _memory_over_time() -> None:
    def step(x: Tensor) -> Tensor:
        doubled = x * 2
        reduced = torch.ops.c10d_ext.all_reduce(doubled, "sum", _tp())
        row = x.sin().view(-1)[:32]
        return torch.ops.c10d_ext.wait_tensor(reduced).view(-1) + row

    def seconds(node: torch.fx.Node) -> float:
        return 1e-6

    # x and everything else has 128 bytes. The collective lasts 5.224 us, and holds its input.
    report = _report(step, torch.zeros(8, 4), compute=seconds)
    assert [(_us(at), amount) for at, amount in report.memory] == [
        (0, 256),  # x, x * 2
        (1, 512),  # the result, and the sine
        (6.224, 640),  # the sum
        (6.224, 512),  # x * 2 is free
        (7.224, 256),  # x and the sum stay
    ]
    assert report.peak_bytes == 640
    assert "memory 640 bytes at most" in str(report)
    events = [e for e in json.loads(report.trace())["traceEvents"] if e["ph"] == "C"]
    assert [e["args"]["bytes"] for e in events] == [256, 512, 640, 512, 256]


def test_memory_over_time(big_world: Call) -> None:
    big_world(_memory_over_time)


def _in_place_takes_no_memory() -> None:
    def step(x: Tensor) -> Tensor:
        y = x + 1
        y = torch.ops.c10d_ext.wait_tensor(torch.ops.c10d_ext.all_reduce_(y, "sum", _tp()))
        return y.add_(1)

    assert _report(step, torch.zeros(8, 4)).peak_bytes == 256


def test_in_place_takes_no_memory(big_world: Call) -> None:
    big_world(_in_place_takes_no_memory)


def _operations_are_torchs_count() -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        y = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        return torch.nn.functional.conv2d(y, w).sum() + y.sum()

    x, w = torch.zeros(2, 4, 16, 8), torch.zeros(3, 4, 3, 3)
    report = _report(step, x, w)
    # 2 products of 16 x 8 x 16 for each of 2 x 4 heads; 3 x 4 x 3 x 3 taps at 2 x 14 x 6 places.
    assert [step.flops for step in report.steps if step.flops] == [
        2 * 2 * 16 * 8 * 16 * 8,
        2 * 2 * 14 * 6 * 3 * 4 * 9,
    ]


def test_operations_are_torchs_count(big_world: Call) -> None:
    big_world(_operations_are_torchs_count)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at


def _fields(message: bytes) -> list[tuple[int, Any]]:
    """(number, value) of a protocol buffer's fields."""
    found: list[tuple[int, Any]] = []
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        value, at = _varint(message, at)
        if tag & 7 == 2:
            found.append((tag >> 3, message[at : at + value]))
            at += value
        else:
            assert tag & 7 == 0
            found.append((tag >> 3, value))
    return found


def _chakra_nodes(data: bytes) -> list[dict[str, Any]]:
    messages, at = [], 0
    while at < len(data):
        size, at = _varint(data, at)
        messages.append(_fields(data[at : at + size]))
        at += size
    assert messages[0] == [(1, b"0.0.4")]
    nodes = []
    for message in messages[1:]:
        node: dict[str, Any] = {"id": 0, "after": []}
        for number, value in message:
            if number == 5:
                place = 0
                while place < len(value):
                    one, place = _varint(value, place)
                    node["after"].append(one)
            elif number == 10:
                (_, name), (_, held) = _fields(value)
                node[name.decode()] = held
            else:
                node[{1: "id", 2: "name", 3: "type", 6: "start", 7: "us"}[number]] = value
        nodes.append(node)
    return nodes


def _chakras_trace() -> None:
    def step(x: Tensor) -> Tensor:
        reduced = torch.ops.c10d_ext.all_reduce(x * 2, "sum", _tp())
        gathered = torch.ops.c10d_ext.all_gather_into_tensor(x, 125, _dp())
        row = x @ x.t()
        y = torch.ops.c10d_ext.wait_tensor(reduced) + row.sum()
        return y + torch.ops.c10d_ext.wait_tensor(gathered).sum()

    def seconds(node: torch.fx.Node) -> float:
        return 2e-6

    report = _report(step, torch.zeros(8, 4), compute=seconds)
    nodes = _chakra_nodes(report.chakra())
    by_name = {node["name"].decode(): node for node in nodes}
    names = [node["name"].decode() for node in nodes]
    assert [(n, by_name[n]["type"]) for n in names] == [
        *(("mul", 4), ("all_reduce", 7), ("all_gather_into_tensor", 7), ("mm", 4)),
        *(("sum_1", 4), ("add", 4), ("sum_2", 4), ("add_1", 4)),
    ]
    after = {n: [names[i] for i in by_name[n]["after"]] for n in names}
    assert after == {
        "mul": [],
        "all_reduce": ["mul"],
        "all_gather_into_tensor": ["mul"],
        "mm": ["mul"],
        "sum_1": ["all_reduce", "mm"],
        "add": ["sum_1"],
        "sum_2": ["all_gather_into_tensor", "add"],
        "add_1": ["sum_2"],
    }
    assert (by_name["all_reduce"]["comm_type"], by_name["all_reduce"]["comm_size"]) == (0, 128)
    assert by_name["all_reduce"]["pg_name"] == _tp().encode()
    assert by_name["all_gather_into_tensor"]["comm_type"] == 2
    assert by_name["mm"]["num_ops"] == 2 * 8 * 4 * 8
    assert by_name["mm"]["us"] == 2


def test_chakras_trace(big_world: Call) -> None:
    big_world(_chakras_trace)


def _chakra_knows_every_op() -> None:
    for op, (call, _) in _expected_bytes().items():
        nodes = _chakra_nodes(_report(call, torch.zeros(8, 4)).chakra())
        assert [n["pg_name"] for n in nodes if n["type"] == 7] == [_tp().encode()], op


def test_chakra_knows_every_op(big_world: Call) -> None:
    big_world(_chakra_knows_every_op)
