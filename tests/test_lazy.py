"""Lazy tensors: collectives as nodes of torch's lazy graphs, run by mark_step.

One file, for its parts start lazy tensors once in each worker, and read the same counters.
"""

from __future__ import annotations

import gc
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_c10d_ext
from tests.contract import (
    COALESCED,
    COALESCED_INPLACE,
    FUNCTIONAL,
    INPLACE,
    OUT,
    Collective,
    Report,
    Variant,
    call,
    expected,
    group,
    inputs,
    load,
    variant_of,
    variants,
    wait,
)
from tests.harness import run, values
from torch_c10d_ext import functional as F

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted(
    f"tests.ops.{path.stem}"
    for path in (ROOT / "tests" / "ops").glob("test_*.py")
    if path.stem not in ("test_wait_tensor", "test_batch_isend_irecv", "test_wait_message")
)
SIZES = (1, 2, 3, 4)
# The eager collectives have every dtype. These are what torch's lazy tensors hold.
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)

pytestmark = pytest.mark.skipif(
    not torch_c10d_ext._C.has_lazy, reason="torch was built without its lazy backend"
)

ops = torch.ops.c10d_ext


# --- on the worker -------------------------------------------------------------------------------


def start_lazy() -> Any:
    """torch._lazy, its backend started (once in a process) and its counters at zero."""
    import torch._lazy
    import torch._lazy.metrics
    import torch._lazy.ts_backend

    if not hasattr(start_lazy, "done"):
        torch._lazy.ts_backend.init()
        start_lazy.done = True  # type: ignore[attr-defined]
    torch._lazy.mark_step()
    torch._lazy.metrics.reset()
    return torch._lazy


def counters() -> dict[str, int]:
    metrics = torch._lazy.metrics
    return {name: metrics.counter_value(name) for name in metrics.counter_names()}


def fallbacks() -> list[str]:
    """Ops that torch's lazy tensors had to run eagerly."""
    return [name for name, count in counters().items() if name.startswith("aten::") and count]


def compiled() -> tuple[int, int]:
    """How many graphs were compiled, and how many were found in the cache."""
    all_ = counters()
    return all_.get("UncachedCompile", 0), all_.get("CachedCompile", 0)


def nodes(*tensors: Tensor) -> str:
    """The lazy graph behind tensors."""
    return str(torch._C._lazy._get_tensors_text(list(tensors)))


def script(*tensors: Tensor) -> str:
    """The TorchScript that it becomes."""
    return str(torch._C._lazy._get_tensors_backend(list(tensors)))


def lines_with(text: str, *names: str) -> list[str]:
    """Which of `names` the lines of a graph mention, in the order of the lines."""
    return [name for name in re.findall(r" = ([\w:]+)\b", text) if name in names]


def executed() -> str:
    """The optimized graph that was executed last."""
    return str(torch.jit.last_executed_optimized_graph())


# --- values --------------------------------------------------------------------------------------


def _every_variant(c: Collective, n: int) -> Iterator[tuple[str, list[Variant]]]:
    for form in c.forms:
        if form in (COALESCED, COALESCED_INPLACE):
            for cases in c.coalesced_cases(n):
                for dtype in (torch.float32, torch.int64):
                    yield form, [variant_of(c, case, dtype) for case in cases]
        else:
            for v in variants(c, n, DTYPES if form == FUNCTIONAL else (torch.float32,)):
                yield form, [v]
            for case in c.odd_cases(n):
                yield form, [variant_of(c, case)]


def _values(module: str) -> Any:
    lazy, c, report = start_lazy(), load(module), Report()
    n, rank = dist.get_world_size(), dist.get_rank()
    for form, vs in _every_variant(c, n):
        what = f"{form} {', '.join(map(str, vs))}"
        with report.attempt(what):
            worlds = [inputs(c, v, salt) for salt, v in enumerate(vs)]
            wanted = [
                expected(c, form, v.case, world)[rank] for v, world in zip(vs, worlds, strict=True)
            ]
            mine = [world[rank].to("lazy") for world in worlds]
            outs = [torch.empty_like(wanted[0]).to("lazy")] if form == OUT else []
            results = call(c, form, vs[0].case, mine, outs)
            for y, want in zip(results, wanted, strict=True):
                report.expect(f"{what}: type", type(y) is not Tensor or y.device.type != "lazy")
                report.expect(f"{what}: shape and dtype before it is run", values_unlike(y, want))
            lazy.mark_step()
            exact = values.exact(vs[0].dtype, vs[0].reduce_op, n)
            checked = [(y, want, what) for y, want in zip(results, wanted, strict=True)]
            if form in (INPLACE, COALESCED_INPLACE):
                checked += [
                    (x, want, f"{what}: input") for x, want in zip(mine, wanted, strict=True)
                ]
            elif form == OUT:
                checked += [(outs[0], wanted[0], f"{what}: out")]
            for y, want, text in checked:
                report.expect(text, values.mismatch(y.cpu(), want, bitwise=exact, ulps=2))
            if form not in (INPLACE, COALESCED_INPLACE):
                for x, world in zip(mine, worlds, strict=True):
                    report.expect(f"{what}: input", values.mismatch(x.cpu(), world[rank]))
    report.expect("fallbacks", f"{found}" if (found := fallbacks()) else "")
    return report.result()


def values_unlike(y: Tensor, want: Tensor) -> str:
    same = y.shape == want.shape and y.dtype == want.dtype
    return "" if same else f"got {y.dtype} {y.shape}, expected {want.dtype} {want.shape}"


def verify(results: list[Any]) -> None:
    failures = [f"rank {rank}: {f}" for rank, result in enumerate(results) for f in result[0]]
    assert not failures, "\n".join(failures[:20])
    assert all(result[2] for result in results)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("module", MODULES)
def test_values(module: str, size: int) -> None:
    verify(run(size, _values, module, deadline=240))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[:, ::2],
    "offset": lambda x: x[1:],
    "expanded": lambda x: x[:1].expand(3, 4),
    "scalar": lambda x: x[0, 1],
    "empty": lambda x: x[:0],
}


def _views() -> Any:
    lazy, report = start_lazy(), Report()
    n, rank = dist.get_world_size(), dist.get_rank()
    for what, view in VIEWS.items():
        world = [values.values((3, 4), torch.float32, r) for r in range(n)]
        x = world[rank].to("lazy")
        y = F.all_reduce(view(x), "sum", group())
        z = F.broadcast(view(x), n - 1, group())
        written = x.clone()
        if what != "expanded":
            F.all_reduce_inplace(view(written), "max", group())
        lazy.mark_step()
        seen = [view(each) for each in world]
        report.expect(what, values.mismatch(y.cpu(), values.reduce_reference(seen, "sum")))
        report.expect(f"{what}: broadcast", values.mismatch(z.cpu(), seen[-1]))
        want = world[rank].clone()
        if what != "expanded":
            view(want).copy_(values.reduce_reference(seen, "max"))
        report.expect(f"{what}: in place", values.mismatch(written.cpu(), want))
    report.expect("fallbacks", f"{found}" if (found := fallbacks()) else "")
    return report.result()


@pytest.mark.parametrize("size", (2, 3))
def test_views(size: int) -> None:
    verify(run(size, _views))


# --- graphs --------------------------------------------------------------------------------------


def _nodes() -> None:
    lazy, rank = start_lazy(), dist.get_rank()
    x = (torch.arange(6.0) + rank).to("lazy")
    y = F.all_reduce(x * 2, "sum", group())
    text = nodes(y)
    assert re.search(
        rf"\[Float\[6\]\] c10d_ext::all_reduce.*reduce_op=sum, group_name={group()}", text
    ), text
    assert "c10d_ext::wait_tensor" in text, text
    graph = script(y)
    assert lines_with(graph, "aten::mul", "c10d_ext::all_reduce", "c10d_ext::wait_tensor") == [
        "aten::mul",
        "c10d_ext::all_reduce",
        "c10d_ext::wait_tensor",
    ], graph
    lazy.mark_step()


def test_a_collective_is_a_node() -> None:
    run(2, _nodes)


def _results_are_plain() -> None:
    lazy = start_lazy()
    x = torch.ones(4).to("lazy")
    for y in (
        F.all_reduce(x, "sum", group()),
        F.wait_tensor(x),
        *F.all_reduce_coalesced([x, x], "sum", group()),
    ):
        assert type(y) is Tensor
    lazy.mark_step()


def test_functional_returns_plain_tensors() -> None:
    run(2, _results_are_plain)


def _steps() -> None:
    lazy, n, rank = start_lazy(), dist.get_world_size(), dist.get_rank()
    w = torch.ones(3, 3).to("lazy")
    lazy.mark_step()
    lazy.metrics.reset()
    for step in range(4):
        x = (torch.arange(9.0).view(3, 3) + rank + step).to("lazy")
        y = F.all_reduce(x @ w, "sum", group())
        z = F.all_gather_tensor(y[:1] + rank, 0, group())
        lazy.mark_step()
        assert compiled() == (1, step), counters()
        total = sum((torch.arange(9.0).view(3, 3) + r + step) @ torch.ones(3, 3) for r in range(n))
        assert torch.equal(y.cpu(), torch.as_tensor(total))
        assert torch.equal(z.cpu(), torch.cat([total[:1] + r for r in range(n)]))
        assert compiled() == (1, step), counters()
    assert not fallbacks()


@pytest.mark.parametrize("size", (1, 2, 3))
def test_a_step_is_one_graph_compiled_once(size: int) -> None:
    run(size, _steps)


def _calls_that_differ() -> list[tuple[str, Callable[[Tensor], Any], Callable[[Tensor], Any]]]:
    a, b = group(), _other_group()
    return [
        (
            "reduce op",
            lambda x: ops.all_reduce(x, "sum", a),
            lambda x: ops.all_reduce(x, "max", a),
        ),
        (
            "factor",
            lambda x: ops.all_reduce(x, "premul_sum", a, factor=2.0),
            lambda x: ops.all_reduce(x, "premul_sum", a, factor=2.0 + 2**-50),
        ),
        ("group", lambda x: ops.all_reduce(x, "min", a), lambda x: ops.all_reduce(x, "min", b)),
        ("root", lambda x: ops.broadcast(x, 0, a), lambda x: ops.broadcast(x, 1, a)),
        (
            "splits",
            lambda x: ops.all_to_all_single(x, [2, 2], [2, 2], a),
            lambda x: ops.all_to_all_single(
                x, [[1, 2], [3, 2]][dist.get_rank()], [[1, 3], [2, 2]][dist.get_rank()], a
            ),
        ),
        (
            "list",
            lambda x: ops.all_reduce_coalesced([x, x], "sum", a)[0],
            lambda x: ops.all_reduce_coalesced([x], "sum", a)[0],
        ),
    ]


def _other_group() -> str:
    if not hasattr(_other_group, "made"):
        everyone = list(range(dist.get_world_size()))
        _other_group.made = dist.new_group(everyone)  # type: ignore[attr-defined]
    return str(_other_group.made.group_name)  # type: ignore[attr-defined]


def _different_graphs() -> None:
    lazy = start_lazy()
    for what, one, other in _calls_that_differ():
        x = torch.arange(4.0).to("lazy") + dist.get_rank()
        lazy.mark_step()
        lazy.metrics.reset()
        for each in (one, other, one, other):
            y = wait(each(x))
            lazy.mark_step()
            want = wait(each(x.cpu()))
            assert torch.equal(y.cpu(), want), what
            del y
        assert compiled() == (2, 2), f"{what}: {counters()}"


def test_calls_that_differ_are_different_graphs() -> None:
    run(2, _different_graphs)


# --- overlap and order ---------------------------------------------------------------------------


def _overlap() -> None:
    """Started as soon as the input is there, waited for just before the first use."""
    lazy, rank = start_lazy(), dist.get_rank()
    names = ["c10d_ext::all_reduce", "aten::mm", "aten::tanh", "c10d_ext::wait_tensor", "aten::add"]
    # Depth first, one of these has the collective first and one the product.
    for swap in (False, True):
        for step in range(3):
            x = (torch.arange(9.0).view(3, 3) + rank + step).to("lazy")
            y = F.all_reduce(x, "sum", group())
            z = y + torch.tanh(x @ x) if swap else torch.tanh(x @ x) + y
            if step == 0:
                graph = script(z)
                assert lines_with(graph, *names[:3]) == names[:3], graph
            lazy.mark_step()
        graph = executed()
        assert lines_with(graph, *names) == names, graph


def test_a_collective_overlaps_what_does_not_need_it() -> None:
    run(2, _overlap)


def _several_in_flight() -> None:
    """A later collective does not wait for an earlier one."""
    lazy, rank = start_lazy(), dist.get_rank()
    for step in range(3):
        x = (torch.arange(4.0) + rank + step).to("lazy")
        a, b = F.all_reduce(x, "sum", group()), F.all_reduce(x, "max", group())
        c = torch.cos(x) + a + b
        lazy.mark_step()
    assert c is not None
    start_, wait_ = "c10d_ext::all_reduce", "c10d_ext::wait_tensor"
    graph = executed()
    found = lines_with(graph, start_, wait_, "aten::cos")
    assert found == [start_, start_, "aten::cos", wait_, wait_], graph


def test_collectives_are_in_flight_together() -> None:
    run(2, _several_in_flight)


def _kept_on_one_rank() -> None:
    """Who still holds a result, and in which order, differs between the ranks."""
    lazy, n, rank = start_lazy(), dist.get_world_size(), dist.get_rank()
    gc.disable()
    try:
        for step in range(4):
            x = (torch.arange(4.0) + rank + step).to("lazy")
            first = F.all_reduce(x, "sum", group())
            second = F.all_reduce(x, "max", group())
            third = F.all_gather_tensor(x, 0, group())
            if rank == 0:
                later = second * 2  # a root before `first`, which only rank 0 has
                del first, third
            else:
                later = first + third[:4]
                del second
            lazy.mark_step()
            later = later.cpu()
            y = F.all_reduce(x, "sum", group())
            lazy.mark_step()
            want = sum(torch.arange(4.0) + r + step for r in range(n))
            assert torch.equal(y.cpu(), torch.as_tensor(want)), f"step {step}: {y.cpu()}"
    finally:
        gc.enable()


@pytest.mark.parametrize("backend", ("gloo", "shm"))
@pytest.mark.parametrize("size", (2, 3))
def test_every_call_is_run_whoever_keeps_its_result(size: int, backend: str) -> None:
    run(size, _kept_on_one_rank, backend=backend)


def _alike_on_one_rank() -> None:
    """Two calls with one input on rank 0, with two inputs on the others."""
    lazy, rank = start_lazy(), dist.get_rank()
    for step in range(3):
        x = (torch.arange(4.0) + step).to("lazy")
        one, other = (x, x) if rank == 0 else (x + 1, x + 2)
        # Nothing but the sum is kept: the compiler is free to merge what it is made of.
        y = F.broadcast(one, 0, group()) + F.broadcast(other, 0, group())
        lazy.mark_step()
        assert torch.equal(y.cpu(), 2 * (torch.arange(4.0) + step))


def test_calls_that_look_alike_are_not_merged() -> None:
    run(2, _alike_on_one_rank)


# --- gradients -----------------------------------------------------------------------------------


def _gradients() -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    n, g = dist.get_world_size(), group()
    for op in ("sum", "avg", "min", "max", "product"):
        yield f"all_reduce {op}", lambda x, op=op: F.all_reduce(x, op, g)
    yield "all_gather_tensor", lambda x: F.all_gather_tensor(x, 0, g)
    yield "reduce_scatter_tensor", lambda x: F.reduce_scatter_tensor(x, "sum", 0, g)
    yield "all_to_all_single", lambda x: F.all_to_all_single(x, None, None, g)
    yield "broadcast", lambda x: F.broadcast(x, n - 1, g)
    yield "reduce", lambda x: F.reduce(x, "sum", 0, g)
    yield "gather", lambda x: F.gather(x, 0, g)
    yield "scatter", lambda x: F.scatter(x, 0, g)
    yield "permute_tensor", lambda x: F.permute_tensor(x, [*range(1, n), 0], g)
    yield "barrier", lambda x: F.barrier(x, g)
    yield "copy_to_group", lambda x: F.copy_to_group(x, g)
    yield "reduce_from_group", lambda x: F.reduce_from_group(x, g)
    yield "coalesced", lambda x: torch.cat(F.all_reduce_coalesced([x, x * x], "sum", g))
    yield "broadcast_coalesced", lambda x: torch.cat(F.broadcast_coalesced([x, x * 2], n - 1, g))
    yield "wait_tensor", lambda x: F.wait_tensor(x)
    for op in ("sum", "max", "product"):
        yield f"all_reduce_inplace {op}", lambda x, op=op: F.all_reduce_inplace(x, op, g)
        yield (
            f"all_reduce_coalesced_ {op}",
            lambda x, op=op: torch.cat(
                [F.wait_tensor(y) for y in ops.all_reduce_coalesced_([x, x + 1], op, g)]
            ),
        )
    yield "broadcast_inplace", lambda x: F.broadcast_inplace(x, 0, g)
    yield (
        "all_gather_tensor_inplace",
        lambda x: F.all_gather_tensor_inplace(x.new_empty(n * x.shape[0], *x.shape[1:]), x, g),
    )
    yield (
        "all_gather_inplace",
        lambda x: torch.stack(F.all_gather_inplace([torch.empty_like(x) for _ in range(n)], x, g)),
    )
    yield (
        "reduce_scatter_tensor_inplace",
        lambda x: F.reduce_scatter_tensor_inplace(
            x.new_empty(x.shape[0] // n, *x.shape[1:]), x, "sum", g
        ),
    )
    yield (
        "all_to_all_inplace",
        lambda x: F.all_to_all_inplace(torch.empty_like(x), x, None, None, g),
    )


def _backward() -> Any:
    lazy, report = start_lazy(), Report()
    n, rank = dist.get_world_size(), dist.get_rank()
    x = values.values((2 * n, 3), torch.float64, rank)
    for what, f in _gradients():
        results = []
        for device in ("cpu", "lazy"):
            leaf = x.clone().to(device).requires_grad_()
            y = f(leaf * 2)
            weight = torch.arange(y.numel(), dtype=torch.float64).view(y.shape) + rank
            (y * weight.to(device)).sum().backward()
            lazy.mark_step()
            results.append((y.detach().cpu(), leaf.grad.cpu()))
        for name, eager, got in zip(("value", "gradient"), *results, strict=True):
            report.expect(f"{what}: {name}", values.close(got, eager))
    report.expect("fallbacks", ", ".join(fallbacks()))
    return report.result()


@pytest.mark.parametrize("size", (1, 2, 3))
def test_gradients(size: int) -> None:
    verify(run(size, _backward))


# --- torch_c10d_ext.distributed ------------------------------------------------------------------


def _imperative() -> Iterator[tuple[str, Callable[[Tensor], list[Tensor]]]]:
    """What a call leaves in the caller's tensors, from this rank's `x` of 2 N rows."""
    import torch_c10d_ext.distributed as ours

    n, rank = ours.get_world_size(), ours.get_rank()

    def written(call: Callable[..., Any], *shape: int) -> Callable[[Tensor], list[Tensor]]:
        def run_it(x: Tensor) -> list[Tensor]:
            out = x.new_full(shape, -1.0)
            call(out, x)
            return [out]

        return run_it

    def listed(call: Callable[..., Any], count: int) -> Callable[[Tensor], list[Tensor]]:
        def run_it(x: Tensor) -> list[Tensor]:
            outs = [x.new_full((2, 3), -1.0) for _ in range(count)]
            call(outs, [x.narrow(0, 2 * row, 2) for row in range(n)])
            return outs

        return run_it

    def in_place(call: Callable[..., Any]) -> Callable[[Tensor], list[Tensor]]:
        def run_it(x: Tensor) -> list[Tensor]:
            y = x * 2
            call(y)
            return [y]

        return run_it

    def block(wait_later: bool) -> Callable[[Tensor], list[Tensor]]:
        def run_it(x: Tensor) -> list[Tensor]:
            ys = [x * (i + 1) for i in range(3)]
            wide = [x.new_full((2 * n * n, 3), -1.0) for _ in ys]
            rows = [x.new_full((2, 3), -1.0) for _ in ys]
            with ours.coalescing_manager(async_ops=wait_later) as calls:
                for y in ys:
                    ours.all_reduce(y)
                for out in wide:
                    ours.all_gather_into_tensor(out, x)
                for out in rows:
                    ours.reduce_scatter_tensor(out, x)
            calls.wait()
            return [*ys, *wide, *rows]

        return run_it

    yield "all_reduce", in_place(ours.all_reduce)
    yield "all_reduce, async", in_place(lambda y: ours.all_reduce(y, async_op=True).wait())
    yield "broadcast", in_place(lambda y: ours.broadcast(y, n - 1))
    yield "reduce", in_place(lambda y: ours.reduce(y, 0))
    yield "a block", block(False)
    yield "a block that is waited for later", block(True)
    yield "all_gather_into_tensor", written(ours.all_gather_into_tensor, 2 * n * n, 3)
    yield "reduce_scatter_tensor", written(ours.reduce_scatter_tensor, 2, 3)
    yield "all_to_all_single", written(ours.all_to_all_single, 2 * n, 3)
    yield "all_gather", listed(lambda outs, ins: ours.all_gather(outs, ins[0]), n)
    yield "reduce_scatter", listed(lambda outs, ins: ours.reduce_scatter(outs[0], ins), 1)
    yield "all_to_all", listed(ours.all_to_all, n)
    yield (
        "gather",
        listed(lambda outs, ins: ours.gather(ins[0], outs if rank == 0 else None), n),
    )
    yield (
        "scatter",
        listed(lambda outs, ins: ours.scatter(outs[0], ins if rank == 0 else None), 1),
    )


def _imperative_calls() -> Any:
    lazy, report = start_lazy(), Report()
    dtypes = (torch.float64, torch.int64, torch.complex64)
    for dtype, (what, f) in itertools.product(dtypes, _imperative()):
        x = values.values((2 * dist.get_world_size(), 3), dtype, dist.get_rank())
        want = f(x.clone())
        got = f(x.clone().to("lazy"))
        lazy.mark_step()
        for each, (a, b) in enumerate(zip(got, want, strict=True)):
            report.expect(f"{what} {dtype}: {each}", values.close(a.cpu(), b))
    report.expect("fallbacks", ", ".join(fallbacks()))
    return report.result()


@pytest.mark.parametrize("size", (1, 2, 3))
def test_imperative_calls(size: int) -> None:
    verify(run(size, _imperative_calls))


# --- training ------------------------------------------------------------------------------------


def _training() -> None:
    """A column- and row-parallel product, trained; the same losses as without lazy tensors."""
    lazy, n, rank = start_lazy(), dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    full = torch.randn(4, 4 * n), torch.randn(4 * n, 4)
    x = torch.randn(8, 4)
    losses: dict[str, list[float]] = {}
    for device in ("cpu", "lazy"):
        w = [full[0].chunk(n, 1)[rank], full[1].chunk(n, 0)[rank]]
        w = [each.clone().to(device).requires_grad_() for each in w]
        optimizer = torch.optim.SGD(w, lr=0.01)
        data = x.to(device)
        losses[device] = []
        lazy.mark_step()
        lazy.metrics.reset()
        for _ in range(5):
            optimizer.zero_grad()
            hidden = torch.tanh(F.copy_to_group(data, group()) @ w[0])
            loss = (F.reduce_from_group(hidden @ w[1], group()) - 1).pow(2).mean()
            loss.backward()
            optimizer.step()
            lazy.mark_step()
            losses[device].append(loss.detach().cpu().item())
        assert not fallbacks(), fallbacks()
    # The first two steps differ in where the parameters come from.
    uncached, cached = compiled()
    assert uncached <= 2 and cached >= 3, counters()
    assert torch.allclose(torch.tensor(losses["lazy"]), torch.tensor(losses["cpu"])), losses
    assert losses["lazy"][-1] < losses["lazy"][0]


def test_training_reaches_the_same_losses() -> None:
    run(2, _training)


# --- errors --------------------------------------------------------------------------------------


def _bad_calls(module: str) -> Any:
    """What eager calls refuse is refused when it is traced, in the same words."""
    lazy, c, report = start_lazy(), load(module), Report()
    n, rank = dist.get_world_size(), dist.get_rank()
    for position, bad in enumerate(c.bad_calls(n, rank)):
        texts = []
        for device in ("cpu", "lazy"):
            try:
                with torch.device(device):
                    bad.call(ops, group())
                texts.append("nothing raised")
            except Exception as error:
                texts.append(f"{type(error).__name__}: {error}".replace("lazy:0", "cpu"))
        report.expect(f"call {position}", "" if texts[0] == texts[1] else f"{texts}")
        report.expect(f"call {position}", "" if bad.text in texts[1] else f"{texts[1]}")
    lazy.mark_step()
    return report.result()


@pytest.mark.parametrize("module", MODULES)
def test_bad_calls_are_refused_in_the_same_words(module: str) -> None:
    verify(run(2, _bad_calls, module))


def _mixed() -> None:
    start_lazy()
    rank = dist.get_rank()
    x, y = torch.ones(2).to("lazy"), torch.ones(2)
    where = f"(rank {rank}/2, group '{group()}')"
    for tensors, place in (([x, y], 1), ([y, x], 0)):
        text = (
            f"all_reduce_coalesced: inputs[{place}] must be on the lazy device of the other "
            f"tensors, got cpu {where}"
        )
        with pytest.raises(TypeError, match=re.escape(text)):
            ops.all_reduce_coalesced(tensors, "sum", group())
    for out, input in ((x, y), (y, x)):
        with pytest.raises((ValueError, RuntimeError), match="out"):
            ops.all_reduce_out(input, "sum", group(), out=out)


def test_refuses_lazy_tensors_among_others() -> None:
    run(2, _mixed)


def test_every_op_has_a_lazy_kernel() -> None:
    names = sorted(
        name
        for path in (ROOT / "csrc" / "ops").glob("*.cpp")
        for name in re.findall(r'\.def\(\s*"(\w+)\(', path.read_text())
    )
    assert len(names) > len(MODULES)
    for name in names:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d_ext::{name}", "Lazy"), name


def _below_functionalization() -> None:
    start_lazy()
    x = torch.ones(2).to("lazy")
    text = (
        "all_reduce_: writing a lazy tensor must go through functionalization, got a lazy tensor "
        f"without it (rank 0/1, group '{group()}')"
    )
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
    with (
        torch._C._ExcludeDispatchKeyGuard(keys),
        pytest.raises(ValueError, match=re.escape(text)),
    ):
        ops.all_reduce_(x, "sum", group())


def test_writing_needs_functionalization() -> None:
    run(1, _below_functionalization)


def _messages() -> None:
    start_lazy()
    x = torch.ones(2).to("lazy")
    text = "batch_isend_irecv: tensors must not be lazy.*permute_tensor.*got a lazy tensor"
    with pytest.raises(NotImplementedError, match=text):
        F.batch_isend_irecv([x], [1 - dist.get_rank()], [True])


def test_messages_are_refused() -> None:
    run(2, _messages)
