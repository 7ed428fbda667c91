"""The contract every collective is held to, whatever it computes.

A test module describes one collective (`Collective`: argument cases, a reference, the calls it must
refuse) and derives its test class from `Contract`; the checks below then run on every rank of
process groups of 1 to 4 workers, on gloo and on shm, for every form of the op (`x`, `x_`, `x_out`,
`x_coalesced`, `x_coalesced_`). A check walks all its combinations and reports every failing one, in
words.

One file, for every check makes its calls, inputs and report in the same way.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.testing._internal import optests

from tests.harness import run, values
from tests.harness.flight import single_rank_shortcut
from torch_c10d_ext._op_info import FORMS

Shape = tuple[int, ...]

# What a form of an op does with its first argument: the suffix of its name.
FUNCTIONAL, INPLACE, OUT, COALESCED, COALESCED_INPLACE = FORMS

# Dim 0 stays first: ops that cut or join rows do it there.
ODD_SHAPES: tuple[Shape, ...] = ((0,), (1,), (5,), (2, 3), (3, 0, 2), (2, 3, 4), (1, 1, 1))


@dataclass(frozen=True)
class Case:
    """One collective call: each rank's input shape and its arguments between input and group."""

    shapes: tuple[Shape, ...]
    args: tuple[tuple[Any, ...], ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def alike(cls, n: int, shape: Shape, *args: Any, **kwargs: Any) -> Case:
        """The same shape and arguments on all n ranks."""
        return cls((shape,) * n, (args,) * n, kwargs)

    def __str__(self) -> str:
        def once(each: Sequence[Any]) -> Any:
            return each[0] if len(set(map(str, each))) == 1 else list(each)

        kwargs = "".join(f" {k}={v}" for k, v in self.kwargs.items())
        return f"shape {once(self.shapes)} args {once(self.args)}{kwargs}"


@dataclass(frozen=True)
class Bad:
    """A call that must be refused, alike on all ranks, before anything is sent.

    `call` makes its own tensors, so that it can run eagerly, under fake tensors and compiled.
    """

    call: Callable[[Any, str], Any]  # of torch.ops.c10d_ext and the group's name
    text: str  # a part of the message
    error: type[Exception] = ValueError


class Collective:
    """What a test module says about its collective."""

    stem: ClassVar[str]
    forms: ClassVar[tuple[str, ...]] = (FUNCTIONAL,)
    reduces: ClassVar[bool] = False  # the first argument is a reduce op
    sums: ClassVar[bool] = False  # adds, without a reduce op to name
    replicated: ClassVar[bool] = False  # every rank gets the same result
    communicates: ClassVar[bool] = True  # forward; else there is nothing to wait for
    traced_as: ClassVar[str] = ""  # the op that tracers record, where it is another
    spmd_adjoint: ClassVar[bool] = True  # the derivative is that of the whole world's computation

    def cases(self, n: int) -> Iterable[Case]:
        """Every kind of argument, at ordinary shapes. Reducing ops leave out the reduce op."""
        raise NotImplementedError

    def odd_cases(self, n: int) -> Iterable[Case]:
        """Unusual shapes: scalar, empty, one element, uneven."""
        raise NotImplementedError

    def coalesced_cases(self, n: int) -> Iterable[list[Case]]:
        """Cases of equal arguments that can travel in one list."""
        cases = list(self.odd_cases(n))
        yield [case for case in cases if case.args == cases[0].args and not case.kwargs]

    def reference(self, case: Case, xs: list[Tensor]) -> list[Tensor]:
        """All ranks' results from all ranks' inputs. Differentiable."""
        raise NotImplementedError

    def inplace_reference(self, case: Case, xs: list[Tensor]) -> list[Tensor]:
        """All ranks' first arguments after the in-place form."""
        return self.reference(case, xs)

    def out_shapes(self, case: Case, rank: int, shape: Shape) -> list[Shape]:
        """Shapes of `out` that take a result of `shape`."""
        return [shape]

    def bad_calls(self, n: int, rank: int) -> Iterable[Bad]:
        """Calls to refuse."""
        raise NotImplementedError


@dataclass(frozen=True)
class Variant:
    """A case together with the data it runs on."""

    case: Case
    dtype: torch.dtype = torch.float32
    reduce_op: str | None = None
    factor: Any = None

    def __str__(self) -> str:
        op = f" {self.reduce_op}" if self.reduce_op else ""
        factor = f" factor {self.factor}" if self.factor is not None else ""
        return f"{self.dtype}{op}{factor} {self.case}"


def variant_of(
    c: Collective,
    case: Case,
    dtype: torch.dtype = torch.float32,
    reduce_op: str = "sum",
    factor: Any = None,
) -> Variant:
    """`case` on `dtype`, with a reduce op put first if the collective takes one."""
    if not c.reduces:
        return Variant(case, dtype)
    kwargs = case.kwargs if factor is None else {**case.kwargs, "factor": factor}
    args = tuple((reduce_op, *each) for each in case.args)
    return Variant(Case(case.shapes, args, kwargs), dtype, reduce_op, factor)


def variants(c: Collective, n: int, dtypes: Iterable[torch.dtype]) -> Iterator[Variant]:
    """Every dtype and reduce op that has a meaning; the cases of arguments take turns.

    The first dtype meets every case.
    """
    cases = list(c.cases(n))
    turn = itertools.count()
    for position, dtype in enumerate(dtypes):
        kinds: list[tuple[str, Any]] = [("", None)]
        if c.reduces:
            kinds = [
                (op, factor)
                for op in values.meanings(dtype)
                for factor in (values.factors(dtype) if op == "premul_sum" else (None,))
            ]
        for op, factor in kinds:
            for case in cases if position == 0 else [cases[next(turn) % len(cases)]]:
                yield variant_of(c, case, dtype, op, factor)


# --- on the worker: calling ----------------------------------------------------------------------


def group() -> str:
    """The default group's name."""
    return str(dist.group.WORLD.group_name)  # type: ignore[union-attr]


def wait(x: Tensor) -> Tensor:
    return torch.ops.c10d_ext.wait_tensor(x)  # type: ignore[no-any-return]


def start(
    c: Collective,
    form: str,
    case: Case,
    xs: Sequence[Tensor],
    outs: Sequence[Tensor] = (),
) -> list[Tensor]:
    """Call the op; its results, not waited for, are a list of one tensor unless coalesced."""
    op = getattr(torch.ops.c10d_ext, c.stem + form)
    rest = (*case.args[dist.get_rank()], group())
    if form in (COALESCED, COALESCED_INPLACE):
        return list(op(list(xs), *rest, **case.kwargs))
    kwargs = dict(case.kwargs, out=outs[0]) if form == OUT else case.kwargs
    return [op(xs[0], *rest, **kwargs)]


def call(
    c: Collective, form: str, case: Case, xs: Sequence[Tensor], outs: Sequence[Tensor] = ()
) -> list[Tensor]:
    """Call the op and wait for its results."""
    return [wait(y) for y in start(c, form, case, xs, outs)]


def expected(c: Collective, form: str, case: Case, xs: list[Tensor]) -> list[Tensor]:
    """All ranks' results of this form from all ranks' inputs."""
    inplace = form in (INPLACE, COALESCED_INPLACE)
    return (c.inplace_reference if inplace else c.reference)(case, xs)


def inputs(c: Collective, v: Variant, salt: int = 0) -> list[Tensor]:
    """All ranks' inputs; arbitrary bits where the op only moves them."""
    if not c.reduces and not c.sums:
        return [
            values.bits(shape, v.dtype, rank, salt=salt) for rank, shape in enumerate(v.case.shapes)
        ]
    product = v.reduce_op == "product"
    return [
        values.values(shape, v.dtype, rank, salt=salt, product=product)
        for rank, shape in enumerate(v.case.shapes)
    ]


class Report:
    """Failures of one rank, and digests that must agree on all ranks."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.digests: dict[str, str] = {}
        self.checked = 0

    def expect(self, what: object, failure: str | bool) -> None:
        """`failure` is a text (or True) if something is wrong."""
        self.checked += 1
        if failure:
            text = f"{what}: {failure}" if isinstance(failure, str) else f"{what}"
            self.failures.append(text)
            print(text, flush=True)  # survives in the log should this rank die of what follows

    @contextlib.contextmanager
    def attempt(self, what: object) -> Iterator[None]:
        """Turn an exception into a failure of `what` and go on."""
        self.checked += 1
        try:
            yield
        except Exception as error:
            text = str(error).strip()
            self.expect(what, f"raised {type(error).__name__}: {text[:1500]}")

    def same_everywhere(self, what: object, x: Tensor) -> None:
        self.digests[str(what)] = hashlib.sha256(values.raw(x)).hexdigest()

    def result(self) -> tuple[list[str], dict[str, str], int]:
        """Also holds that nothing is left behind in the registry of works."""
        import torch_c10d_ext

        # What was never waited for ends by itself, soon.
        ends = time.monotonic() + 10
        while torch_c10d_ext.pending_count() and time.monotonic() < ends:
            time.sleep(0.01)
        self.expect("works left pending", f"{n}" if (n := torch_c10d_ext.pending_count()) else "")
        return self.failures, self.digests, self.checked


def load(module: str) -> Collective:
    collective = importlib.import_module(module).COLLECTIVE
    assert isinstance(collective, Collective)
    return collective


def _groups(c: Collective, form: str, n: int, odd: bool) -> list[list[Case]]:
    """What one call of this form takes: lists of cases, of one case unless coalesced."""
    if form in (COALESCED, COALESCED_INPLACE):
        return list(c.coalesced_cases(n))
    return [[case] for case in (c.odd_cases(n) if odd else c.cases(n))]


def _together(vs: list[Variant]) -> str:
    """A name for what one call takes."""
    if len(vs) == 1:
        return str(vs[0])
    return f"{vs[0]} and shapes {', '.join(str(v.case.shapes[0]) for v in vs[1:])}"


# --- on the worker: checks -----------------------------------------------------------------------


def check_values(module: str, form: str) -> Any:
    """Every dtype and reduce op gives the reference's values, and all ranks the same bits."""
    c, n, rank, report = load(module), dist.get_world_size(), dist.get_rank(), Report()
    for v in variants(c, n, values.DTYPES):
        v = Variant(v.case, v.dtype, v.reduce_op, v.factor)
        salts = (0, 1) if form in (COALESCED, COALESCED_INPLACE) else (0,)
        with report.attempt(v):
            worlds = [inputs(c, v, salt) for salt in salts]
            wanted = [expected(c, form, v.case, world) for world in worlds]
            mine = [world[rank].clone() for world in worlds]
            outs = [_unwritten(wanted[0][rank], "contiguous")] if form == OUT else []
            results = call(c, form, v.case, mine, outs)
            report.expect(f"{v}: number of results", len(results) != len(mine))
            for y, want in zip(results, wanted, strict=False):
                exact = values.exact(v.dtype, v.reduce_op, n)
                ulps = values.ulps(v.dtype, v.reduce_op, n)
                report.expect(v, values.mismatch(y, want[rank], bitwise=exact, ulps=ulps))
                if form in (FUNCTIONAL, COALESCED):
                    report.expect(f"{v}: result is contiguous", not y.is_contiguous())
                if c.replicated:
                    report.same_everywhere((v, len(report.digests)), y)
    return report.result()


def check_values_of_one_rank(module: str, form: str) -> Any:
    """The same with a group of one rank sent through its backend."""
    with single_rank_shortcut(False):
        return check_values(module, form)


def _unwritten(like: Tensor, layout: str) -> Tensor:
    return values.empty_like(like.shape, like.dtype, layout)


def check_layouts(module: str, form: str) -> Any:
    """Odd shapes and every memory layout, alike and different on the ranks; inputs untouched."""
    c, n, _rank, report = load(module), dist.get_world_size(), dist.get_rank(), Report()
    for dtype in (torch.float32, torch.complex64, torch.bool):
        for cases in _groups(c, form, n, odd=True) + _groups(c, form, n, odd=False)[:1]:
            vs = [variant_of(c, case, dtype) for case in cases]
            names = sorted({name for v in vs for name in _layouts(v, form)})
            for name in [*names, "mixed"]:
                what = f"{_together(vs)}, layout {name}"
                with report.attempt(what):
                    _check_layout(c, form, vs, name, report, what)
    return report.result()


def _layouts(v: Variant, form: str) -> list[str]:
    names = set.intersection(*(set(values.layouts(v.dtype, s)) for s in v.case.shapes))
    if form in (INPLACE, COALESCED_INPLACE):
        names.discard("expanded")  # several elements at one address cannot be written
    return sorted(names)


def _layout_of(v: Variant, form: str, name: str, rank: int) -> str:
    possible = _layouts(v, form)
    if name == "mixed":
        possible = [p for p in possible if p != "expanded"]
        return possible[(rank + 1) % len(possible)]
    return name if name in possible else "contiguous"


def _check_layout(
    c: Collective, form: str, vs: list[Variant], name: str, report: Report, what: str
) -> None:
    _n, rank = dist.get_world_size(), dist.get_rank()
    worlds = [
        [values.lay_out(x, _layout_of(v, form, name, r)) for r, x in enumerate(inputs(c, v, i))]
        for i, v in enumerate(vs)
    ]
    # The reference works on the values alone.
    plain = [[values.lay_out(x, "contiguous") for x in world] for world in worlds]
    plain = [[x.resolve_conj().resolve_neg() for x in world] for world in plain]
    wanted = [expected(c, form, v.case, xs)[rank] for v, xs in zip(vs, plain, strict=True)]
    mine = [world[rank] for world in worlds]
    before = [values.memory(x) for x in mine]
    inplace = form in (INPLACE, COALESCED_INPLACE)
    gaps_before = [gaps(x) for x in mine] if inplace else []
    tries: list[list[Tensor]] = [[]]
    if form == OUT:
        tries = [[out] for out in _outs(c, vs[0].case, wanted[0])]
    for outs in tries:
        around = [gaps(out) for out in outs]
        started = start(c, form, vs[0].case, mine, outs)
        if form in (INPLACE, OUT, COALESCED_INPLACE):
            targets = outs if form == OUT else mine
            same = all(y is x for y, x in zip(started, targets, strict=True))
            report.expect(f"{what}: does not return what it wrote to", not same)
        results = [wait(y) for y in started]
        for y, want in zip(results, wanted, strict=True):
            where = f"{what}, out {tuple(y.shape)} strides {y.stride()}" if form == OUT else what
            report.expect(where, values.mismatch(y.reshape(want.shape), want))
        for out, was in zip(outs, around, strict=True):
            report.expect(f"{what}: wrote between the elements of out", gaps(out) != was)
        if inplace:
            for x, was in zip(mine, gaps_before, strict=True):
                report.expect(f"{what}: wrote between the elements", gaps(x) != was)
        else:
            after = [values.memory(x) for x in mine]
            report.expect(f"{what}: input changed", after != before)


def _outs(c: Collective, case: Case, want: Tensor) -> Iterator[Tensor]:
    for shape in c.out_shapes(case, dist.get_rank(), tuple(want.shape)):
        for layout in values.layouts(want.dtype, shape):
            if layout == "conj":
                yield values.empty_like(shape, want.dtype, "contiguous").conj()
            elif layout == "neg":
                yield torch._neg_view(values.empty_like(shape, want.dtype, "contiguous"))
            elif layout != "expanded":
                yield values.empty_like(shape, want.dtype, layout)


def gaps(x: Tensor) -> bytes:
    """The bytes of x's storage that belong to none of its elements."""
    storage = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).clone()
    covered = storage.view(x.dtype)
    if x.numel():
        fill = torch.zeros((), dtype=torch.uint8).expand(x.dtype.itemsize).clone().view(x.dtype)
        covered.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(fill.reshape(()))
    return bytes(storage.numpy().tobytes())


def check_fake(module: str, form: str) -> Any:
    """Fake tensors, static and dynamic, foretell shape, strides, dtype and device."""
    c, n, rank, report = load(module), dist.get_world_size(), dist.get_rank(), Report()
    for dtype in (torch.float32, torch.float8_e5m2):
        # Symbolic shapes cost ten times as much, and do not see the dtype.
        modes = ("static", "dynamic") if dtype == torch.float32 else ("static",)
        for cases in _groups(c, form, n, odd=True) + _groups(c, form, n, odd=False):
            vs = [variant_of(c, case, dtype) for case in cases]
            for name in ("contiguous", "transposed", "strided"):
                what = f"{_together(vs)}, layout {name}"
                with report.attempt(what):
                    xs = [
                        values.lay_out(inputs(c, v, i)[rank], _layout_of(v, form, name, rank))
                        for i, v in enumerate(vs)
                    ]
                    wanted = [
                        expected(c, form, v.case, inputs(c, v, i))[rank] for i, v in enumerate(vs)
                    ]
                    outs = [_unwritten(wanted[0], "contiguous")] if form == OUT else []
                    foretold = [
                        (mode, _describe(_fake_call(c, form, vs[0].case, xs, outs, mode)))
                        for mode in modes
                    ]
                    real = _describe(call(c, form, vs[0].case, xs, outs))
                    for mode, fake in foretold:
                        wrong = f"fake {fake}, real {real}" if fake != real else ""
                        report.expect(f"{what} ({mode})", wrong)
    return report.result()


def _fake_call(
    c: Collective, form: str, case: Case, xs: list[Tensor], outs: list[Tensor], mode: str
) -> list[Tensor]:
    env = ShapeEnv() if mode == "dynamic" else None
    fake_mode = FakeTensorMode(shape_env=env)

    def fake(x: Tensor) -> Tensor:
        if env is None:
            return fake_mode.from_tensor(x)
        # Sizes 0 and 1 are constants in every symbolic shape, by torch's rule.
        sizes = [DimDynamic.DYNAMIC if s > 1 else DimDynamic.STATIC for s in x.shape]
        context = StatelessSymbolicContext(dynamic_sizes=sizes)
        return fake_mode.from_tensor(x, symbolic_context=context)

    fakes = [fake(x) for x in xs], [fake(out) for out in outs]
    with fake_mode:
        return call(c, form, case, *fakes)


def _describe(ys: Iterable[Tensor]) -> list[Any]:
    def plain(sizes: Iterable[Any]) -> list[int]:
        return [s.node.hint if isinstance(s, torch.SymInt) else s for s in sizes]

    return [(plain(y.shape), plain(y.stride()), y.dtype, y.device) for y in ys]


def check_opcheck(module: str, form: str) -> Any:
    """torch.library.opcheck in all its parts."""
    c, n, rank, report = load(module), dist.get_world_size(), dist.get_rank(), Report()
    op = getattr(torch.ops.c10d_ext, c.stem + form).default
    differentiable = form != OUT
    for cases in _groups(c, form, n, odd=False)[:2]:
        vs = [variant_of(c, case, torch.float64) for case in cases]
        xs = [values.values(v.case.shapes[rank], v.dtype, rank, salt=i) for i, v in enumerate(vs)]
        case = vs[0].case
        outs = []
        if form == OUT:
            world = [values.values(s, torch.float64, r) for r, s in enumerate(case.shapes)]
            outs = [_unwritten(expected(c, form, case, world)[rank], "contiguous")]
        first: Any = xs if form in (COALESCED, COALESCED_INPLACE) else xs[0]
        args = (first, *case.args[rank], group())
        kwargs = dict(case.kwargs, out=outs[0]) if form == OUT else case.kwargs
        for part in ("test_schema", "test_autograd_registration", "test_faketensor"):
            with report.attempt(f"opcheck {part} of {vs[0]}"):
                torch.library.opcheck(op, args, kwargs, test_utils=part)
        # The remaining part compares values, which are there only after a wait.
        with report.attempt(f"opcheck test_aot_dispatch_dynamic of {vs[0]}"):
            for x in xs:
                x.requires_grad_(differentiable)
            optests.aot_autograd_check(
                functools.partial(_waited, c, form, case),
                (xs, outs),
                {},
                dynamic=True,
                check_gradients=differentiable,
            )
    return report.result()


def _waited(c: Collective, form: str, case: Case, xs: list[Tensor], outs: list[Tensor]) -> Any:
    if form in (INPLACE, COALESCED_INPLACE):
        xs = [x.clone() for x in xs]
    return call(c, form, case, xs, [out.clone() for out in outs])


def check_gradients(module: str, form: str) -> Any:
    """First and second derivatives are those of the whole world's computation.

    Every rank's cotangent is random and its own. The reference differentiates all ranks' outputs
    with respect to all ranks' inputs in one process.
    """
    c, n, report = load(module), dist.get_world_size(), Report()
    for dtype in (torch.float64, torch.complex128):
        cases = [case for cases in _groups(c, form, n, odd=False) for case in cases[:2]]
        odd = [case for cases in _groups(c, form, n, odd=True) for case in cases]
        kinds = [("sum", None)]
        if c.reduces:
            kinds = [
                (op, factor)
                for op in values.meanings(dtype)
                for factor in (values.factors(dtype) if op == "premul_sum" else (None,))
            ]
        for op, factor in kinds:
            for case in cases if op != "sum" else cases + odd:
                v = variant_of(c, case, dtype, op, factor)
                for ties in (False, True) if op in ("min", "max", "product") else (False,):
                    what = f"{v}{' with ties and zeros' if ties else ''}"
                    with report.attempt(what):
                        _check_gradient(c, form, v, ties, report, what)
    return report.result()


def smooth_values(shape: Shape, dtype: torch.dtype, rank: int, *, salt: int = 0) -> Tensor:
    """Random normal values for derivatives."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randn(shape, dtype=dtype, generator=generator)


def _check_gradient(
    c: Collective, form: str, v: Variant, ties: bool, report: Report, what: str
) -> None:
    rank, inplace = dist.get_rank(), form in (INPLACE, COALESCED_INPLACE)
    case, n = v.case, dist.get_world_size()
    xs = [smooth_values(s, v.dtype, r) for r, s in enumerate(case.shapes)]
    if ties:  # few distinct values, zero among them
        xs = [
            torch.randint(-1, 2, x.shape, generator=torch.Generator().manual_seed(r)).to(x.dtype)
            for r, x in enumerate(xs)
        ]
    xs = [x.requires_grad_() for x in xs]
    ys = expected(c, form, case, [x * 1 for x in xs])
    gs = [
        smooth_values(tuple(y.shape), y.dtype, r, salt=1).requires_grad_() for r, y in enumerate(ys)
    ]
    touched = [i for i, y in enumerate(ys) if y.requires_grad]
    want = torch.autograd.grad(
        [ys[i] for i in touched],
        xs,
        [gs[i] for i in touched],
        create_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )
    hs = [smooth_values(tuple(x.shape), x.dtype, r, salt=2) for r, x in enumerate(xs)]
    twice = [i for i, w in enumerate(want) if w.requires_grad]
    want2 = (
        torch.autograd.grad(
            [want[i] for i in twice],
            [*xs, *gs],
            [hs[i] for i in twice],
            allow_unused=True,
            materialize_grads=True,
        )
        if twice
        else [torch.zeros_like(t) for t in (*xs, *gs)]
    )

    x = xs[rank].detach().clone().requires_grad_()
    g = gs[rank].detach().clone().requires_grad_()
    (y, *_) = call(c, form, case, [x * 1] if inplace else [x])
    report.expect(f"{what}: value", values.close(y, ys[rank]))
    (got,) = torch.autograd.grad(
        y, x, g, create_graph=True, allow_unused=True, materialize_grads=True
    )
    report.expect(f"{what}: gradient", values.close(got, want[rank]))
    got2 = torch.autograd.grad(got, [x, g], hs[rank], allow_unused=True, materialize_grads=True)
    # min, max: the choice of the winner is a constant of the second derivative.
    report.expect(f"{what}: second derivative", values.close(got2[0], want2[rank]))
    report.expect(f"{what}: cotangent's gradient", values.close(got2[1], want2[n + rank]))


def check_vmap(module: str, form: str) -> Any:
    """vmap equals the loop over slices: any in_dims, nested, over lists, and through grad."""
    c, n, rank, report = load(module), dist.get_world_size(), dist.get_rank(), Report()
    coalesced = form in (COALESCED, COALESCED_INPLACE)
    for cases in _groups(c, form, n, odd=False) + _groups(c, form, n, odd=True)[:4]:
        vs = [variant_of(c, case, torch.float64) for case in cases]
        for batch_shape, in_dims in (((3,), (0,)), ((2,), (-1,)), ((0,), (0,)), ((2, 3), (0, 0))):
            what = f"{_together(vs)} batch {batch_shape} in_dims {in_dims}"
            with report.attempt(what):
                batches = [
                    [
                        smooth_values((*batch_shape, *shape), v.dtype, r, salt=i)
                        for r, shape in enumerate(v.case.shapes)
                    ]
                    for i, v in enumerate(vs)
                ]
                want = [
                    _loop(c, form, v.case, xs, len(batch_shape))[rank]
                    for v, xs in zip(vs, batches, strict=True)
                ]

                def f(*xs: Tensor, case: Case = vs[0].case) -> Any:
                    inplace = form in (INPLACE, COALESCED_INPLACE)
                    ys = call(c, form, case, [x.clone() for x in xs] if inplace else xs)
                    return tuple(ys) if coalesced else ys[0]

                mine = [xs[rank] for xs in batches]
                for dim in in_dims:
                    f = torch.func.vmap(f, in_dims=dim)
                if in_dims == (-1,):
                    mine = [x.movedim(0, -1) for x in mine]
                got = f(*mine)
                for y, w in zip(got if coalesced else (got,), want, strict=True):
                    report.expect(what, values.close(y, w, tolerance=1e-12))
    return report.result()


def _loop(c: Collective, form: str, case: Case, xs: list[Tensor], depth: int) -> list[Tensor]:
    """The reference applied to every slice, results stacked."""
    if depth == 0:
        return expected(c, form, case, xs)
    count = xs[0].size(0)
    if count == 0:
        ones = [torch.ones(x.shape[depth:], dtype=x.dtype) for x in xs]
        shapes = [tuple(y.shape) for y in expected(c, form, case, ones)]
        return [
            torch.empty((*x.shape[:depth], *s), dtype=x.dtype)
            for x, s in zip(xs, shapes, strict=True)
        ]
    slices = [_loop(c, form, case, [x[i] for x in xs], depth - 1) for i in range(count)]
    return [torch.stack(ys) for ys in zip(*slices, strict=True)]


def check_func(module: str) -> Any:
    """torch.func: vjp, jvp, grad of vmap, and vmap of grad."""
    c, n, rank, report = load(module), dist.get_world_size(), dist.get_rank(), Report()
    for case in list(c.cases(n))[:2]:
        v = variant_of(c, case, torch.float64)
        xs = [smooth_values(s, v.dtype, r) for r, s in enumerate(v.case.shapes)]
        ts = [smooth_values(s, v.dtype, r, salt=1) for r, s in enumerate(v.case.shapes)]
        leaves = [x.clone().requires_grad_() for x in xs]
        ys = expected(c, FUNCTIONAL, v.case, leaves)
        gs = [smooth_values(tuple(y.shape), y.dtype, r, salt=2) for r, y in enumerate(ys)]
        touched = [i for i, y in enumerate(ys) if y.requires_grad]
        want = torch.autograd.grad(
            [ys[i] for i in touched],
            leaves,
            [gs[i] for i in touched],
            allow_unused=True,
            materialize_grads=True,
        )

        def f(x: Tensor, case: Case = v.case) -> Tensor:
            return call(c, FUNCTIONAL, case, [x])[0]

        with report.attempt(f"{v}: vjp"):
            y, pull = torch.func.vjp(f, xs[rank])
            report.expect(f"{v}: value under vjp", values.close(y, ys[rank]))
            report.expect(f"{v}: vjp", values.close(pull(gs[rank])[0], want[rank]))
        with report.attempt(f"{v}: grad"):
            got = torch.func.grad(lambda x: (f(x) * gs[rank]).sum())(xs[rank])  # noqa: B023
            report.expect(f"{v}: grad", values.close(got, want[rank]))
        if not c.spmd_adjoint:
            continue  # one rule for values and another for gradients leaves no jvp to agree with
        with report.attempt(f"{v}: jvp"):
            want_t = torch.func.jvp(
                lambda *x: tuple(c.reference(v.case, list(x))),  # noqa: B023
                tuple(xs),
                tuple(ts),
            )[1]
            y, t = torch.func.jvp(f, (xs[rank],), (ts[rank],))
            report.expect(f"{v}: value under jvp", values.close(y, ys[rank]))
            report.expect(f"{v}: jvp", values.close(t, want_t[rank]))
        with report.attempt(f"{v}: vmap of grad"):
            got = torch.func.vmap(torch.func.grad(lambda x: (f(x) * gs[rank]).sum()))(  # noqa: B023
                torch.stack((xs[rank], xs[rank] * 2))
            )
            report.expect(f"{v}: vmap of grad", values.close(got[0], want[rank]))
    return report.result()


def computation(c: Collective, form: str, case: Case) -> Callable[..., Any]:
    """A pure function around one call: its input is a temporary, its result is used."""
    rank, name = dist.get_rank(), group()
    args, kwargs = case.args[rank], case.kwargs
    op = getattr(torch.ops.c10d_ext, c.stem + form)
    wait_tensor = torch.ops.c10d_ext.wait_tensor

    if form == FUNCTIONAL:

        def functional(x: Tensor) -> Tensor:
            return wait_tensor(op(x * 2, *args, name, **kwargs)) + 1

        return functional
    if form == INPLACE:

        def inplace(x: Tensor) -> Tensor:
            y = x * 2
            op(y, *args, name, **kwargs)
            return wait_tensor(y) + 1

        return inplace
    if form == OUT:

        def out(x: Tensor, out: Tensor) -> Tensor:
            y = torch.empty_like(out)
            op(x * 2, *args, name, out=y, **kwargs)
            return wait_tensor(y) + 1

        return out
    if form == COALESCED:

        def coalesced(*xs: Tensor) -> list[Tensor]:
            ys = op([x * 2 for x in xs], *args, name, **kwargs)
            return [wait_tensor(y) + 1 for y in ys]

        return coalesced

    def coalesced_inplace(*xs: Tensor) -> list[Tensor]:
        ys = [x * 2 for x in xs]
        op(ys, *args, name, **kwargs)
        return [wait_tensor(y) + 1 for y in ys]

    return coalesced_inplace


@dataclass
class Problem:
    """A computation with this rank's input, and what it should give."""

    what: str
    f: Callable[..., Any]
    xs: list[Tensor]
    want: list[Tensor]
    grads: list[Tensor]
    cotangents: list[Tensor]
    start_ops: tuple[str, ...]


def problems(
    c: Collective, form: str, dtype: torch.dtype = torch.float64, salt: int = 0, odd: bool = False
) -> Iterator[Problem]:
    """The cases of a form as problems for tracers."""
    n, rank = dist.get_world_size(), dist.get_rank()
    for cases in _groups(c, form, n, odd=odd):
        vs = [variant_of(c, case, dtype) for case in cases]
        case = vs[0].case
        worlds = [
            [
                smooth_values(s, dtype, r, salt=salt + i).requires_grad_(dtype.is_floating_point)
                for r, s in enumerate(v.case.shapes)
            ]
            for i, v in enumerate(vs)
        ]
        ys = [
            [y + 1 for y in expected(c, form, v.case, [x * 2 for x in xs])]
            for v, xs in zip(vs, worlds, strict=True)
        ]
        gs = [
            [smooth_values(tuple(y.shape), dtype, r, salt=7 + i) for r, y in enumerate(each)]
            for i, each in enumerate(ys)
        ]
        pairs = [
            (y, g)
            for each, cot in zip(ys, gs, strict=True)
            for y, g in zip(each, cot, strict=True)
            if y.requires_grad
        ]
        grads = torch.autograd.grad(
            [y for y, _ in pairs],
            [xs[rank] for xs in worlds],
            [g for _, g in pairs],
            allow_unused=True,
            materialize_grads=True,
        )
        mine = [xs[rank].detach() for xs in worlds]
        want = [each[rank].detach() for each in ys]
        if form == OUT:
            mine.append(torch.empty_like(want[0]))
        yield Problem(
            _together(vs),
            computation(c, form, case),
            mine,
            want,
            list(grads),
            [each[rank] for each in gs],
            tuple(f"c10d_ext.{name}" for name in (c.stem, c.traced_as) if name)
            if c.communicates
            else (),
        )


def _listed(y: Any) -> list[Tensor]:
    return [y] if isinstance(y, Tensor) else list(y)


def check_compiled(module: str, form: str, backend: str, limit: int | None) -> Any:
    """torch.compile(fullgraph=True), static and dynamic shapes, forward and backward.

    Compiling does not communicate, so even ranks compile one and odd ranks the other, taking turns.
    """
    c, rank, report = load(module), dist.get_rank(), Report()
    for turn, problem in enumerate(itertools.islice(problems(c, form), limit)):
        dynamic = backend != "inductor" and (turn + rank) % 2 == 1
        what = f"{problem.what} {backend}{' dynamic' if dynamic else ''}"
        with report.attempt(what):
            torch._dynamo.reset()
            f = torch.compile(problem.f, backend=backend, fullgraph=True, dynamic=dynamic)
            if dynamic:
                for x in problem.xs:
                    for dim, size in enumerate(x.shape):
                        if size > 1:
                            torch._dynamo.maybe_mark_dynamic(x, dim)
            with torch.no_grad():
                _compare(report, f"{what}, without gradients", f(*problem.xs), problem.want)
            if form == OUT:
                continue
            xs = [x.clone().requires_grad_() for x in problem.xs]
            ys = _listed(f(*xs))
            _compare(report, what, ys, problem.want)
            live = [(y, g) for y, g in zip(ys, problem.cotangents, strict=True) if y.requires_grad]
            grads = torch.autograd.grad(
                [y for y, _ in live],
                xs,
                [g for _, g in live],
                allow_unused=True,
                materialize_grads=True,
            )
            _compare(report, f"{what}, gradient", grads, problem.grads)
    return report.result()


def _compare(report: Report, what: str, got: Any, want: list[Tensor]) -> None:
    got = _listed(got)
    report.expect(f"{what}: number of results", len(got) != len(want))
    for y, w in zip(got, want, strict=False):
        report.expect(what, values.close(y, w))


def calls_in(graph: torch.fx.Graph) -> list[str]:
    """The names of the communication ops in a graph, in order."""
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return [name for name in names if "c10d" in name]


def _has_wait_after_start(graph: torch.fx.Graph, start_ops: tuple[str, ...]) -> str:
    if not start_ops:
        return ""
    calls = calls_in(graph)
    starts = [i for i, name in enumerate(calls) if name.startswith(start_ops)]
    waits = [i for i, name in enumerate(calls) if "wait_tensor" in name]
    if starts and waits and starts[0] < waits[-1]:
        return ""
    return f"no {start_ops[0]} followed by wait_tensor in {calls}"


def check_make_fx(module: str, form: str) -> Any:
    """make_fx with real, fake and symbolic tensors records start and wait, and replays."""
    c, report = load(module), Report()
    for problem in itertools.islice(problems(c, form), 3):
        for mode in ("real", "fake", "symbolic"):
            what = f"{problem.what} make_fx {mode}"
            with report.attempt(what):
                traced = make_fx(problem.f, tracing_mode=mode)(*problem.xs)
                report.expect(what, _has_wait_after_start(traced.graph, problem.start_ops))
                _compare(report, what, traced(*problem.xs), problem.want)
    return report.result()


class _Module(torch.nn.Module):
    def __init__(self, f: Callable[..., Any]) -> None:
        super().__init__()
        self.f = f

    def forward(self, *xs: Tensor) -> Any:
        return self.f(*xs)


def check_export(module: str, form: str) -> Any:
    """torch.export, strict and not, static and dynamic: saved, loaded, run, decomposed.

    Exporting does not communicate, so even and odd ranks differ in what is static.
    """
    c, rank, report = load(module), dist.get_rank(), Report()
    problem = next(iter(problems(c, form)))
    for strict in (False, True):
        dynamic = strict ^ (rank % 2 == 1)
        what = f"{problem.what} export {strict=} {dynamic=}"
        with report.attempt(what):
            # Sizes that a reference ties together are inferred by export.
            spec = tuple(
                tuple(torch.export.Dim.AUTO if size > 1 else None for size in x.shape)
                for x in problem.xs
            )
            program = torch.export.export(
                _Module(problem.f),
                tuple(problem.xs),
                strict=strict,
                dynamic_shapes=(spec,) if dynamic else None,
            )
            report.expect(what, _has_wait_after_start(program.graph, problem.start_ops))
            _compare(report, what, program.module()(*problem.xs), problem.want)
            file = io.BytesIO()
            torch.export.save(program, file)
            file.seek(0)
            loaded = torch.export.load(file)
            _compare(report, f"{what}, loaded", loaded.module()(*problem.xs), problem.want)
            if not dynamic:
                continue  # most of a decomposition is torch making its table
            lowered = program.run_decompositions()
            _compare(report, f"{what}, decomposed", lowered.module()(*problem.xs), problem.want)
    return report.result()


def check_errors(module: str) -> Any:
    """Bad calls are refused with the same words eagerly, faked and compiled; the group lives on."""
    c, n, rank, report = load(module), dist.get_world_size(), dist.get_rank(), Report()
    ops, name = torch.ops.c10d_ext, group()
    tail = f"(rank {rank}/{n}, group '{name}')"
    for bad in c.bad_calls(n, rank):
        what = f"refuses with {bad.text!r}"
        text = _error_of(lambda: bad.call(ops, name), bad.error)  # noqa: B023
        report.expect(f"{what}, eager", _lacks(text, bad.text))
        if "known:" not in text and bad.error in (ValueError, TypeError):
            report.expect(f"{what}, says where", _lacks(text, tail))
        report.expect(f"{what}, names its op", _lacks(text.split(": ")[0], c.traced_as or c.stem))
        report.expect(f"{what}, works afterwards", _unusable())
        with FakeTensorMode():
            fake = _error_of(lambda: bad.call(ops, name), bad.error)  # noqa: B023
        report.expect(f"{what}, fake", _lacks(fake, bad.text))
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda: bad.call(ops, name),  # noqa: B023
            backend="aot_eager",
            fullgraph=True,
        )
        report.expect(f"{what}, compiled", _lacks(_error_of(compiled, Exception), bad.text))
        report.expect(f"{what}, works after compiling", _unusable())
    report.expect("there are bad calls to refuse", report.checked == 0)
    return report.result()


def _error_of(call: Callable[[], Any], error: type[Exception]) -> str:
    try:
        call()
    except error as e:
        return str(e)
    except Exception as e:
        return f"{type(e).__name__} instead of {error.__name__}: {e}"
    return "nothing raised"


def _lacks(text: str, part: str) -> str:
    return "" if part in text else f"{part!r} is not in {text!r}"


def _unusable() -> str:
    """Whether the group fails to reduce; the empty string if it works."""
    rank, n = dist.get_rank(), dist.get_world_size()
    y = wait(torch.ops.c10d_ext.all_reduce(torch.tensor([rank + 1, 7 * rank]), "sum", group()))
    want = torch.tensor([n * (n + 1) // 2, 7 * n * (n - 1) // 2])
    return values.mismatch(y, want)


# --- in the parent -------------------------------------------------------------------------------


def verify(
    world_size: int,
    check: Callable[..., Any],
    *args: Any,
    backend: str = "gloo",
    deadline: float = 100,
) -> None:
    """Run a check on every rank and fail with every failing combination of every rank."""
    results = run(world_size, check, *args, backend=backend, deadline=deadline)
    ranks_by_text: dict[str, list[int]] = {}
    for rank, (texts, _, _) in enumerate(results):
        for text in texts:
            ranks_by_text.setdefault(text, []).append(rank)
    failures = [f"ranks {ranks}: {text}" for text, ranks in ranks_by_text.items()]
    digests = [result[1] for result in results]
    failures += [
        f"ranks differ in their bits: {what}"
        for what, digest in digests[0].items()
        if any(each.get(what) != digest for each in digests)
    ]
    shown = "\n".join(text[:1000] for text in failures[:20])
    assert not failures, f"{len(failures)} failures at world size {world_size}\n{shown}"
    assert all(count > 1 for _, _, count in results), "nothing was checked"


def places(gloo: Sequence[int], shm: Sequence[int]) -> Any:
    """The backends and world sizes that a test runs at."""
    pairs = [*(("gloo", n) for n in gloo), *(("shm", n) for n in shm)]
    return pytest.mark.parametrize(("backend", "size"), pairs)


class Contract:
    """Base of a collective's test class; the module holds the Collective as COLLECTIVE."""

    @property
    def module(self) -> str:
        return type(self).__module__

    def pytest_generate_tests(self, metafunc: Any) -> None:
        collective = importlib.import_module(metafunc.module.__name__).COLLECTIVE
        if "form" in metafunc.fixturenames:
            forms = [
                f for f in collective.forms if f in self.applicable(metafunc.function.__name__)
            ]
            metafunc.parametrize("form", forms, ids=[collective.stem + form for form in forms])

    @staticmethod
    def applicable(test: str) -> Sequence[str]:
        everything = (FUNCTIONAL, INPLACE, OUT, COALESCED, COALESCED_INPLACE)
        if test in ("test_gradients", "test_vmap"):
            return [form for form in everything if form != OUT]
        return everything

    @places(gloo=(1, 2, 3, 4), shm=(2, 4))
    def test_values(self, form: str, backend: str, size: int) -> None:
        verify(size, check_values, self.module, form, backend=backend)

    @pytest.mark.parametrize("backend", ("gloo", "shm"))
    def test_values_of_one_rank_through_the_backend(self, form: str, backend: str) -> None:
        verify(1, check_values_of_one_rank, self.module, form, backend=backend)

    @places(gloo=(3,), shm=(2,))
    def test_layouts(self, form: str, backend: str, size: int) -> None:
        verify(size, check_layouts, self.module, form, backend=backend)

    @pytest.mark.parametrize("size", (3,))
    def test_fake_equals_real(self, form: str, size: int) -> None:
        verify(size, check_fake, self.module, form)

    @pytest.mark.parametrize("size", (2,))
    def test_opcheck(self, form: str, size: int) -> None:
        verify(size, check_opcheck, self.module, form)

    @places(gloo=(1, 2, 3), shm=(2, 4))
    def test_gradients(self, form: str, backend: str, size: int) -> None:
        verify(size, check_gradients, self.module, form, backend=backend)

    @pytest.mark.parametrize("size", (1, 2, 3))
    def test_vmap(self, form: str, size: int) -> None:
        verify(size, check_vmap, self.module, form)

    @pytest.mark.parametrize("size", (1, 3))
    def test_func_transforms(self, size: int) -> None:
        verify(size, check_func, self.module)

    @places(gloo=(2,), shm=(1,))
    def test_aot_eager(self, form: str, backend: str, size: int) -> None:
        limit = None if backend == "gloo" else 1  # tracing does not see the backend
        verify(size, check_compiled, self.module, form, "aot_eager", limit, backend=backend)

    def test_inductor(self, form: str) -> None:
        check = (check_compiled, self.module, form, "inductor", 1)
        verify(2, *check, backend="shm", deadline=200)

    def test_make_fx(self, form: str) -> None:
        verify(2, check_make_fx, self.module, form)

    def test_export(self, form: str) -> None:
        verify(2, check_export, self.module, form)

    @pytest.mark.parametrize("size", (1, 2))
    def test_errors(self, size: int) -> None:
        verify(size, check_errors, self.module)
