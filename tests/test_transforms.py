"""Transforms of the whole distributed function, against the same function in one process.

`of_all_ranks` makes one function of all ranks: it takes every rank's input and returns every rank's
output, and in between each rank runs its own part of an SPMD program. All ranks call it with the
same arguments, and each must get what a single process computes without communication: values,
Jacobians, Hessians, tangents, batches. So finite differences have a meaning, too: every rank moves
the same element of the same rank's input.

It enters by reduce_scatter(avg) and leaves by all_gather. Of N equal arguments the one is this
rank's share, and the adjoint hands an N-th of its gradient to each; the adjoint of the other sums N
equal gradients. So the factors cancel, in derivatives of any order.

One file, for its parts derive, batch and compose the same functions.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._vmap_internals import _vmap
from torch.autograd.functional import hessian as autograd_hessian
from torch.autograd.functional import jacobian
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import torch_c10d_ext.functional as F
from tests.contract import Report, Shape, calls_in, group, places, smooth_values, verify, wait
from tests.harness import run, values
from tests.harness.flight import in_flight
from tests.harness.values import reduce_reference
from torch_c10d_ext import AsyncCollectiveTensor

# Each op's transforms are in its contract; these are of functions made of several.
pytestmark = pytest.mark.long

# --- one function of all ranks -------------------------------------------------------------------


Whole = Callable[..., tuple[Tensor, ...]]


def of_all_ranks(local: Callable[..., Sequence[Tensor]], whole: Whole, xs: list[Tensor]) -> Whole:
    """`local`, of this rank's tensors, as a function of all ranks' (all ranks' first, second, ...).

    `whole` is the same function without communication; its outputs' shapes at `xs` are taken over.
    """
    n, rank = dist.get_world_size(), dist.get_rank()
    in_shapes, out_shapes = (
        [[tuple(t.shape) for t in ts[i : i + n]] for i in range(0, len(ts), n)]
        for ts in (xs, whole(*xs))
    )

    def enter(xs: Sequence[Tensor], shapes: list[Shape]) -> Tensor:
        flat, sizes = torch.cat([x.reshape(-1) for x in xs]), [math.prod(s) for s in shapes]
        mine = torch.ops.c10d_ext.reduce_scatter(flat, "avg", sizes, group())
        return wait(mine).reshape(shapes[rank])

    def leave(y: Tensor, shapes: list[Shape]) -> list[Tensor]:
        sizes = [math.prod(s) for s in shapes]
        flat = wait(torch.ops.c10d_ext.all_gather(y.reshape(-1), sizes, group()))
        return [part.reshape(s) for part, s in zip(flat.split(sizes), shapes, strict=True)]

    def f(*xs: Tensor) -> tuple[Tensor, ...]:
        mine = [enter(xs[i * n : (i + 1) * n], shapes) for i, shapes in enumerate(in_shapes)]
        ys = local(*mine)
        return tuple(
            part for y, shapes in zip(ys, out_shapes, strict=True) for part in leave(y, shapes)
        )

    return f


# --- the collectives -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A call of a collective, as a rank makes it, and without communication."""

    local: Callable[..., Any]  # this rank's tensors -> its results
    whole: Callable[..., Any]  # for each of those tensors all ranks', in a list -> likewise
    shapes: tuple[tuple[Shape, ...], ...]  # for each of those tensors all ranks' shapes
    dtype: torch.dtype = torch.float64
    ties: bool = False  # on few distinct values, zero among them

    def inputs(self, batch: Shape = (), salt: int = 0) -> list[Tensor]:
        """All ranks' first tensors, then all ranks' second ones, ..."""
        xs = [
            smooth_values((*batch, *shape), self.dtype, r, salt=salt + i)
            for i, shapes in enumerate(self.shapes)
            for r, shape in enumerate(shapes)
        ]
        return [(1.2 * x).round() for x in xs] if self.ties and self.dtype.is_floating_point else xs

    def without_communication(self, *xs: Tensor) -> tuple[Tensor, ...]:
        n = dist.get_world_size()
        worlds = [list(xs[i : i + n]) for i in range(0, len(xs), n)]
        return tuple(y for world in _listed(self.whole(*worlds)) for y in world)

    def distributed(self) -> Whole:
        return of_all_ranks(
            lambda *xs: _results(self.local(*xs)), self.without_communication, self.inputs()
        )


def _results(y: Any) -> list[Tensor]:
    return [y] if isinstance(y, Tensor) else list(y)


def _listed(worlds: Any) -> list[list[Tensor]]:
    return [worlds] if isinstance(worlds[0], Tensor) else list(worlds)


# The rule of a reduce op is one for all forms; each kind of rule meets every form.
FOR_EVERY_FORM = ("sum", "product with ties", "max")


def steps(n: int) -> dict[str, Step]:
    """Every op and reduce op, even and uneven, in every form that differentiates."""
    last = n - 1
    ring = [(m + 1) % n for m in range(n)]
    uneven = [1 + r % 2 for r in range(n)]
    total = sum(uneven)
    sent = [[1 + (i + 2 * j) % 2 for j in range(n)] for i in range(n)]  # rows from rank i to rank j
    ops, name = torch.ops.c10d_ext, group()

    def alike(*shapes: Shape) -> tuple[tuple[Shape, ...], ...]:
        return tuple((shape,) * n for shape in shapes)

    def parts(xs: list[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        (x,) = {id(x): x for x in xs}.values()
        return list(x.chunk(n) if sizes is None else x.split(list(sizes)))

    def only(xs: list[Tensor], rank: int) -> list[Tensor]:
        return [x if r == rank else torch.zeros_like(x) for r, x in enumerate(xs)]

    def everywhere(x: Tensor) -> list[Tensor]:
        return [x] * n

    def exchanged(xs: list[Tensor]) -> list[Tensor]:
        blocks = [x.split(sizes) for x, sizes in zip(xs, sent, strict=True)]
        return [torch.cat([each[r] for each in blocks]) for r in range(n)]

    def exchange(x: Tensor) -> Tensor:
        rank = dist.get_rank()
        return F.all_to_all_single(x, [row[rank] for row in sent], sent[rank], None)

    found = {
        "all_gather uneven": Step(
            lambda x: F.all_gather(x, uneven, None),
            lambda xs: everywhere(torch.cat(xs)),
            (tuple((rows,) for rows in uneven),),
        ),
        "all_gather_single": Step(
            lambda x: F.all_gather_single(x, 1, None),
            lambda xs: everywhere(torch.cat(xs, 1)),
            alike((2, 1)),
        ),
        "all_gather_single of scalars": Step(
            lambda x: F.all_gather_single(x, 0, None),
            lambda xs: everywhere(torch.stack(xs)),
            alike(()),
        ),
        "all_gather_single_coalesced": Step(
            lambda x, y: F.all_gather_single_coalesced([x, y], None),
            lambda xs, ys: [everywhere(torch.cat(xs)), everywhere(torch.cat(ys))],
            alike((1,), (1, 2)),
        ),
        "all_to_all_single": Step(exchange, exchanged, (tuple((sum(row),) for row in sent),)),
        "broadcast": Step(
            lambda x: F.broadcast(x, last, None), lambda xs: everywhere(xs[last]), alike((2,))
        ),
        "broadcast in place": Step(
            lambda x: F.broadcast_inplace(x * 1, 0, None),
            lambda xs: everywhere(xs[0]),
            alike((2,)),
        ),
        "broadcast_coalesced": Step(
            lambda x, y: F.broadcast_coalesced([x, y], last, None),
            lambda xs, ys: [everywhere(xs[last]), everywhere(ys[last])],
            alike((2,), ()),
        ),
        "gather": Step(
            lambda x: F.gather(x, last, None),
            lambda xs: [torch.cat(xs) if r == last else xs[r][:0] for r in range(n)],
            alike((2,)),
        ),
        "permute_tensor": Step(
            lambda x: F.permute_tensor(x, ring, None),
            lambda xs: [xs[r - 1] for r in range(n)],
            alike((2,)),
        ),
        "barrier": Step(lambda x: F.barrier(x, None), list, alike((2,))),
        "scatter": Step(
            lambda x: F.scatter(x, 0, None), lambda xs: list(xs[0].chunk(n)), alike((n,))
        ),
        "complex all_to_all_single": Step(
            exchange, exchanged, (tuple((sum(row),) for row in sent),), torch.complex128
        ),
    }
    for op, dtype, ties in itertools.chain(
        ((op, torch.float64, False) for op in ("sum", "avg", "product", "min", "max")),
        ((op, torch.float64, True) for op in ("product", "min", "max")),
        ((op, torch.complex128, False) for op in ("sum", "avg", "product")),
        ((op, torch.complex128, True) for op in ("product",)),
        (("premul_sum", dtype, False) for dtype in (torch.float64, torch.complex128)),
    ):
        kind = f"{'complex ' if dtype.is_complex else ''}{op}{' with ties' if ties else ''}"
        factor = None
        if op == "premul_sum":
            factor = 0.5 - 2j if dtype.is_complex else -1.5
        scale = {} if factor is None else {"factor": factor}

        def reduced(xs: list[Tensor], op: str = op, factor: Any = factor) -> list[Tensor]:
            return everywhere(reduce_reference(xs, op, factor))

        calls: dict[str, tuple[Any, Any, Any]] = {
            "all_reduce": (
                lambda x, op=op, scale=scale: F.all_reduce(x, op, None, **scale),
                reduced,
                alike((2,)),
            ),
            "all_reduce in place": (
                lambda x, op=op, scale=scale: wait(ops.all_reduce_(x * 1, op, name, **scale)),
                reduced,
                alike((2,)),
            ),
            "all_reduce_coalesced": (
                lambda x, y, op=op, scale=scale: F.all_reduce_coalesced([x, y], op, None, **scale),
                lambda xs, ys, reduced=reduced: [reduced(xs), reduced(ys)],
                alike((2,), ()),
            ),
            "all_reduce_coalesced in place": (
                lambda x, y, op=op, scale=scale: [
                    wait(z) for z in ops.all_reduce_coalesced_([x * 1, y * 1], op, name, **scale)
                ],
                lambda xs, ys, reduced=reduced: [reduced(xs), reduced(ys)],
                alike((2,), ()),
            ),
            "reduce": (
                lambda x, op=op, scale=scale: F.reduce(x, op, last, None, **scale),
                lambda xs, reduced=reduced: only(reduced(xs), last),
                alike((2,)),
            ),
            "reduce in place": (
                lambda x, op=op, scale=scale: wait(ops.reduce_(x * 1, op, last, name, **scale)),
                lambda xs, reduced=reduced: [*xs[:last], reduced(xs)[last]],
                alike((2,)),
            ),
            "reduce_scatter uneven": (
                lambda x, op=op, scale=scale: F.reduce_scatter(x, op, uneven, None, **scale),
                lambda xs, reduced=reduced: parts(reduced(xs), uneven),
                alike((total,)),
            ),
            "reduce_scatter_single": (
                lambda x, op=op, scale=scale: F.reduce_scatter_single(x, op, 0, None, **scale),
                lambda xs, reduced=reduced: parts(reduced(xs)),
                alike((n, 2)),
            ),
            "reduce_scatter_single_coalesced": (
                lambda x, y, op=op, scale=scale: [
                    wait(z)
                    for z in ops.reduce_scatter_tensor_coalesced([x, y], op, n, name, **scale)
                ],
                lambda xs, ys, reduced=reduced: [parts(reduced(xs)), parts(reduced(ys))],
                alike((n,), (n, 2)),
            ),
        }
        for stem, (local, whole, shapes) in calls.items():
            if stem.endswith(("in place", "_coalesced")) and kind not in FOR_EVERY_FORM:
                continue
            found[f"{stem} {kind}"] = Step(local, whole, shapes, dtype, ties)
    return found


# --- derivatives ---------------------------------------------------------------------------------


def _loss(f: Whole) -> Callable[..., Tensor]:
    """A scalar of all ranks' outputs, curved in each."""

    def loss(*xs: Tensor) -> Tensor:
        terms = []
        for i, y in enumerate(f(*xs)):
            y = torch.view_as_real(y) if y.is_complex() else y
            weights = torch.arange(1.0, y.numel() + 1, dtype=torch.float64).add(0.3 * i).cos()
            terms.append((y.sin() * weights.reshape(y.shape)).sum())
        return torch.stack(terms).sum()

    return loss


def _leaves(tree: Any) -> list[Tensor]:
    return [tree] if isinstance(tree, Tensor) else [t for item in tree for t in _leaves(item)]


def _compare(report: Report, what: str, got: Any, want: Any) -> None:
    ours, theirs = _leaves(got), _leaves(want)
    report.expect(f"{what}: number of tensors", len(ours) != len(theirs))
    texts = [values.close(g.detach(), w.detach()) for g, w in zip(ours, theirs, strict=False)]
    report.expect(what, next((text for text in texts if text), ""))


def _line(f: Callable[..., Tensor], xs: list[Tensor], vs: list[Tensor]) -> Callable[..., Tensor]:
    """`f` along the line through xs in the direction vs."""
    return lambda t: f(*(x + t * v for x, v in zip(xs, vs, strict=True)))


def derivatives(
    f: Whole, xs: list[Tensor], vs: list[Tensor], nested_forward: bool
) -> Iterator[tuple[str, Any]]:
    """Ways of differentiating a real f once, twice and three times, with torch.func."""
    every = tuple(range(len(xs)))
    loss = _loss(f)
    yield "jacrev", jacrev(f, every)(*xs)
    yield "jacfwd", jacfwd(f, every)(*xs)
    yield "hessian", hessian(loss, every)(*xs)
    along, t = _line(loss, xs, vs), torch.zeros((), dtype=torch.float64)
    yield "third derivative", grad(grad(grad(along)))(t)
    yield "jacrev of jacrev", jacrev(jacrev(loss, every), every)(*xs)
    yield "jacrev of jacfwd", jacrev(jacfwd(loss, every), every)(*xs)
    yield "third derivative, mixed", jvp(grad(grad(along)), (t,), (t + 1,))
    if nested_forward:
        yield "jacfwd of jacfwd", jacfwd(jacfwd(loss, every), every)(*xs)


def autograd_derivatives(f: Whole, xs: list[Tensor], vs: list[Tensor]) -> Iterator[tuple[str, Any]]:
    """The same with torch.autograd, of a real or complex f: backward three times, forward mode."""
    xs = [x.clone().requires_grad_() for x in xs]
    loss = _loss(f)
    y = loss(*xs)
    for i in range(3):
        gs = torch.autograd.grad(
            y, xs, create_graph=True, allow_unused=True, materialize_grads=True
        )
        yield f"backward {i + 1}", gs
        y = torch.stack([(g.real * v.real).sum() for g, v in zip(gs, vs, strict=True)]).sum()
        if not y.requires_grad:
            break
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, v) for x, v in zip(xs, vs, strict=True)]
        y, tangent = forward_ad.unpack_dual(loss(*duals))
        assert tangent is not None, "the tangent is lost"
        yield "forward mode", (y, tangent)
        yield (
            "backward of forward mode",
            torch.autograd.grad(tangent, xs, allow_unused=True, materialize_grads=True),
        )


def check_derivatives() -> Any:
    """Derivatives by every transform are those of one process.

    Another quarter of the steps at each world size.
    """
    n, report = dist.get_world_size(), Report()
    for name, step in list(steps(n).items())[n % 4 :: 4]:
        xs, vs = step.inputs(), step.inputs(salt=3)
        f, whole = step.distributed(), step.without_communication
        # copy_ of torch refuses tangents that are zeros by their type, which nesting makes.
        nested = "in place" not in name
        with report.attempt(f"{name}: torch.autograd"):
            wanted = list(autograd_derivatives(whole, xs, vs))
            for (what, got), (_, want) in zip(
                list(autograd_derivatives(f, xs, vs)), wanted, strict=True
            ):
                _compare(report, f"{name}: {what}", got, want)
        if step.dtype.is_complex:
            continue  # torch.func's Jacobians are of real functions
        with report.attempt(f"{name}: torch.func"):
            wanted = list(derivatives(whole, xs, vs, nested))
            for (what, got), (_, want) in zip(
                list(derivatives(f, xs, vs, nested)), wanted, strict=True
            ):
                _compare(report, f"{name}: {what}", got, want)
    return report.result()


# --- batches -------------------------------------------------------------------------------------


def _stacked(ys: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.stack(each) for each in zip(*ys, strict=True)]


def check_vmap() -> Any:
    """vmap is the loop over slices: any in_dims, also by rank, nested; a quarter at a time."""
    n, report = dist.get_world_size(), Report()
    for name, step in list(steps(n).items())[n % 4 :: 4]:
        f, whole = step.distributed(), step.without_communication
        batch = step.inputs((3,))
        slices = [[x[i] for x in batch] for i in range(3)]
        want = _stacked([whole(*xs) for xs in slices])
        # A tensor is batched on all ranks or on none, along whatever dimension.
        for dims in (
            [0] * len(batch),
            [-1] * len(batch),
            [0 if i % n % 2 else -1 for i in range(len(batch))],
            [0 if x.dim() < 3 else 1 for x in batch],
        ):
            with report.attempt(f"{name}: vmap {dims}"):
                moved = [x.movedim(0, d) for x, d in zip(batch, dims, strict=True)]
                _compare(report, f"{name}: vmap {dims}", vmap(f, tuple(dims))(*moved), want)
        with report.attempt(f"{name}: part of a list"):
            if len(step.shapes) > 1:
                part_of = [*batch[:n], *[x[0] for x in batch[n:]]]
                got = vmap(f, (0,) * n + (None,) * (len(batch) - n))(*part_of)
                alone = [whole(*xs[:n], *part_of[n:]) for xs in slices]
                _compare(report, f"{name}: part of a list", got, _stacked(alone))
        with report.attempt(f"{name}: nested"):
            twice = step.inputs((2, 3))
            rows = [
                _stacked([whole(*[x[i, j] for x in twice]) for j in range(3)]) for i in range(2)
            ]
            _compare(report, f"{name}: nested", vmap(vmap(f))(*twice), _stacked(rows))
            across = vmap(vmap(f), in_dims=1, out_dims=1)(*twice)
            _compare(report, f"{name}: nested, inner batch first", across, _stacked(rows))
        with report.attempt(f"{name}: older vmap"):
            # What a hook or a custom backward meets under is_grads_batched.
            _compare(report, f"{name}: older vmap", _vmap(f)(*batch), want)
            across = _vmap(_vmap(f), in_dims=1, out_dims=1)(*twice)
            _compare(report, f"{name}: older vmap, nested", across, _stacked(rows))
        with report.attempt(f"{name}: gradients"):
            every = tuple(range(len(batch)))
            singly = _stacked([grad(_loss(whole), every)(*xs) for xs in slices])
            per_sample = vmap(grad(_loss(f), every))(*batch)
            _compare(report, f"{name}: per-sample gradients", per_sample, singly)
            of_sum = grad(lambda *xs: vmap(_loss(f))(*xs).sum(), every)(*batch)  # noqa: B023
            _compare(report, f"{name}: gradient of a batch", of_sum, singly)
            if step.dtype.is_complex:
                continue
            vs = step.inputs((3,), salt=3)
            pushed = vmap(lambda xs, vs: jvp(f, xs, vs)[1])(tuple(batch), tuple(vs))  # noqa: B023
            one = [jvp(whole, tuple(xs), tuple(v[i] for v in vs))[1] for i, xs in enumerate(slices)]
            _compare(report, f"{name}: per-sample tangents", pushed, _stacked(one))
    return report.result()


class _Counting(TorchDispatchMode):
    """Counts the collectives that are started."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d_ext" and func is not torch.ops.c10d_ext.wait_tensor.default:
            self.started.append(func.name().rstrip("_"))  # in place or not
        return func(*args, **(kwargs or {}))


def _started(f: Callable[..., Any], *args: Any) -> list[str]:
    with _Counting() as counting:
        f(*args)
    return counting.started


def check_counts() -> Any:
    """A batch sends what one slice sends: as many collectives, whatever the transform."""
    n, rank, report = dist.get_world_size(), dist.get_rank(), Report()
    for name, step in list(steps(n).items())[::2]:
        if step.dtype.is_complex or step.ties:
            continue
        mine, batch, twice = (tuple(step.inputs(b)[rank::n]) for b in ((), (3,), (2, 3)))
        every = tuple(range(len(mine)))

        def local(*xs: Tensor, step: Step = step) -> tuple[Tensor, ...]:
            return tuple(_results(step.local(*xs)))

        def pull(*xs: Tensor, local: Any = local) -> Any:
            ys, back = vjp(local, *xs)
            return back(ys)

        def push(*xs: Tensor, local: Any = local) -> Any:
            return jvp(local, xs, xs)

        def backward(*xs: Tensor, local: Any = local, batch: Shape = ()) -> None:
            leaves = [x.clone().requires_grad_() for x in xs]
            ys = local(*leaves)
            gs = [y.new_ones((*batch, *y.shape)) for y in ys]
            torch.autograd.grad(ys, leaves, gs, is_grads_batched=bool(batch))

        def pushed(*xs: Tensor, local: Any = local) -> Any:
            return jacobian(local, xs, vectorize=True, strategy="forward-mode")

        for what, one, many in (
            (
                "is_grads_batched",
                _started(backward, *mine),
                _started(partial(backward, batch=(3,)), *mine),
            ),
            ("vmap", _started(local, *mine), _started(vmap(local), *batch)),
            ("nested vmap", _started(local, *mine), _started(vmap(vmap(local)), *twice)),
            ("vmap of vjp", _started(pull, *mine), _started(vmap(pull), *batch)),
            ("vmap of jvp", _started(push, *mine), _started(vmap(push), *batch)),
            # One basis vector per element: ranks with inputs of other sizes would disagree.
            *(
                (
                    ("jacfwd", _started(push, *mine), _started(jacfwd(local, every), *mine)),
                    ("jacobian, forward mode", _started(push, *mine), _started(pushed, *mine)),
                )
                if all(len(set(shapes)) == 1 for shapes in step.shapes)
                else ()
            ),
        ):
            report.expect(f"{name}: {what}", "" if one == many else f"{many}, one slice {one}")
        report.expect(f"{name}: starts one", "" if len(_started(local, *mine)) == 1 else "more")
    return report.result()


# --- batches of torch.autograd --------------------------------------------------------------------


def _grads(
    ys: Sequence[Tensor], xs: list[Tensor], cotangents: Sequence[Tensor], batched: bool
) -> list[Tensor]:
    """Gradients of ys for a batch of cotangents: at once, or one after the other."""
    if not batched:
        every = [_pull(ys, xs, each) for each in zip(*cotangents, strict=True)]
        return _stacked(every)
    return _pull(ys, xs, cotangents, is_grads_batched=True)


def _pull(
    ys: Sequence[Tensor], xs: list[Tensor], cotangents: Sequence[Tensor], **kwargs: bool
) -> list[Tensor]:
    pairs = [(y, c) for y, c in zip(ys, cotangents, strict=True) if y.requires_grad]
    roots, kept = zip(*pairs, strict=True)
    gs = torch.autograd.grad(roots, xs, kept, create_graph=True, allow_unused=True, **kwargs)
    batch = cotangents[0].shape[: cotangents[0].dim() - ys[0].dim()]
    return [
        x.new_zeros((*batch, *x.shape)) if g is None else g for g, x in zip(gs, xs, strict=True)
    ]


def batched_derivatives(f: Whole, xs: list[Tensor], batched: bool) -> Iterator[tuple[str, Any]]:
    """Derivatives as torch.autograd batches them, or, for comparison, one after the other."""
    xs = [x.clone().requires_grad_() for x in xs]
    ys = [y.sin() for y in f(*xs)]

    def cotangents(*batch: int) -> list[Tensor]:
        return [smooth_values((*batch, *y.shape), y.dtype, i) for i, y in enumerate(ys)]

    twice = cotangents(2, 3)
    if batched:
        nested = _vmap(lambda *gs: tuple(_grads(ys, xs, gs, batched)))(*twice)
    else:
        nested = _stacked([_grads(ys, xs, gs, batched) for gs in zip(*twice, strict=True)])
    yield "is_grads_batched, nested", nested
    for i in range(2):
        ys = _grads(ys, xs, cotangents(3), batched)
        yield f"is_grads_batched {i + 1}", ys
    if xs[0].is_complex():
        return
    at, loss = tuple(x.detach() for x in xs), _loss(f)
    if not batched:
        every = tuple(range(len(xs)))
        yield from (("jacobian", jacrev(f, every)(*at)) for _ in range(3))
        yield from (("hessian", hessian(loss, every)(*at)) for _ in range(2))
        return
    yield "jacobian", jacobian(f, at, vectorize=True)
    yield "jacobian, create_graph", jacobian(f, at, create_graph=True, vectorize=True)
    yield "jacobian, forward mode", jacobian(f, at, vectorize=True, strategy="forward-mode")
    for outer in ("reverse-mode", "forward-mode"):
        yield (
            f"hessian, {outer}",
            autograd_hessian(loss, at, vectorize=True, outer_jacobian_strategy=outer),
        )


def check_batched_derivatives() -> Any:
    """What torch.autograd batches is the loop of one process; a quarter of the steps at a time."""
    n, report = dist.get_world_size(), Report()
    for name, step in list(steps(n).items())[n % 4 :: 4]:
        xs, f, whole = step.inputs(), step.distributed(), step.without_communication
        wanted = list(batched_derivatives(whole, xs, batched=False))
        with report.attempt(name):
            for (what, got), (_, want) in zip(
                batched_derivatives(f, xs, batched=True), wanted, strict=True
            ):
                _compare(report, f"{name}: {what}", got, want)
    return report.result()


# --- compiled autograd ---------------------------------------------------------------------------


# One for each kind of node, in lists and in place, linear and not.
COMPILED = (
    *("all_gather uneven", "all_gather_single of scalars", "all_gather_single_coalesced"),
    *("all_to_all_single", "broadcast_coalesced", "gather", "permute_tensor", "barrier", "scatter"),
    *("all_reduce max", "all_reduce_coalesced in place product with ties", "reduce in place sum"),
    *("reduce_scatter uneven max", "reduce_scatter_single_coalesced product with ties"),
    "all_reduce complex premul_sum",
)


def check_compiled_autograd() -> Any:
    """What compiled autograd makes of eager calls is their gradient; half the calls at a time."""
    n, rank, report, graphs = dist.get_world_size(), dist.get_rank(), Report(), []

    backend = "aot_eager"

    def compiler(graph: torch.fx.GraphModule) -> Any:
        graphs.append(graph)
        return torch.compile(graph, backend=backend, fullgraph=True)

    def gradients(f: Whole, xs: list[Tensor], compiles: bool) -> list[Tensor]:
        xs = [x.clone().requires_grad_() for x in xs]
        loss = _loss(f)(*(x * 1 for x in xs))
        how = compiled_autograd._enable(compiler) if compiles else contextlib.nullcontext()
        with how, warnings.catch_warnings():
            # torch looks for a grad in what the graph has from forward.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            loss.backward()
        return [x.grad for x in xs]

    torch._dynamo.reset()
    for name in COMPILED[n % 2 :: 2]:
        step = steps(n)[name]

        def local(*xs: Tensor, step: Step = step) -> tuple[Tensor, ...]:
            ys = _results(step.local(*xs))
            # torch cannot trace a complex tensor in flight that is viewed as real.
            return tuple(wait(y) if y.is_complex() else y for y in ys)

        with report.attempt(name):
            xs = step.inputs()[rank::n]
            _compare(report, name, gradients(local, xs, True), gradients(local, xs, False))

    if n > 2:
        return report.result()
    # One graph serves the nodes of one call, whatever the values, and no other call.
    ops, one, graphs, backend = torch.ops.c10d_ext, [torch.arange(4.0)], [], "eager"
    for factor, found in ((2, 1), (2, 1), (3, 2), (2, 2)):

        def scaled(x: Tensor, factor: int = factor) -> tuple[Tensor, ...]:
            return (ops.wait_tensor(ops.all_reduce(x, "premul_sum", group(), factor=factor)),)

        for _ in range(2):
            one[0] += 1
            _compare(report, "again", gradients(scaled, one, True), gradients(scaled, one, False))
        report.expect(f"graphs up to factor {factor}", len(graphs) != found and str(len(graphs)))

    # Of a list, what is not asked for is undefined. Backward a second time frees nothing twice.
    def first_of_two(x: Tensor) -> tuple[Tensor, ...]:
        return (ops.wait_tensor(ops.all_reduce_coalesced([x, x * 2], "max", group())[0]),)

    _compare(report, "one of two", *(gradients(first_of_two, one, c) for c in (True, False)))
    x = torch.ones(3, requires_grad=True)
    y = ops.wait_tensor(ops.all_reduce(x * 1, "max", group())).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="a second time"), compiled_autograd._enable(compiler):
        y.backward()
    return report.result()


# --- finite differences --------------------------------------------------------------------------


def check_finite_differences() -> Any:
    """torch's gradcheck and gradgradcheck, all ranks moving the same element at once."""
    n, report = dist.get_world_size(), Report()
    smooth = [(name, step) for name, step in steps(n).items() if not step.ties]
    for name, step in smooth[n % 4 :: 4]:  # others at each world size, all of them in the end
        xs = [x.requires_grad_() for x in step.inputs()]
        f = step.distributed()
        with report.attempt(f"{name}: gradcheck"):
            torch.manual_seed(5)  # of the cotangents and tangents that it makes up
            done = torch.autograd.gradcheck(
                f,
                xs,
                check_forward_ad=True,
                check_batched_grad=True,
                check_batched_forward_grad=True,
            )
            report.expect(f"{name}: gradcheck", not done)
        with report.attempt(f"{name}: gradgradcheck"):
            torch.manual_seed(5)
            done = torch.autograd.gradgradcheck(
                f, xs, check_fwd_over_rev=True, check_rev_over_rev=True, fast_mode=True
            )
            report.expect(f"{name}: gradgradcheck", not done)
    return report.result()


# --- compositions --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Move:
    """One step of a random program: a collective on x, every rank's tensor of shape (n, 2)."""

    name: str
    op: str  # of the ones that reduce
    number: int  # a root, or a distance to pass on

    def local(self, x: Tensor) -> Tensor:
        n, rank = dist.get_world_size(), dist.get_rank()
        root = self.number % n
        if self.name == "all_reduce":
            return F.all_reduce(x, self.op, None)
        if self.name == "all_reduce in place":
            return F.all_reduce_inplace(x * 1, self.op, None)
        if self.name == "all_reduce_coalesced":
            y, z = F.all_reduce_coalesced([x, (x * x).sum()], self.op, None)
            return y + z
        if self.name == "reduce":
            return F.reduce(x, self.op, root, None)
        if self.name == "reduce_scatter, all_gather":
            y = F.reduce_scatter_single(x, self.op, 0, None)
            return F.all_gather_single(y * (rank + 1), 0, None)
        if self.name == "all_to_all":
            return F.all_to_all_single(x, None, None, None)
        if self.name == "broadcast":
            return F.broadcast(x, root, None)
        if self.name == "gather, scatter":
            return F.scatter(F.gather(x, root, None).cos(), root, None, size=n)
        if self.name == "permute":
            return F.permute_tensor(x, [(m + self.number) % n for m in range(n)], None)
        assert self.name == "all_gather uneven", self.name
        part = x.narrow(0, 0, 1 if rank % 2 else n)
        return x * F.all_gather(part, [1 if m % 2 else n for m in range(n)], None).mean(0)

    def whole(self, xs: list[Tensor]) -> list[Tensor]:
        n = len(xs)
        root = self.number % n
        if self.name in ("all_reduce", "all_reduce in place"):
            return [reduce_reference(xs, self.op)] * n
        if self.name == "all_reduce_coalesced":
            y = reduce_reference(xs, self.op)
            return [y + reduce_reference([(x * x).sum() for x in xs], self.op)] * n
        if self.name == "reduce":
            y = reduce_reference(xs, self.op)
            return [y if r == root else torch.zeros_like(y) for r in range(n)]
        if self.name == "reduce_scatter, all_gather":
            rows = reduce_reference(xs, self.op).chunk(n)
            return [torch.cat([row * (r + 1) for r, row in enumerate(rows)])] * n
        if self.name == "all_to_all":
            return [torch.cat([x[r : r + 1] for x in xs]) for r in range(n)]
        if self.name == "broadcast":
            return [xs[root]] * n
        if self.name == "gather, scatter":
            return [x.cos() for x in xs]
        if self.name == "permute":
            return [xs[(r - self.number) % n] for r in range(n)]
        assert self.name == "all_gather uneven", self.name
        mean = torch.cat([x[: 1 if r % 2 else n] for r, x in enumerate(xs)]).mean(0)
        return [x * mean for x in xs]


MOVES = (
    "all_reduce",
    "all_reduce in place",
    "all_reduce_coalesced",
    "reduce",
    "reduce_scatter, all_gather",
    "all_to_all",
    "broadcast",
    "gather, scatter",
    "permute",
    "all_gather uneven",
)

PROGRAMS = st.lists(
    st.builds(
        Move,
        st.sampled_from(MOVES),
        st.sampled_from(("sum", "avg", "product", "min", "max")),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=5,
)


def check_program(moves: list[Move]) -> Any:
    """A program of collectives, each followed by something curved that differs by rank."""
    n, report = dist.get_world_size(), Report()

    def curved(x: Tensor, first: Tensor, rank: int) -> Tensor:
        return (x + first * (0.3 + 0.1 * rank)).sin()

    def local(first: Tensor) -> list[Tensor]:
        x = first
        for move in moves:
            x = curved(move.local(x), first, dist.get_rank())
        return [x]

    def whole(*first: Tensor) -> tuple[Tensor, ...]:
        xs = list(first)
        for move in moves:
            xs = [
                curved(x, y, r) for r, (x, y) in enumerate(zip(move.whole(xs), first, strict=True))
            ]
        return tuple(xs)

    xs, vs, batch = (
        [smooth_values((*b, n, 2), torch.float64, r, salt=s) for r in range(n)]
        for b, s in (((), 0), ((), 3), ((2,), 0))
    )
    every = tuple(range(n))
    f = of_all_ranks(local, whole, xs)
    with report.attempt("program"):
        _compare(report, "value", f(*xs), whole(*xs))
        got, want = (grad(_loss(g), every) for g in (f, whole))
        _compare(report, "gradient", got(*xs), want(*xs))
        _compare(report, "tangent", jvp(f, tuple(xs), tuple(vs)), jvp(whole, tuple(xs), tuple(vs)))
        _compare(
            report,
            "Hessian's product",
            jvp(got, tuple(xs), tuple(vs)),
            jvp(want, tuple(xs), tuple(vs)),
        )
        slices = [[x[i] for x in batch] for i in range(2)]
        _compare(report, "batch", vmap(f)(*batch), _stacked([whole(*each) for each in slices]))
        singly = _stacked([want(*each) for each in slices])
        _compare(report, "per-sample gradients", vmap(got)(*batch), singly)
    return report.result()


# --- order, and waiting ---------------------------------------------------------------------------


def _derivative_of_what_nobody_waited_for() -> None:
    """min and max look at their result: when it has come, though nobody asked for it before."""
    n, rank = dist.get_world_size(), dist.get_rank()
    x = torch.tensor([1.0 + rank, 5.0 - rank], requires_grad=True)
    for op, won in (("max", [rank == n - 1, rank == 0]), ("min", [rank == 0, rank == n - 1])):
        with in_flight() as gate:
            y = F.all_reduce(x, op, None)
            gate.open_after(0.05)
            (g,) = torch.autograd.grad(y, x, torch.ones(2))
        assert torch.equal(g, n * torch.tensor(won).float()), (op, g)
        with in_flight() as gate, forward_ad.dual_level():
            gate.open_after(0.05)
            y = F.all_reduce(
                forward_ad.make_dual(x.detach(), torch.full((2,), 1.0 + rank)), op, None
            )
            t = forward_ad.unpack_dual(y).tangent
        assert t is not None and torch.equal(
            t, torch.tensor([n, 1.0] if op == "max" else [1.0, n])
        ), t


def _randomness(randomness: str) -> None:
    """A batch that draws random numbers is reduced like any other."""

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        noisy = x + torch.rand(2)
        return noisy, F.all_reduce(noisy, "sum", None)

    torch.manual_seed(dist.get_rank())
    noisy, y = vmap(f, randomness=randomness)(torch.zeros(3, 2))
    assert torch.equal(y, wait(F.all_reduce(noisy, "sum", None)))
    assert torch.equal(noisy[0], noisy[1]) == (randomness == "same")


def _batches_in_flight() -> None:
    """A batch of cotangents in flight, and collectives that a hook calls on it."""
    n, rank = dist.get_world_size(), dist.get_rank()
    batches = [smooth_values((3, 2), torch.float64, r) for r in range(n)]
    total = torch.stack(batches).sum(0)

    def grads(hook: Callable[[Tensor], Tensor]) -> Tensor:
        x = torch.ones(2, dtype=torch.float64, requires_grad=True)
        y = 2 * x
        y.register_hook(hook)
        with in_flight() as gate:
            cotangents = F.all_reduce(batches[rank], "sum", None)
            assert rank > 0 or isinstance(cotangents, AsyncCollectiveTensor)
            gate.open_after(0.05)
            (g,) = torch.autograd.grad(y, x, cotangents, is_grads_batched=True)
        return g

    alone = torch.ones(2, dtype=torch.float64)
    hooks: dict[str, Callable[[Tensor], Tensor]] = {
        "all_reduce": lambda g: F.all_reduce(g, "sum", None),
        "written in place": lambda g: F.all_reduce_inplace(g * 1, "sum", None),
        "another dimension": lambda g: F.reduce_scatter_single(
            F.all_gather_single(g[None], 1, None), "sum", 1, None
        )[0],
        "in a list": lambda g: F.all_reduce_coalesced([alone, g], "sum", None)[1],
    }
    for name, hook in hooks.items():
        assert torch.allclose(grads(hook), 2 * n * total), name


def _levels_of_a_list() -> None:
    """A list of tensors batched by both vmaps, the outer one, the inner one, and neither."""
    n, rank = dist.get_world_size(), dist.get_rank()
    every = [
        [smooth_values(shape, torch.float64, r) for shape in ((2, 3, 4), (2, 1, 4), (3, 4), (4,))]
        for r in range(n)
    ]
    both, outer, inner, alone = every[rank]
    of_all_ranks = [torch.stack([x.expand(2, 3, 4) for x in xs]) for xs in zip(*every, strict=True)]
    ops = torch.ops.c10d_ext
    calls: list[tuple[Callable[[list[Tensor]], list[Tensor]], Callable[[Tensor], Tensor]]] = [
        (lambda xs: ops.all_reduce_coalesced(xs, "sum", group()), lambda x: x.sum(0)),
        (
            lambda xs: ops.all_gather_into_tensor_coalesced(xs, n, group()),
            lambda x: torch.cat(list(x), -1),
        ),
    ]
    for call, whole in calls:

        def local(*xs: Tensor, call: Any = call) -> tuple[Tensor, ...]:
            return tuple(wait(y) for y in call([*xs, alone]))

        def nested(both: Tensor, outer: Tensor, local: Any = local) -> tuple[Tensor, ...]:
            return _vmap(local, (0, None, 0))(both, outer, inner)

        got = _vmap(nested)(both, outer.squeeze(1))
        for y, xs in zip(got, of_all_ranks, strict=True):
            assert torch.allclose(y, whole(xs)), call


def _refused_in_batches() -> None:
    out, batch = torch.empty(2), torch.ones(3, 2)
    with pytest.raises(RuntimeError, match="all_reduce_out.*doesn't work on out="):
        _vmap(lambda x: torch.ops.c10d_ext.all_reduce_out(x, "sum", group(), out=out))(batch)


# --- without gradients ---------------------------------------------------------------------------


def _without_gradients() -> None:
    """A call on x.detach(), or under no_grad, leaves nothing behind: no node, nothing saved."""
    packed: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        return t

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    for name, step in steps(dist.get_world_size()).items():
        n, rank = dist.get_world_size(), dist.get_rank()
        mine = [x.requires_grad_() for x in step.inputs()[rank::n]]
        with hooks:
            ys = _results(step.local(*[x.detach() for x in mine]))
            with torch.no_grad():
                ys += _results(step.local(*mine))
        assert all(y.grad_fn is None and not y.requires_grad for y in ys), name
        assert not packed, f"{name} saves {len(packed)} tensors"
    x = torch.ones(2, requires_grad=True)
    with hooks:
        F.all_reduce(x, "max", None)
    assert packed, "the hooks see what is saved"


def _graphs_of(f: Callable[[Tensor], Tensor], x: Tensor) -> list[list[str]]:
    """The collectives in f's forward and backward graph."""
    seen: list[list[str]] = []

    def keep(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append([name for name in calls_in(gm.graph) if "wait_tensor" not in name])
        return make_boxed_func(gm.forward)

    torch._dynamo.reset()
    y = torch.compile(f, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)(
        x
    )
    y.sum().backward()
    return seen


def _graphs_without_gradients() -> None:
    x = smooth_values((4,), torch.float64, dist.get_rank()).requires_grad_()
    ops = "c10d_ext.all_reduce.default"
    with_gradient = _graphs_of(lambda x: F.all_reduce(x * 2, "sum", None) + x, x)
    assert with_gradient == [[ops], [ops]], with_gradient
    detached = _graphs_of(lambda x: F.all_reduce((x * 2).detach(), "sum", None) + x, x)
    assert detached == [[ops], []], detached

    def under_no_grad(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = F.all_reduce(x * 2, "max", None)
        return y + x

    assert _graphs_of(under_no_grad, x) == [[ops], []]


# --- in the parent -------------------------------------------------------------------------------


def _compiled(backend: str) -> Any:
    """Transforms within compiled code, against values computed from all ranks' inputs."""
    n, rank = dist.get_world_size(), dist.get_rank()
    inputs = [smooth_values((3, 2), torch.float64, r) for r in range(n)]
    xs = torch.stack(inputs)
    total, x = xs.sin().sum(0), inputs[rank]
    cos, eye = x.cos(), torch.eye(6, dtype=torch.float64).reshape(3, 2, 3, 2)
    tangents = xs.cos().sum(0)
    best = xs.sin().argmax(0) == rank

    def summed(x: Tensor) -> Tensor:
        return F.all_reduce(x.sin(), "sum", group())

    def largest(x: Tensor) -> Tensor:
        return F.all_reduce(x.sin(), "max", group())

    def gathered(x: Tensor) -> Tensor:
        return F.all_gather_tensor(x.sin(), 0, group())

    def loss(x: Tensor) -> Tensor:
        return summed(x).square().sum()

    # The loss of each of n ranks holds each input.
    slope = 2 * n * total * cos
    cases: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
        "grad": (grad(loss), slope),
        "vjp": (lambda x: vjp(summed, x)[1](torch.ones_like(x))[0], n * cos),
        "jvp": (lambda x: jvp(summed, (x,), (x.cos(),))[1], xs.cos().square().sum(0)),
        "vmap": (vmap(summed, in_dims=1, out_dims=1), total),
        "vmap(grad)": (vmap(grad(loss)), slope),
        "jacrev": (jacrev(summed), n * cos * eye),
        "jacfwd": (jacfwd(summed), tangents * eye),
        "jvp of max": (
            lambda x: jvp(largest, (x,), (x.cos(),))[1],
            xs.cos().square().gather(0, xs.sin().argmax(0)[None])[0],
        ),
        "grad of max": (
            grad(lambda x: largest(x).square().sum()),
            best * 2 * n * xs.sin().amax(0) * cos,
        ),
        "vmap of all_gather": (vmap(gathered, in_dims=1, out_dims=1), xs.sin().reshape(-1, 2)),
    }
    report = Report()
    for name, (f, want) in cases.items():
        if backend == "inductor" and name not in ("grad", "jvp", "vmap(grad)", "jvp of max"):
            continue
        with report.attempt(name):
            torch._dynamo.reset()
            got = torch.compile(f, backend=backend, fullgraph=True)(x)
            report.expect(name, values.close(got + 0, want))
    return report.result()


@pytest.mark.parametrize(
    ("compiler", "backend", "size"), [("aot_eager", "shm", 3), ("inductor", "gloo", 2)]
)
def test_within_compiled_code(compiler: str, backend: str, size: int) -> None:
    verify(size, _compiled, compiler, backend=backend, deadline=200)


@pytest.mark.parametrize(
    ("backend", "size"),
    [("gloo", 1), ("gloo", 2), ("shm", 3), pytest.param("shm", 4, marks=pytest.mark.long)],
)
def test_derivatives(backend: str, size: int) -> None:
    verify(size, check_derivatives, backend=backend, deadline=200)


@pytest.mark.parametrize(
    ("backend", "size"), [("shm", 2), pytest.param("shm", 3, marks=pytest.mark.long)]
)
def test_finite_differences(backend: str, size: int) -> None:
    verify(size, check_finite_differences, backend=backend, deadline=200)


@places(gloo=(2,), shm=())
def test_compiled_autograd(backend: str, size: int) -> None:
    verify(size, check_compiled_autograd, backend=backend, deadline=200)


@places(gloo=(1, 2), shm=(3, 4))
def test_batches_of_autograd(backend: str, size: int) -> None:
    verify(size, check_batched_derivatives, backend=backend, deadline=200)


@places(gloo=(1, 2), shm=(3, 4))
def test_vmap(backend: str, size: int) -> None:
    verify(size, check_vmap, backend=backend, deadline=200)


def _batches_along_other_dimensions() -> None:
    """Ranks that agree on the batch and the slices, but not on where the batch is."""
    n, rank = dist.get_world_size(), dist.get_rank()
    every = [smooth_values((3, 3), torch.float64, r) for r in range(n)]
    dim = rank % 2
    x = every[rank].movedim(0, dim)
    total, ring = torch.stack(every).sum(0), [(r + 1) % n for r in range(n)]
    calls: list[tuple[Callable[[Tensor], Any], Tensor]] = [
        (lambda x: F.all_reduce(x, "sum", group()), total),
        (lambda x: F.all_reduce_coalesced([x, x], "sum", group())[1], total),
        (lambda x: F.broadcast(x, n - 1, group()), every[n - 1]),
        (lambda x: F.permute_tensor(x, ring, group()), every[(rank - 1) % n]),
        (lambda x: F.all_gather_tensor(x, 0, group()), torch.cat(every, 1)),
        (lambda x: F.reduce_scatter_tensor(x.repeat(n), "sum", 0, group()), total),
    ]
    for f, want in calls:
        assert torch.allclose(vmap(f, in_dims=dim)(x) + 0, want), f


@pytest.mark.parametrize("backend", ("gloo", "shm"))
def test_ranks_may_batch_along_other_dimensions(backend: str) -> None:
    run(3, _batches_along_other_dimensions, backend=backend)


def test_a_batch_is_one_collective() -> None:
    verify(2, check_counts, backend="shm")


@settings(
    max_examples=30,
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
@given(
    moves=PROGRAMS,
    place=st.sampled_from([("gloo", 2), ("shm", 1), ("shm", 2), ("shm", 3), ("shm", 4)]),
)
def test_compositions(moves: list[Move], place: tuple[str, int]) -> None:
    verify(place[1], check_program, moves, backend=place[0])


def test_derivatives_wait_for_what_they_read() -> None:
    run(2, _derivative_of_what_nobody_waited_for)


def test_a_batch_of_cotangents_may_be_in_flight() -> None:
    run(2, _batches_in_flight)


def test_a_list_holds_tensors_of_any_level() -> None:
    run(2, _levels_of_a_list)


def test_out_forms_are_refused_in_a_batch_of_autograd() -> None:
    run(1, _refused_in_batches)


@pytest.mark.parametrize("randomness", ("same", "different"))
def test_randomness_does_not_matter(randomness: str) -> None:
    run(2, _randomness, randomness)


def test_a_call_without_gradients_records_and_saves_nothing() -> None:
    run(2, _without_gradients, backend="shm")


def test_a_call_without_gradients_has_no_backward_graph() -> None:
    run(2, _graphs_without_gradients, backend="shm")
