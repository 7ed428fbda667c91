"""Every collective of torch.distributed on the shm backend, against references in one process.

Where gloo does the same thing right it passes the same checks, which shows that they ask of shm
what torch means.

One file, for `test_checked.py` and `tests/hosts/` hold other backends to its functions, by name.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import torch_c10d_ext.distributed as ours
from tests.backends.dist_ops import (
    BY_NAME,
    DIST_OPS,
    REDUCE_OPS,
    DistOp,
    How,
    Shape,
    Tensors,
    all_gather_single,
    inputs_of,
    reduce_scatter_single,
)
from tests.contract import Report, gaps, verify
from tests.harness import needs_memory, run, values
from tests.harness.worker import FALLBACK
from torch_c10d_ext import _C
from torch_c10d_ext.errors import CollectiveMismatch, CollectiveTimeout, GroupClosed

SIZES = (1, 2, 3, 4)
MANY = 8  # more than cores
LONG = pytest.mark.long
CPU = torch.device("cpu")

everywhere = pytest.mark.parametrize("size", [*SIZES, pytest.param(MANY, marks=LONG)])
with_gloo = pytest.mark.parametrize(
    ("backend", "size"),
    [
        *(("shm", n) for n in SIZES),
        pytest.param("shm", MANY, marks=LONG),
        ("gloo", 2),
        ("gloo", 4),
    ],
)

SHAPES: tuple[Shape, ...] = ((3, 4), (0,), (1,), (5,), (3, 0, 2), (2, 3, 4), (1, 1, 1), ())


def gloo_can(
    collective: DistOp, dtype: torch.dtype = torch.float32, how: How | None = None
) -> bool:
    """What gloo does right, on contiguous tensors."""
    # reduce leaves partial sums on the other ranks.
    wrong = {
        "reduce",
        "all_gather uneven",
        "reduce_scatter uneven",
        "all_to_all",
        "all_to_all uneven",
    }
    if collective.name in wrong or "stacked" in collective.name or "manager" in collective.name:
        return False
    if how is not None and collective.reduces and how.reduce_op not in ("sum", "min", "max"):
        return False
    return dtype in (torch.float32, torch.float64, torch.uint8, torch.int32, torch.int64)


def call(collective: DistOp, how: How, xs: Tensors, outs: Tensors) -> None:
    work = collective.call(xs, outs, how)
    for each in work if isinstance(work, list) else [work]:
        if each is not None:
            each.wait()


def fresh(collective: DistOp, xs: Tensors, shapes: list[Shape], dtype: torch.dtype) -> Tensors:
    """Outputs for a call: the inputs of in-place collectives, patterned memory otherwise."""
    if collective.inplace:
        return [x.clone() for x in xs]
    return [values.empty_like(shape, dtype, "contiguous") for shape in shapes]


def check(
    report: Report, what: str, collective: DistOp, shape: Shape, dtype: torch.dtype, how: How
) -> None:
    """One call on contiguous tensors."""
    n, rank = dist.get_world_size(how.group), dist.get_rank(how.group)
    with report.attempt(what):
        world = inputs_of(collective, n, shape, dtype, how)
        want = collective.reference(world, how)[rank]
        outs = fresh(collective, world[rank], collective.outputs(n, rank, shape, how.root), dtype)
        xs = [x.clone() for x in world[rank]]
        call(collective, how, xs, outs)
        # Among eight ranks the bits of the values do not fit the accumulator any more.
        rounds = dtype in (*values.FLOATS, *values.COMPLEX) and collective.reduces
        exact = not rounds or (n <= 4 and values.exact(dtype, how.reduce_op, n))
        for part, (out, w) in enumerate(zip(outs, want, strict=True)):
            wrong = values.mismatch(out, w, bitwise=exact, ulps=4)
            report.expect(f"{what}, part {part}", wrong)
            if collective.replicated:
                report.same_everywhere(f"{what}, part {part}", out)
        for x, given in zip(xs, world[rank], strict=True):
            report.expect(f"{what}: input changed", values.raw(x) != values.raw(given))


def kinds(dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    """Reduce ops, with factors, that dist.* lets through for `dtype`."""
    for op in values.meanings(dtype):
        if dtype in values.COMPLEX and not dist.distributed_c10d.supports_complex(
            How(op, 1.0).op if op == "premul_sum" else How(op).op
        ):
            continue
        for factor in values.factors(dtype) if op == "premul_sum" else (None,):
            if not isinstance(factor, complex):
                yield op, factor


def reduces(backend: str) -> Any:
    n, report = dist.get_world_size(), Report()
    turn = itertools.count()
    for collective, dtype in itertools.product(DIST_OPS, values.DTYPES):
        if not collective.reduces:
            continue
        for op, factor in kinds(dtype):
            t = next(turn)
            how = How(op, factor, root=t % n, async_op=t % 2 == 0)
            if backend == "gloo" and not gloo_can(collective, dtype, how):
                continue
            if n == 8 and t % 5:
                continue
            check(
                report,
                f"{collective} {dtype} {op} {factor} root {how.root}",
                collective,
                (7, 3),
                dtype,
                how,
            )
    return report.result()


@with_gloo
def test_reduces_every_dtype_with_every_op(backend: str, size: int) -> None:
    verify(size, reduces, backend, backend=backend)


def moves(backend: str) -> Any:
    n, report = dist.get_world_size(), Report()
    turn = itertools.count()
    for collective, dtype in itertools.product(DIST_OPS, values.DTYPES):
        t = next(turn)
        how = How(root=t % n, async_op=t % 2 == 0)
        if not collective.reduces and (backend == "shm" or gloo_can(collective, dtype)):
            check(report, f"{collective} {dtype} root {how.root}", collective, (7, 3), dtype, how)
    return report.result()


@with_gloo
def test_moves_every_dtype(backend: str, size: int) -> None:
    verify(size, moves, backend, backend=backend)


LESS_THAN_A_BYTE = (torch.int1, torch.int7, torch.uint1, torch.uint4)


def moves_less_than_bytes() -> Any:
    """Integers of 1 to 7 bits, in a byte each: torch has no kernel that copies them."""
    n, rank, report = dist.get_world_size(), dist.get_rank(), Report()

    def of(sender: int, receiver: int = 0, count: int = 3) -> Tensor:
        values = torch.arange(2 * count, dtype=torch.uint8) + 16 * sender + 64 * receiver
        return values[::2].view(dtype)

    def room(count: int = 3) -> Tensor:
        return torch.zeros(count, dtype=torch.uint8).view(dtype)

    def expect(what: str, got: Tensors, want: Tensors) -> None:
        got, want = ([x.view(torch.uint8) for x in xs] for xs in (got, want))
        same = len(got) == len(want) and all(map(torch.equal, got, want))
        report.expect(f"{dtype} {api.__name__}.{what}", "" if same else f"{got}, not {want}")

    whole, last = range(n), n - 1
    for dtype, api in itertools.product(LESS_THAN_A_BYTE, (dist, ours)):
        with report.attempt(f"{dtype} {api.__name__}"):
            mine, gathered = of(rank), [of(r) for r in whole]
            outs = [room() for _ in whole]
            api.all_gather(outs, mine)
            expect("all_gather", outs, gathered)
            out = room(3 * n)
            all_gather_single(out, mine.view(torch.uint8).contiguous().view(dtype), api=api)
            expect("all_gather_into_tensor", out.view(n, 3).unbind(), gathered)
            uneven = [room(r + 1) for r in whole]
            api.all_gather(uneven, of(rank, count=rank + 1))
            expect("all_gather uneven", uneven, [of(r, count=r + 1) for r in whole])
            outs = [room() for _ in whole]
            api.gather(mine, outs if rank == last else None, dst=last)
            expect("gather", outs, gathered if rank == last else [room() for _ in whole])
            out = room()
            api.scatter(out, [of(last, r) for r in whole] if rank == last else None, src=last)
            expect("scatter", [out], [of(last, rank)])
            outs = [room() for _ in whole]
            api.all_to_all(outs, [of(rank, r) for r in whole])
            expect("all_to_all", outs, [of(r, rank) for r in whole])
            flat = torch.cat([of(rank, r).view(torch.uint8) for r in whole]).view(dtype)
            out = room(3 * n)
            api.all_to_all_single(out, flat)
            expect("all_to_all_single", out.view(n, 3).unbind(), [of(r, rank) for r in whole])
            out = of(rank)
            api.broadcast(out, src=last)
            expect("broadcast", [out], [of(last)])
            if n > 1 and rank < 2:
                out = room()
                messages = [api.isend(mine, 1 - rank), api.irecv(out, 1 - rank)]
                for message in messages:
                    message.wait()
                expect("isend", [out], [of(1 - rank)])
    return report.result()


@pytest.mark.parametrize("size", (1, 2, 3))
def test_moves_integers_of_less_than_a_byte(size: int) -> None:
    verify(size, moves_less_than_bytes, backend="shm")


def refuses() -> Any:
    """What has no meaning is refused on every rank, and the group works on."""
    report = Report()
    pairs = itertools.product(values.DTYPES, values.REDUCE_OPS)
    for dtype, op in ((d, o) for d, o in pairs if o not in values.meanings(d)):
        x = torch.ones(3).to(dtype)
        factor = 2.0 if op == "premul_sum" else None
        try:
            dist.all_reduce(x, How(op, factor).op)
            report.expect(f"{op} of {dtype}", "went through")
        except (TypeError, ValueError, RuntimeError) as error:
            named = op.replace("_", "") in str(error).lower().replace("_", "")
            report.expect(f"{op} of {dtype} is named", "" if named else str(error))
    x = torch.ones(3)
    dist.all_reduce(x)
    report.expect("works afterwards", values.mismatch(x, torch.ones(3) * dist.get_world_size()))
    return report.result()


@pytest.mark.parametrize("size", (1, 2))
def test_refuses_ops_without_a_meaning(size: int) -> None:
    verify(size, refuses, backend="shm")


INPUT_LAYOUTS = ("contiguous", "transposed", "strided", "offset", "expanded", "neg")
OUTPUT_LAYOUTS = ("strided", "offset", "contiguous", "transposed")


def _layout(names: tuple[str, ...], index: int, shape: Shape, dtype: torch.dtype) -> str:
    possible = [name for name in names if name in values.layouts(dtype, shape)]
    return possible[index % len(possible)]


def lays_out(collectives: Sequence[DistOp] = DIST_OPS, api: Any = dist) -> Any:
    """Shapes and strides of all kinds, different on the ranks and between inputs and outputs."""
    n, rank, report = dist.get_world_size(), dist.get_rank(), Report()
    turns = itertools.count()
    for collective, shape, _ in itertools.product(collectives, SHAPES, range(4 if n < 8 else 1)):
        if not shape and not collective.scalars:
            continue
        turn = next(turns)
        dtype = (torch.float32, torch.complex64, torch.bfloat16)[turn % 3]
        how = How(root=turn % n, async_op=turn % 2 == 0, api=api)
        what = f"{collective} shape {shape} {dtype} turn {turn}"
        with report.attempt(what):
            world = [
                [
                    values.lay_out(
                        x,
                        _layout(
                            OUTPUT_LAYOUTS if collective.inplace else INPUT_LAYOUTS,
                            turn + r + i,
                            tuple(x.shape),
                            dtype,
                        ),
                    )
                    for i, x in enumerate(xs)
                ]
                for r, xs in enumerate(inputs_of(collective, n, shape, dtype, how))
            ]
            # The reference works on the values alone.
            plain = [[x.resolve_neg().clone() for x in xs] for xs in world]
            want = collective.reference(plain, how)[rank]
            outs = [
                values.empty_like(s, dtype, _layout(OUTPUT_LAYOUTS, turn + rank + i, s, dtype))
                for i, s in enumerate(collective.outputs(n, rank, shape, how.root))
            ]
            xs = world[rank]
            if collective.inplace:
                outs = xs
            around = [gaps(out) for out in outs]
            before = [values.memory(x) for x in xs]
            call(collective, how, xs, outs)
            for i, (out, w) in enumerate(zip(outs, want, strict=True)):
                where = f"{what}, part {i} {tuple(out.shape)} strides {out.stride()}"
                report.expect(where, values.mismatch(out, w, bitwise=n <= 4, ulps=4))
                report.expect(f"{where}: wrote between elements", gaps(out) != around[i])
            if not collective.inplace:
                report.expect(f"{what}: input changed", [values.memory(x) for x in xs] != before)
    return report.result()


@everywhere
def test_takes_any_shape_and_strides(size: int) -> None:
    verify(size, lays_out, backend="shm")


COUNTS = (
    *(1, 2, 3, 5, 8, 15, 31, 33, 63, 65, 127, 129, 255, 257, 511, 513, 1001, 1023, 1025),
    *(2047, 4095, 4097, 8191, 8193, 16383, 16385, 32769, 65535, 65537, 131071, 131073, 262145),
    *(524_289, 1_048_577, 2_097_169, 3_333_333, 8_388_621),
)
LARGEST = COUNTS[-1] + 100_000


def sweeps() -> Any:
    """Every size range of every algorithm: odd counts, elements that differ everywhere."""
    n, rank, report = dist.get_world_size(), dist.get_rank(), Report()
    # Small integers: sums are exact in every dtype and all ranks' parts are slices of this.
    base = torch.from_numpy(np.random.default_rng(9).integers(0, 13, LARGEST, dtype="uint8"))
    collectives = [v for v in DIST_OPS if "uneven" not in v.name and "stacked" not in v.name]
    for collective, count in itertools.product(collectives, COUNTS):
        how = How(root=count % n, async_op=count % 2 == 0)
        for dtype in (torch.uint8, torch.float32, torch.bfloat16):
            # `count` is the most that a rank passes or gets.
            most = max(
                sum(s[0] for s in shapes(n, how.root, (1,), how.root))
                for shapes in (collective.inputs, collective.outputs)
            )
            each = max(1, count // most)
            if (count > (1 << 20) and dtype != torch.uint8) or (n > 4 and count > 1 << 18):
                continue
            what = f"{collective} {dtype} {each} elements each"
            with report.attempt(what):
                world = [
                    [
                        base[1009 * r + 77 * i : 1009 * r + 77 * i + s[0]].to(dtype)
                        for i, s in enumerate(collective.inputs(n, r, (each,), how.root))
                    ]
                    for r in range(n)
                ]
                shapes = collective.outputs(n, rank, (each,), how.root)
                xs = world[rank]
                outs = (
                    [x.clone() for x in xs]
                    if collective.inplace
                    else [torch.full(s, 99).to(dtype) for s in shapes]
                )
                want = collective.reference(world, how)[rank]
                call(collective, how, xs, outs)
                for out, w in zip(outs, want, strict=True):
                    report.expect(what, "" if torch.equal(out, w) else _differs(out, w))
    return report.result()


def _differs(out: Tensor, want: Tensor) -> str:
    wrong = (out != want).nonzero().reshape(-1)
    return f"{len(wrong)} of {out.numel()} elements, first {wrong[:3].tolist()}, last {wrong[-1]}"


@everywhere
def test_is_right_at_every_size(size: int) -> None:
    verify(size, sweeps, backend="shm")


HUGE = (1 << 31) + 17


def _passes_two_to_the_31() -> None:
    rank = dist.get_rank()
    marks = torch.tensor([0, 1, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, HUGE - 1])
    x = torch.full((HUGE,), rank + 1, dtype=torch.uint8)
    x[marks] = torch.arange(10, 16, dtype=torch.uint8) * (rank + 1)
    dist.all_reduce(x)
    assert torch.equal(x[marks], torch.arange(10, 16, dtype=torch.uint8) * 3)
    x[marks] = 3
    assert x.min() == 3 and x.max() == 3
    x[marks] = torch.arange(10, 16, dtype=torch.uint8) * (rank + 1)
    dist.broadcast(x, 1)
    assert torch.equal(x[marks], torch.arange(10, 16, dtype=torch.uint8) * 2)


@pytest.mark.long
def test_more_than_two_to_the_31_elements() -> None:
    needs_memory(2.5 * HUGE)
    run(2, _passes_two_to_the_31, backend="shm")


# --- point to point ------------------------------------------------------------------------------


def _message(source: int, destination: int, tag: int, count: int = 5) -> Tensor:
    return torch.arange(count, dtype=torch.float32) + 1000 * source + 100 * destination + 10 * tag


def _sends_and_receives() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    there, here = (rank + 1) % n, (rank - 1) % n

    # Blocking, in turn.
    got = torch.zeros(5)
    if rank % 2 == 0:
        dist.send(_message(rank, there, 0), there)
        source = dist.recv(got, here)
    else:
        source = dist.recv(got, here)
        dist.send(_message(rank, there, 0), there)
    assert source == here
    assert torch.equal(got, _message(here, rank, 0))

    # Tags choose the message, whatever the order of the calls.
    sent = [dist.isend(_message(rank, there, tag), there, tag=tag) for tag in (1, 2, 3)]
    outs = {tag: torch.zeros(5) for tag in (3, 1, 2)}
    received = [dist.irecv(out, here, tag=tag) for tag, out in outs.items()]
    for work in reversed(sent + received):
        work.wait()
    for tag, out in outs.items():
        assert torch.equal(out, _message(here, rank, tag)), tag

    # Messages of one tag arrive in the order they were sent in.
    sent = [dist.isend(_message(rank, there, i), there, tag=7) for i in range(20)]
    for i in range(20):
        dist.recv(got, here, tag=7)
        assert torch.equal(got, _message(here, rank, i)), i
    for work in sent:
        work.wait()

    # Received before sent, all sizes, in both directions at once.
    for count in (0, 1, 3, 1000, 70_001, 1_500_001):
        out = torch.full((count,), -1.0)
        receiving = dist.irecv(out, here, tag=count)
        sending = dist.isend(_message(rank, there, 0, count), there, tag=count)
        receiving.wait()
        sending.wait()
        assert torch.equal(out, _message(here, rank, 0, count)), count
        assert receiving.is_completed() and sending.is_completed()
    assert receiving.source_rank() == here

    # Beside collectives, whichever was called first.
    out, total = torch.zeros(5), torch.ones(1)
    receiving = dist.irecv(out, here, tag=4)
    dist.all_reduce(total)
    dist.send(_message(rank, there, 4), there, tag=4)
    receiving.wait()
    assert torch.equal(out, _message(here, rank, 4)) and total == n

    # What is sent may be overwritten once the send is over.
    for count in (5, 300_000):
        out = torch.zeros(count)
        receiving = dist.irecv(out, here, tag=5)
        x = _message(rank, there, 5, count)
        dist.isend(x, there, tag=5).wait()
        x.fill_(-1)
        receiving.wait()
        assert torch.equal(out, _message(here, rank, 5, count))


def _receives_from_anyone() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    if rank == 0:
        sources: list[int] = []
        for _ in range(2 * (n - 1)):
            got = torch.zeros(5)
            source = dist.recv(got)
            assert torch.equal(got, _message(source, 0, sources.count(source)))
            sources.append(source)
        assert sorted(sources) == sorted([*range(1, n)] * 2)
        got = torch.zeros(5)
        work = dist.irecv(got, tag=9)
        dist.barrier()
        work.wait()
        assert work.source_rank() == n - 1
        assert torch.equal(got, _message(n - 1, 0, 9))
    else:
        dist.send(_message(rank, 0, 0), 0)
        dist.send(_message(rank, 0, 1), 0)
        dist.barrier()
        if rank == n - 1:
            dist.send(_message(rank, 0, 9), 0, tag=9)


@pytest.mark.parametrize(
    ("backend", "size"),
    [*(("shm", n) for n in SIZES[1:]), pytest.param("shm", MANY, marks=LONG), ("gloo", 2)],
)
def test_sends_and_receives(backend: str, size: int) -> None:
    if backend == "shm":  # gloo ends a send before it is received only for small messages
        run(size, _sends_and_receives, backend=backend)
    run(size, _receives_from_anyone, backend=backend)


# --- works, futures, barriers --------------------------------------------------------------------


def _many_in_flight() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    total = n * (n + 1) / 2
    for count in (2, 300_000):
        works, wanted = [], []
        for i in range(12):
            x = torch.full((count,), float(rank + 1 + i))
            works.append((dist.all_reduce(x, async_op=True), x))
            wanted.append(total + n * i)
            y = torch.full((count,), float(rank + i))
            works.append((dist.broadcast(y, i % n, async_op=True), y))
            wanted.append(float(i % n + i))
        for (work, x), want in reversed(list(zip(works, wanted, strict=True))):
            assert work.wait()
            assert work.is_completed()
            assert torch.equal(x, torch.full((count,), want))
            assert work.wait()  # once more does nothing


def _completes_without_a_wait() -> None:
    x = torch.ones(300_000)
    work = dist.all_reduce(x, async_op=True)
    ends = time.monotonic() + 20
    while not work.is_completed():
        assert time.monotonic() < ends
        time.sleep(0.001)
    assert torch.equal(x, torch.full_like(x, dist.get_world_size()))
    y = torch.ones(5)
    dist.all_reduce(y, async_op=True)  # the work is dropped
    dist.barrier()
    assert torch.equal(y, torch.full_like(y, dist.get_world_size()))


def _futures() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    for count in (3, 200_000):
        x = torch.full((count,), rank + 1.0)
        future = dist.all_reduce(x, async_op=True).get_future()
        then = future.then(lambda f: f.value()[0] / n)
        assert isinstance(future, _C.Future) and isinstance(then, _C.Future)
        assert torch.equal(then.wait(), torch.full((count,), (n + 1) / 2))
        (same,) = future.wait()
        assert same.data_ptr() == x.data_ptr()
        assert future.done()
        ((both,), _) = torch.futures.wait_all([future, then])
        assert both.data_ptr() == x.data_ptr()
        failing = future.then(lambda f: f.no_such)
        with pytest.raises(RuntimeError, match="running the callback: AttributeError: .*no_such"):
            failing.wait()
        for collective in (v for v in DIST_OPS if " in a" not in v.name and "batch" not in v.name):
            if collective.name == "all_reduce_coalesced":
                continue  # returns a future
            how = How(async_op=True, root=n - 1)
            xs = inputs_of(collective, n, (5,), torch.float32, how)
            outs = fresh(
                collective, xs[rank], collective.outputs(n, rank, (5,), how.root), torch.float32
            )
            work = collective.call(xs[rank], outs, how)
            arrives = work.get_future()
            assert isinstance(arrives, _C.Future), collective
            arrives.wait()
            for out, want in zip(outs, collective.reference(xs, how)[rank], strict=True):
                assert not (wrong := values.mismatch(out, want, ulps=4)), f"{collective}: {wrong}"
            work.wait()


def _reduced_later(turn: int, late: float = 0.0) -> torch.futures.Future:
    """The future of a sum, which the ranks enter `late` seconds apart, each turn another last."""
    n, rank = dist.get_world_size(), dist.get_rank()
    time.sleep(late * ((rank + turn) % n))
    return dist.all_reduce(torch.full((4,), rank + 1.0), async_op=True).get_future()


def _callbacks_block() -> None:
    """Until other operations are done, in the thread that would do them."""
    n = dist.get_world_size()
    total = torch.full((4,), n * (n + 1) / 2)

    def chain(turn: int, depth: int) -> Tensor:
        if depth == 0:
            return total
        (value,) = _reduced_later(turn, 0.01).wait()
        assert torch.equal(value, total)
        return _reduced_later(turn).then(lambda _: chain(turn + 1, depth - 1)).wait()

    for turn in range(2 * n):
        first = dist.all_reduce(torch.ones(3), async_op=True)
        result = first.get_future().then(lambda _, turn=turn: chain(turn, 3))
        if turn % 2:
            # Now this thread, too, may be the one that the callback runs on.
            first.wait()
        assert torch.equal(result.wait(), total)
    for turn in range(2 * n):
        first = _reduced_later(turn, 0.01)
        second = _reduced_later(turn, 0.01)  # when all but the last have asked for it
        result = first.then(lambda _, second=second: second.wait()[0])
        assert torch.equal(result.wait(), total)


def _durations() -> None:
    x = torch.ones(1 << 20)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert 0 < work._get_duration() < 20_000  # ms


def _barriers() -> None:
    for turn in range(6):
        if dist.get_rank() == turn % dist.get_world_size():
            time.sleep(0.02)
        entered = time.clock_gettime(time.CLOCK_MONOTONIC)
        if turn % 2:
            dist.barrier()
        else:
            dist.barrier(async_op=True).wait()
        left = time.clock_gettime(time.CLOCK_MONOTONIC)
        times: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(times, (entered, left))
        assert max(e for e, _ in times) <= min(leaving for _, leaving in times)
    dist.group.WORLD.monitored_barrier(dt.timedelta(seconds=20))


def _sequence_numbers() -> None:
    # Of the backend: a ProcessGroup asks torch's own backends alone.
    backend = dist.group.WORLD._get_backend(CPU)
    before = backend._get_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    dist.barrier()
    after = backend._get_sequence_number_for_group()
    numbers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, after)
    assert after - before == 4
    assert len(set(numbers)) == 1, numbers


@everywhere
def test_works_futures_and_barriers(size: int) -> None:
    for fn in (
        _many_in_flight,
        _completes_without_a_wait,
        _futures,
        _callbacks_block,
        _durations,
        _barriers,
        _sequence_numbers,
    ):
        run(size, fn, backend="shm")


def _patient_threads() -> None:
    """Who carries on with an asynchronous call does not take the core from who made it."""
    rank = dist.get_rank()
    x = torch.ones(3_000_000)
    work = dist.all_reduce(x, async_op=True)
    arrived = work.get_future()  # which needs a thread
    arrived.wait()
    policies = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # another thread may end
            if (task / "comm").read_text().strip() == "c10d_ext_shm":
                policies.add(os.sched_getscheduler(int(task.name)))
    assert policies == {os.SCHED_BATCH}, (rank, policies)
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_progress_threads_wait_for_their_turn() -> None:
    run(2, _patient_threads, backend="shm")


def _spans() -> None:
    """A span per call, from when the work begins; a call queued behind another begins after it."""
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.ones(300_000)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        if rank:
            time.sleep(0.05)
        works = [dist.all_reduce(x, async_op=True), dist.broadcast(x, 0, async_op=True)]
        for work in works:
            work.wait()
        dist.barrier()
        all_gather_single(torch.empty(2 * n), torch.ones(2))
        reduce_scatter_single(torch.empty(2), torch.ones(2 * n))
        if n > 1:
            (dist.send if rank % 2 else dist.recv)(torch.ones(3), rank ^ 1)
    spans = {e.name: e.time_range for e in prof.events() if e.name.startswith("shm:")}
    wanted = {"all_reduce", "broadcast", "barrier", "all_gather", "reduce_scatter"}
    for name in wanted | ({"send" if rank % 2 else "recv"} if n > 1 else set()):
        assert any(name in span for span in spans), (name, list(spans))
    first = next(r for name, r in spans.items() if "all_reduce" in name)
    second = next(r for name, r in spans.items() if "broadcast" in name)
    if n > 1 and rank == 0:  # which was there 50 ms before the others
        assert first.end - first.start > 30_000  # us
        assert second.start - first.start > 30_000


@pytest.mark.parametrize("size", (1, 2, 4))
def test_profiler_spans(size: int) -> None:
    run(size, _spans, backend="shm")


# --- sparse --------------------------------------------------------------------------------------


def _sparse(rank: int, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    if kind == "empty":
        return torch.sparse_coo_tensor(size=(5, 4), check_invariants=True)
    count = {"different": rank + 1, "many": 70_000 + rank}.get(kind, 3)
    high = 300 if kind == "many" else 4
    at = torch.randint(0, high, (2, count), generator=generator)
    shape: tuple[int, ...] = (count, 3) if kind == "hybrid" else (count,)
    given = torch.arange(float(np.prod(shape))).reshape(shape) % 1000 + 10 * rank
    return torch.sparse_coo_tensor(at, given, (high + 1, high, *shape[1:]), check_invariants=True)


def _sparse_sums() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    for kind in ("same count", "different", "hybrid", "empty", "many"):
        x = _sparse(rank, kind)
        dist.all_reduce(x)
        want = torch.stack([_sparse(r, kind).to_dense() for r in range(n)]).sum(0)
        assert x.is_sparse
        assert torch.equal(x.to_dense(), want), kind


COMPLEX = (torch.complex64, torch.complex128)
ADDED_AS_OTHERS = (
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex32),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)


def _sparse_of_every_dtype(dtypes: tuple[torch.dtype, ...]) -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    for dtype, op, kind in itertools.product(dtypes, ("sum", "avg"), ("different", "hybrid")):
        if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
            continue
        unit = 1 - 2j if dtype.is_complex else 1
        x = (_sparse(rank, kind) * unit).to(dtype)
        # Of complex values torch's own reduces a copy.
        (ours if dtype.is_complex else dist).all_reduce(x, REDUCE_OPS[op])
        assert x.dtype == dtype
        want = torch.stack([_sparse(r, kind).to_dense() for r in range(n)]).sum(0) * unit
        given = x.to_dense().to(torch.complex128 if dtype.is_complex else torch.float64)
        want = (want / n if op == "avg" else want).to(given.dtype)
        torch.testing.assert_close(given, want, rtol=0.01, atol=0.01)
    # Those that torch itself does not add up, and indices that come twice.
    for dtype in ADDED_AS_OTHERS:
        x = torch.sparse_coo_tensor(
            torch.tensor([[0, 2, 2]]), torch.ones(3).to(dtype), (4,), check_invariants=True
        )
        (ours if dtype.is_complex else dist).all_reduce(x)
        assert (x.dtype, x._indices().tolist()) == (dtype, [[0, 2]])
        assert x._values().to(torch.complex64).tolist() == [n, 2 * n], x
    # Of no sparse, or no dense, dimension that has room.
    for shape, sparse_dims in (((3,), 0), ((0, 3), 1), ((3, 0), 1), ((), 0)):
        ones = torch.ones(shape)
        entries = ones.to_sparse(1) if sparse_dims else None
        at = entries.indices() if entries is not None else torch.empty(0, 1, dtype=torch.int64)
        values = entries.values() if entries is not None else ones[None]
        x = torch.sparse_coo_tensor(at, values, shape, check_invariants=True)
        dist.all_reduce(x)
        assert torch.equal(x.to_dense(), torch.full(shape, float(n))), (shape, sparse_dims)


@pytest.mark.parametrize("backend", ["shm", FALLBACK])
@everywhere
def test_reduces_sparse_tensors_of_every_dtype(size: int, backend: str) -> None:
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int16)
    run(size, _sparse_of_every_dtype, (*dtypes, *COMPLEX), backend=backend)


def _sparse_in_flight(keys: str) -> None:
    """The call waits for nobody; what it reads and writes is in the order of calls."""
    n, rank = dist.get_world_size(), dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    x = torch.full((4, 3), rank + 1.0).to_sparse(1)
    if rank == n - 1 and n > 1:
        store.wait([f"{keys}{r}" for r in range(n - 1)], dt.timedelta(seconds=30))
    y = torch.ones(2)
    works = []
    for _ in range(3):
        works += [dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True)]
    store.set(f"{keys}{rank}", "called")
    for work in works:
        work.wait()
    assert x.to_dense().eq(n * (n + 1) / 2 * n**2).all(), x
    assert y.eq(n**3).all(), y


@pytest.mark.parametrize("backend", ["shm", FALLBACK])
@everywhere
def test_sparse_tensors_in_flight(size: int, backend: str) -> None:
    run(size, _sparse_in_flight, f"tests/sparse/{backend}", backend=backend)


@with_gloo
def test_reduces_sparse_tensors(backend: str, size: int) -> None:
    run(size, _sparse_sums, backend=backend)


# --- groups --------------------------------------------------------------------------------------


@contextlib.contextmanager
def subgroup(ranks: list[int] | None = None, **kwargs: Any) -> Iterator[Any]:
    """A group for a while; every rank of the world takes part in making it."""
    group = dist.new_group(ranks, **kwargs)
    try:
        yield group
    finally:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def _subgroups() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    for ranks in ([0], [n - 1], list(range(1, n)), list(range(0, n, 2)), list(range(n))):
        if not ranks:
            continue
        report = Report()
        with subgroup(ranks) as group:
            if rank not in ranks:
                continue
            for collective in DIST_OPS:
                how = How(root=len(ranks) - 1, group=group)
                check(report, f"{collective} in {ranks}", collective, (3, 2), torch.float32, how)
        assert not report.failures, report.failures


def _groups_in_any_order() -> None:
    """Calls on different groups, in different orders on the ranks, do not wait for each other."""
    rank = dist.get_rank()
    with subgroup() as a, subgroup() as b:
        for count in (3, 200_000):
            x, y = torch.full((count,), rank + 1.0), torch.full((count,), rank + 2.0)
            calls = [
                lambda x=x: dist.all_reduce(x, group=a, async_op=True),
                lambda y=y: dist.all_reduce(y, group=b, async_op=True),
            ]
            works = [make() for make in (calls if rank % 2 else calls[::-1])]
            for work in works:
                work.wait()
            n = dist.get_world_size()
            assert x[0] == x[-1] == n * (n + 1) / 2
            assert y[0] == y[-1] == n * (n + 1) / 2 + n


def _groups_come_and_go() -> None:
    for i in range(10):
        with subgroup() as group:
            x = torch.full((5,), float(i))
            dist.all_reduce(x, group=group)
            assert x[0] == i * dist.get_world_size()


def _splits() -> None:
    """ProcessGroup.split_group; dist.split_group asks for an accelerator."""
    n, rank, world = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    lower, upper = list(range(n // 2 + n % 2)), list(range(n // 2 + n % 2, n))
    mine = lower if rank in lower else upper
    group = world.split_group(mine, timeout=dt.timedelta(seconds=20), group_name=f"half{mine[0]}")
    assert (group.rank(), group.size()) == (mine.index(rank), len(mine))
    x = torch.tensor([rank + 1.0])
    group.allreduce([x]).wait()
    assert x == sum(r + 1 for r in mine)
    group.shutdown()


def _one_tensor_in_flight() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.int64, torch.bfloat16):
        for count in (1, 100_000):
            x = torch.ones(count, dtype=dtype)
            works = [dist.all_reduce(x, async_op=True) for _ in range(4)]
            for work in reversed(works):
                work.wait()
            assert torch.equal(x, torch.full_like(x, n**4)), (dtype, x)
            x.fill_(rank)
            every = torch.empty(n * count, dtype=dtype)
            dist.broadcast(x, n - 1, async_op=True)
            all_gather_single(every, x, None, True)
            dist.all_reduce(every, async_op=True).get_future().wait()
            assert torch.equal(every, torch.full_like(every, n * (n - 1))), (dtype, every)
    # Futures that nobody waits for hold nothing up.
    x = torch.ones(1)
    for _ in range(50):
        future = ours.all_reduce(x, async_op=True).get_future()
    future.wait()
    dist.barrier()


def _chain(api: Any, dtype: torch.dtype, count: int, stride: int, waits: bool) -> list[Tensor]:
    """Calls each of which reads what the one before it writes; all the tensors they leave."""
    rank, n = dist.get_rank(), dist.get_world_size()
    group = dist.distributed_c10d._get_default_group()
    name, last = group.group_name, n - 1

    def fresh(rows: int) -> Tensor:
        return torch.zeros(rows, stride, dtype=dtype)[:, 0]

    x, y, z = fresh(count), fresh(n * count), fresh(n * count)
    x.copy_((torch.arange(count) + 3 * rank) % 7 - 2)
    if dtype in (torch.float32, torch.bfloat16):
        x[:: 3 + rank] = float("nan")
    parts, others = ([fresh(count) for _ in range(n)] for _ in range(2))
    at_root = others if rank == 0 else None
    sparse = torch.eye(4).mul_(rank + 1).to_sparse()
    reduce_op = "sum" if dtype.is_complex else "max"
    op = REDUCE_OPS[reduce_op]
    made = [x]

    ops = torch.ops.c10d_ext

    def make(call: Callable[..., Tensor], *args: Any, out: Tensor | None = None) -> Any:
        if out is None:
            made.append(call(made[-1], *args, name))
            out = made[-1]
        else:
            call(*args, name, out=out)
        return SimpleNamespace(wait=lambda: ops.wait_tensor(out))

    calls: list[Callable[[], Any]] = [
        lambda: api.all_reduce(x, op, None, True),
        lambda: api.all_gather(parts, x, None, True),
        lambda: api.all_reduce(parts[0], REDUCE_OPS["sum"], None, True),
        lambda: api.all_to_all(others, parts, None, True),
        lambda: api.broadcast(others[last], last, None, True),
        lambda: api.reduce_scatter(x, others, op, None, True),
        lambda: all_gather_single(y, x, None, True, api=api),
        lambda: api.all_to_all_single(z, y, None, None, None, True),
        lambda: reduce_scatter_single(x, z, op, None, True, api=api),
        lambda: api.reduce(
            x, 0, REDUCE_OPS["avg" if dtype.is_floating_point else "sum"], None, True
        ),
        lambda: api.broadcast(x, 0, None, True),
        lambda: api.gather(x, at_root, 0, None, True),
        lambda: api.scatter(x, at_root, 0, None, True),
        lambda: group.allreduce_coalesced([x, y, z]),
        lambda: group.allgather_coalesced([[part] for part in parts], [x]),
        lambda: group.allgather_into_tensor_coalesced([y, z], [x, parts[last]]),
        lambda: group.reduce_scatter_tensor_coalesced([x, parts[0]], [y, z]),
        lambda: api.all_reduce(sparse, REDUCE_OPS["sum"], None, True),
        lambda: api.all_reduce(sparse, REDUCE_OPS["avg"], None, True),
        lambda: make(ops.all_gather_into_tensor_out, x, n, out=y),
        lambda: make(ops.all_to_all_single_out, y, [count] * n, [count] * n, out=z),
        lambda: make(ops.reduce_scatter_tensor_out, z, reduce_op, n, out=x),
        lambda: make(ops.all_reduce_out, x, reduce_op, out=parts[0]),
        # What is read shares memory with what is written.
        lambda: make(ops.all_gather_into_tensor_out, y[:count], n, out=y),
        lambda: make(ops.all_to_all_single_out, y, [count] * n, [count] * n, out=y),
        lambda: make(ops.reduce_scatter_tensor_out, y, reduce_op, n, out=y[count : 2 * count]),
        lambda: make(ops.all_reduce_out, y[:count], reduce_op, out=y[count : 2 * count]),
        lambda: make(ops.all_reduce, reduce_op),
        lambda: make(ops.all_gather_into_tensor, n),
        lambda: make(ops.reduce_scatter_tensor, reduce_op, n),
        lambda: make(ops.broadcast, last),
    ]
    works = []
    for call in calls:
        works.append(call())
        if waits:
            works[-1].wait()
    for work in reversed(works):
        work.wait()
    return [x, y, z, *parts, *others, sparse.to_dense(), *made]


def _chains_in_flight() -> None:
    """Calls in flight do what the same calls do that are waited for one by one."""
    dtypes = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.complex64)
    for api, dtype, count, stride in (
        *itertools.product((dist, ours), dtypes, (13,), (1, 2)),
        (dist, torch.float32, 300_000, 1),
        (ours, torch.bfloat16, 300_000, 2),
    ):
        waited, in_flight = (_chain(api, dtype, count, stride, waits) for waits in (True, False))
        for i, pair in enumerate(zip(waited, in_flight, strict=True)):
            expected, got = (t.contiguous().view(torch.uint8) for t in pair)
            assert torch.equal(expected, got), (api, dtype, count, stride, i, *pair)


def _shrinks() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    group = dist.new_group()
    dist.barrier(group)
    gone = [1] if n > 2 else [n - 1]
    if rank not in gone:
        smaller = dist.shrink_group(gone, group)
        left = [r for r in range(n) if r not in gone]
        assert dist.get_process_group_ranks(smaller) == left
        x = torch.tensor([rank + 1.0])
        dist.all_reduce(x, group=smaller)
        assert x == sum(r + 1 for r in left)
        dist.destroy_process_group(smaller)
    else:
        dist.destroy_process_group(group)
    dist.barrier()


def _merges() -> None:
    """Two groups of some ranks become one of all."""
    n, rank = dist.get_world_size(), dist.get_rank()
    parts = [dist.new_group(list(range(first, n, 2)), backend="shm") for first in (0, 1)]
    whole, part = dist.new_group(backend="shm"), parts[rank % 2]
    name = f"merged {whole.group_name}"
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    merged = part.merge_remote_group(store, n, dt.timedelta(seconds=30), name, name)
    assert type(merged._get_backend(CPU)) is type(whole._get_backend(CPU))
    x = torch.full((3,), rank + 1.0)
    merged.allreduce([x]).wait()
    assert torch.equal(x, torch.full((3,), n * (n + 1) / 2))
    with pytest.raises(CollectiveMismatch, match=r"broadcast\(\d+ x float32"):
        merged.broadcast(torch.ones(2 + merged.rank()), 0).wait()
    # The groups that it was made of go on.
    dist.all_reduce(x, group=part)
    assert torch.equal(x, torch.full((3,), part.size() * n * (n + 1) / 2))
    dist.barrier()
    merged.shutdown()
    for group in (part, whole):
        dist.destroy_process_group(group)


@pytest.mark.parametrize("size", (2, 3, 4))
def test_groups(size: int) -> None:
    for fn in (_subgroups, _groups_in_any_order, _groups_come_and_go, _splits, _shrinks, _merges):
        run(size, fn, backend="shm")


@pytest.mark.parametrize("size", (2, 3, 4))
def test_calls_on_one_tensor_run_in_their_order(size: int) -> None:
    run(size, _one_tensor_in_flight, backend="shm")
    run(size, _chains_in_flight, backend="shm")


def _beside_gloo(other: str) -> None:
    with subgroup(backend=other) as group:
        assert group._get_backend(CPU).name() == other.split(":")[-1]
        for _ in range(3):
            x, y = torch.ones(5), torch.ones(5)
            dist.all_reduce(x, group=group)
            dist.all_reduce(y)
            assert torch.equal(x, y) and x[0] == dist.get_world_size()


def test_is_a_backend_beside_others() -> None:
    run(2, _beside_gloo, "shm", backend="gloo")
    run(2, _beside_gloo, "cpu:shm", backend="gloo")
    run(2, _beside_gloo, "gloo", backend="shm")


# --- what goes wrong -----------------------------------------------------------------------------


def raised(error: type[BaseException], fn: Callable[[], Any]) -> Any:
    """The error that `fn` raises; no wait of its own outlasts the call's deadline."""
    with pytest.raises(error) as raising:
        fn()
    return raising.value


def _times_out() -> None:
    """A rank that does not come is named by those that wait, and the group is of no more use."""
    n, rank = dist.get_world_size(), dist.get_rank()
    late = n - 1
    with subgroup() as group:
        dist.all_reduce(torch.ones(1), group=group)
        group.set_timeout(dt.timedelta(seconds=1))
        dist.barrier()
        if rank != late:
            error = raised(
                CollectiveTimeout,
                lambda: dist.all_reduce(torch.ones(1000), group=group),
            )
            assert isinstance(error, dist.DistBackendError)
            assert error.ranks == [late]
            assert error.op and error.seq and error.group
            for text in (f"rank {late}", "all_reduce", f"rank {rank}/{n}"):
                assert text in str(error), str(error)
            raised(dist.DistBackendError, lambda: dist.all_reduce(torch.ones(1), group=group))
        dist.barrier()
        if rank == late:
            raised(dist.DistBackendError, lambda: dist.all_reduce(torch.ones(1), group=group))
    dist.barrier()


def _times_out_per_call() -> None:
    rank = dist.get_rank()
    with subgroup() as group:
        if rank == 0:
            options = dist.AllreduceOptions()
            options.timeout = dt.timedelta(seconds=0.2)
            work = group.allreduce([torch.ones(3)], options)
            raised(CollectiveTimeout, lambda: work and work.wait())
        dist.barrier()
    with subgroup() as group:
        group.set_timeout(dt.timedelta(seconds=0.2))
        if rank == 0:
            fn = lambda: dist.all_reduce(torch.ones(3), group=group)  # noqa: E731
            raised(CollectiveTimeout, fn)
        dist.barrier()


def _wait_has_its_own_timeout() -> None:
    """A wait that gives up leaves the work to go on."""
    n, rank, x = dist.get_world_size(), dist.get_rank(), torch.ones(3)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        raised(RuntimeError, lambda: work.wait(dt.timedelta(seconds=0.1)))
        assert not work.is_completed()
        store.set("shm/has waited", "")
    else:
        store.wait(["shm/has waited"], dt.timedelta(seconds=20))
        work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert torch.equal(x, torch.full((3,), float(n)))


def _never_is_a_timeout() -> None:
    n, rank, never = dist.get_world_size(), dist.get_rank(), dt.timedelta(days=365_000)
    store = dist.distributed_c10d._get_default_store()
    with subgroup(timeout=never) as group:
        x = torch.ones(3)
        if rank == 0:
            work = dist.all_reduce(x, group=group, async_op=True)
            store.set("shm/is in flight", "")
        else:
            store.wait(["shm/is in flight"], dt.timedelta(seconds=20))
            work = dist.all_reduce(x, group=group, async_op=True)
        assert work.wait(never)
        assert torch.equal(x, torch.full((3,), float(n)))
        group.monitored_barrier(never)
        for wrong in (dt.timedelta.max, dt.timedelta(seconds=-1)):
            error = raised(ValueError, lambda wrong=wrong: group.set_timeout(wrong))
            assert "set_timeout: the timeout must be from 0 to 292000 years, got -" in str(error)
    for wrong in (dt.timedelta.max, dt.timedelta(seconds=-1)):
        error = raised(ValueError, lambda wrong=wrong: dist.new_group(timeout=wrong))
        assert "shm: the timeout must be from 0 to 292000 years, got -" in str(error)
        assert f"(rank {rank}/{n}, group '" in str(error)


def _monitored_barrier_names_the_missing() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    with subgroup() as group:
        if rank in (0, 2):
            error = raised(
                RuntimeError,
                lambda: group.monitored_barrier(dt.timedelta(seconds=0.3), wait_all_ranks=True),
            )
            missing = [r for r in range(n) if r not in (0, 2)]
            if rank == 0:
                assert all(str(r) in str(error) for r in missing), str(error)
        dist.barrier()


def _aborts() -> None:
    rank = dist.get_rank()
    with subgroup() as group:
        dist.all_reduce(torch.ones(1), group=group)
        if rank == 0:
            work = dist.all_reduce(torch.ones(1000), group=group, async_op=True)
            group.abort()
            raised(GroupClosed, work.wait)
        dist.barrier()
        # Nobody waits for a group that one rank has given up.
        fn = lambda: dist.all_reduce(torch.ones(1000), group=group)  # noqa: E731
        raised(dist.DistBackendError, fn)
    dist.barrier()


def _use_after_destroy() -> None:
    group = dist.new_group()
    backend = group._get_backend(CPU)
    dist.all_reduce(torch.ones(1), group=group)
    dist.destroy_process_group(group)
    raised(GroupClosed, lambda: backend.allreduce([torch.ones(3)]).wait())


@pytest.mark.parametrize("size", (2, 4))
def test_timeouts_and_ends(size: int) -> None:
    for fn in (
        _times_out,
        _times_out_per_call,
        _never_is_a_timeout,
        _wait_has_its_own_timeout,
        _monitored_barrier_names_the_missing,
        _aborts,
        _use_after_destroy,
    ):
        run(size, fn, backend="shm")


BAD: dict[str, tuple[str, Callable[[int], tuple[Any, ...]]]] = {
    "shape": ("all_reduce", lambda odd: (3 + odd, "float32", "sum", 0)),
    "dtype": ("all_reduce", lambda odd: (4, ("float32", "int32")[odd], "sum", 0)),
    "reduce op": ("all_reduce", lambda odd: (4, "float32", ("sum", "max")[odd], 0)),
    "root": ("broadcast", lambda odd: (4, "float32", "sum", odd)),
    "size of a large one": ("all_reduce", lambda odd: (100_000 + odd, "float32", "sum", 0)),
}


def _mismatches() -> None:
    """Ranks that disagree all raise, told of both sides, before anything is written."""
    n, rank = dist.get_world_size(), dist.get_rank()
    for what, (name, arguments) in BAD.items():
        for async_op in (False, True):
            count, dtype, op, root = arguments(int(rank == n - 1))
            x = torch.full((count,), 7).to(getattr(torch, dtype))
            how = How(op, root=root, async_op=async_op)
            error = raised(
                CollectiveMismatch,
                lambda how=how, x=x, collective=BY_NAME[name]: call(collective, how, [x], [x]),
            )
            assert torch.equal(x, torch.full_like(x, 7)), what
            assert name in str(error), str(error)
            assert f"rank {n - 1}" in str(error), str(error)
            # The group goes on.
            y = torch.ones(2)
            dist.all_reduce(y)
            assert y[0] == n
    # Different collectives.
    x = torch.full((4,), 7.0)
    fn = dist.all_reduce if rank == 0 else dist.broadcast
    args = () if rank == 0 else (0,)
    error = raised(CollectiveMismatch, lambda: fn(x, *args))
    assert "all_reduce" in str(error) and "broadcast" in str(error), str(error)
    assert torch.equal(x, torch.full_like(x, 7))


@pytest.mark.parametrize("size", (2, 3, 4))
def test_mismatches_raise_on_all_ranks(size: int) -> None:
    run(size, _mismatches, backend="shm")


def _single_machine_errors() -> None:
    """Wrong calls that need no peer to be seen."""
    n = dist.get_world_size()
    world = dist.group.WORLD
    overlapping = list(torch.empty(n + 1).unfold(0, 2, 1))
    bad: list[tuple[str, Callable[[], Any]]] = [
        (
            "output of a wrong size",
            lambda: all_gather_single(torch.empty(1), torch.ones(2)),
        ),
        (
            "shards of a wrong size",
            lambda: reduce_scatter_single(torch.empty(2), torch.ones(2 * n + 1)),
        ),
        (
            "another dtype",
            lambda: dist.all_gather([torch.empty(2, dtype=torch.int32)] * n, torch.ones(2)),
        ),
        ("too few outputs", lambda: dist.all_gather([torch.empty(2)] * (n - 1), torch.ones(2))),
        (
            "splits that do not add up",
            lambda: dist.all_to_all_single(torch.empty(n), torch.ones(n), [2] * n, [1] * n),
        ),
        ("a root that is none", lambda: world.broadcast([torch.ones(2)], n + 3).wait()),
        ("elements that share memory", lambda: dist.all_reduce(torch.ones(1).expand(4))),
    ]
    for what, fn in bad:
        try:
            fn()
        except (ValueError, TypeError, RuntimeError):
            pass
        else:
            raise AssertionError(f"{what} went through")
    for fn in (
        lambda: dist.all_gather([torch.empty(2)] * n, torch.ones(2)),
        lambda: dist.all_to_all(overlapping, list(torch.ones(n, 2))),
        lambda: dist.gather(torch.ones(2), overlapping, dist.get_rank()),
        lambda: world.allreduce_coalesced(overlapping).wait(),
    ):
        with pytest.raises(ValueError, match="numbers 0 and 1 that overlap"):
            fn()
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x == n


@pytest.mark.parametrize("size", (2,))
def test_wrong_calls_are_refused(size: int) -> None:
    run(size, _single_machine_errors, backend="shm")
