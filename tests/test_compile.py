"""torch.compile: nothing in flight is reused or freed, scheduling passes act, graphs stay whole.

One file, for each part compiles small programs of the same kind and reads what became of them.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh

import torch_c10d_ext
import torch_c10d_ext.functional as F
from tests.contract import calls_in, group, smooth_values
from tests.harness import run, values
from tests.harness.flight import Gate, in_flight

INDUCTOR_DEADLINE = 200.0


def _xs(shape: tuple[int, ...], salt: int = 0) -> list[Tensor]:
    return [smooth_values(shape, torch.float64, r, salt=salt) for r in range(dist.get_world_size())]


def _assert_close(got: Tensor, want: Tensor, what: object = "") -> None:
    text = values.close(got + 0, want)
    assert not text, f"{what}: {text}"


# --- buffers in flight ---------------------------------------------------------------------------


def _tempting(start: Callable[[Tensor], Tensor], x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Leaves a collective in flight amid computations that would love to reuse its buffers."""
    a = (x * 2).sin()  # a temporary: dead, but for the collective that reads it
    y = start(a)
    # Temporaries of a's size, some by external calls into memory that is planned for them.
    b = (w @ w).tanh()
    c = (b @ w).tanh()
    d = (c @ w).tanh()
    return torch.ops.c10d_ext.wait_tensor(y) + 1, d


# Waits as late as they can be, starts as early: the longest time in flight that Inductor can give.
_LONG_FLIGHTS = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["raise_comms", "sink_waits"],
}


def _starts() -> dict[str, tuple[Callable[[Tensor], Tensor], Callable[[list[Tensor]], Tensor]]]:
    ops, name = torch.ops.c10d_ext, group()
    n, rank = dist.get_world_size(), dist.get_rank()
    ring = [(m + 1) % n for m in range(n)]
    even = [8 // n] * n
    return {
        "all_reduce": (lambda a: ops.all_reduce(a, "sum", name), lambda xs: sum(xs[1:], xs[0])),
        "all_reduce_": (lambda a: ops.all_reduce_(a, "sum", name), lambda xs: sum(xs[1:], xs[0])),
        "all_gather_into_tensor": (
            lambda a: ops.all_gather_into_tensor(a, n, name),
            lambda xs: torch.cat(xs),
        ),
        "reduce_scatter_tensor": (
            lambda a: ops.reduce_scatter_tensor(a, "sum", n, name),
            lambda xs: sum(xs[1:], xs[0]).chunk(n)[rank],
        ),
        "all_to_all_single": (
            lambda a: ops.all_to_all_single(a, even, even, name),
            lambda xs: torch.cat([x.chunk(n)[rank] for x in xs]),
        ),
        "broadcast": (lambda a: ops.broadcast(a, 1, name), lambda xs: xs[1]),
        "reduce": (
            lambda a: ops.reduce(a, "sum", 0, name),
            lambda xs: sum(xs[1:], xs[0]) * (rank == 0),
        ),
        "gather": (
            lambda a: ops.gather(a, 0, name),
            lambda xs: torch.cat(xs) if rank == 0 else xs[0][:0],
        ),
        "scatter": (lambda a: ops.scatter(a, 1, name), lambda xs: xs[1].chunk(n)[rank]),
        "permute_tensor": (
            lambda a: ops.permute_tensor(a, ring, name),
            lambda xs: xs[(rank - 1) % n],
        ),
        "barrier": (lambda a: ops.barrier(a, name), lambda xs: xs[rank]),
        "all_gather": (lambda a: ops.all_gather(a, [8] * n, name), lambda xs: torch.cat(xs)),
        "reduce_scatter": (
            lambda a: ops.reduce_scatter(a, "sum", [2, 6], name),
            lambda xs: sum(xs[1:], xs[0]).split([2, 6])[rank],
        ),
        "all_reduce_coalesced": (
            lambda a: ops.all_reduce_coalesced([a, a + 1], "sum", name)[0],
            lambda xs: sum(xs[1:], xs[0]),
        ),
    }


_STARTS = (
    "all_reduce",
    "all_reduce_",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "permute_tensor",
    "barrier",
    "all_gather",
    "reduce_scatter",
    "all_reduce_coalesced",
)


def _nothing_in_flight_is_reused(name: str, jam: bool) -> None:
    start, reference = _starts()[name]
    rank, w = dist.get_rank(), smooth_values((8, 8), torch.float64, 77)
    xs = _xs((8, 8))
    want = reference([(x * 2).sin() for x in xs]) + 1
    beside = _tempting(lambda a: a * 1, xs[rank], w)[1]
    kept = xs[rank].clone()
    settings = dict(_LONG_FLIGHTS)
    if not jam:
        # torch 2.12 compares the ranks' graphs by an object collective, which our backend in Python
        # does not have.
        optimizations = torch._inductor.config.aten_distributed_optimizations
        if hasattr(optimizations, "spmd_check"):
            settings["aten_distributed_optimizations.spmd_check"] = False
    with torch._inductor.config.patch(settings):
        compiled = torch.compile(lambda x, w: _tempting(start, x, w), fullgraph=True)
        compiled(xs[rank], w)
    for _ in range(3):
        with in_flight() if jam else contextlib.nullcontext(Gate("unused")) as gate:
            gate.open_after(0.05)
            y, d = compiled(xs[rank], w)
            _assert_close(y, want, "result")
            _assert_close(d, beside, "computation beside the collective")
            assert torch.equal(xs[rank], kept), "input changed"


@pytest.mark.parametrize("name", _STARTS)
def test_inductor_reuses_nothing_in_flight(name: str) -> None:
    run(2, _nothing_in_flight_is_reused, name, True, deadline=INDUCTOR_DEADLINE)


# What a backend in Python can serve: torch has no hooks for the other collectives.
_DELAYED = (
    "all_reduce",
    "all_reduce_",
    "all_to_all_single",
    "broadcast",
    "permute_tensor",
    "barrier",
    "all_gather",
    "reduce_scatter",
    "all_reduce_coalesced",
)


@pytest.mark.parametrize("name", _DELAYED)
def test_inductor_reuses_nothing_a_delayed_backend_reads(name: str) -> None:
    run(
        2,
        _nothing_in_flight_is_reused,
        name,
        False,
        backend="delayed",
        deadline=INDUCTOR_DEADLINE,
    )


def _reuse_is_noticed() -> None:
    x = torch.arange(4.0) + dist.get_rank()
    y = torch.ops.c10d_ext.all_reduce(x, "sum", group())
    # What a careless memory planner does.
    y.mul_(3)
    with pytest.raises(RuntimeError, match="changed in flight"):
        torch.ops.c10d_ext.wait_tensor(y)


def test_the_delayed_backend_notices_reuse() -> None:
    run(2, _reuse_is_noticed, backend="delayed")


def test_every_op_is_tried_in_flight() -> None:
    started = {str(op).split(".")[1] for op in _collective_ops()}
    stems = {s.removesuffix("_").removesuffix("_coalesced").removesuffix("_out") for s in started}
    # Tracers see the Megatron pair as an alias and as an all_reduce.
    stems -= {"wait_tensor", "copy_to_group", "reduce_from_group"}
    # Messages hold their own memory, see test_messages.py.
    assert stems - {"batch_isend_irecv", "wait_message"} <= set(_STARTS)


def _collective_ops() -> list[str]:
    names = torch._C._dispatch_get_all_op_names()
    return [n.replace("::", ".") for n in names if n.startswith("c10d_ext::")]


def _nothing_unused_is_reused(name: str) -> None:
    """A collective whose result nobody reads still owns its memory until it is done."""
    start, _ = _starts()[name]
    rank, w = dist.get_rank(), smooth_values((8, 8), torch.float64, 77)
    xs = _xs((8, 8))

    def step(x: Tensor, w: Tensor) -> Tensor:
        start((x * 2).sin())
        b = (w @ w).tanh()
        c = (b @ w).tanh()
        return (c @ w).tanh()

    want = _tempting(lambda a: a * 1, xs[rank], w)[1]
    compiled = torch.compile(step, fullgraph=True)
    _, (code,) = run_and_get_code(compiled, xs[rank], w)
    (call,) = re.findall(r"^ +(?:\w+ = )?torch\.ops\.c10d_ext\..*", code, re.MULTILINE)
    in_flight_code = code[code.index(call) :].split("wait_tensor")[0]  # in place: waited for
    for buffer in re.findall(r"buf\d+", call):
        assert f"del {buffer}  # reuse" not in in_flight_code, f"{buffer} of {call}"
    for _ in range(3):
        with in_flight() as gate:
            gate.open_after(0.1)
            got = [compiled(xs[rank], w) for _ in range(3)]
        dist.barrier()  # what was in flight has landed, wherever that is
        for each in got:
            _assert_close(each, want, "computation beside the collective")


@pytest.mark.parametrize("name", _STARTS)
def test_inductor_reuses_nothing_of_an_unused_result(name: str) -> None:
    run(2, _nothing_unused_is_reused, name, deadline=INDUCTOR_DEADLINE)


def _unwaited_result_of_a_graph() -> None:
    """A graph may hand out a result in flight; the caller waits."""
    xs = _xs((8, 5))
    name, rank = group(), dist.get_rank()

    @torch.compile(fullgraph=True)
    def start(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.ops.c10d_ext.all_reduce((x * 2).sin(), "sum", name)
        return y, (x * 3).cos() @ x.t()

    want = sum((x * 2).sin() for x in xs)
    start(xs[rank])
    torch.ops.c10d_ext.wait_tensor(start(xs[rank])[0])
    with in_flight() as gate:
        y, _ = start(xs[rank])
        junk = [torch.full((8, 5), 3.0, dtype=torch.float64) for _ in range(50)]
        gate.open_after(0.02)
        _assert_close(torch.ops.c10d_ext.wait_tensor(y), want)
        assert all(torch.equal(j, junk[0]) for j in junk)


def test_a_graph_may_return_a_result_in_flight() -> None:
    run(2, _unwaited_result_of_a_graph, deadline=INDUCTOR_DEADLINE)


def _wait_for_effect(backend: str) -> None:
    """`wait_tensor(y)` with its result ignored, then y used: what imperative code writes."""
    xs = _xs((4, 5))
    name, rank = group(), dist.get_rank()

    def functional(x: Tensor) -> Tensor:
        y = torch.ops.c10d_ext.all_reduce(x * 2, "sum", name)
        torch.ops.c10d_ext.wait_tensor(y)
        return y + 1

    def in_place(x: Tensor) -> Tensor:
        y = x * 2
        torch.ops.c10d_ext.all_reduce_(y, "sum", name)
        torch.ops.c10d_ext.wait_tensor(y)
        return y + 1

    def of_the_input(x: Tensor) -> Tensor:
        torch.ops.c10d_ext.all_reduce_(x, "sum", name)
        torch.ops.c10d_ext.wait_tensor(x)
        return x + 1

    total = sum(xs[1:], xs[0])
    for f, want in (
        (functional, 2 * total + 1),
        (in_place, 2 * total + 1),
        (of_the_input, total + 1),
    ):
        compiled = torch.compile(f, backend=backend, fullgraph=True)
        for _ in range(2):
            x = xs[rank].clone()
            with in_flight() as gate:
                gate.open_after(0.03)
                _assert_close(compiled(x), want, f.__name__)
                if f is of_the_input:
                    _assert_close(x, total, "the input")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_wait_for_its_effect_alone(backend: str) -> None:
    run(2, _wait_for_effect, backend, deadline=INDUCTOR_DEADLINE)


# --- scheduling ----------------------------------------------------------------------------------


def _order(passes: list[str]) -> str:
    """The generated code of a step that has room for overlap on both sides."""
    name, rank = group(), dist.get_rank()

    def step(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        before = (w @ w).relu()  # independent of the collective: it can start earlier
        y = torch.ops.c10d_ext.all_reduce(x * 2, "sum", name)
        y = torch.ops.c10d_ext.wait_tensor(y)  # and be waited for later
        after = (before @ w).relu() @ w
        return y + 1, after

    x, w = _xs((16, 16))[rank], _xs((16, 16), salt=5)[0]
    settings = {
        "reorder_for_compute_comm_overlap": bool(passes),
        "reorder_for_compute_comm_overlap_passes": passes,
        "allow_buffer_reuse": True,
    }
    with torch._inductor.config.patch(settings):
        (got, _), (code, *_) = run_and_get_code(torch.compile(step, fullgraph=True), x, w)
    _assert_close(got, 2 * sum(_xs((16, 16))) + 1)
    return code


def _positions(code: str) -> tuple[int, int, list[int]]:
    """Line numbers of the start, of the wait, and of the matrix products."""
    lines = [line for line in code.splitlines() if not line.strip().startswith("#")]
    begin = next(i for i, line in enumerate(lines) if re.search(r"c10d_ext\.all_reduce", line))
    end = next(i for i, line in enumerate(lines) if "wait_tensor" in line and i > begin)
    products = [i for i, line in enumerate(lines) if "extern_kernels.mm(" in line]
    return begin, end, products


def test_sink_waits_moves_the_wait_behind_the_computation() -> None:
    for code in run(2, _order, ["sink_waits"], deadline=INDUCTOR_DEADLINE):
        begin, end, products = _positions(code)
        assert len(products) == 3
        assert sum(begin < p < end for p in products) >= 2, code


def test_raise_comms_moves_the_start_before_the_computation() -> None:
    for code in run(2, _order, ["raise_comms"], deadline=INDUCTOR_DEADLINE):
        begin, _, products = _positions(code)
        assert begin < products[0], code


def test_raise_and_sink_overlap_everything() -> None:
    codes = run(2, _order, ["raise_comms", "sink_waits"], deadline=INDUCTOR_DEADLINE)
    for code in codes:
        begin, end, products = _positions(code)
        assert begin < products[0] and products[-1] < end, code
    assert codes[0].count("c10d_ext") == codes[1].count("c10d_ext")


def _layers(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return (F.all_reduce(x @ v, "avg", None).relu() @ w).square().mean()


def _copies(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    y = (x @ F.copy_to_group(v, None)).relu()
    return (y @ F.copy_to_group(w, None)).square().mean()


def _backward_in_order(loss: Callable[..., Tensor]) -> str:
    """The generated backward, whose gradients are collectives."""
    x, v, w = (t.requires_grad_() for t in (_xs((16, 16))[dist.get_rank()], *_xs((16, 16), salt=5)))

    def step(f: Any) -> list[Tensor]:
        return list(torch.autograd.grad(f(x, v, w), (x, v, w)))

    want = step(loss)
    with torch._inductor.config.patch(_LONG_FLIGHTS):
        got, codes = run_and_get_code(step, torch.compile(loss, fullgraph=True))
    for g, wanted in zip(got, want, strict=True):
        _assert_close(g, wanted)
    return codes[-1]


@pytest.mark.parametrize("loss", [_layers, _copies])
def test_collectives_of_backward_overlap(loss: Callable[..., Tensor]) -> None:
    """The gradient of the activations, or of the last weight, travels during a product."""
    for code in run(2, _backward_in_order, loss, deadline=INDUCTOR_DEADLINE):
        begin, end, products = _positions(code)
        assert len(products) == 4, code
        assert sum(begin < p < end for p in products) >= 1, code


def _reordered_by_cost(settings: dict[str, Any]) -> str:
    name, rank = group(), dist.get_rank()

    def step(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.ops.c10d_ext.wait_tensor(torch.ops.c10d_ext.all_reduce(x * 2, "sum", name))
        z = torch.ops.c10d_ext.wait_tensor(
            torch.ops.c10d_ext.all_gather_into_tensor(x * 3, dist.get_world_size(), name)
        )
        return y + 1, (z @ w).relu() @ w

    x, w = _xs((16, 16))[rank], _xs((16, 16), salt=5)[0]
    passes = torch._inductor.config.aten_distributed_optimizations
    if hasattr(passes, "spmd_check"):
        # torch 2.12 has it on: a collective at compile time, which a rank served by a cache skips.
        settings = {**settings, "aten_distributed_optimizations.spmd_check": False}
    with torch._inductor.config.patch(settings):
        (got, other), (code, *_) = run_and_get_code(torch.compile(step, fullgraph=True), x, w)
    _assert_close(got, 2 * sum(_xs((16, 16))) + 1)
    _assert_close(other, (torch.cat(_xs((16, 16))) * 3 @ w).relu() @ w)
    return code


def test_default_reordering_passes_take_our_ops() -> None:
    settings = {"reorder_for_compute_comm_overlap": True}
    for code in run(2, _reordered_by_cost, settings, deadline=INDUCTOR_DEADLINE):
        assert code.count("wait_tensor") >= 2


def test_peak_memory_and_locality_passes_take_our_ops() -> None:
    settings = {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": [
            "reorder_communication_preserving_peak_memory",
            "sink_waits_iterative",
        ],
        "reorder_for_peak_memory": True,
        "reorder_for_locality": True,
    }
    run(2, _reordered_by_cost, settings, deadline=INDUCTOR_DEADLINE)


# --- whole graphs --------------------------------------------------------------------------------


class _Captured:
    """A compiler backend that keeps the graphs it is given, and runs them by way of AOTAutograd."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs.append(gm)
        return torch._dynamo.lookup_backend("aot_eager")(gm, inputs)


def _functional_calls(n: int, g: Any) -> dict[str, Callable[[Tensor], Any]]:
    ring = [(m + 1) % n for m in range(n)]
    return {
        "all_reduce": lambda x: F.all_reduce(x, "sum", g),
        "all_reduce avg": lambda x: F.all_reduce(x, "avg", g),
        "premul_sum": lambda x: F.all_reduce(x, "premul_sum", g, factor=0.5),
        "all_reduce_coalesced": lambda x: F.all_reduce_coalesced([x, x + 1], "sum", g),
        "all_gather_single": lambda x: F.all_gather_single(x, 1, g),
        "all_gather_single_autograd": lambda x: F.all_gather_single_autograd(x, 0, g),
        "all_gather_tensor": lambda x: F.all_gather_tensor(x, 0, g),
        "all_gather_tensor_autograd": lambda x: F.all_gather_tensor_autograd(x, 1, g),
        "all_gather_single_coalesced": lambda x: F.all_gather_single_coalesced([x, x * 2], g),
        "reduce_scatter_single": lambda x: F.reduce_scatter_single(x, "sum", 1, g),
        "reduce_scatter_single_autograd": lambda x: F.reduce_scatter_single_autograd(
            x, "sum", 0, g
        ),
        "reduce_scatter_tensor": lambda x: F.reduce_scatter_tensor(x, "avg", 0, g),
        "reduce_scatter_tensor_autograd": lambda x: F.reduce_scatter_tensor_autograd(
            x, "sum", 1, g
        ),
        "reduce_scatter_single_coalesced": lambda x: F.reduce_scatter_single_coalesced(
            [x, x * 2], "sum", [0, 1], g
        ),
        "all_to_all_single": lambda x: F.all_to_all_single(x, None, None, g),
        "all_to_all_single_autograd": lambda x: F.all_to_all_single_autograd(
            x, [2] * n, [2] * n, g
        ),
        "broadcast": lambda x: F.broadcast(x, n - 1, g),
        "broadcast_coalesced": lambda x: F.broadcast_coalesced([x, x + 1], 0, g),
        "reduce": lambda x: F.reduce(x, "sum", 0, g),
        "gather": lambda x: F.gather(x, 0, g, gather_dim=1),
        "scatter": lambda x: F.scatter(x, 0, g, scatter_dim=1),
        "permute_tensor": lambda x: F.permute_tensor(x, ring, g),
        "barrier": lambda x: F.barrier(x, g),
        "all_gather": lambda x: F.all_gather(x, [2 * n] * n, g),
        "reduce_scatter": lambda x: F.reduce_scatter(x, "sum", [2] * n, g),
        "copy_to_group": lambda x: F.copy_to_group(x * 1, g),
        "reduce_from_group": lambda x: F.reduce_from_group(x, g),
        "wait_tensor": lambda x: F.wait_tensor(F.all_reduce(x, "sum", g)),
    }


# How a group is resolved while tracing does not depend on the function.
_ENOUGH_FOR_A_GROUP = ("all_reduce", "all_gather_single_coalesced", "permute_tensor", "all_gather")


def _whole_graphs(form: str) -> list[str]:
    n, rank = dist.get_world_size(), dist.get_rank()
    g: Any = {
        "name": lambda: group(),
        "group": lambda: dist.group.WORLD,
        "None": lambda: None,
        "mesh": lambda: init_device_mesh("cpu", (n,)),
        "mesh and dim": lambda: (init_device_mesh("cpu", (n,)), 0),
        "ranks": lambda: list(range(n)),
    }[form]()
    x = _xs((2 * n, 2 * n))[rank]
    failures = []
    for name, call in _functional_calls(n, g).items():
        if form != "None" and name not in _ENOUGH_FOR_A_GROUP:
            continue
        torch._dynamo.reset()
        try:
            want = call(x)
            captured = _Captured()
            got = torch.compile(call, backend=captured, fullgraph=True)(x)
            pairs = [(got, want)] if isinstance(want, Tensor) else list(zip(got, want, strict=True))
            for y, w in pairs:
                assert type(y) is Tensor, f"{type(y)} out of a graph"
                _assert_close(y, w + 0, name)
            assert len(captured.graphs) == 1
            if name != "copy_to_group":
                calls = calls_in(captured.graphs[0].graph)
                assert any("wait_tensor" in c for c in calls), f"no wait in {calls}"
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {str(error)[:600]}")
    return failures


@pytest.mark.parametrize("form", ["name", "group", "None", "mesh", "mesh and dim", "ranks"])
def test_functional_calls_make_whole_graphs(form: str) -> None:
    failures = run(2, _whole_graphs, form, deadline=150)
    assert not failures[0] and not failures[1], "\n".join(failures[0] or failures[1])


def _data_dependent_splits(backend: str) -> None:
    """Mixture-of-experts dispatch: split sizes that are data, exchanged by the same op."""
    n, rank = dist.get_world_size(), dist.get_rank()

    def dispatch(x: Tensor, counts: Tensor) -> Tensor:
        theirs = F.all_to_all_single(counts, None, None, None)
        ins, outs = counts.tolist(), theirs.tolist()
        return F.all_to_all_single(x * 2, outs, ins, None) + 1

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(dispatch, backend=backend, fullgraph=True)
        for turn in range(3):
            matrix = [[(i + 2 * j + turn) % 4 for j in range(n)] for i in range(n)]
            xs = [smooth_values((sum(row), 3), torch.float64, r) for r, row in enumerate(matrix)]
            want = torch.cat([2 * x.split(matrix[r])[rank] + 1 for r, x in enumerate(xs)])
            counts = torch.tensor(matrix[rank])
            _assert_close(dispatch(xs[rank], counts), want, "eager")
            _assert_close(compiled(xs[rank], counts), want, f"{backend} turn {turn}")
            leaf = xs[rank].clone().requires_grad_()
            (grad,) = torch.autograd.grad(compiled(leaf, counts).sum(), leaf)
            assert torch.equal(grad, torch.full_like(grad, 2.0))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_data_dependent_splits(backend: str) -> None:
    run(2, _data_dependent_splits, backend, deadline=INDUCTOR_DEADLINE)


def _dynamic_sizes() -> None:
    """One compiled graph for many sizes, forward and backward."""
    n, rank = dist.get_world_size(), dist.get_rank()

    def f(x: Tensor) -> Tensor:
        y = F.all_gather_single(x.sin(), 0, None)
        return F.reduce_scatter_single(y * y, "sum", 0, None)

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(f, backend=counter, fullgraph=True, dynamic=True)
    for rows in (4, 7, 12):
        xs = [x.requires_grad_() for x in _xs((rows, 3))]
        want = n * xs[rank].sin() ** 2
        y = compiled(xs[rank])
        _assert_close(y.detach(), want.detach())
        g = _xs((rows, 3), salt=3)
        (got,) = torch.autograd.grad(y, xs[rank], g[rank])
        # y_r depends on x_r alone, through n equal terms.
        _assert_close(got, torch.autograd.grad(want, xs[rank], g[rank])[0])
    assert counter.frame_count == 1, f"compiled {counter.frame_count} times"


def test_one_graph_for_many_sizes() -> None:
    run(2, _dynamic_sizes)


def _training_step(backend: str) -> None:
    """A tensor-parallel MLP compiled whole: losses and gradients equal the eager ones."""
    n, rank = dist.get_world_size(), dist.get_rank()
    w1 = smooth_values((6, 8), torch.float64, 50).chunk(n, 1)[rank].contiguous()
    w2 = smooth_values((8, 6), torch.float64, 51).chunk(n, 0)[rank].contiguous()
    x = smooth_values((4, 6), torch.float64, 52)

    def loss(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        h = torch.nn.functional.gelu(F.copy_to_group(x, None) @ w1)
        return F.reduce_from_group(h @ w2, None).square().mean()

    def grads(f: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, w1, w2)]
        value = f(*leaves)
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    full1, full2 = (smooth_values(s, torch.float64, r) for s, r in (((6, 8), 50), ((8, 6), 51)))
    leaves = [t.clone().requires_grad_() for t in (x, full1, full2)]
    value = (torch.nn.functional.gelu(leaves[0] @ leaves[1]) @ leaves[2]).square().mean()
    gx, g1, g2 = torch.autograd.grad(value, leaves)
    want = [value.detach(), gx, g1.chunk(n, 1)[rank], g2.chunk(n, 0)[rank]]
    for kind, f in (
        ("eager", loss),
        (backend, torch.compile(loss, backend=backend, fullgraph=True)),
    ):
        for got, w, what in zip(grads(f), want, ("loss", "x", "w1", "w2"), strict=True):
            _assert_close(got, w.contiguous(), f"{kind}: {what}")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_tensor_parallel_step(backend: str) -> None:
    run(2, _training_step, backend, deadline=INDUCTOR_DEADLINE)


def _strided_temporaries() -> None:
    """Whatever strides Inductor gives a temporary, the collective takes and the result has them."""
    n, rank = dist.get_world_size(), dist.get_rank()
    xs = _xs((8, 8))
    for name in _STARTS:
        start, reference = _starts()[name]
        want = reference([(x * 2).t()[:, ::2] for x in xs])

        def f(x: Tensor, start: Callable[[Tensor], Tensor] = start) -> Tensor:
            return torch.ops.c10d_ext.wait_tensor(start((x * 2).t()[:, ::2])).sin()

        torch._dynamo.reset()
        _assert_close(torch.compile(f, fullgraph=True)(xs[rank]), want.sin().contiguous(), name)
    assert n == 2


def test_strided_temporaries() -> None:
    run(2, _strided_temporaries, deadline=INDUCTOR_DEADLINE)


def _input_overwritten_behind_the_wait(passes: list[str]) -> None:
    """The graph updates its own input after the collective that reads it."""
    n, rank = dist.get_world_size(), dist.get_rank()
    xs = _xs((4, 5))

    def f(x: Tensor) -> Tensor:
        y = F.all_gather_single(x, 0, None)
        x.add_(100)
        return y * 2

    settings = {
        "reorder_for_compute_comm_overlap": bool(passes),
        "reorder_for_compute_comm_overlap_passes": passes,
    }
    with torch._inductor.config.patch(settings):
        compiled = torch.compile(f, fullgraph=True)
        for _ in range(3):
            x = xs[rank].clone()
            with in_flight() as gate:
                gate.open_after(0.05)
                y = compiled(x)
            _assert_close(y, 2 * torch.cat(xs))
            _assert_close(x, xs[rank] + 100)
    assert n == 2


@pytest.mark.parametrize("passes", [[], ["sink_waits"], ["raise_comms", "sink_waits"]])
def test_input_overwritten_behind_the_wait(passes: list[str]) -> None:
    run(2, _input_overwritten_behind_the_wait, passes, deadline=INDUCTOR_DEADLINE)


def _same_bits_as_eager() -> None:
    """Low precision accumulates wide in compiled code, too, and the factor is not rounded."""
    rank = dist.get_rank()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for op, factor in (("sum", None), ("avg", None), ("premul_sum", 0.3), ("product", None)):
            x = values.values((65,), dtype, rank, product=op == "product")

            def f(x: Tensor, op: str = op, factor: float | None = factor) -> Tensor:
                return F.all_reduce(x, op, None, factor=factor)

            torch._dynamo.reset()
            eager, compiled = f(x) + 0, torch.compile(f, fullgraph=True)(x)
            text = values.mismatch(compiled, eager)
            assert not text, f"{dtype} {op}: {text}"


def test_compiled_reductions_have_the_bits_of_eager_ones() -> None:
    run(2, _same_bits_as_eager, deadline=INDUCTOR_DEADLINE)


def _unused_results_do_not_unbalance_the_ranks() -> None:
    """A collective whose result nobody uses may be dropped, but then by every rank."""
    name = group()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def f(x: Tensor) -> Tensor:
        F.all_reduce(x, "sum", name)
        return F.all_reduce(x * 2, "sum", name) + 1

    xs = _xs((3,))
    for _ in range(3):
        _assert_close(f(xs[dist.get_rank()]), 2 * sum(xs) + 1)


def test_unused_results() -> None:
    run(2, _unused_results_do_not_unbalance_the_ranks)


# Two ranks compile what looks the same on both until shapes and derivatives are worked out, with
# Inductor's caches on; then once more, in new processes.
_COMPILE_ON_TWO_RANKS = """
import datetime, os, sys
import torch, torch.distributed as dist, torch._inductor.compile_fx
from torch._dynamo.utils import counters
def main(rank, store):
    import torch_c10d_ext.functional as F
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    xs = [torch.arange(3.0) + 10 * r + 1 for r in range(2)]
    product = lambda x: F.all_reduce(x, "product", None)
    uneven = lambda x: F.reduce_scatter(x, "sum", [1, 2], None)
    wants = {product: xs[0] * xs[1], uneven: (xs[0] + xs[1]).split([1, 2])[rank]}
    grads = {product: 2 * xs[1 - rank], uneven: torch.ones(3)}
    for f in (product, uneven):
        x = xs[rank].clone().requires_grad_()
        y = torch.compile(f, fullgraph=True)(x)
        y.sum().backward()
        assert torch.equal(y, wants[f]) and torch.equal(x.grad, grads[f]), (rank, y, x.grad)
    hits = counters["inductor"]["fxgraph_cache_hit"]
    sys.stdout.write(f"{rank} hits {hits}\\n")
    sys.stdout.flush()
    dist.destroy_process_group()
for turn in range(2):
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            main(rank, f"{sys.argv[1]}/store{turn}")
            os._exit(0)
    assert [os.waitpid(pid, 0)[1] for pid in ranks] == [0, 0]
"""


@pytest.mark.long
def test_caches_tell_ranks_apart(tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": str(Path(torch_c10d_ext.__file__).parent.parent),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE_ON_TWO_RANKS, tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=INDUCTOR_DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    # Two graphs of two halves: none from another rank, all from this one.
    assert sorted(done.stdout.splitlines()[:2]) == ["0 hits 0", "1 hits 0"]
    assert sorted(done.stdout.splitlines()[2:]) == ["0 hits 4", "1 hits 4"]


# Compiles one function with Inductor's caches on in three processes, and says of each whether code
# was taken from them. A source file of the package changes before the last.
_COMPILE_THRICE = """
import os, sys
import torch, torch.distributed as dist, torch._inductor.compile_fx
from torch._dynamo.utils import counters
def compile_once():
    import torch_c10d_ext
    assert torch_c10d_ext.__file__.startswith(os.getcwd())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    @torch.compile(fullgraph=True)
    def f(x):
        # No code of its own for the C++ compiler.
        y = torch.ops.c10d_ext.all_gather_into_tensor(x, 1, "0")
        return torch.ops.c10d_ext.wait_tensor(y)
    assert torch.equal(f(torch.arange(4.0)), torch.arange(4.0))
    inductor = counters["inductor"]
    hits, misses = inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"]
    print("HITS", hits, "MISSES", misses, flush=True)
    dist.destroy_process_group()
for change in ("", "", "# a new lowering"):
    with open(sys.argv[1], "a") as source:
        source.write(change)
    assert "torch_c10d_ext" not in sys.modules
    if os.fork() == 0:
        compile_once()
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.mark.long
def test_changing_the_extension_serves_no_stale_code(tmp_path: Path) -> None:
    package = tmp_path / "torch_c10d_ext"
    source = Path(torch_c10d_ext.__file__).parent
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": "0",  # a new cache would have to find out
    }
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE_THRICE, package / "ops" / "all_gather_into_tensor.py"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=INDUCTOR_DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["HITS 0 MISSES 1", "HITS 1 MISSES 0", "HITS 0 MISSES 1"]
