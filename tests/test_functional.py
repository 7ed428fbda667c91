"""torch_c10d_ext.functional: torch's signatures, any dimension, coalesced and in-place forms."""

import inspect
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as torch_functional
from torch import Tensor

import torch_c10d_ext.functional as F
from tests.contract import group
from tests.harness import needs_memory, run, values

_PUBLIC = sorted(
    name
    for name, value in vars(torch_functional).items()
    if inspect.isfunction(value)
    and value.__module__ == torch_functional.__name__
    and not name.startswith("_")
    # Halves of autograd registrations and a context manager of the compiler, no collectives.
    and not name.endswith(("_backward", "_setup_context", "_ctx"))
)


def test_there_are_functions_to_compare() -> None:
    assert len(_PUBLIC) >= 18  # torch 2.11 has as many
    assert {"all_reduce", "all_gather_tensor", "permute_tensor", "wait_tensor"} <= set(_PUBLIC)


@pytest.mark.parametrize("name", _PUBLIC)
def test_signature_is_a_superset_of_torchs(name: str) -> None:
    theirs = inspect.signature(getattr(torch_functional, name)).parameters
    ours = inspect.signature(getattr(F, name)).parameters
    for position, (key, parameter) in enumerate(theirs.items()):
        assert key in ours, f"{name} lacks {key}"
        assert list(ours)[position] == key, f"{name}: {key} is at another place"
        assert ours[key].kind == parameter.kind
        if parameter.default is not inspect.Parameter.empty:
            assert ours[key].default == parameter.default
    for key in list(ours)[len(theirs) :]:
        assert ours[key].default is not inspect.Parameter.empty, f"{name}: {key} has no default"


@pytest.mark.parametrize(
    "name", sorted(n for n, f in vars(F).items() if inspect.isfunction(f) and n[0] != "_")
)
def test_every_function_has_a_docstring(name: str) -> None:
    assert inspect.getdoc(getattr(F, name)), f"{name} has no docstring"


# --- any dimension -------------------------------------------------------------------------------


def _xs(shape: tuple[int, ...]) -> list[Tensor]:
    return [values.values(shape, torch.float64, rank) for rank in range(dist.get_world_size())]


def _any_dimension() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    xs = _xs((2 * n, 3 * n, n))
    x, total = xs[rank], sum(xs[1:], xs[0])
    parts = [1 + r for r in range(n)]
    for dim in (0, 1, 2, -1, -3):
        checks = {
            "all_gather_single": (F.all_gather_single(x, dim, None), torch.cat(xs, dim)),
            "all_gather_tensor": (F.all_gather_tensor(x, dim, None), torch.cat(xs, dim)),
            "reduce_scatter_single": (
                F.reduce_scatter_single(x, "sum", dim, None),
                total.chunk(n, dim)[rank],
            ),
            "reduce_scatter_tensor": (
                F.reduce_scatter_tensor(x, "avg", dim, None),
                total.chunk(n, dim)[rank] / n,
            ),
            "gather": (
                F.gather(x, n - 1, None, gather_dim=dim),
                torch.cat(xs, dim) if rank == n - 1 else torch.cat(xs, dim).narrow(dim, 0, 0),
            ),
            "scatter": (F.scatter(x, 0, None, scatter_dim=dim), xs[0].chunk(n, dim)[rank]),
        }
        uneven = [
            each.narrow(dim, 0, 1).repeat_interleave(parts[r], dim) + r for r, each in enumerate(xs)
        ]
        sizes = [each.size(dim) for each in uneven]
        checks["all_gather"] = (
            F.all_gather(uneven[rank], sizes, None, gather_dim=dim),
            torch.cat(uneven, dim),
        )
        whole = [
            torch.cat([each.narrow(dim, 0, 1)] * sum(parts), dim) * (r + 1)
            for r, each in enumerate(xs)
        ]
        checks["reduce_scatter"] = (
            F.reduce_scatter(whole[rank], "sum", parts, None, scatter_dim=dim),
            sum(whole[1:], whole[0]).split(parts, dim)[rank],
        )
        for name, (y, want) in checks.items():
            text = values.mismatch(y + 0, want.contiguous(), bitwise=False, ulps=2)
            assert not text, f"{name} dim {dim}: {text}"


@pytest.mark.parametrize("size", (1, 2, 3, 4))
def test_any_dimension(size: int) -> None:
    run(size, _any_dimension)


def _coalesced() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    many = [_xs(shape) for shape in ((n, 2), (2 * n, n, 3), (3 * n,))]
    mine = [xs[rank] for xs in many]
    totals = [sum(xs[1:], xs[0]) for xs in many]
    dims = [0, 1, 0]
    pairs = {
        "all_reduce_coalesced": (F.all_reduce_coalesced(mine, "sum", None), totals),
        "all_gather_single_coalesced": (
            F.all_gather_single_coalesced(mine, None),
            [torch.cat(xs) for xs in many],
        ),
        "all_gather_into_tensor_coalesced": (
            F.all_gather_into_tensor_coalesced(mine, None),
            [torch.cat(xs) for xs in many],
        ),
        "reduce_scatter_single_coalesced": (
            F.reduce_scatter_single_coalesced(mine, "sum", dims, None),
            [t.chunk(n, d)[rank] for t, d in zip(totals, dims, strict=True)],
        ),
        "reduce_scatter_tensor_coalesced": (
            F.reduce_scatter_tensor_coalesced(mine, "sum", dims, None),
            [t.chunk(n, d)[rank] for t, d in zip(totals, dims, strict=True)],
        ),
        "broadcast_coalesced": (
            F.broadcast_coalesced(mine, n - 1, None),
            [xs[n - 1] for xs in many],
        ),
    }
    for name, (ys, wants) in pairs.items():
        assert len(ys) == len(wants), name
        for y, want in zip(ys, wants, strict=True):
            text = values.mismatch(y + 0, want.contiguous())
            assert not text, f"{name}: {text}"


@pytest.mark.parametrize("size", (1, 2, 3))
def test_coalesced(size: int) -> None:
    run(size, _coalesced)


def _all_to_all() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    xs = _xs((2 * n, 3))
    for splits in (None, [2] * n):
        y = F.all_to_all_single(xs[rank], splits, splits, None)
        assert torch.equal(y + 0, torch.cat([x.split(2)[rank] for x in xs]))
    matrix = [[(i + 2 * j) % 3 for j in range(n)] for i in range(n)]
    uneven = [values.values((sum(row), 2), torch.float64, r) for r, row in enumerate(matrix)]
    outs, ins = [row[rank] for row in matrix], matrix[rank]
    want = torch.cat([x.split(matrix[r])[rank] for r, x in enumerate(uneven)])
    for f in (F.all_to_all_single, F.all_to_all_single_autograd):
        assert torch.equal(f(uneven[rank], outs, ins, None) + 0, want)


@pytest.mark.parametrize("size", (1, 2, 3))
def test_all_to_all_with_and_without_splits(size: int) -> None:
    run(size, _all_to_all)


def _inplace_forms() -> None:
    """torch's `*_inplace` functions: the arguments of torch.distributed, the result written."""
    n, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    xs = _xs((2 * n, 3))
    total = sum(xs[1:], xs[0])

    out = torch.empty(2 * n * n, 3, dtype=torch.float64)
    F.all_gather_tensor_inplace(out, xs[rank], group)
    assert torch.equal(out, torch.cat(xs))

    out = torch.empty(2, 3, dtype=torch.float64)
    F.reduce_scatter_tensor_inplace(out, xs[rank], "sum", group)
    assert torch.equal(out, total.chunk(n)[rank])

    x = xs[rank].clone()
    F.all_reduce_inplace(x, "sum", group)
    assert torch.equal(x, total)

    x = xs[rank].clone()
    assert F.broadcast_inplace(x, n - 1, group) is x
    assert torch.equal(x, xs[n - 1])

    out = torch.empty(2 * n, 3, dtype=torch.float64)
    F.all_to_all_inplace(out, xs[rank], None, None, group)
    assert torch.equal(out, torch.cat([x.chunk(n)[rank] for x in xs]))

    outs = [torch.empty(2 * n, 3, dtype=torch.float64) for _ in range(n)]
    F.all_gather_inplace(outs, xs[rank], group)
    assert all(torch.equal(y, x) for y, x in zip(outs, xs, strict=True))

    # Where the output is not what the op writes: another dtype, another dimension.
    out = torch.empty(2 * n * n, 3)
    F.all_gather_tensor_inplace(out, xs[rank], group)
    assert torch.equal(out, torch.cat(xs).float())
    out = torch.empty(2 * n, 3 * n, dtype=torch.float64)
    F.all_gather_tensor_inplace(out, xs[rank], group, gather_dim=1)
    assert torch.equal(out, torch.cat(xs, 1))
    out = torch.empty(n, 2 * n, 3, dtype=torch.float64)
    F.all_gather_tensor_inplace(out, xs[rank], group)
    assert torch.equal(out, torch.stack(xs))


@pytest.mark.parametrize("size", (1, 2, 3))
def test_inplace_functions(size: int) -> None:
    run(size, _inplace_forms)


def _torch_gives_the_same() -> None:
    """On what torch can do on gloo, our functions and torch's agree."""
    n, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    x = values.values((n, 2 * n), torch.float32, rank)
    ring = [(m + 1) % n for m in range(n)]
    row = x[0].contiguous()
    calls = {
        "all_reduce": lambda m: m.all_reduce(x, "SUM", group),
        "all_reduce max": lambda m: m.all_reduce(x, "max", group),
        "broadcast": lambda m: m.broadcast(x, n - 1, group),
        "all_gather_tensor": lambda m: m.all_gather_tensor(x, 1, group),
        "reduce_scatter_tensor": lambda m: m.reduce_scatter_tensor(x, "sum", 1, group),
        "all_to_all_single": lambda m: m.all_to_all_single(x, None, None, group),
        "permute_tensor": lambda m: m.permute_tensor(row, ring, group),
        "keywords": lambda m: m.all_reduce(x, reduceOp="sum", group=group, tag=""),
    }
    for name, call in calls.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch renames some of its own
            ours, theirs = call(F), call(torch_functional)
        assert ours.shape == theirs.shape, name
        assert torch.equal(ours + 0, theirs + 0), name


@pytest.mark.parametrize("size", (1, 2, 3))
def test_agrees_with_torch(size: int) -> None:
    run(size, _torch_gives_the_same)


def _result_is_contiguous() -> None:
    n = dist.get_world_size()
    x = torch.ones(2 * n, 3 * n, n)
    for dim in range(3):
        assert F.all_gather_single(x, dim, None).is_contiguous()
        assert F.reduce_scatter_single(x, "sum", dim, None).is_contiguous()


def test_results_are_contiguous_for_every_dimension() -> None:
    run(2, _result_is_contiguous)


def _meta_tensors() -> None:
    """On the meta device shapes are computed and nothing is sent."""
    n = dist.get_world_size()
    x = torch.empty(2 * n, 3, device="meta")
    shapes = {
        F.all_reduce(x, "sum", None): (2 * n, 3),
        F.all_gather_single(x, 1, None): (2 * n, 3 * n),
        F.reduce_scatter_single(x, "sum", 0, None): (2, 3),
        F.all_gather(x, [2 * n] * n, None): (2 * n * n, 3),
        F.scatter(x, 0, None): (2, 3),
        F.all_to_all_single(x, None, None, None): (2 * n, 3),
    }
    for y, shape in shapes.items():
        assert y.device.type == "meta"
        assert tuple(y.shape) == shape


@pytest.mark.parametrize("size", (1, 2))
def test_meta_tensors(size: int) -> None:
    run(size, _meta_tensors)


def _kinds_of_input() -> None:
    """Parameters, results of inference mode, and tensors that live in shared memory."""
    n, rank = dist.get_world_size(), dist.get_rank()
    want = torch.arange(3.0) * n + n * (n - 1) / 2
    x = torch.arange(3.0) + rank
    assert torch.equal(F.all_reduce(torch.nn.Parameter(x), "sum", None).detach() + 0, want)
    with torch.inference_mode():
        y = F.all_reduce(x.clone(), "sum", None)
        assert torch.equal(y + 0, want)
        z = x.clone()
        assert torch.equal(
            torch.ops.c10d_ext.wait_tensor(torch.ops.c10d_ext.all_reduce_(z, "sum", group())), want
        )
    with torch.no_grad():
        y = F.all_reduce(torch.nn.Parameter(x), "sum", None)
        assert not y.requires_grad
        assert torch.equal(y + 0, want)
    assert torch.equal(F.all_reduce(x.clone().share_memory_(), "sum", None) + 0, want)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = F.all_reduce(x, "sum", None)
        assert y.dtype == torch.float32
        assert torch.equal(y + 0, want)


@pytest.mark.parametrize("size", (1, 2))
def test_kinds_of_input(size: int) -> None:
    run(size, _kinds_of_input)


# Elements: past what an int counts.
_LARGE = 2**31 + 64


def _large_tensors(backend: str) -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    x = torch.full((_LARGE,), rank, dtype=torch.uint8)
    x[-3:] = torch.tensor([7, 8, 9]) * (rank + 1)
    torch.ops.c10d_ext.wait_tensor(torch.ops.c10d_ext.broadcast_(x, 1, group()))
    assert x[-3:].tolist() == [14, 16, 18]
    assert x[0] == x[2**31] == 1
    if backend == "gloo":
        return  # its all_gather takes ten times as long
    half = x[_LARGE // 2 :]
    y = torch.ops.c10d_ext.wait_tensor(torch.ops.c10d_ext.all_gather_into_tensor(half, n, group()))
    assert y.numel() == _LARGE
    assert y[_LARGE // 2 - 3 : _LARGE // 2].tolist() == y[-3:].tolist() == [14, 16, 18]


@pytest.mark.long
@pytest.mark.parametrize("backend", ("gloo", "shm"))
def test_more_elements_than_an_int_counts(backend: str) -> None:
    needs_memory(6 * _LARGE)
    run(2, _large_tensors, backend, backend=backend, deadline=120)
