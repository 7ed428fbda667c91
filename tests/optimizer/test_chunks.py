"""Products and the collectives beside them in parts: what is made, its values, what is missed."""

from __future__ import annotations

import contextlib
import io
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import torch_c10d_ext
from tests.harness import run
from tests.harness.crew import crew
from tests.optimizer.graphs import bits, join_fake_world
from torch_c10d_ext import Compute, Link
from torch_c10d_ext.optimizer import CheckFailed, Settings, check_rewrite, optimize_and_report

ext, native, aten = torch.ops.c10d_ext, torch.ops._c10d_functional, torch.ops.aten
Call = Callable[..., Any]
pytestmark = pytest.mark.long  # most of it compiles
RANKS = 4
INDUCTOR_DEADLINE = 200.0
LONG = pytest.mark.long
# Products and links are slow, launches and copies are not, so that small sites are worth it.
SETTINGS: dict[str, Any] = {
    "link": Link(latency=1e-6, bandwidth=1e6, shared="wire"),
    "compute": Compute(memory_bandwidth=1e9, flops=1e8),
    "memory_budget": 2**30,
}


def _group() -> str:
    return str(dist.group.WORLD.group_name)  # type: ignore[union-attr]


def _settings(**changes: Any) -> Settings:
    return Settings.of(None, None, **{**SETTINGS, "numerics": "rounding", **changes})


def _gathered(x: Tensor, ops: Any = ext) -> Tensor:
    n = dist.get_world_size()
    whole: Tensor = ops.wait_tensor(ops.all_gather_into_tensor(x, n, _group()))
    return whole


def _scattered(x: Tensor, op: str = "sum", ops: Any = ext) -> Tensor:
    n = dist.get_world_size()
    part: Tensor = ops.wait_tensor(ops.reduce_scatter_tensor(x, op, n, _group()))
    return part


def _reduced(x: Tensor, op: str = "sum", ops: Any = ext) -> Tensor:
    total: Tensor = ops.wait_tensor(ops.all_reduce(x, op, _group()))
    return total


def _folded(x: Tensor) -> Tensor:
    """The same rows in three dimensions."""
    return x.view(4, -1, x.shape[1])


# Each takes x of 32 rows and b, both of 32 columns.


def _gather(x: Tensor, b: Tensor) -> Any:
    return _gathered(x) @ b


def _gather_twice_used(x: Tensor, b: Tensor) -> Any:
    whole = _gathered(x, native)
    return whole @ b, whole @ (b * 2), whole + 1


def _gather_three_dims(x: Tensor, b: Tensor) -> Any:
    whole = _gathered(_folded(x))
    return torch.matmul(whole, b), whole * 2


def _scatter(x: Tensor, b: Tensor) -> Any:
    return _scattered(x @ b) * 2


def _scatter_three_dims(x: Tensor, b: Tensor) -> Any:
    return _scattered(torch.matmul(_folded(x), b), ops=native) + 1


def _scatter_maximum(x: Tensor, b: Tensor) -> Any:
    return _scattered(x @ b, "max")


def _reduce(x: Tensor, b: Tensor) -> Any:
    return _reduced(x @ b, ops=native) * 2


def _reduce_three_dims(x: Tensor, b: Tensor) -> Any:
    return torch.relu(_reduced(torch.matmul(_folded(x), b)))


def _gather_bias(x: Tensor, b: Tensor) -> Any:
    return F.linear(_gathered(x), b.t(), b[0])


def _scatter_bias(x: Tensor, b: Tensor) -> Any:
    return _scattered(F.linear(x, b, b[1]), "avg")


def _reduce_bias(x: Tensor, b: Tensor) -> Any:
    return _reduced(F.linear(_folded(x), b.t(), b[2]), "avg") * 3


_PROGRAMS = (
    *(_gather, _gather_twice_used, _gather_three_dims),
    *(_scatter, _scatter_three_dims, _scatter_maximum, _reduce, _reduce_three_dims),
)
_FLOATS = (_gather_bias, _scatter_bias, _reduce_bias)


def _parts_made(about: Any) -> bool:
    return bool(re.search(r"^done: 1 .* in [248] parts$", str(about), re.MULTILINE))


def _tensors(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def _values() -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())

    def whole(*shape: int) -> Tensor:
        return torch.randint(-9, 10, shape, generator=generator)

    for program in (*_PROGRAMS, *_FLOATS):
        x, b = whole(32, 32), whole(32, 32)
        given = [(x.float(), b.float(), "rounding"), (x.double() / 7, b.double() / 3, "rounding")]
        if program in _PROGRAMS:
            # Without permission to round; sums pass the end of int32, and come around.
            given.append((x.int() * 2**14, b.int() * 2**15, "bitwise"))
        for k, (first, second, numerics) in enumerate(given):
            graph = make_fx(program)(first, second)
            new, about = optimize_and_report(graph, _settings(numerics=numerics))
            assert _parts_made(about), f"{program.__name__}, {first.dtype}\n{about}"
            want, got = _tensors(graph(first, second)), _tensors(new(first, second))
            if k == 1:
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
            elif k == 0 and program in _FLOATS:
                torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
            else:
                # Whole numbers of floats are exact in whatever order they are added.
                assert bits(got) == bits(want), f"{program.__name__}, {first.dtype}"


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=LONG)])
def test_values_of_parts(ranks: int, backend: str) -> None:
    run(ranks, _values, backend=backend)


def _random_chain(seed: int) -> Call:
    """A program of products, collectives, and computation between them."""
    rng = random.Random(seed)
    layers = [rng.choice(["up and down", "reduce", "gather", "scatter"]) for _ in range(3)]
    numbers = [rng.random() for _ in range(12)]

    def program(x: Tensor, ws: list[Tensor]) -> list[Tensor]:
        n = dist.get_world_size()
        also = []
        draws = iter(numbers)
        for k, layer in enumerate(layers):
            ops = ext if next(draws) < 0.5 else native
            a, b = ws[2 * k], ws[2 * k + 1]
            y = _folded(x) if next(draws) < 0.5 else x
            bias = a[0] if next(draws) < 0.4 else None
            if layer == "up and down":
                y = _scattered(F.linear(torch.relu(_gathered(y, ops) @ a), b, bias), ops=ops)
            elif layer == "reduce":
                y = _reduced(F.linear(y, a, bias), rng.choice(["sum", "max"]), ops)
            elif layer == "gather":
                whole = _gathered(y, ops)
                if next(draws) < 0.3:
                    also.append(whole * 2)
                y = F.linear(whole, a, bias)[: whole.shape[0] // n] + y
            else:
                y = _scattered(torch.cat([y] * n) @ a, ops=ops) - y
            x = torch.relu(y).reshape(x.shape)
        return [x, *also]

    return program


def _random_chains(first: int, count: int) -> tuple[int, int]:
    made = followed = 0
    for seed in range(first, first + count):
        generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
        x = torch.randint(-99, 99, (32, 32), generator=generator)
        ws = list(torch.randint(-99, 99, (6, 32, 32), generator=generator))
        graph = make_fx(_random_chain(seed))(x, ws)
        new, about = optimize_and_report(graph, _settings(numerics="bitwise"))
        assert bits(new(x, ws)) == bits(graph(x, ws)), f"seed {seed}\n{about}"
        made += bool(re.search("in [248] parts$", str(about), re.MULTILINE))
        followed += "could not follow" not in str(about)
    return made, followed


@pytest.mark.parametrize(
    ("ranks", "backend"),
    [(2, "shm"), (3, "gloo"), *(pytest.param(*p, marks=LONG) for p in ((2, "gloo"), (3, "shm")))],
)
def test_random_chains_keep_their_values(ranks: int, backend: str) -> None:
    for made, followed in run(ranks, _random_chains, 100 * ranks, 10, backend=backend):
        assert made > 5
        assert followed == 10


class _Parallel(torch.nn.Module):
    """Two layers, each on all ranks in parts; rows of the input are one rank's."""

    def __init__(self, scatter: bool) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.scatter = scatter
        for name in ("up", "down", "second_up", "second_down"):
            # Halves, so that sums of all layers are exact in float32.
            weight = torch.randint(-1, 2, (32, 32)).float() / 2
            self.register_parameter(name, torch.nn.Parameter(weight))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in ((self.up, self.down), (self.second_up, self.second_down)):
            if self.scatter:
                x = _scattered(torch.relu(_gathered(x) @ up) @ down)
            else:
                x = _reduced(torch.relu(x @ up) @ down)
        return x.sum()


def _trained(module: torch.nn.Module, call: Any, x: Tensor) -> list[Tensor]:
    module.zero_grad()
    x = x.detach().requires_grad_()
    loss = call(x)
    loss.backward()
    assert x.grad is not None
    return [loss.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def _training(compiler: str, scatter: bool) -> str:
    module = _Parallel(scatter)
    x = torch.randint(-2, 3, (32, 32)).float()
    want = _trained(module, module, x)
    out = io.StringIO()
    settings = {**SETTINGS, "numerics": "rounding", "explain": True}
    with contextlib.redirect_stdout(out):
        if compiler == "aot_eager":
            backend = torch_c10d_ext.communication_backend(**settings)
            call = torch.compile(module, backend=backend, fullgraph=True)
        else:
            options = torch_c10d_ext.communication_options(**settings)
            call = torch.compile(module, options=options, fullgraph=True)
        got = _trained(module, call, x)
    assert bits(got) == bits(want), out.getvalue()
    torch.compiler.reset()
    return out.getvalue()


def _trainings(compiler: str) -> list[str]:
    return [_training(compiler, scatter) for scatter in (True, False)]


@pytest.mark.parametrize(
    ("compiler", "ranks", "backend"),
    [
        *(("aot_eager", ranks, backend) for ranks in (2, 4) for backend in ("shm", "gloo")),
        ("inductor", 2, "shm"),
        # The backend is not seen by the compiler, and more ranks have the same graphs.
        *(pytest.param("inductor", *p, marks=LONG) for p in ((2, "gloo"), (4, "shm"), (4, "gloo"))),
    ],
)
def test_a_training_step_in_parts(ranks: int, compiler: str, backend: str) -> None:
    for texts in run(ranks, _trainings, compiler, backend=backend, deadline=INDUCTOR_DEADLINE):
        for text in texts:
            forward, backward = text.split("\nstep ")
            assert re.search("in [248] parts$", forward, re.MULTILINE), text
            assert re.search("in [248] parts$", backward, re.MULTILINE), text
        # The backward graph of a layer in parts has its own all_reduce alone.
        assert "launches 2 -> " in texts[1].split("\nstep ")[1], texts[1]


# --- without ranks -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fake_world() -> Iterator[Call]:
    with crew(1, "gloo") as made:
        made.run(join_fake_world, RANKS)
        yield lambda fn, *args: made.run(fn, *args)[0]


def _traced(program: Any, rows: int = 32, dtype: torch.dtype = torch.float32) -> GraphModule:
    x, b = torch.empty(rows, 32, dtype=dtype), torch.empty(32, 32, dtype=dtype)
    return make_fx(program, tracing_mode="fake")(x, b)


def _second_factor(x: Tensor, b: Tensor) -> Any:
    return x @ _gathered(b[:8]).t()


def _summed_over(x: Tensor, b: Tensor) -> Any:
    return b[:, :1].t() @ _gathered(b[:8])


def _batches(x: Tensor, b: Tensor) -> Any:
    return _reduced(torch.bmm(_folded(x), b.expand(4, 32, 32)))


def _used_twice(x: Tensor, b: Tensor) -> Any:
    y = x @ b
    return _reduced(y) * y


def _scaled(x: Tensor, b: Tensor) -> Any:
    return _reduced(torch.addmm(b[0], x, b, beta=2))


def _added_matrix(x: Tensor, b: Tensor) -> Any:
    return _reduced(torch.addmm(b, x, b))


def _overwritten(x: Tensor, b: Tensor) -> Any:
    return _reduced(x @ b).mul_(2)


def _between_barriers(x: Tensor, b: Tensor) -> Any:
    return _reduced(ext.barrier(x, _group()) @ b)


def _hidden(x: Tensor, b: Tensor) -> Any:
    y = _reduced(x[:2] @ b)
    for _ in range(400):
        b = b @ b
    return y + b[:2]


def _one_product(x: Tensor, b: Tensor) -> Any:
    return _scattered(_gathered(x) @ b)


_MISSED: dict[Any, str] = {
    _second_factor: "1 all_gather before a product in parts: it is the second factor",
    _summed_over: "1 all_gather before a product in parts: its rows are summed over",
    _batches: "products of batches of matrices are not cut",
    _used_twice: "1 all_reduce of a product in parts: its product is used elsewhere, too",
    _scaled: "its product is scaled",
    _added_matrix: "what is added to its product is a matrix",
    _overwritten: "its memory is written",
    _between_barriers: "no collective passes barrier",
    _hidden: "nothing waits for it",
    _one_product: "its product is in parts for another collective",
}


def _reasons() -> None:
    def said(graph: GraphModule, **changes: Any) -> str:
        return str(optimize_and_report(graph, _settings(**changes))[1])

    for program, why in _MISSED.items():
        text = said(_traced(program))
        assert f"{why}" in text, f"{program.__name__}\n{text}"
        assert ("parts\n" in text) == (program is _one_product), text
    floats = "floats need numerics='rounding'"
    assert floats in said(_traced(_gather), numerics="bitwise")
    assert floats not in said(_traced(_gather))
    assert floats not in said(_traced(_gather, dtype=torch.int32), numerics="bitwise")
    assert "33 rows or columns do not make two equal parts" in said(_traced(_gather, 33))
    symbolic = make_fx(_gather, tracing_mode="symbolic")(torch.empty(32, 32), torch.empty(32, 32))
    assert "its sizes are not numbers in the graph" in said(symbolic)
    dear = Link(latency=1.0, bandwidth=1e6, shared="wire")
    assert "launches and copies cost what it gains" in said(_traced(_gather), link=dear)
    assert "in parts" not in said(_traced(_gather), chunk=False)


def test_what_is_missed_is_said(fake_world: Call) -> None:
    fake_world(_reasons)


def _budgets() -> None:
    # Gathered, and needed whole besides: what is put together is there beside its parts.
    def program(x: Tensor, b: Tensor) -> Any:
        whole = _gathered(x)
        return whole @ b, whole

    graph = _traced(program)
    _, about = optimize_and_report(graph, _settings())
    assert _parts_made(about)
    peak = about.peak
    assert peak > about.peak_before
    for budget in range(int(about.peak_before), int(peak) + 4096, 4096):
        _, about = optimize_and_report(graph, _settings(memory_budget=budget))
        assert about.peak <= budget
        assert _parts_made(about) == (budget >= peak), (budget, peak, str(about))
        missed = "in parts: parts take more memory than there is" in str(about)
        assert missed == (budget < peak)


def test_parts_keep_to_the_budget(fake_world: Call) -> None:
    fake_world(_budgets)


def _in_two(x: Tensor, b: Tensor, first: slice, second: slice, *, swapped: bool = False) -> Any:
    n = dist.get_world_size()
    parts = [_gathered(x[rows]) @ b for rows in (first, second)]
    parts = parts[::-1] if swapped else parts
    return torch.cat([p.view(n, -1, 32) for p in parts], 1).view(-1, 32)


def _checks() -> None:
    half, rest = slice(0, 16), slice(16, 32)
    yes, no = (lambda group: True), (lambda group: False)

    def check(a: Any, b: Any, order: Any = yes, rounding: bool = True, **dtype: Any) -> bool:
        try:
            before, after = _traced(a, **dtype).graph, _traced(b, **dtype).graph
            check_rewrite(before, after, 2**40, order, rounding=rounding)
        except CheckFailed:
            return False
        return True

    assert check(_gather, lambda x, b: _in_two(x, b, half, rest))
    assert not check(_gather, lambda x, b: _in_two(x, b, half, rest), rounding=False)
    whole = {"dtype": torch.int64}
    assert check(_gather, lambda x, b: _in_two(x, b, half, rest), rounding=False, **whole)
    assert not check(_gather, lambda x, b: _in_two(x, b, half, rest, swapped=True))
    assert not check(_gather, lambda x, b: _in_two(x, b, rest, half))
    assert not check(_gather, lambda x, b: _in_two(x, b, half, half))

    # The rows of all parts must be interleaved by rank.
    def one_below_the_other(x: Tensor, b: Tensor) -> Any:
        return torch.cat([_gathered(x[half]) @ b, _gathered(x[rest]) @ b])

    assert not check(_gather, one_below_the_other)

    def gathered_in_two(x: Tensor, b: Tensor) -> Any:
        parts = [_gathered(x[rows]).view(RANKS, -1, 32) for rows in (half, rest)]
        return torch.cat(parts, 1).view(-1, 32) + 1

    # What only moves does not round.
    assert check(lambda x, b: _gathered(x) + 1, gathered_in_two, order=no, rounding=False)

    def reduced(x: Tensor, b: Tensor, first: slice, second: slice, op: str = "sum") -> Any:
        return torch.cat([_reduced(x[rows] @ b, op) for rows in (first, second)]) * 2

    once = lambda x, b: _reduced(x @ b) * 2  # noqa: E731
    assert check(once, lambda x, b: reduced(x, b, half, rest))
    assert not check(once, lambda x, b: reduced(x, b, rest, half))
    assert not check(once, lambda x, b: reduced(x, b, half, rest, "max"))
    assert not check(once, lambda x, b: reduced(x, b, half, rest), rounding=False)
    # gloo adds by an element's place, but whole numbers are the same sum.
    assert not check(once, lambda x, b: reduced(x, b, half, rest), no, rounding=False)
    assert check(once, lambda x, b: reduced(x, b, half, rest), no, rounding=False, **whole)

    def scattered(x: Tensor, b: Tensor, dim: int, cut: int, first: slice, second: slice) -> Any:
        if cut == 1:
            parts = [_scattered(x @ b[:, columns]) for columns in (first, second)]
        else:
            parts = [_scattered(x[rows] @ b) for rows in (first, second)]
        return torch.cat(parts, dim) * 2

    assert check(_scatter, lambda x, b: scattered(x, b, 1, 1, half, rest))
    assert not check(_scatter, lambda x, b: scattered(x, b, 1, 1, rest, half))
    assert not check(_scatter, lambda x, b: scattered(x, b, 0, 0, half, rest))

    # A part that is left out is a collective that other ranks wait for.
    def lost(x: Tensor, b: Tensor) -> Any:
        return torch.cat([_reduced(x[half] @ b), _reduced(x[half] @ b)]) * 2

    assert not check(once, lost)

    def too_many(x: Tensor, b: Tensor) -> Any:
        _reduced(x[half] @ b * 1)
        return reduced(x, b, half, rest)

    assert not check(once, too_many)


def test_the_checker_knows_parts(fake_world: Call) -> None:
    fake_world(_checks)
