"""Point to point: in eager as torch.distributed has it, and the same in a graph.

One file, for what is asked of messages in eager is asked of the same ones in graphs.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import inspect
import itertools
import time
import unittest.mock
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

import torch_c10d_ext
import torch_c10d_ext.distributed as ours
from tests.contract import Report, calls_in, verify
from tests.harness import run, values
from tests.harness.crew import crew
from tests.harness.worker import FALLBACK
from tests.optimizer.graphs import join_fake_world
from torch_c10d_ext import functional

BACKENDS = ("gloo", "shm")
# shm's collectives over gloo, too, where ranks cannot share memory.
EVERYWHERE = (*BACKENDS, FALLBACK)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (5,), (2, 3))
# A message that never comes ends a test, not the machine's patience.
DEADLINE = 150

on_every_backend = pytest.mark.parametrize(
    ("backend", "size"), list(itertools.product(BACKENDS, (2, 3, 4)))
)
NAMES = ("send", "recv", "isend", "irecv", "P2POp", "batch_isend_irecv")


def ends() -> tuple[int, int, int]:
    """This rank, and its neighbours in the ring."""
    n, rank = dist.get_world_size(), dist.get_rank()
    return rank, (rank + 1) % n, (rank - 1) % n


def value(rank: int, shape: tuple[int, ...] = (4,), salt: int = 0) -> Tensor:
    numel = torch.Size(shape).numel()
    return (torch.arange(float(numel)) + 100 * rank + 10 * salt).view(shape)


def idle() -> None:
    """Nothing is left in flight, on any rank."""
    ours.barrier()
    assert torch_c10d_ext.pending_count() == 0


# --- surface -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_signature_is_torchs(name: str) -> None:
    theirs = inspect.signature(getattr(dist, name)).parameters
    mine = inspect.signature(getattr(ours, name)).parameters
    assert list(mine) == list(theirs)
    assert [p.default for p in mine.values()] == [p.default for p in theirs.values()]
    assert getattr(ours, name) is not getattr(dist, name)
    assert inspect.getdoc(getattr(ours, name))


# --- values --------------------------------------------------------------------------------------


def _every_dtype_and_layout() -> Any:
    rank, right, left = ends()
    report = Report()
    for dtype, shape in itertools.product(values.DTYPES, SHAPES):
        mine, theirs = values.bits(shape, dtype, rank), values.bits(shape, dtype, left)
        for layout in values.layouts(dtype, shape):
            what = f"{dtype} {shape} {layout}"
            x = values.lay_out(mine, layout)
            want = values.lay_out(theirs, layout)
            y = torch.zeros_like(want).contiguous()
            if layout != "expanded":  # memory that receives holds each element once
                y = values.lay_out(y, layout)
            before = values.memory(x)
            with report.attempt(what):
                works = [ours.irecv(y, left), ours.isend(x, right)]
                assert [work.wait() for work in works] == [True, True]
                report.expect(what, values.mismatch(y, want, bitwise=True))
                report.expect(f"{what}: sent", values.memory(x) != before)
    idle()
    return report.result()


@on_every_backend
def test_every_dtype_and_layout(backend: str, size: int) -> None:
    verify(size, _every_dtype_and_layout, backend=backend, deadline=DEADLINE)


# Bytes. Where ranks agree on messages, those of up to 4096, 262144 or 1048576, by where the ranks
# are, go with what is said of them.
SIZES = (4096, 0, 4097, 1, 262144, 4095, 262145, 1048576, 5, 1048577, 4096)


def _sizes_in_one_order(sizes: tuple[int, ...]) -> Any:
    """Messages of one tag, which travel in different ways, arrive in their order, from anybody."""
    n, (rank, right, left), report = dist.get_world_size(), ends(), Report()
    for from_anybody, waits_at_once in itertools.product((False, True), (False, True)):
        # From any source there is one that sends.
        source = None if from_anybody and n > 2 else left
        if source is None and rank not in (0, 1):
            ours.barrier()
            continue
        sends, receives = source is not None or rank == 0, source is not None or rank == 1
        ys = [torch.zeros(2 * size, dtype=torch.uint8)[::2] for size in sizes]
        works: list[tuple[dist.Work, int]] = []
        for i, y in enumerate(ys):
            x = ((torch.arange(y.numel()) + 7 * i + 100 * rank) % 251).to(torch.uint8)
            one = [(ours.irecv(y, source, tag=5), i)] if receives else []
            one += [(ours.isend(x, right, tag=5), i)] if sends else []
            if waits_at_once:
                for work, _ in one:
                    work.wait()
            works += one
        for work, _ in reversed(works):
            work.wait()
        for i, y in enumerate(ys if receives else []):
            want = ((torch.arange(y.numel()) + 7 * i + 100 * left) % 251).to(torch.uint8)
            report.expect(f"{i}: {sizes[i]} bytes", "" if torch.equal(y, want) else "differs")
        ours.barrier()
    idle()
    return report.result()


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_sizes_in_one_order(backend: str) -> None:
    # gloo itself refuses an empty message from any source.
    sizes = tuple(size for size in SIZES if size or backend != "gloo")
    for size in (2, 3):
        verify(size, _sizes_in_one_order, sizes, backend=backend)


def _speaks_torchs_language(ours_sends: bool) -> None:
    """At the other end is torch itself."""
    rank, right, left = ends()
    for dtype in (torch.float32, torch.int64, torch.complex64, torch.bool):
        x, want = values.bits((3,), dtype, rank), values.bits((3,), dtype, left)
        y = torch.zeros_like(want)
        send, recv = (ours.isend, dist.irecv) if ours_sends else (dist.isend, ours.irecv)
        works = [send(x, right), recv(y, left)]
        for work in works:
            work.wait()
        assert not (wrong := values.mismatch(y, want, bitwise=True)), wrong


@pytest.mark.parametrize("ours_sends", [True, False])
def test_messages_to_and_from_torch(ours_sends: bool) -> None:
    for backend in EVERYWHERE:
        run(2, _speaks_torchs_language, ours_sends, backend=backend)


def _returns_and_orders(api: Any) -> list[Any]:
    """A program of torch.distributed, and what came of it."""
    n, rank = dist.get_world_size(), dist.get_rank()
    last, seen = n - 1, []
    # Order of one tag, and tags against the order.
    if rank == 0:
        for salt in range(3):
            assert api.send(value(0, salt=salt), last) is None
        api.send(value(0, salt=5), group_dst=last, tag=5)
        api.send(value(0, salt=6), last, tag=6)
    elif rank == last:
        x = torch.zeros(4)
        for _ in range(3):
            seen += [api.recv(x, 0), x.clone()]
        b = torch.zeros(4)
        works = [api.irecv(b, 0, tag=6), api.irecv(x, 0, tag=5)]
        for work in reversed(works):
            seen += [work.wait()]
        seen += [x.clone(), b, api.get_rank()]
    api.barrier()
    # From any source: everyone's message arrives once.
    if rank == 0:
        got = {}
        for _ in range(last):
            y = torch.zeros(4)
            source = api.recv(y, tag=1)
            got[source] = y
        y = torch.zeros(4)
        work = api.irecv(y, tag=2)
        work.wait()
        got["work"] = (work._source_rank() > 0, y[0].item() == 100 * work._source_rank())
        for _ in range(last - 1):
            api.irecv(y, tag=2).wait()
        seen += [sorted(got.items(), key=str)]
    else:
        api.send(value(rank), 0, tag=1)
        api.send(value(rank), 0, tag=2)
    api.barrier()
    # A group, in its ranks.
    pair = api.new_group([last, 0])
    z = value(rank)
    if rank in (0, last):
        me = api.get_rank(pair)
        other = 1 - me
        if me == 0:
            seen += [api.send(z, group=pair, group_dst=other)]
        else:
            seen += [api.recv(z, group=pair, group_src=other), z]
    else:
        with pytest.warns(UserWarning, match="irecv|recv"):
            seen += [api.recv(z, group=pair, group_src=0)]
        with pytest.warns(UserWarning, match="irecv"):
            seen += [api.irecv(z, group=pair, group_src=0)]
    api.barrier()
    # A batch.
    _, right, left = ends()
    y = torch.zeros(4)
    ops = [api.P2POp(api.isend, value(rank), right), api.P2POp(api.irecv, y, left)]
    seen += [[getattr(op, a) for a in ("peer", "tag", "group_peer")] for op in ops]
    assert ops[0].group is dist.group.WORLD
    for work in api.batch_isend_irecv(ops):
        work.wait()
    return [*seen, y]


def _same_as_torch() -> None:
    theirs, mine = str(_returns_and_orders(dist)), str(_returns_and_orders(ours))
    assert mine == theirs
    idle()


@on_every_backend
def test_a_program_of_torch_gives_the_same(backend: str, size: int) -> None:
    run(size, _same_as_torch, backend=backend, deadline=DEADLINE)


# --- works ---------------------------------------------------------------------------------------


def _works() -> None:
    rank = dist.get_rank()
    x = torch.zeros(6)[::2]
    if rank == 0:
        work = ours.irecv(x, 1)
        assert isinstance(work, dist.Work)
        assert not work.is_completed()  # rank 1 sends after the barrier
        with pytest.raises(RuntimeError, match=r"recv: the (message|wait) must"):
            work.wait(dt.timedelta(milliseconds=50))
        assert not work.is_completed()
        future = work.get_future()
        assert not future.done()
        ours.barrier()
        (got,) = future.wait()
        assert torch.equal(got, value(1, (3,)))
        assert torch.equal(x, value(1, (3,)))
        assert work.wait() and work.wait(dt.timedelta(seconds=20))  # once more does nothing
        assert work.is_completed() and work.is_success()
        assert work._source_rank() == 1
    else:
        ours.barrier()
        work = ours.isend(value(1, (3,)), 0)
        work.get_future().wait()
        assert work.wait() and work.is_completed() and work.is_success()
    # Asked until it is there.
    y = torch.zeros(2)
    work = ours.irecv(y, 1 - rank) if rank else ours.isend(value(0, (2,)), 1)
    while not work.is_completed():
        pass
    assert rank == 0 or torch.equal(y, value(0, (2,)))
    # Sent, and never waited for.
    if rank:
        ours.isend(value(1), 0, tag=3)
    else:
        z = torch.zeros(4)
        ours.recv(z, 1, tag=3)
        assert torch.equal(z, value(1))
    ours.barrier()


def test_works() -> None:
    for backend in EVERYWHERE:
        run(2, _works, backend=backend, deadline=DEADLINE)


def _short_and_long_ways() -> None:
    """Rank 0 and the last one of a group of theirs; whether a call has a work shows its way."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    group = dist.new_group([0, last])
    if rank not in (0, last):
        return
    place, other = (0, last) if rank == 0 else (1, 0)

    class Mode(TorchFunctionMode):
        def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return f(*args, **(kwargs or {}))

    class Subclass(Tensor):
        pass

    def by_world(m: Any, x: Tensor, peer: int) -> Any:
        return m(x, peer, group)

    def by_group(m: Any, x: Tensor, peer: int) -> Any:
        return m(x, None, group, 0, 1 - place)

    def with_tag(m: Any, x: Tensor, peer: int) -> Any:
        return m(x, peer, group, tag=7)

    def by_name(m: Any, x: Tensor, peer: int) -> Any:
        return m(x, peer, group.group_name)

    def in_a_mode(m: Any, x: Tensor, peer: int) -> Any:
        with Mode():
            return m(x, peer, group)

    def of_a_parameter(m: Any, x: Tensor, peer: int) -> Any:
        return m(torch.nn.Parameter(x), peer, group)

    def of_a_subclass(m: Any, x: Tensor, peer: int) -> Any:
        return m(x.as_subclass(Subclass), peer, group)

    def of_a_leaf(m: Any, x: Tensor, peer: int) -> Any:
        return m(x.requires_grad_(), peer, group)

    start = torch_c10d_ext._C.start_messages
    for turn, (call, is_short) in enumerate(
        (
            (by_world, True),
            (with_tag, True),
            (of_a_leaf, True),
            (by_group, False),
            (by_name, False),
            (in_a_mode, False),
            (of_a_parameter, True),
            (of_a_subclass, False),
        )
    ):
        with unittest.mock.patch.object(
            torch_c10d_ext._C, "start_messages", side_effect=start
        ) as works:
            x = value(place, salt=turn)
            if place == 0:
                assert call(ours.send, x, other) is None
                assert x._version == 0
            y = torch.zeros(4)
            assert call(ours.recv, y, other) == other
            assert y._version == 1
            if place == 1:
                call(ours.send, x, other)
        assert works.call_count == (0 if is_short else 2), call
        assert torch.equal(y.detach(), value(1 - place, salt=turn))
        assert y.grad_fn is None
    assert torch_c10d_ext.pending_count() == 0


@on_every_backend
def test_plain_messages_take_a_short_way(backend: str, size: int) -> None:
    run(size, _short_and_long_ways, backend=backend)


def _a_message_that_never_comes() -> None:
    short = dist.new_group(timeout=dt.timedelta(seconds=2))
    ours.barrier()
    if dist.get_rank() == 0:
        x = torch.zeros(3)
        program = torch.compile(
            lambda x: ours.recv(x, 1, short), backend="aot_eager", fullgraph=True
        )
        with pytest.raises(RuntimeError, match=r"recv: the message .*must.*rank 0/2"):
            program(x)
        assert torch.equal(x, torch.zeros(3))
    ours.barrier()


def _memory_is_given_back() -> None:
    rank = dist.get_rank()

    def uses(x: Tensor) -> int:
        return torch._C._storage_Use_Count(x.untyped_storage()._cdata)

    for fns in (dist, ours):
        for count in (3, 1 << 20):
            x = torch.full((count,), 2.0 * rank)
            before = uses(x)
            work = fns.isend(x, 1) if rank == 0 else fns.irecv(x, 0)
            work.wait()
            del work
            ends = time.monotonic() + 30
            while uses(x) != before:  # a thread has just told of the end
                assert time.monotonic() < ends, (fns, count, uses(x) - before)
                time.sleep(0.001)
            assert x.eq(0).all()


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_a_message_that_is_over_holds_no_memory(backend: str) -> None:
    run(2, _memory_is_given_back, backend=backend)


def test_waiting_ends_with_the_groups_timeout() -> None:
    for backend in BACKENDS:
        run(2, _a_message_that_never_comes, backend=backend, deadline=DEADLINE)


# --- coalescing ----------------------------------------------------------------------------------


def _blocks(compiled: bool) -> None:
    rank, right, left = ends()

    def program(x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        a, b = torch.zeros(4), torch.zeros(4)
        with ours.coalescing_manager():
            work = ours.irecv(a, left)
            ours.isend(x, right)
            ours.all_reduce(total)
            ours.irecv(b, left, tag=1)
            ours.isend(x + 1, right, tag=1)
        work.wait()
        with ours.coalescing_manager(async_ops=True) as block:
            ours.isend(a * 2, right)
            ours.irecv(b.view(2, 2), left, tag=0)
        block.wait()
        return a, b

    f = torch.compile(program, fullgraph=True) if compiled else program
    total = torch.full((2,), rank + 1.0)
    n = dist.get_world_size()
    with open_blocks_are_closed():
        a, b = f(value(rank), total)
    assert torch.equal(a, value(left))
    assert torch.equal(b, value((left - 1) % n) * 2)
    assert torch.equal(total, torch.full((2,), n * (n + 1) / 2))
    with ours.coalescing_manager():
        early = ours.isend(value(rank), right)
        assert not early.is_completed()
        with pytest.raises(RuntimeError, match="the block must end before its messages"):
            early.wait()
        late = ours.irecv(a, left)
    assert early.wait() and late.is_completed() and late._source_rank() == left
    with ours.coalescing_manager():
        ours.isend(value(rank, (5,)), right)
        c = torch.zeros(5)
        ours.recv(c, left)  # what was held back goes first, or this would never end
    assert torch.equal(c, value(left, (5,)))
    with contextlib.suppress(KeyError), ours.coalescing_manager():
        ours.isend(value(rank), right)
        raise KeyError
    idle()  # what the block held back has not been sent


def _some_ranks_send(compiled: bool) -> None:
    """The collectives of a block are the same call on every rank, whoever sends between them."""
    rank, n = dist.get_rank(), dist.get_world_size()
    x, y, got = torch.full((2,), rank + 1.0), torch.full((3,), rank + 1.0), torch.zeros(2)

    def program() -> None:
        with ours.coalescing_manager():
            ours.all_reduce(x)
            if rank == 0:
                ours.isend(torch.full((2,), 7.0), 1)
                ours.send(torch.full((2,), 8.0), 1, tag=1)  # starts what is held, but no collective
            elif rank == 1:
                ours.irecv(got, 0)
                ours.recv(got[1:].expand(2).clone(), 0, tag=1)
            ours.all_reduce(y)

    with open_blocks_are_closed():
        (torch.compile(program, fullgraph=True, backend="aot_eager") if compiled else program)()
    total = n * (n + 1) / 2
    assert torch.equal(x, torch.full((2,), total)) and torch.equal(y, torch.full((3,), total))
    assert torch.equal(got, torch.full((2,), 7.0 if rank == 1 else 0.0))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_block_in_which_some_ranks_send(backend: str, compiled: bool) -> None:
    run(3, _some_ranks_send, compiled, backend=backend, deadline=DEADLINE)


@contextlib.contextmanager
def open_blocks_are_closed() -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "While compiling, we found certain side effects")
        yield


@pytest.mark.parametrize("compiled", [False, True])
def test_blocks(compiled: bool) -> None:
    places = itertools.product(BACKENDS, (2, 3))
    for backend, size in zip(BACKENDS, (2, 3), strict=True) if compiled else places:
        run(size, _blocks, compiled, backend=backend, deadline=DEADLINE)


# --- bad input -----------------------------------------------------------------------------------


def _refused() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    other = 1 - rank
    x = torch.ones(4)
    spread = torch.ones(1).expand(3)
    sub = ours.new_group([0, 1])
    here = rf".*\(rank {rank}/{n}, group '0'\)"
    p2p = ours.P2POp(ours.isend, x, other)
    elsewhere = ours.P2POp(ours.isend, x, other, sub)
    single: list[tuple[dict[str, Any], type[Exception], str]] = [
        (dict(tensor=[x], dst=other), TypeError, f"tensor must be a Tensor, got list{here}"),
        (dict(tensor=x, dst=other, group_dst=other), ValueError, "one of dst and group_dst"),
        (dict(tensor=x, dst=n), ValueError, f"dst must be a rank of the group.*got {n}{here}"),
        (dict(tensor=x, group_dst=n), ValueError, f"group_dst must be.*0 to 1, got {n}{here}"),
        (dict(tensor=x, group_dst=-1), ValueError, f"got -1{here}"),
        (dict(tensor=x, group_dst="a"), TypeError, f"group_dst must be an int, got str{here}"),
        (dict(tensor=x, dst=rank), ValueError, f"must be another rank, got {rank}{here}"),
        (dict(tensor=x, dst=other, tag="a"), TypeError, f"tag must be an int, got str{here}"),
        (dict(tensor=x, dst=other, tag=-1), ValueError, f"tag must be.*got -1{here}"),
        (dict(tensor=x.to_sparse(), dst=other), TypeError, "must be a dense"),
    ]
    bad: list[tuple[Callable[[], Any], type[Exception], str]] = []
    for kwargs, error, text in single:
        for f in (ours.send, ours.isend, ours.recv, ours.irecv):
            mine = kwargs
            if "recv" in f.__name__:
                text = text.replace("dst", "src")
                mine = {k.replace("dst", "src"): v for k, v in kwargs.items()}
            prefix = "" if "dense" in text else f"{f.__name__}: "
            bad.append((lambda f=f, a=mine: f(**a), error, prefix + ".*" + text))
    bad += [
        (lambda: ours.send(x), ValueError, "send: one of dst and group_dst"),
        (lambda: ours.irecv(spread, other), ValueError, "a place of its own"),
        (lambda: ours.P2POp(print, x, other), ValueError, "P2POp: op must be isend or irecv"),
        (lambda: ours.P2POp(ours.isend, 3, other), TypeError, "P2POp: tensor must be a Tensor"),
        (lambda: ours.P2POp(ours.isend, x), ValueError, "P2POp: one of peer and group_peer"),
        (lambda: ours.P2POp(ours.isend, x, n), ValueError, "P2POp: peer must be a rank"),
        (lambda: ours.batch_isend_irecv([]), IndexError, "at least one P2POp, got none"),
        (lambda: ours.batch_isend_irecv(3), ValueError, "a list of P2POp, got 3"),
        (lambda: ours.batch_isend_irecv([x]), ValueError, "a list of P2POp"),
        (lambda: ours.batch_isend_irecv([p2p, elsewhere]), ValueError, f"of one group.*{here}"),
        (
            lambda: functional.batch_isend_irecv([x], [other], [True, False]),
            ValueError,
            "batch_isend_irecv: each message must have",
        ),
        (lambda: functional.wait_message(x), ValueError, "wait_message: ticket must be.*another"),
    ]
    for call, error, text in bad:
        with pytest.raises(error, match=text):
            call()
    # The same type as torch's, where torch does not end the process.
    for name, args in (
        ("isend", ([x], other)),
        ("isend", (x,)),
        ("send", (x, rank)),
        ("isend", (x, other, None, "a")),
        ("P2POp", (print, x, other)),
        ("P2POp", (dist.isend, 3, other)),
        ("batch_isend_irecv", ([],)),
        ("batch_isend_irecv", (3,)),
    ):
        errors = []
        for api in (dist, ours):
            with pytest.raises(Exception) as info:
                getattr(api, name)(*args)
            errors.append(info.type)
        assert issubclass(errors[1], errors[0]), (name, args, errors)
    idle()
    works = [ours.isend(value(rank), other), ours.irecv(x, other)]  # the group is as it was
    for work in works:
        work.wait()
    assert torch.equal(x, value(other))


def test_bad_input_is_refused_before_anything_is_sent() -> None:
    for backend in EVERYWHERE:
        run(2, _refused, backend=backend)


# --- graphs --------------------------------------------------------------------------------------


def _ring(x: Tensor) -> list[Tensor]:
    """Neighbours start in opposite orders; waits stand in the order that hangs when moved up."""
    rank, right, left = ends()
    a, b = torch.empty_like(x), torch.zeros(8)[::2]
    if rank % 2:
        works = [ours.irecv(a, left), ours.isend(x, right)]
    else:
        works = [ours.isend(x, right), ours.irecv(a, left)]
    for work in works:
        work.wait()
    ops = [ours.P2POp(ours.irecv, b, right, tag=7), ours.P2POp(ours.isend, x * 3, left, tag=7)]
    for work in ours.batch_isend_irecv(ops):
        work.wait()
    return [a + 1, b.clone()]


def _ring_wants(rank: int, n: int) -> list[Tensor]:
    return [value((rank - 1) % n) + 1, value((rank + 1) % n) * 3]


def _pipeline(x: Tensor) -> list[Tensor]:
    """Micro-batches pass through the ranks; sends have no result and are waited for at the end."""
    n, rank = dist.get_world_size(), dist.get_rank()
    sent, outs = [], []
    for part in range(3):
        y = x[part] * 1
        if rank > 0:
            assert ours.recv(y, rank - 1, tag=part) == rank - 1
        y = y * 2 + 1
        outs.append(y)
        if rank < n - 1:
            sent.append(ours.isend(y, rank + 1, tag=part))
    for work in sent:
        work.wait()
    return outs


def _pipeline_wants(rank: int, n: int) -> list[Tensor]:
    outs = []
    for part in range(3):
        y = value(0)[part]
        for _ in range(rank + 1):
            y = y * 2 + 1
        outs.append(y)
    return outs


def _blocking(x: Tensor) -> list[Tensor]:
    """Blocking calls that take turns, with collectives between; nothing hangs on their results."""
    n, rank = dist.get_world_size(), dist.get_rank()
    y, total = torch.zeros_like(x), torch.ones(2)
    work = ours.all_reduce(total, async_op=True) if rank == 0 else None
    for turn in range(2):
        for source in range(n - 1):
            if rank == source:
                ours.send(x + turn, source + 1)
            elif rank == source + 1:
                assert ours.recv(y, source) == source
        ours.barrier() if turn == 1 else None
        if work is None:
            work = ours.all_reduce(total, async_op=True)
        elif turn == 0:
            work.wait()
    work.wait()
    return [y, total]


def _blocking_wants(rank: int, n: int) -> list[Tensor]:
    return [value(rank - 1) + 1 if rank else torch.zeros(4), torch.full((2,), float(n))]


PROGRAMS: dict[str, tuple[Any, Any]] = {
    "ring": (_ring, _ring_wants),
    "pipeline": (_pipeline, _pipeline_wants),
    "blocking": (_blocking, _blocking_wants),
}


class Program(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.program = PROGRAMS[name][0]

    def forward(self, x: Tensor) -> list[Tensor]:
        return self.program(x)


def _runs(kind: str) -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    for name, (program, wants) in PROGRAMS.items():
        want = wants(rank, n)
        x = value(rank)
        f: Any = program
        if kind in ("aot_eager", "inductor"):
            torch._dynamo.reset()
            f = torch.compile(program, backend=kind, fullgraph=True)
        elif kind == "peak_memory":
            torch._dynamo.reset()
            options = {"reorder_for_peak_memory": True, "reorder_for_compute_comm_overlap": True}
            assert all(hasattr(torch._inductor.config, option) for option in options)
            f = torch.compile(program, fullgraph=True, options=options)
        elif kind == "make_fx":
            f = make_fx(program)(x)
            f.graph.eliminate_dead_code()
            f.recompile()
        elif kind in ("strict", "non-strict"):
            f = torch.export.export(Program(name), (x,), strict=kind == "strict").module()
        for _ in range(3):
            for got, w in zip(f(x), want, strict=True):
                assert torch.equal(got, w), (name, got, w)
        idle()


# Among three ranks there is a first, one in the middle and a last; to trace for four is slow.
@pytest.mark.parametrize(
    ("kind", "size"),
    [
        *itertools.product(["eager", "make_fx"], [2, 3, 4]),
        *itertools.product(["aot_eager", "strict"], [2, 3]),
        ("inductor", 2),
        pytest.param("inductor", 3, marks=pytest.mark.long),
        ("peak_memory", 3),
        ("non-strict", 3),
    ],
)
def test_programs_never_hang(kind: str, size: int) -> None:
    run(size, _runs, kind, backend="gloo" if size != 3 else "shm", deadline=DEADLINE)


def _from_any_source(kind: str) -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    members = list(range(1, n))
    some = ours.new_group(members)  # whose ranks are not those of the world
    me = rank - 1

    def program(x: Tensor, source: int) -> tuple[Tensor, Any]:
        y = torch.zeros_like(x)
        if me == 0:
            return y, ours.recv(y, group=some)
        if me == source:
            ours.send(x, group=some, group_dst=0)
        return y, None

    for source in range(1, n - 1) if rank else ():
        torch._dynamo.reset()
        f: Any = program
        if kind != "eager":
            f = torch.compile(program, backend=kind, fullgraph=True)
        y, got = f(value(rank), source)
        if me == 0:
            assert got == members[source]
            assert torch.equal(y, value(members[source]))
        ours.barrier(some)


def _asks_a_work_for_its_source(kind: str) -> None:
    rank = dist.get_rank()

    def program(x: Tensor) -> tuple[Tensor, int]:
        y = torch.zeros_like(x)
        work = ours.irecv(y)
        work.wait()
        return y, work.source_rank()

    if rank == 0:
        torch._dynamo.reset()
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            f: Any = torch.compile(program, backend=kind, fullgraph=True)
            y, source = f(value(0))
        assert source == 2
        assert torch.equal(y, value(2))
    elif rank == 2:
        ours.send(value(2), 0)
    ours.barrier()


@pytest.mark.parametrize("kind", ["aot_eager", "inductor"])
def test_a_traced_work_knows_its_source(kind: str) -> None:
    run(3, _asks_a_work_for_its_source, kind, deadline=DEADLINE)


def _refuses_a_rank_it_cannot_trace() -> None:
    rank = dist.get_rank()

    def ranked(x: Tensor) -> int:
        return ours.recv(x)

    def unranked(x: Tensor) -> Tensor:
        ours.irecv(x).wait()
        return x + 1

    if rank == 0:
        with pytest.raises(Exception, match="capture_scalar_outputs = True"):
            torch.compile(ranked, backend="aot_eager", fullgraph=True)(torch.zeros(4))
        y = torch.compile(unranked, backend="aot_eager", fullgraph=True)(torch.zeros(4))
        assert torch.equal(y, value(1) + 1)
    else:
        ours.send(value(rank), 0)


def _with_scalars(kind: str) -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        _from_any_source(kind)


@pytest.mark.parametrize("kind", ["eager", "aot_eager", "inductor"])
def test_any_source_in_a_group(kind: str) -> None:
    run(4, _with_scalars, kind, deadline=DEADLINE)


def test_the_rank_of_any_source_needs_a_setting() -> None:
    run(2, _refuses_a_rank_it_cannot_trace, deadline=DEADLINE)


def _trains() -> None:
    """Outside autograd, in the forward half of a graph alone; backward sends nothing."""
    rank, right, left = ends()

    def program(x: Tensor, w: Tensor, leaf: Tensor) -> Tensor:
        y, got = x * w, torch.zeros_like(x)
        works = [ours.isend(y, right), ours.irecv(got, left)]
        z = (y * y).sin()
        for work in works:
            work.wait()
        works = [ours.isend(z, left), ours.irecv(leaf, right)]
        for work in works:
            work.wait()
        return (y * got * z).sum()

    results = []
    for kind in (None, "aot_eager", "inductor"):
        torch._dynamo.reset()
        x, w = value(rank).requires_grad_(), torch.tensor(0.5, requires_grad=True)
        leaf = torch.zeros(4, requires_grad=True)
        f: Any = torch.compile(program, backend=kind, fullgraph=True) if kind else program
        loss = f(x, w, leaf)
        loss.backward()
        assert leaf.requires_grad and leaf.grad is None
        results.append((loss.detach(), x.grad, w.grad, leaf.detach()))
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            torch.testing.assert_close(got, want)
    idle()


def test_gradients_pass_by() -> None:
    run(2, _trains, deadline=DEADLINE)


def _graphs() -> None:
    """What is traced: messages that nobody uses stay, in their order, dynamic sizes included."""
    rank = dist.get_rank()
    graphs: list[torch.fx.GraphModule] = []

    def capture(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        def compiler(gm: torch.fx.GraphModule, inputs: Any) -> Any:
            gm.graph.eliminate_dead_code()
            gm.recompile()
            graphs.append(gm)
            return gm.forward

        return aot_autograd(fw_compiler=compiler)(gm, inputs)

    def program(x: Tensor) -> Tensor:
        if rank == 0:
            ours.send(x, 1)
            ours.isend(x + 1, 1, tag=2)  # nobody waits
            ours.isend(x + 2, 1, tag=2).wait()
            return x
        y = torch.zeros_like(x)
        ours.recv(y, 0)
        ours.irecv(y, 0, tag=2).wait()
        z = torch.zeros_like(x)
        ours.recv(z, 0, tag=2)
        return y + z

    f = torch.compile(program, backend=capture, fullgraph=True, dynamic=True)
    for size in (4, 6, 7):
        x = value(0, (size,))
        got = f(x)
        assert torch.equal(got, x if rank == 0 else 2 * x + 3)
    assert len(graphs) == 1
    calls = [str(n.args[1]) for n in graphs[0].graph.nodes if "with_effects" in str(n.target)]
    short = ["start" if "batch_isend_irecv" in c else "wait" for c in calls]
    want = ["start", "wait", "start", "start", "wait"]
    assert short == (want if rank == 0 else ["start", "wait"] * 3), calls
    traced = make_fx(program)(value(0))
    assert [c for c in calls_in(traced.graph) if "message" in c or "isend" in c]
    idle()


def test_what_a_graph_holds() -> None:
    run(2, _graphs, deadline=DEADLINE)


def _waits_first(nodes: list[Any]) -> list[Any]:
    """A schedule that Inductor may choose: waits for collectives as early as they may come."""
    from torch._inductor import ir

    made = {name: node for node in nodes for name in node.get_buffer_names()}

    def with_what_it_needs(node: Any, order: dict[Any, None]) -> dict[Any, None]:
        if node not in order:
            for dependency in node.unmet_dependencies:
                if dependency.name in made:
                    with_what_it_needs(made[dependency.name], order)
            order[node] = None
        return order

    waits = [node for node in nodes if isinstance(node.node, ir._WaitKernel)]
    assert waits
    order: dict[Any, None] = {}
    for node in sorted(waits, key=lambda node: len(with_what_it_needs(node, {}))) + nodes:
        with_what_it_needs(node, order)
    assert len(order) == len(nodes)
    return list(order)


def _beside_collectives() -> None:
    """A collective waits for the peer that waits for a message first, in Inductor's order too."""
    rank = dist.get_rank()
    # Compiled, rank 1 might start its part of the collective before it needs to.
    only_rank_0_compiles = False

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        # Early waits would save memory: what is large is short lived.
        total = x.repeat(50_000)
        if rank == 0:
            work = ours.all_reduce(total, async_op=True)
            ours.send(x.repeat(50_000) * 2, 1)  # before rank 1 takes part in the collective
            work.wait()
            total = total.reshape(-1, 4).mean(0)
            ours.send(x * 3, 1)
            if not only_rank_0_compiles:  # whose traced form another rank must trace, too
                ours.barrier()
            return torch.zeros_like(x), total
        y, z = x.new_zeros(200_000), torch.zeros_like(x)
        ours.recv(y, 0)
        ours.all_reduce(total)
        ours.recv(z, 0)
        if not only_rank_0_compiles:
            ours.barrier()
        return y[:4] + z, total.reshape(-1, 4).mean(0)

    x = value(rank)
    for changes in (
        {},
        {"reorder_for_peak_memory": True},
        {"_post_fusion_custom_pass": _waits_first, "reorder_for_peak_memory": False},
    ):
        torch._dynamo.reset()
        with torch._inductor.config.patch(changes):
            only_rank_0_compiles = "_post_fusion_custom_pass" in changes
            f = program
            if rank == 0 or not only_rank_0_compiles:
                f = torch.compile(program, fullgraph=True)
            for _ in range(2):
                y, total = f(x)
                assert torch.equal(y, value(0) * 5 if rank else torch.zeros(4))
                assert torch.allclose(total, value(0) + value(1))
    idle()


def test_beside_collectives() -> None:
    for backend in BACKENDS:
        run(2, _beside_collectives, backend=backend, deadline=DEADLINE)


def _last_first(seen: list[tuple[list[str], list[str]]]) -> Any:
    """A schedule as far from the program's as dependencies allow; notes the order of kernels."""
    from torch._inductor import ir

    def kernels(nodes: list[Any]) -> list[str]:
        return [n.node.get_name() for n in nodes if isinstance(n.node, ir._CollectiveKernel)]

    def reordered(nodes: list[Any]) -> list[Any]:
        made = {name: n for n in nodes for name in n.get_buffer_names()}
        place = {n: k for k, n in enumerate(nodes)}
        left = {n: {made[d.name] for d in n.unmet_dependencies if d.name in made} for n in nodes}
        order: list[Any] = []
        while left:
            node = max((n for n, needs in left.items() if not needs - {n}), key=place.__getitem__)
            del left[node]
            order.append(node)
            for needs in left.values():
                needs.discard(node)
        assert order != nodes
        seen.append((kernels(nodes), kernels(order)))
        return order

    return reordered


class _Lost(dict[str, Any]):
    """Takes dependencies, and forgets them."""

    def __missing__(self, name: str) -> set[str]:
        return set()


def _order_without_edges() -> None:
    """Effect edges that Inductor loses (pytorch#189209) leave messages in their order."""
    from torch._inductor import comms
    from torch._inductor.graph import GraphLowering

    join_fake_world(2)

    def program(x: Tensor) -> tuple[Tensor, ...]:
        a, b, total = torch.empty_like(x), torch.empty_like(x), x * 1
        works = [ours.isend(x * 2, 1), ours.irecv(a, 1)]
        reduced = ours.all_reduce(total, async_op=True)
        for work in works:
            work.wait()
        ours.send(x + 1, 1)
        ours.recv(b, 1)
        reduced.wait()
        return a, b, total

    def orders(edges: bool, kernels: bool) -> tuple[list[str], list[str]]:
        seen: list[tuple[list[str], list[str]]] = []
        make = GraphLowering.__init__

        def make_without(self: Any, *args: Any, **kwargs: Any) -> None:
            make(self, *args, **kwargs)
            self.additional_star_deps = _Lost()

        torch._dynamo.reset()
        with pytest.MonkeyPatch.context() as patch:
            if not edges:
                patch.setattr(GraphLowering, "__init__", make_without)
            if not kernels:
                patch.setattr(comms, "decide_global_ordering_of_comms", lambda nodes, *rest: nodes)
            changes = {"_post_fusion_custom_pass": _last_first(seen), "fx_graph_cache": False}
            with torch._inductor.config.patch(changes):
                torch.compile(program, fullgraph=True)(torch.ones(4))
        (found,) = seen
        # Four starts and four waits of messages, one of two at once, and a collective.
        assert len(found[0]) >= 9
        return found

    for edges in (True, False):
        told, took = orders(edges, kernels=True)
        assert told == took
    # Each of the two keeps the order; without both, this schedule changes it.
    told, took = orders(edges=False, kernels=False)
    assert told != took


def test_messages_keep_their_order_where_effect_edges_are_lost() -> None:
    with crew(1, "gloo") as made:
        made.start(0, _order_without_edges)
        made.result(0, deadline=DEADLINE)


def _leaves_the_graph() -> None:
    rank, right, left = ends()

    def program(x: Tensor, y: Tensor) -> tuple[Tensor, Any, Any]:
        return x * 2, ours.irecv(y, left), ours.isend(x, right)

    for kind in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        x, y = value(rank), torch.zeros(4)
        twice, received, sent = torch.compile(program, backend=kind, fullgraph=True)(x, y)
        x.zero_()  # a graph has sent a copy
        received.wait()
        sent.wait()
        assert torch.equal(y, value(left))
        assert torch.equal(twice, value(rank) * 2)
        assert received.is_completed() and received._source_rank() == left
    idle()


def test_works_that_leave_the_graph() -> None:
    run(2, _leaves_the_graph, deadline=DEADLINE)
