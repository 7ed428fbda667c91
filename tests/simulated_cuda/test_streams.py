"""The stream rules: what a collective reads, writes, keeps and waits for, on whatever streams.

Every test here fails when the line of csrc that keeps its rule is taken out (mutate.py).
"""

from __future__ import annotations

import ctypes
import datetime as dt
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_c10d_ext
import torch_c10d_ext.distributed as ext
import torch_c10d_ext.functional as F
from tests.contract import group, wait
from tests.harness.flight import single_rank_shortcut
from tests.simulated_cuda.on_cuda import device, run_on_devices

pytestmark = pytest.mark.cuda

NCCL = "cpu:shm,cuda:nccl"
COUNT = 1 << 14


def _starts(n: int, rank: int) -> dict[str, tuple[Callable[[Tensor], Tensor], Any]]:
    """Functional calls of (n * n, 2) values, and their results from the ranks' inputs."""

    def all_of(xs: list[Tensor]) -> Tensor:
        return torch.stack(xs)

    def parts(x: Tensor) -> list[Tensor]:
        return list(x.chunk(n))

    last = n - 1
    even = [COUNT // n] * n
    return {
        "all_reduce": (lambda x: F.all_reduce(x, "sum", None), lambda xs: all_of(xs).sum(0)),
        "all_reduce strided": (
            lambda x: F.all_reduce(x.t(), "sum", None),
            lambda xs: all_of(xs).sum(0).t(),
        ),
        "all_reduce of float8": (
            lambda x: F.all_reduce(x.to(torch.float8_e4m3fn), "sum", None).float(),
            lambda xs: all_of(xs).sum(0),
        ),
        "premul_sum": (
            lambda x: F.all_reduce(x, "premul_sum", None, factor=0.5),
            lambda xs: all_of(xs).sum(0) / 2,
        ),
        "all_reduce_coalesced": (
            lambda x: F.all_reduce_coalesced([x, x * 2], "sum", None)[1],
            lambda xs: 2 * all_of(xs).sum(0),
        ),
        "all_gather_single": (lambda x: F.all_gather_single(x, 0, None), lambda xs: torch.cat(xs)),
        "all_gather_single dim 1": (
            lambda x: F.all_gather_single(x, 1, None),
            lambda xs: torch.cat(xs, 1),
        ),
        "all_gather_into_tensor_coalesced": (
            lambda x: F.all_gather_into_tensor_coalesced([x, x + 1], None)[1],
            lambda xs: torch.cat(xs) + 1,
        ),
        "all_gather": (
            lambda x: F.all_gather(x[: rank + 1], list(range(1, n + 1)), None),
            lambda xs: torch.cat([x[: r + 1] for r, x in enumerate(xs)]),
        ),
        "reduce_scatter_single": (
            lambda x: F.reduce_scatter_single(x, "sum", 0, None),
            lambda xs: parts(all_of(xs).sum(0))[rank],
        ),
        "reduce_scatter of bools": (
            lambda x: F.reduce_scatter_single(x > 1, "sum", 0, None).float(),
            lambda xs: parts(((all_of(xs) > 1).any(0)).float())[rank],
        ),
        "reduce_scatter_single_coalesced": (
            lambda x: F.reduce_scatter_tensor_coalesced([x, x * 2], "sum", [0, 0], None)[1],
            lambda xs: 2 * parts(all_of(xs).sum(0))[rank],
        ),
        "reduce_scatter": (
            lambda x: F.reduce_scatter(x, "sum", even, None),
            lambda xs: parts(all_of(xs).sum(0))[rank],
        ),
        "all_to_all_single": (
            lambda x: F.all_to_all_single(x, None, None, None),
            lambda xs: torch.cat([parts(x)[rank] for x in xs]),
        ),
        "broadcast": (lambda x: F.broadcast(x, last, None), lambda xs: xs[last]),
        "broadcast_coalesced": (
            lambda x: F.broadcast_coalesced([x, x + 1], last, None)[1],
            lambda xs: xs[last] + 1,
        ),
        "permute_tensor": (
            lambda x: F.permute_tensor(x, [(r + 1) % n for r in range(n)], None),
            lambda xs: xs[(rank - 1) % n],
        ),
        "reduce": (
            lambda x: F.reduce(x, "sum", last, None),
            lambda xs: all_of(xs).sum(0) if rank == last else None,
        ),
        "gather": (
            lambda x: F.gather(x, last, None),
            lambda xs: torch.cat(xs) if rank == last else torch.empty(0, 2),
        ),
        "scatter": (lambda x: F.scatter(x, last, None), lambda xs: parts(xs[last])[rank]),
        "barrier": (lambda x: F.barrier(x, None), lambda xs: xs[rank]),
    }


def _world(n: int) -> list[Tensor]:
    base = torch.arange(COUNT * 2).reshape(COUNT, 2) % 4
    return [(base + r).clamp(max=4).float() for r in range(n)]


def _each(
    check: Callable[[str, Any, Tensor, Tensor | None], str], *, shortcut: bool = False
) -> list[str]:
    """What is wrong with each call's result, the shortcut for one rank off unless told."""
    n, rank, failures = dist.get_world_size(), dist.get_rank(), []
    mine, world = device(), _world(n)
    with single_rank_shortcut(shortcut):
        for name, (start, reference) in _starts(n, rank).items():
            want = reference([x.clone() for x in world])
            got = check(name, start, world[rank].to(mine), want)
            if got:
                failures.append(f"{name}: {got}")
    torch.cuda.synchronize()
    assert torch_c10d_ext.pending_count() == 0
    return failures


def _differ(y: Tensor, want: Tensor | None) -> str:
    if want is None:
        return ""
    y = y.cpu()
    if y.shape != want.shape:
        return f"shape {tuple(y.shape)} instead of {tuple(want.shape)}"
    wrong = int((y != want).sum())
    return f"{wrong} of {want.numel()} values are wrong" if wrong else ""


def _none_fails(failures: list[list[str]]) -> None:
    for rank, each in enumerate(failures):
        assert not each, f"rank {rank}:\n" + "\n".join(each)


def _read_in_order() -> list[str]:
    """The input is written late, and overwritten as soon as the call is back."""

    def check(_name: str, start: Any, x: Tensor, want: Tensor | None) -> str:
        late = torch.full_like(x, -1.0)
        torch.cuda.synchronize()
        torch.cuda._sleep(3_000_000)
        late.copy_(x)
        y = start(late)
        late.fill_(-7.0)
        return _differ(y + 0, want)

    return _each(check)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_inputs_are_read_in_the_order_of_the_stream(size: int) -> None:
    _none_fails(run_on_devices(size, _read_in_order, backend=NCCL))


def _other_stream() -> list[str]:
    """Started on one stream, waited for on another, while the first one's memory is used again."""
    begins, ends = torch.cuda.Stream(device()), torch.cuda.Stream(device())

    def check(_name: str, start: Any, x: Tensor, want: Tensor | None) -> str:
        torch.cuda.synchronize()
        with torch.cuda.stream(begins):
            given = x.clone()
            y = start(given)
            del given
        with torch.cuda.stream(ends):
            if _is_over(y) or _name.endswith("dim 1"):  # computed with, where it began
                ends.wait_stream(begins)
                _plain(y).record_stream(ends)
            y = F.wait_tensor(y)
        with torch.cuda.stream(begins):
            junk = [torch.full_like(x, 9.0) for _ in range(4)]
            junk += [torch.full((COUNT * k,), 9.0, device=x.device) for k in (1, 2, 4)]
            junk += [torch.full((1,), 9.0, device=x.device) for _ in range(4)]
        with torch.cuda.stream(ends):
            z = y + 0
        # The junk is written by now, and what is on `ends` need not be done.
        begins.synchronize()
        ends.synchronize()
        text = _differ(z, want)
        if not all(bool((j == 9.0).all()) for j in junk):
            text += " memory of others was written"
        return text

    return _each(check)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_memory_is_kept_for_the_stream_that_waits(size: int) -> None:
    _none_fails(run_on_devices(size, _other_stream, backend=NCCL))


def _dropped() -> list[str]:
    """Results that are dropped on another stream right after the wait, and on none at all."""
    side = torch.cuda.Stream(device())

    def check(_name: str, start: Any, x: Tensor, want: Tensor | None) -> str:
        torch.cuda.synchronize()
        texts = []
        for waited in (True, False):
            y = start(x)
            if waited:
                with torch.cuda.stream(side):
                    F.wait_tensor(y)
            shape = y.shape
            del y
            junk = [torch.full((COUNT * k,), 9.0, device=x.device) for k in (1, 2, 2, 4)]
            junk += [torch.full(shape, 9.0, device=x.device) for _ in range(2)]
            torch.cuda.synchronize()
            if not all(bool((j == 9.0).all()) for j in junk):
                texts.append(f"written after it was given back ({waited=})")
        F.wait_tensor(F.all_reduce(torch.ones(1, device=x.device), "sum", None))
        for _ in range(70):  # the sweep
            F.wait_tensor(F.all_reduce(torch.ones(1, device=x.device), "sum", None))
        return ", ".join(texts)

    return _each(check)


@pytest.mark.parametrize("size", [1, 2])
def test_dropped_results_are_not_written_any_more(size: int) -> None:
    _none_fails(run_on_devices(size, _dropped, backend=NCCL, deadline=200))


def _second_wait() -> list[str]:
    """A work that is waited for on two streams orders both."""
    first, second = torch.cuda.Stream(device()), torch.cuda.Stream(device())

    def check(_name: str, start: Any, x: Tensor, want: Tensor | None) -> str:
        torch.cuda.synchronize()
        y = start(x)
        if _is_over(y) or _name.endswith("dim 1"):  # computed with, on the stream it began on
            return ""
        work = F.work_of(y)
        with torch.cuda.stream(first):
            torch.cuda._sleep(5_000_000)
            work.wait()
        with torch.cuda.stream(second):
            work.wait()
            z = _plain(y) + 0
        second.synchronize()
        text = _differ(z, want)
        torch.cuda.synchronize()
        F.wait_tensor(y)
        return text

    return _each(check)


def _plain(y: Tensor) -> Tensor:
    return getattr(y, "elem", y)


def _is_over(y: Tensor) -> bool:
    return not isinstance(y, F.AsyncCollectiveTensor) or y.completed


def test_a_second_wait_orders_its_stream_too() -> None:
    _none_fails(run_on_devices(2, _second_wait, backend=NCCL))


def _threads() -> list[str]:
    """Two threads wait for one result, each on a stream of its own."""
    mine = device()

    def check(_name: str, start: Any, x: Tensor, want: Tensor | None) -> str:
        torch.cuda.synchronize()
        y = start(x)
        plain = _plain(y)
        if _is_over(y) or _name.endswith("dim 1"):
            torch.cuda.synchronize()
        texts: list[str] = []
        both = threading.Barrier(2)

        def use() -> None:
            torch.cuda.set_device(mine)
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                both.wait(20)
                wait(plain)
                z = plain + 0
            stream.synchronize()
            texts.append(_differ(z, want))

        threads = [threading.Thread(target=use) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        F.wait_tensor(y)
        return "" if texts == ["", ""] else f"{texts}"

    return _each(check)


def test_two_threads_wait_each_on_its_stream() -> None:
    _none_fails(run_on_devices(2, _threads, backend=NCCL))


def _swept() -> list[str]:
    """What a later call finds over, and completes, is ordered with whoever waits later."""
    mine = device()
    elsewhere, late = torch.cuda.Stream(mine), torch.cuda.Stream(mine)

    def check(_name: str, start: Any, x: Tensor, want: Tensor | None) -> str:
        torch.cuda.synchronize()
        y = start(x)
        torch.cuda.synchronize()
        one = torch.ones(1, device=mine)
        with torch.cuda.stream(elsewhere):
            torch.cuda._sleep(20_000_000)
            others = [torch.ops.c10d_ext.all_reduce(one, "sum", group()) for _ in range(130)]
        with torch.cuda.stream(late):
            z = F.wait_tensor(y) + 0
        late.synchronize()
        text = _differ(z, want)
        for other in others:
            wait(other)
        return text

    return _each(check)


def test_what_was_swept_is_complete() -> None:
    _none_fails(run_on_devices(2, _swept, backend=NCCL, deadline=200))


def _device_of_the_tensor() -> list[str]:
    """The current device is another one than the tensors'."""
    mine = device()

    def check(_name: str, start: Any, x: Tensor, want: Tensor | None) -> str:
        torch.cuda.synchronize(mine)
        other = (mine.index + 1) % torch.cuda.device_count()
        late = torch.full_like(x, -1.0)
        torch.cuda.synchronize(mine)
        torch.cuda._sleep(3_000_000)
        late.copy_(x)
        with torch.cuda.device(other):
            y = start(late)
            late.fill_(-7.0)
            z = F.wait_tensor(y) + 0
            assert torch.cuda.current_device() == other
        return _differ(z, want)

    return _each(check)


@pytest.mark.parametrize("size", [1, 2])
def test_the_current_device_does_not_matter(size: int) -> None:
    _none_fails(run_on_devices(size, _device_of_the_tensor, backend=NCCL))


def _host_is_free() -> bool:
    """A wait orders streams and does not block the host."""
    x = torch.ones(1 << 10, device=device())
    with single_rank_shortcut(False):
        wait(torch.ops.c10d_ext.all_reduce(x, "sum", group()))
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)
        spun = torch.cuda.Event()
        spun.record()
        y = wait(torch.ops.c10d_ext.all_reduce(x, "sum", group()))
        free = not spun.query()
    return free and bool((y == dist.get_world_size()).all())


@pytest.mark.parametrize("size", [1, 2])
def test_a_wait_leaves_the_host_free(size: int) -> None:
    assert all(run_on_devices(size, _host_is_free, backend=NCCL))


# These compute with their results before they return them, on the stream of the call.
COMPUTED = ["all_reduce of float8", "reduce_scatter of bools"]


def _made_at_once() -> list[str]:
    """Results of one rank are made on the stream of the call: any other one waits for that."""
    mine = device()
    begins, waits, uses, again = (torch.cuda.Stream(mine) for _ in range(4))
    computed: list[str] = []

    def check(name: str, start: Any, x: Tensor, want: Tensor | None) -> str:
        torch.cuda.synchronize()
        with torch.cuda.stream(begins):
            torch.cuda._sleep(3_000_000)
            y, other = start(x.clone()), start(x.clone())
        if _is_over(y):
            computed.append(name)
            return ""
        with torch.cuda.stream(waits):
            z = F.wait_tensor(y) + 0
        with torch.cuda.stream(uses):
            used = other + 0
        with torch.cuda.stream(again):  # the third stream, and the second wait
            plain = wait(_plain(y)) + 0
        del y, other
        with torch.cuda.stream(begins):
            junk = [torch.full_like(x, 9.0) for _ in range(8)]
        for stream in (begins, waits, uses, again):
            stream.synchronize()
        texts = [_differ(got, want) for got in (z, used, plain)]
        if not all(bool((j == 9.0).all()) for j in junk):
            texts.append("memory of others was written")
        return ", ".join(text for text in texts if text)

    failures = _each(check, shortcut=True)
    assert computed == COMPUTED
    return failures


def test_results_of_one_rank_are_ordered_with_whoever_waits() -> None:
    _none_fails(run_on_devices(1, _made_at_once, backend=NCCL))


def _events_of_many() -> int:
    """How many more events there are after many results of one rank, dropped or waited for."""
    x = torch.ones(8, device=device())
    live = ctypes.CDLL("libcudart.so.13").simulated_cuda_live_events
    F.wait_tensor(F.all_reduce(x, "sum", None))
    torch.cuda.synchronize()
    before, kept = live(), []
    for turn in range(1000):
        y = F.all_reduce(x, "sum", None)
        if turn % 2:
            kept.append(y)
        if turn % 100 == 0:
            torch.cuda.synchronize()
    return int(live()) - before


def test_events_of_one_ranks_results_are_released() -> None:
    (more,) = run_on_devices(1, _events_of_many, backend=NCCL)
    assert more <= 300


def _messages() -> list[str]:
    """Messages around the ring, started on one stream and waited for on another."""
    mine, n, rank = device(), dist.get_world_size(), dist.get_rank()
    begins, ends = torch.cuda.Stream(mine), torch.cuda.Stream(mine)
    failures = []
    for turn in range(3):
        with torch.cuda.stream(begins):
            dtype = torch.complex64 if turn % 2 else torch.float32
            x = torch.full((COUNT,), -1.0, device=mine, dtype=dtype)
            torch.cuda._sleep(3_000_000)
            x.fill_(float(10 * turn + rank))
            given = x.conj() if turn % 2 else x  # every second one is sent from a copy
            like = torch.empty(COUNT, device=mine, dtype=dtype)
            peers = [(rank + 1) % n, (rank - 1) % n]
            sent, got = F.batch_isend_irecv([given, like], peers, [True, False])
            x.fill_(-7.0)
            del x, given
        with torch.cuda.stream(ends):
            got, source = F.wait_message(got, like)
            F.wait_message(sent, like)
            del sent
        with torch.cuda.stream(begins):
            junk = [torch.full((COUNT,), 9.0, device=mine, dtype=dtype) for _ in range(4)]
        with torch.cuda.stream(ends):
            z = got + 0
        begins.synchronize()  # the junk is written by now, and what is on `ends` need not be done
        torch.cuda.synchronize()
        want = torch.full((COUNT,), float(10 * turn + (rank - 1) % n), dtype=dtype)
        assert int(source) == (rank - 1) % n
        if text := _differ(z, want):
            failures.append(f"turn {turn}: {text}")
        if not all(bool((j == 9.0).all()) for j in junk):
            failures.append(f"turn {turn}: memory of others was written")
    return failures


@pytest.mark.parametrize("size", [2, 4])
def test_messages(size: int) -> None:
    _none_fails(run_on_devices(size, _messages, backend=NCCL))


def _messages_of_another_device() -> list[str]:
    """The current device is another one than that of the messages."""
    mine, n, rank = device(), dist.get_world_size(), dist.get_rank()
    x = torch.full((COUNT,), -1.0, device=mine)
    like = torch.empty(COUNT, device=mine)
    torch.cuda.synchronize(mine)
    torch.cuda._sleep(3_000_000)
    x.fill_(float(rank))
    with torch.cuda.device((mine.index + 1) % torch.cuda.device_count()):
        _sent, got = F.batch_isend_irecv([x, like], [(rank + 1) % n, (rank - 1) % n], [True, False])
        x.fill_(-7.0)
        got, _source = F.wait_message(got, like)
    text = _differ(got + 0, torch.full((COUNT,), float((rank - 1) % n)))
    return [text] if text else []


def test_the_current_device_does_not_matter_to_messages() -> None:
    _none_fails(run_on_devices(2, _messages_of_another_device, backend=NCCL))


def _never_waited() -> list[str]:
    """Results that nobody waits for are found over by later calls, or by one later wait."""
    x = torch.ones(1 << 18, device=device())  # 1 MiB
    F.wait_tensor(F.all_reduce(x, "sum", None))
    torch.cuda.synchronize()
    failures, before = [], torch.cuda.memory_allocated()
    for later in ("calls", "a wait"):
        for _ in range(100):
            F.all_reduce(x, "sum", None)
        torch.cuda.synchronize()
        calls = 130 if later == "calls" else 1
        ys = [torch.ops.c10d_ext.all_reduce(x[:1], "sum", group()) for _ in range(calls)]
        for y in ys:
            wait(y)
        torch.cuda.synchronize()
        more = (torch.cuda.memory_allocated() - before) >> 20
        if more > 8:
            failures.append(f"{more} MiB are held after {later}")
    if torch_c10d_ext.pending_count():
        failures.append(f"{torch_c10d_ext.pending_count()} are pending")
    return failures


@pytest.mark.parametrize("size", [1, 2])
def test_results_that_nobody_waits_for_are_released(size: int) -> None:
    _none_fails(run_on_devices(size, _never_waited, backend=NCCL))


def _future_aside(key: str) -> bool:
    """To ask for a work's future does not hold up the stream that does."""
    mine, store = device(), dist.distributed_c10d._get_default_store()
    x = torch.ones(COUNT, device=mine)
    F.wait_tensor(F.all_reduce(x, "sum", None))
    torch.cuda.synchronize()
    if dist.get_rank() != 0:
        store.wait([key], dt.timedelta(seconds=30))
    work = ext.all_reduce(x, async_op=True)
    future, went_on = work.get_future(), True
    if dist.get_rank() == 0:
        beside, ends = torch.cuda.Event(), time.monotonic() + 5
        beside.record()
        while not beside.query() and time.monotonic() < ends:
            time.sleep(0.01)
        went_on = beside.query()
        store.set(key, "1")
    future.wait()
    return went_on and bool((x == dist.get_world_size()).all())


def test_a_future_leaves_the_callers_stream_free() -> None:
    key = f"future-{time.monotonic_ns()}"
    assert all(run_on_devices(2, _future_aside, key, backend=NCCL))


def _spread_by_a_future() -> list[str]:
    """What a future's callback puts where it belongs is there for whoever waits, on any stream."""
    mine, n, rank = device(), dist.get_world_size(), dist.get_rank()
    waits, again = torch.cuda.Stream(mine), torch.cuda.Stream(mine)
    failures = []
    for turn in range(5):
        x = torch.full((COUNT,), float(rank + turn), device=mine)
        outs = [torch.full((COUNT,), -1.0, device=mine) for _ in range(n)]
        torch.cuda.synchronize()
        work = ext.all_gather(outs, x, async_op=True)
        future = work.get_future()
        with torch.cuda.stream(waits):
            work.wait()
            z = torch.stack(outs)
        with torch.cuda.stream(again):
            future.wait()
            z2 = torch.stack(outs)
        waits.synchronize()
        again.synchronize()
        want = torch.arange(n).float().add(turn).repeat_interleave(COUNT).view(n, COUNT)
        failures += [
            f"turn {turn}: {text}" for text in (_differ(z, want), _differ(z2, want)) if text
        ]
    return failures


@pytest.mark.parametrize("size", [2, 4])
def test_what_a_future_has_spread_is_seen_on_every_stream(size: int) -> None:
    _none_fails(run_on_devices(size, _spread_by_a_future, backend=NCCL))
