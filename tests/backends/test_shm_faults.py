"""What the shm backend does when something goes wrong: ranks that die, stop or disagree.

One file, for `tests/hosts/` holds other backends to its functions and tables, by name.
"""

from __future__ import annotations

import datetime as dt
import os
import queue
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_c10d_ext.distributed as ours
from tests.backends.dist_ops import all_gather_single, reduce_scatter_single
from tests.backends.failures import Report, check_works, report
from tests.harness import run
from tests.harness.crew import crew, mark
from tests.harness.worker import FALLBACK
from tests.native import build
from torch_c10d_ext import _C, errors, functional
from torch_c10d_ext._backends import shm_settings

BACKEND = "shm"
# shm itself, and its collectives over gloo where ranks cannot share memory.
everywhere = pytest.mark.parametrize("backend", [BACKEND, FALLBACK])


# --- ranks that go away --------------------------------------------------------------------------

# What a rank may be waiting in for a rank that is gone, by name.
CALLS: dict[str, Callable[[int], Any]] = {
    "all_reduce": lambda gone: dist.all_reduce(torch.ones(3)),
    "all_reduce of 64 MiB": lambda gone: dist.all_reduce(torch.ones(1 << 24)),
    "all_gather": lambda gone: dist.all_gather(
        [torch.empty(2) for _ in range(dist.get_world_size())], torch.ones(2)
    ),
    "all_to_all": lambda gone: dist.all_to_all_single(
        torch.empty(dist.get_world_size()), torch.ones(dist.get_world_size())
    ),
    "broadcast": lambda gone: dist.broadcast(torch.ones(1), gone),
    "barrier": lambda gone: dist.barrier(),
    "work": lambda gone: dist.all_reduce(torch.ones(3), async_op=True).wait(),
    "future": lambda gone: dist.all_reduce(torch.ones(3), async_op=True).get_future().wait(),
    "our future": lambda gone: ours.all_reduce(torch.ones(3), async_op=True).get_future().wait(),
    "recv": lambda gone: dist.recv(torch.empty(1), gone),
    "send of 64 MiB": lambda gone: dist.send(torch.ones(1 << 24), gone),
    "op": lambda gone: torch.ops.c10d_ext.wait_tensor(
        torch.ops.c10d_ext.all_reduce(torch.ones(3), "sum", dist.group.WORLD.group_name)
    ),
}


def _call(name: str, gone: int, scratch: Path) -> tuple[Report, Report]:
    check_works()
    mark(scratch, f"rank {dist.get_rank()}")
    first = report(lambda: CALLS[name](gone))
    # Once broken, a group says so at once.
    return first, report(lambda: dist.all_reduce(torch.ones(1)))


def _idle_forever(scratch: Path) -> None:
    check_works()
    mark(scratch, f"rank {dist.get_rank()}")
    time.sleep(120)


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, BACKEND) for name in CALLS]
    + [
        (name, FALLBACK)
        for name in ("all_reduce of 64 MiB", "barrier", "future", "recv", "send of 64 MiB", "op")
    ],
)
def test_a_killed_rank_is_named_on_all_survivors(name: str, backend: str) -> None:
    size, victim = 3, 1
    pairwise = name.startswith(("send", "recv"))
    survivors = [0] if pairwise else [0, 2]
    with crew(size, backend) as ranks:
        for rank in range(size):
            if rank in survivors:
                ranks.start(rank, _call, name, victim, ranks.scratch)
            else:
                ranks.start(rank, _idle_forever, ranks.scratch)
        for rank in range(size):
            ranks.await_mark(f"rank {rank}")
        ranks.signal(victim, signal.SIGKILL)
        for rank in survivors:
            failure, later = ranks.result(rank)
            assert failure.kind == "RankLost", failure.text
            assert failure.ranks == [victim]
            assert failure.op in name.replace("work", "all_reduce").replace(
                "future", "all_reduce"
            ).replace("op", "all_reduce").replace("all_to_all", "all_to_all_single")
            assert f"rank {victim} (pid {ranks.pid(victim)}" in failure.text
            assert f"(rank {rank}/{size}, " in failure.text
            if not pairwise:
                assert failure.seq == 2
                assert "collective 2" in failure.text
            assert later.kind == "RankLost", later.text
            assert later.ranks == [victim]


# What rank 2 waits in for rank 1, which lives, when rank 0 is killed.
BESIDE: dict[str, Callable[[], Any]] = {
    "recv": lambda: dist.recv(torch.empty(1), 1),
    "recv from anyone": lambda: dist.recv(torch.empty(1)),
    "send of 64 MiB": lambda: dist.send(torch.ones(1 << 24), 1),
    "work": lambda: dist.irecv(torch.empty(1), 1).wait(),
}


def _wait_for_another(name: str, scratch: Path) -> tuple[Report, Report]:
    check_works()
    mark(scratch, f"rank {dist.get_rank()}")
    return report(BESIDE[name]), report(lambda: dist.recv(torch.empty(1), 1))


@everywhere
@pytest.mark.parametrize("name", BESIDE)
def test_a_killed_rank_ends_messages_of_others(name: str, backend: str) -> None:
    with crew(3, backend) as ranks:
        for rank in (0, 1):
            ranks.start(rank, _idle_forever, ranks.scratch)
        ranks.start(2, _wait_for_another, name, ranks.scratch)
        for rank in range(3):
            ranks.await_mark(f"rank {rank}")
        killed = ranks.signal(0, signal.SIGKILL)
        failures = ranks.result(2)
        for failure in failures:
            assert (failure.kind, failure.ranks) == ("RankLost", [0]), failure
            assert f"got rank 0 (pid {ranks.pid(0)}, gone) (rank 2/3, " in failure.text
        print(f"kill() to exception: {(failures[0].at - killed) * 1e3:.1f} ms")


def _fail_in_groups_of_two(scratch: Path) -> list[float]:
    """Rank 0's failures, one with every other rank; those only wait to be killed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group([0, peer]) for peer in range(1, size)]
    for peer in range(1, size):
        if rank in (0, peer):
            check_works(groups[peer - 1])
    if rank != 0:
        time.sleep(120)
    times = []
    for peer in range(1, size):
        mark(scratch, f"with {peer}")
        failure = report(lambda peer=peer: dist.all_reduce(torch.ones(1), group=groups[peer - 1]))
        assert failure.kind == "RankLost", failure.text
        times.append(failure.at)
    return times


def test_ranks_killed_one_after_another_are_reported_each() -> None:
    size = 6
    with crew(size, BACKEND) as ranks:
        for rank in range(size):
            ranks.start(rank, _fail_in_groups_of_two, ranks.scratch)
        killed = []
        for rank in range(1, size):
            ranks.await_mark(f"with {rank}")
            killed.append(ranks.signal(rank, signal.SIGKILL))
        reported = ranks.result(0)
    latencies = [late - early for late, early in zip(reported, killed, strict=True)]
    print(
        f"kill() to exception: median {statistics.median(latencies) * 1e3:.2f} ms, "
        f"worst {max(latencies) * 1e3:.2f} ms"
    )


def _survive(scratch: Path) -> None:
    others = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        _idle_forever(scratch)
    else:
        check_works()
        mark(scratch, f"rank {dist.get_rank()}")
        assert report(lambda: dist.barrier()).kind == "RankLost"
        for _ in range(100):
            check_works(others)


@everywhere
def test_groups_without_the_lost_rank_go_on(backend: str) -> None:
    with crew(3, backend) as ranks:
        for rank in range(3):
            ranks.start(rank, _survive, ranks.scratch)
        for rank in range(3):
            ranks.await_mark(f"rank {rank}")
        ranks.signal(1, signal.SIGKILL)
        ranks.result(0)
        ranks.result(2)


def _shrink(scratch: Path, victim: int) -> list[int]:
    group = dist.new_group()
    if dist.get_rank() == victim:
        _idle_forever(scratch)
    check_works()
    mark(scratch, f"rank {dist.get_rank()}")
    assert report(lambda: dist.all_reduce(torch.ones(1), group=group)).ranks == [victim]
    rest = dist.shrink_group([victim], group)
    for _ in range(100):
        check_works(rest)
    return dist.get_process_group_ranks(rest)


@everywhere
@pytest.mark.parametrize("victim", [0, 1])
def test_the_group_can_be_shrunk_to_the_survivors(victim: int, backend: str) -> None:
    survivors = [rank for rank in range(3) if rank != victim]
    with crew(3, backend) as ranks:
        for rank in range(3):
            ranks.start(rank, _shrink, ranks.scratch, victim)
        for rank in range(3):
            ranks.await_mark(f"rank {rank}")
        ranks.signal(victim, signal.SIGKILL)
        for rank in survivors:
            assert ranks.result(rank) == survivors


def _leave_early() -> Report | None:
    group = dist.new_group()
    check_works(group)
    if dist.get_rank() == 1:
        dist.destroy_process_group(group)
        return None
    return report(lambda: dist.all_reduce(torch.ones(1), group=group))


@everywhere
def test_a_rank_that_left_the_group_is_named(backend: str) -> None:
    with crew(2, backend) as ranks:
        failure, _ = ranks.run(_leave_early)
        assert (failure.kind, failure.ranks, failure.op) == ("RankLost", [1], "all_reduce")
        assert f"rank 1 (pid {ranks.pid(1)}, left the group)" in failure.text


def _complete_and_die(scratch: Path) -> list[float]:
    """What a rank contributed before it died still counts."""
    rank = dist.get_rank()
    tensors = [torch.full((5,), float(2**rank)) for _ in range(3)]
    if rank == 1:
        works = [dist.all_reduce(x, async_op=True) for x in tensors]
        for work in works:
            work.wait()
        mark(scratch, "done")
        os.kill(os.getpid(), signal.SIGKILL)
    for x in tensors:
        dist.all_reduce(x)
    return [x[0].item() for x in tensors]


@everywhere
def test_what_was_completed_before_a_death_stays_complete(backend: str) -> None:
    with crew(2, backend) as ranks:
        for rank in range(2):
            ranks.start(rank, _complete_and_die, ranks.scratch)
        ranks.await_mark("done")
        assert ranks.result(0) == [3.0, 3.0, 3.0]


# --- ranks that do not answer --------------------------------------------------------------------


def _wait_a_moment() -> None:
    """A wait with a timeout of its own names who is missing, and the operation goes on."""
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    x, message = torch.full((3,), float(rank)), torch.zeros(2)
    if rank == 1:
        store.wait(["tests/moment 0", "tests/moment 2"], dt.timedelta(seconds=30))
        dist.send(torch.ones(2), 0)
    ops = ["all_reduce", "barrier"]  # the second is behind the first
    started = [dist.all_reduce(x, async_op=True), dist.barrier(async_op=True)]
    if rank == 0:
        ops.append("recv")
        started.append(dist.irecv(message, 1))
    if rank != 1:
        for work, op in zip(started, ops, strict=True):
            failure = report(lambda work=work: work.wait(dt.timedelta(milliseconds=50)))
            assert (failure.kind, failure.op) == ("CollectiveTimeout", op)
            # On a busy machine others may be late as well.
            assert 1 in failure.ranks and set(failure.ranks) <= {0, 1, 2} - {rank}, failure
            text = r"must end within 50 ms, got no answer from (rank 0 .*)?rank 1 \(pid"
            assert re.search(text, failure.text), failure
        store.set(f"tests/moment {rank}", "")
    for work in started:
        work.wait()
    assert torch.equal(x, torch.full((3,), 3.0))
    assert rank != 0 or torch.equal(message, torch.ones(2))


@everywhere
def test_a_wait_with_a_timeout_of_its_own_names_who_is_missing(backend: str) -> None:
    run(3, _wait_a_moment, backend=backend)


def _wait_for_a_stopped_rank(scratch: Path) -> Report:
    check_works()
    mark(scratch, f"rank {dist.get_rank()}")
    if dist.get_rank() == 0:
        time.sleep(120)
    while not (scratch / "stopped").exists():
        time.sleep(0.01)
    work = dist.all_reduce(torch.ones(3), async_op=True)
    return report(lambda: work.wait(dt.timedelta(milliseconds=200)))


@everywhere
def test_a_wait_with_a_timeout_of_its_own_names_a_rank_0_that_is_stopped(backend: str) -> None:
    """It is rank 0 that others ask whom they wait for."""
    with crew(2, backend) as ranks:
        for rank in range(2):
            ranks.start(rank, _wait_for_a_stopped_rank, ranks.scratch)
        ranks.await_mark("rank 0")
        ranks.await_mark("rank 1")
        ranks.signal(0, signal.SIGSTOP)
        mark(ranks.scratch, "stopped")
        failure = ranks.result(1)
        assert (failure.kind, failure.ranks) == ("CollectiveTimeout", [0]), failure
        asked = f"within 200 ms, got no answer from rank 0 (pid {ranks.pid(0)}, stopped)"
        assert asked in failure.text, failure
        ranks.signal(0, signal.SIGCONT)


def _disagree_in_flight() -> None:
    x = torch.ones(4 + dist.get_rank())
    for start in (dist.all_reduce, ours.all_reduce):
        for _ in range(20):
            work = start(x, async_op=True)  # who comes second knows at once
            assert report(work.wait).kind == "CollectiveMismatch"
            assert torch.equal(x, torch.ones(len(x)))
    y = functional.all_reduce(x, "sum", None)
    assert report(lambda: y + 0).kind == "CollectiveMismatch"
    for call in (lambda: ours.all_reduce(x), lambda: functional.all_reduce_inplace(x) + 0):
        assert report(call).kind == "CollectiveMismatch"
    check_works()
    assert _C.pending_count() == 0


@everywhere
def test_ranks_hear_at_the_wait_that_they_disagree(backend: str) -> None:
    run(2, _disagree_in_flight, backend=backend)


def _name_what_was_called() -> None:
    rank = dist.get_rank()
    count = 3 + rank
    x, twice = torch.ones(count), torch.empty(2 * count)
    calls: dict[str, Callable[[], object]] = {
        "all_gather_into_tensor": lambda: all_gather_single(twice, x),
        "reduce_scatter_tensor": lambda: reduce_scatter_single(x, twice),
        "all_to_all_single": lambda: dist.all_to_all_single(twice, twice.clone()),
        "all_reduce": lambda: dist.all_reduce(x),
    }
    for name, call in calls.items():
        failure = report(call)
        assert (failure.kind, failure.op) == ("CollectiveMismatch", name), failure
        assert failure.text.startswith(f"{name}: "), failure
    group = dist.new_group(backend="shm")
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        failure = report(lambda: group.monitored_barrier(dt.timedelta(milliseconds=200)))
        assert (failure.kind, failure.op) == ("CollectiveTimeout", "monitored_barrier"), failure
        assert failure.text.startswith("monitored_barrier: ") and failure.ranks == [1], failure
        store.set("tests/named", "")
    else:
        store.wait(["tests/named"], dt.timedelta(seconds=30))
    dist.destroy_process_group(group)


@everywhere
def test_errors_name_what_was_called(backend: str) -> None:
    run(2, _name_what_was_called, backend=backend)


def _time_out(scratch: Path, seconds: float, absent: int) -> tuple[Report, float]:
    group = dist.new_group()
    check_works(group)
    assert group is not None
    group.set_timeout(dt.timedelta(seconds=seconds))
    rank = dist.get_rank()
    mark(scratch, f"rank {rank}")
    if rank == absent:
        time.sleep(120)
    time.sleep(0.5)  # it is stopped meanwhile
    begin = time.monotonic()
    return report(lambda: dist.all_reduce(torch.ones(1), group=group)), begin


@everywhere
@pytest.mark.parametrize(("absent", "stopped"), [(1, True), (1, False), (0, True)])
def test_a_rank_that_does_not_come_is_named_with_its_state(
    absent: int, stopped: bool, backend: str
) -> None:
    timeout = 1.0
    with crew(3, backend) as ranks:
        for rank in range(3):
            ranks.start(rank, _time_out, ranks.scratch, timeout, absent)
        for rank in range(3):
            ranks.await_mark(f"rank {rank}")
        if stopped:
            ranks.signal(absent, signal.SIGSTOP)
        for rank in {0, 1, 2} - {absent}:
            failure, begin = ranks.result(rank)
            assert (failure.kind, failure.ranks) == ("CollectiveTimeout", [absent]), failure.text
            assert (failure.op, failure.seq) == ("all_reduce", 2)
            state = "stopped" if stopped else "sleeping"
            assert f"rank {absent} (pid {ranks.pid(absent)}, {state})" in failure.text
            # The first rank to give up tells the others.
            assert rank == 2 or failure.at - begin > timeout - 0.5
            assert "collective 2 must be done" in failure.text
        if stopped:
            ranks.signal(absent, signal.SIGCONT)


# --- ranks that disagree -------------------------------------------------------------------------


# What one rank (`odd`) calls and what the others call: outputs that must stay as they are, and how.
Asked = tuple[list[torch.Tensor], Callable[[], Any]]


def _reduced(count: int = 6, dtype: torch.dtype = torch.float32, op: Any = "SUM") -> Asked:
    x = torch.full((count,), 7, dtype=dtype)
    return [x], lambda: dist.all_reduce(x, getattr(dist.ReduceOp, op))


def _sent(root: int = 0, count: int = 6) -> Asked:
    x = torch.full((count,), 7.0)
    return [x], lambda: dist.broadcast(x, root)


def _reduced_to(root: int) -> Asked:
    x = torch.full((6,), 7.0)
    return [x], lambda: dist.reduce(x, root)


def _gathered(count: int = 2, dtype: torch.dtype = torch.float32) -> Asked:
    outs = [torch.full((count,), 7, dtype=dtype) for _ in range(dist.get_world_size())]
    return outs, lambda: dist.all_gather(outs, torch.ones(count, dtype=dtype))


def _gathered_at(root: int) -> Asked:
    rank, size = dist.get_rank(), dist.get_world_size()
    outs = [torch.full((2,), 7.0) for _ in range(size)]
    return outs, lambda: dist.gather(torch.ones(2), outs if rank == root else None, root)


def _scattered(root: int) -> Asked:
    rank, size = dist.get_rank(), dist.get_world_size()
    out = torch.full((2,), 7.0)
    ins = [torch.ones(2) for _ in range(size)] if rank == root else None
    return [out], lambda: dist.scatter(out, ins, root)


def _scattered_sums(count: int) -> Asked:
    out = torch.full((count,), 7.0)
    ins = [torch.ones(count) for _ in range(dist.get_world_size())]
    return [out], lambda: dist.reduce_scatter(out, ins)


def _exchanged(receive: int, send: int) -> Asked:
    """With so many elements from and to every rank, and one more of this rank for itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ins = [send + (peer == rank) for peer in range(size)]
    outs = [receive + (peer == rank) for peer in range(size)]
    out = torch.full((sum(outs),), 7.0)
    return [out], lambda: dist.all_to_all_single(out, torch.ones(sum(ins)), outs, ins)


def _together(*counts: int) -> Asked:
    outs = [torch.full((count,), 7.0) for count in counts]
    return outs, lambda: dist.group.WORLD.allreduce_coalesced(outs).wait()


def _sparse(*sizes: int, dims: int = 1, op: Any = "SUM") -> Asked:
    x = torch.ones(sizes).to_sparse(dims)
    return [x], lambda: dist.all_reduce(x, getattr(dist.ReduceOp, op))


def _met() -> Asked:
    return [], lambda: dist.barrier()


# By what differs: what the odd rank asks for, what the others do, and how both are described.
MISMATCHES: dict[str, tuple[Callable[[], Asked], Callable[[], Asked], str, str]] = {
    "all_reduce shape": (
        lambda: _reduced(count=5),
        lambda: _reduced(count=6),
        "all_reduce(5 x float32, sum)",
        "all_reduce(6 x float32, sum)",
    ),
    "sizes in a list": (
        lambda: _together(3, 5),
        lambda: _together(5, 3),
        "all_reduce(8 x float32 in 2 tensors of sizes [3, 5], sum)",
        "all_reduce(8 x float32 in 2 tensors of sizes [5, 3], sum)",
    ),
    "sparse shape": (
        lambda: _sparse(3, 2),
        lambda: _sparse(2, 3),
        "all_reduce(float32 of shape [3, 2] with 1 sparse dimensions, sum)",
        "all_reduce(float32 of shape [2, 3] with 1 sparse dimensions, sum)",
    ),
    "sparse dimensions": (
        lambda: _sparse(3, 2, dims=2),
        lambda: _sparse(3, 2),
        "all_reduce(float32 of shape [3, 2] with 2 sparse dimensions, sum)",
        "all_reduce(float32 of shape [3, 2] with 1 sparse dimensions, sum)",
    ),
    "sparse reduce op": (
        lambda: _sparse(3, 2, op="AVG"),
        lambda: _sparse(3, 2),
        "all_reduce(float32 of shape [3, 2] with 1 sparse dimensions, avg)",
        "all_reduce(float32 of shape [3, 2] with 1 sparse dimensions, sum)",
    ),
    "sparse or dense": (
        lambda: _sparse(3, 2),
        lambda: _reduced(),
        "all_reduce(float32 of shape [3, 2] with 1 sparse dimensions, sum)",
        "all_reduce(6 x float32, sum)",
    ),
    "all_reduce size beyond the arena": (
        lambda: _reduced(count=(1 << 22) + 1),
        lambda: _reduced(count=1 << 22),
        "all_reduce(4194305 x float32, sum)",
        "all_reduce(4194304 x float32, sum)",
    ),
    "dtype of the same width": (
        lambda: _reduced(dtype=torch.int32),
        lambda: _reduced(),
        "all_reduce(6 x int32, sum)",
        "all_reduce(6 x float32, sum)",
    ),
    "dtype of the same size": (
        lambda: _reduced(dtype=torch.float64, count=3),
        lambda: _reduced(),
        "all_reduce(3 x float64, sum)",
        "all_reduce(6 x float32, sum)",
    ),
    "reduce op": (
        lambda: _reduced(op="MAX"),
        lambda: _reduced(),
        "all_reduce(6 x float32, max)",
        "all_reduce(6 x float32, sum)",
    ),
    "op": (
        lambda: _sent(),
        lambda: _reduced(),
        "broadcast(6 x float32, root 0)",
        "all_reduce(6 x float32, sum)",
    ),
    "op without data": (lambda: _met(), lambda: _gathered(), "barrier()", "all_gather(2 x float32"),
    "broadcast root": (
        lambda: _sent(1),
        lambda: _sent(0),
        "broadcast(6 x float32, root 1)",
        "broadcast(6 x float32, root 0)",
    ),
    "broadcast shape": (
        lambda: _sent(count=5),
        lambda: _sent(),
        "broadcast(5 x float32, root 0)",
        "broadcast(6 x float32, root 0)",
    ),
    "reduce root": (lambda: _reduced_to(1), lambda: _reduced_to(0), "root 1", "root 0"),
    "gather root": (lambda: _gathered_at(1), lambda: _gathered_at(0), "root 1", "root 0"),
    "scatter root": (lambda: _scattered(1), lambda: _scattered(0), "root 1", "root 0"),
    "all_gather shape": (
        lambda: _gathered(3),
        lambda: _gathered(2),
        "all_gather(3 x float32)",
        "all_gather(2 x float32)",
    ),
    "all_gather dtype": (
        lambda: _gathered(2, torch.bfloat16),
        lambda: _gathered(2, torch.float16),
        "all_gather(2 x bfloat16)",
        "all_gather(2 x float16)",
    ),
    "reduce_scatter shape": (
        lambda: _scattered_sums(4),
        lambda: _scattered_sums(3),
        "reduce_scatter(4 x float32, sum)",
        "reduce_scatter(3 x float32, sum)",
    ),
    "splits": (lambda: _exchanged(2, 3), lambda: _exchanged(2, 2), "3 x float32", "expects 2"),
}


def _disagree(name: str, odd: int) -> None:
    rank = dist.get_rank()
    check_works()
    odds, rest, odd_text, rest_text = MISMATCHES[name]
    for _ in range(2):  # and once more after it has failed
        outs, call = odds() if rank == odd else rest()
        before = [out.clone() for out in outs]
        failure = report(call)
        assert failure.kind == "CollectiveMismatch", failure
        assert odd_text in failure.text and rest_text in failure.text, failure.text
        assert f"(rank {rank}/{dist.get_world_size()}, " in failure.text
        if name != "splits":
            everyone = range(dist.get_world_size())
            expected = [odd] if odd != 0 else [peer for peer in everyone if peer != 0]
            assert failure.ranks == expected, failure
        for out, old in zip(outs, before, strict=True):
            assert torch.equal(out.to_dense(), old.to_dense()), (out, old)
        check_works()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", MISMATCHES)
def test_ranks_that_disagree_all_raise(name: str, size: int) -> None:
    run(size, _disagree, name, 1, backend=BACKEND)


@pytest.mark.parametrize("name", MISMATCHES)
def test_ranks_that_disagree_all_raise_over_gloo(name: str) -> None:
    run(3, _disagree, name, 1, backend=FALLBACK)


def _in_a_list(outs: list[torch.Tensor], group: Any) -> Any:
    return group.allreduce_coalesced(outs)


def _in_a_block_of_the_backend(outs: list[torch.Tensor], group: Any) -> Any:
    backend = group._get_backend(torch.device("cpu"))
    backend._start_coalescing()
    for out in outs:
        backend.allreduce([out])
    return backend._end_coalescing()


def _in_a_block(outs: list[torch.Tensor], group: Any) -> Any:
    with ours.coalescing_manager(group, async_ops=True) as block:
        for out in outs:
            ours.all_reduce(out, group=group)
    return block


DOUBLE = torch.float64
SINGLE = torch.float32
# What the odd rank reduces and what the others do, by how many and of which dtypes.
COALESCED: dict[str, tuple[Callable[[list[torch.Tensor], Any], Any], list[Any], list[Any], str]] = {
    "lists": (_in_a_list, [SINGLE] * 3, [SINGLE] * 2, "in 3 tensors of sizes [4, 4, 4]"),
    "dtypes": (_in_a_block, [SINGLE] * 2, [SINGLE, DOUBLE], "in 2 tensors of sizes [4, 4]"),
    "more of a dtype": (
        _in_a_block,
        [DOUBLE] * 3 + [SINGLE],
        [DOUBLE] * 2 + [SINGLE] * 2,
        "in 3 tensors of sizes [4, 4, 4]",
    ),
    "dtypes in a block of the backend": (
        _in_a_block_of_the_backend,
        [SINGLE] * 2,
        [SINGLE, DOUBLE],
        "in 2 tensors of sizes [4, 4]",
    ),
    "numbers in a block of the backend": (
        _in_a_block_of_the_backend,
        [SINGLE] * 3,
        [SINGLE] * 2,
        "in 3 tensors of sizes [4, 4, 4]",
    ),
}


def _lose_step(name: str, odd: int) -> None:
    """After it a call of one rank would meet an earlier one of another, of the same kind."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    check_works(group)
    start, odds, rest, text = COALESCED[name]
    outs = [torch.full((4,), 7.0, dtype=d) for d in (odds if rank == odd else rest)]
    block = start(outs, group)
    after = torch.full((4,), 7.0, dtype=DOUBLE)
    work = dist.all_reduce(after, group=group, async_op=True)
    failure = report(block.wait)
    assert failure.kind == "CollectiveMismatch", failure
    assert text in failure.text, failure.text
    assert "different numbers of tensors may have coalesced their calls differently" in failure.text
    assert f"(rank {rank}/{size}, " in failure.text
    assert failure.ranks == ([odd] if odd != 0 else list(range(1, size)))
    later_calls = (lambda: dist.all_reduce(after, group=group), lambda: dist.barrier(group))
    for later in (work.wait, *later_calls):
        ended = report(later)
        assert (ended.kind, ended.ranks) == ("CollectiveMismatch", failure.ranks), ended
        assert "the group is broken since " in ended.text and text in ended.text, ended.text
        assert f"(rank {rank}/{size}, " in ended.text
    assert all(torch.equal(out, torch.full_like(out, 7.0)) for out in (*outs, after))
    assert _C.pending_count() == 0
    dist.destroy_process_group(group)
    check_works()  # the other groups of these ranks


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", COALESCED)
@pytest.mark.parametrize("odd", [0, 1])
def test_ranks_that_coalesce_differently_end_the_group(name: str, size: int, odd: int) -> None:
    run(size, _lose_step, name, odd, backend=BACKEND)


@pytest.mark.parametrize("name", [name for name in COALESCED if "backend" not in name])
def test_ranks_that_coalesce_differently_end_the_group_over_gloo(name: str) -> None:
    """There the calls of a block of the backend start one by one."""
    run(3, _lose_step, name, 1, backend=FALLBACK)


SHAPES: dict[str, Callable[[int, Any], Any]] = {
    "all_reduce": lambda wide, group: dist.all_reduce(torch.ones(wide, 8 // wide), group=group),
    "broadcast": lambda wide, group: dist.broadcast(torch.ones(wide, 8 // wide), 0, group),
    "all_gather": lambda wide, group: dist.all_gather(
        [torch.empty(wide, 8 // wide) for _ in range(dist.get_world_size())],
        torch.ones(wide, 8 // wide),
        group,
    ),
    "functional": lambda wide, group: functional.wait_tensor(
        functional.all_gather_single(torch.ones(wide, 8 // wide), 0, group)
    ),
    "coalesced": lambda wide, group: group.allreduce_coalesced(
        [torch.ones(wide, 8 // wide), torch.ones(3)]
    ).wait(),
}


def _compares_shapes() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    lenient = dist.new_group()
    os.environ["TORCH_C10D_EXT_SHM_STRICT"] = "1"
    strict = dist.new_group()
    del os.environ["TORCH_C10D_EXT_SHM_STRICT"]
    for name, call in SHAPES.items():
        call(4, strict)
        call(4 if rank == 1 else 2, lenient)
        failure = report(lambda call=call: call(4 if rank == 1 else 2, strict))
        assert (failure.kind, failure.ranks) == ("CollectiveMismatch", [1]), failure
        if name != "coalesced":
            assert "of shape [4, 2] on rank 1" in failure.text
            assert "of shape [2, 4] on ranks 0 and 2" in failure.text
        else:
            assert failure.text.count("of shape hash ") == 2
    # torch's functions and this package's meet, and parts of other sizes are no mismatch.
    whole = torch.empty(size * 4, 2)
    if rank == 0:
        functional.wait_tensor(functional.all_gather_single(torch.ones(4, 2), 0, strict))
    else:
        dist.all_gather(list(whole.split(4)), torch.ones(4, 2), strict)
        assert whole.eq(1).all()
    parts = [torch.empty(r, 2) for r in range(size)]
    dist.gather(torch.ones(rank, 2), parts if rank == 0 else None, 0, strict)
    assert rank != 0 or all(part.eq(1).all() for part in parts)


@everywhere
def test_shapes_are_compared_where_that_is_set(backend: str) -> None:
    run(3, _compares_shapes, backend=backend)


@everywhere
@pytest.mark.parametrize("name", ["all_reduce shape", "op", "reduce op"])
def test_rank_0_may_be_the_odd_one(name: str, backend: str) -> None:
    run(3, _disagree, name, 0, backend=backend)


def _order() -> None:
    """Two collectives in flight in one order here and in another there."""
    rank = dist.get_rank()
    x, y = torch.full((6,), 7.0), torch.full((6,), 8.0)
    calls = [
        lambda: dist.all_reduce(x, async_op=True),
        lambda: dist.broadcast(y, 0, async_op=True),
    ]
    works = [call() for call in (calls if rank == 1 else calls[::-1])]
    failures = [report(work.wait) for work in works]
    assert [f.kind for f in failures] == ["CollectiveMismatch"] * 2, failures
    assert failures[0].seq + 1 == failures[1].seq
    assert x.tolist() == [7.0] * 6 and y.tolist() == [8.0] * 6
    check_works()


@everywhere
def test_another_order_is_a_mismatch(backend: str) -> None:
    run(2, _order, backend=backend)
    run(3, _order, backend=backend)


def _message_refused(works: list[Any], sent: torch.Tensor, wanted: torch.Tensor, tag: int) -> None:
    """Both ends say the same, and nothing is written."""
    rank = dist.get_rank()
    before = wanted.clone()
    op = "send" if rank == 0 else "recv"
    for work in works:
        failure = report(work.wait)
        assert failure.kind == "CollectiveMismatch", failure
        assert failure.text == (
            f"{op}: what is sent must be what is received, got {told(sent)} from rank 0, "
            f"{told(wanted)} expected by rank 1, tag {tag} (rank {rank}/2, group '0')"
        )
        assert (failure.op, failure.ranks) == (op, [0, 1]), failure
        assert failure.seq > 0
    assert torch.equal(wanted, before)


def told(x: torch.Tensor) -> str:
    return f"{x.numel()} x {str(x.dtype).removeprefix('torch.')}"


def _receive_something_else(own: bool, receives_first: bool) -> None:
    api: Any = ours if own else dist
    rank = dist.get_rank()
    for sent, wanted in (
        (torch.ones(6), torch.full((5,), 7.0)),
        (torch.ones(4), torch.full((5,), 7.0)),
        (torch.ones(0), torch.full((5,), 7.0)),
        (torch.ones(5), torch.ones(0)),
        (torch.ones(5, dtype=torch.int32), torch.full((10,), 7.0)[::2]),
        (torch.ones(2, dtype=torch.int64), torch.full((4,), 7.0)),
        (torch.ones(1 << 20), torch.full((1 << 19,), 7.0)),
    ):
        for source in (0, None):

            def start(
                x: torch.Tensor, y: torch.Tensor, tag: int, source: int | None = source
            ) -> Any:
                # The barriers also show that collectives pass messages that wait.
                if receives_first and rank == 0:
                    dist.barrier()
                work = api.isend(x, 1, tag=tag) if rank == 0 else api.irecv(y, source, tag=tag)
                if receives_first and rank == 1:
                    dist.barrier()
                return work

            _message_refused([start(sent, wanted, 2)], sent, wanted, 2)
            # As if it had not been sent.
            right = torch.arange(float(wanted.numel()))
            work = start(right, wanted, 2)
            work.wait()
            if rank == 1:
                assert torch.equal(wanted, right)
                assert work._source_rank() == 0
    check_works()


@everywhere
@pytest.mark.parametrize("receives_first", [False, True])
def test_a_message_of_another_size_fails_on_both_sides(backend: str, receives_first: bool) -> None:
    for own in (False, True):
        run(2, _receive_something_else, own, receives_first, backend=backend)


def _refused_among_others() -> None:
    """Each send meets the receive of its turn, whatever became of those before."""
    rank = dist.get_rank()
    sizes, expected = (1, 2, 3, 4, 5, 6), (1, 5, 3, 9, 5, 6)
    sent = [torch.full((size,), float(i)) for i, size in enumerate(sizes)]
    got = [torch.full((size,), -1.0) for size in expected]
    for api in (dist, ours):
        for tag in (1, 2):  # whose messages pass each other
            works = [
                api.isend(x, 1, tag=tag) if rank == 0 else api.irecv(y, 0, tag=tag)
                for x, y in zip(sent, got, strict=True)
            ]
            for work, x, y in reversed(list(zip(works, sent, got, strict=True))):
                if x.numel() == y.numel():
                    work.wait()
                    assert rank == 0 or torch.equal(y, x)
                else:
                    _message_refused([work], x, y, tag)
    # In a batch, there and back.
    x, small, fits = torch.ones(3), torch.zeros(2), torch.zeros(3)
    ops = [
        ours.P2POp(ours.isend, x, 1 - rank, tag=1),
        ours.P2POp(ours.irecv, small if rank else fits, 1 - rank, tag=1),
    ]
    sending, receiving = ours.batch_isend_irecv(ops)
    if rank == 0:
        _message_refused([sending], x, small, 1)
        receiving.wait()
        assert torch.equal(fits, x)
    else:
        sending.wait()
        _message_refused([receiving], x, small, 1)
    # As ops, which a graph holds.
    (ticket,) = functional.batch_isend_irecv([small if rank else x], [1 - rank], [rank == 0])
    failure = report(lambda: functional.wait_message(ticket))
    assert failure.kind == "CollectiveMismatch", failure
    assert "3 x float32 from rank 0, 2 x float32 expected by rank 1" in failure.text
    # A future ends, too.
    work = ours.isend(x, 1) if rank == 0 else ours.irecv(small, 0)
    with pytest.raises(RuntimeError, match="2 x float32 expected by rank 1"):
        work.get_future().wait()
    assert work.is_completed() and not work.is_success()
    check_works()


@everywhere
def test_messages_around_one_that_is_refused_arrive(backend: str) -> None:
    run(2, _refused_among_others, backend=backend)


def _never_comes() -> None:
    rank = dist.get_rank()
    group = dist.new_group()
    assert group is not None
    group.set_timeout(dt.timedelta(seconds=0.5))
    for source in (1, None) if rank == 0 else ():
        x = torch.full((3,), 7.0)
        failure = report(lambda x=x, source=source: dist.recv(x, source, group, tag=5))
        assert failure.kind == "CollectiveTimeout", failure
        assert failure.ranks == ([] if source is None else [1]), failure
        who = "any rank" if source is None else r"rank 1 \(pid \d+, \w+\)"
        assert re.fullmatch(
            r"recv: the message with tag 5 must be done within 0.5 s, got no answer from "
            rf"{who} \(rank 0/2, group '\d+'\)",
            failure.text,
        ), failure.text
        assert x.eq(7).all()
    dist.barrier()
    # What was given up does not take what comes later, which has time on a busy machine, too.
    group.set_timeout(dt.timedelta(seconds=60))
    y = torch.full((2,), 1.0 + rank)
    dist.recv(y, 1, group, tag=5) if rank == 0 else dist.send(y, 0, group, tag=5)
    assert y.eq(2).all()
    check_works(group)
    dist.destroy_process_group(group)


@everywhere
def test_a_receive_gives_up_at_its_deadline(backend: str) -> None:
    run(2, _never_comes, backend=backend)


def _goes_on_after_a_rank_left() -> None:
    rank = dist.get_rank()
    group = dist.new_group()
    check_works(group)
    pending = dist.irecv(torch.empty(1), 1, group) if rank == 0 else None
    dist.barrier()
    if rank == 1:
        dist.destroy_process_group(group)
    if pending is not None:
        for call in (
            pending.wait,
            lambda: dist.recv(torch.empty(1), 1, group),
            lambda: dist.send(torch.empty(1), 1, group),
        ):
            failure = report(call)
            assert failure.kind == "RankLost" and failure.ranks == [1], failure
            assert "every rank must live until the message with tag 0 is done" in failure.text
            assert "left the group" in failure.text
        dist.send(torch.ones(3), 2, group)
    elif rank == 2:
        x = torch.zeros(3)
        dist.recv(x, 0, group)
        assert x.eq(1).all()
    dist.barrier()
    if rank != 1:
        dist.destroy_process_group(group)


@everywhere
def test_messages_pass_between_ranks_that_stay(backend: str) -> None:
    run(3, _goes_on_after_a_rank_left, backend=backend)


def _leaves_with_messages(leaver: int, count: int) -> None:
    rank = dist.get_rank()
    group = dist.new_group()
    check_works(group)
    x = torch.arange(count) + 10.0 * rank
    y = torch.empty(count)
    if rank == leaver:
        dist.isend(x, 2, group)  # nobody has its work
        works = [dist.isend(x, 2, group, tag=1), dist.irecv(y, None, group, tag=2)]
        dist.destroy_process_group(group)
        for work in works:
            work.wait()
        assert torch.equal(y, torch.arange(count) + 20.0)
    elif rank == 2:
        time.sleep(0.2)  # it leaves meanwhile
        for tag in (1, 0):
            y.fill_(-1)
            dist.recv(y, leaver, group, tag=tag)
            assert torch.equal(y, torch.arange(count) + 10.0 * leaver)
        dist.send(x, leaver, group, tag=2)
    dist.barrier()
    if rank != leaver:
        dist.destroy_process_group(group)


def _leaves_with_messages_of_all_sizes() -> None:
    for leaver in (1, 0):
        for count in (3, 1 << 20):
            _leaves_with_messages(leaver, count)


@everywhere
def test_who_leaves_waits_for_its_messages(backend: str) -> None:
    run(3, _leaves_with_messages_of_all_sizes, backend=backend)


def _leaves_with_messages_for_nobody() -> None:
    rank = dist.get_rank()
    group = dist.new_group()
    check_works(group)
    if rank == 1:
        works = {
            "send": dist.isend(torch.ones(1 << 20), 0, group),
            "recv": dist.irecv(torch.empty(3), 0, group, tag=1),
        }
        dist.destroy_process_group(group)
        for op, work in works.items():
            failure = report(work.wait)
            assert failure.kind == "GroupClosed" and failure.ranks == [], failure
            assert failure.text.startswith(f"{op}: the group must be alive, got a destroyed one (")
    dist.barrier()
    if rank == 0:
        failure = report(lambda: dist.recv(torch.empty(1 << 20), 1, group))
        assert failure.kind == "RankLost" and failure.ranks == [1], failure
        dist.destroy_process_group(group)


@pytest.mark.long
@everywhere
def test_messages_that_nobody_takes_fail_when_their_group_is_destroyed(backend: str) -> None:
    run(2, _leaves_with_messages_for_nobody, backend=backend)


# --- signals -------------------------------------------------------------------------------------


def _add_sparse(x: torch.Tensor) -> None:
    sparse = x.to_sparse()
    try:
        dist.all_reduce(sparse)
    finally:
        kept.append(sparse)


# Results of calls that were interrupted.
kept: list[torch.Tensor] = []

WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": lambda x: dist.all_reduce(x),
    "work": lambda x: dist.all_reduce(x, async_op=True).wait(),
    "recv": lambda x: dist.recv(x, 1),
    "ours": lambda x: ours.all_reduce(x),
    "sparse": lambda x: _add_sparse(x),
    "monitored": lambda x: ours.monitored_barrier(timeout=dt.timedelta(seconds=30)),
}


def _be_interrupted(name: str, raised: type[BaseException], scratch: Path) -> tuple[Report, float]:
    def interrupt(*_args: Any) -> None:
        raise raised("interrupted")

    signal.signal(signal.SIGINT, interrupt)
    check_works()
    x = torch.ones(3)
    mark(scratch, "waiting")
    failure = report(lambda: WAITS[name](x))
    # What was interrupted goes on in the background; the group stays in step.
    if name == "ours":
        torch.ops.c10d_ext.wait_tensor(x)  # which knows of it
        value = x[0].item()
        check_works()
        return failure, value
    check_works()
    until = time.monotonic() + 10
    while name == "recv" and x[0] == 1 and time.monotonic() < until:
        time.sleep(0.01)  # no collective waits for a message
    return failure, (kept.pop().to_dense() if name == "sparse" else x)[0].item()


def _come_when_told(name: str, scratch: Path) -> None:
    check_works()
    while not (scratch / "interrupted").exists():
        time.sleep(0.01)
    x = torch.full((3,), 2.0)
    if name == "monitored":
        ours.monitored_barrier()
    elif name == "sparse":
        dist.all_reduce(x.to_sparse())
    else:
        dist.send(x, 0) if name == "recv" else dist.all_reduce(x)
    check_works()


@everywhere
@pytest.mark.parametrize(
    ("name", "raised"),
    [(name, KeyboardInterrupt) for name in WAITS] + [(name, TimeoutError) for name in WAITS],
)
def test_an_interrupt_ends_a_wait(name: str, raised: type[BaseException], backend: str) -> None:
    """Whatever the signal's handler raises, what is waited for goes on."""
    with crew(2, backend) as ranks:
        ranks.start(0, _be_interrupted, name, raised, ranks.scratch)
        ranks.start(1, _come_when_told, name, ranks.scratch)
        ranks.await_mark("waiting")
        time.sleep(0.2)
        sent = ranks.signal(0, signal.SIGINT)
        time.sleep(0.5)
        mark(ranks.scratch, "interrupted")
        failure, value = ranks.result(0)
        ranks.result(1)
        assert failure.kind == raised.__name__
        print(f"{failure.kind} {(failure.at - sent) * 1e3:.0f} ms after the signal")
        assert value == {"recv": 2.0, "monitored": 1.0}.get(name, 3.0)


def _through_a_block(x: torch.Tensor) -> Any:
    with dist._coalescing_manager(async_ops=True) as block:
        dist.all_reduce(x)
    return block.works[0].get_future()


def _work_of(x: torch.Tensor) -> dist.Work:
    work = functional.work_of(x)
    assert work is not None
    return work


def _through_two_collectives(x: torch.Tensor) -> Any:
    backend = dist.group.WORLD._get_backend(x.device)  # type: ignore[union-attr]
    backend._start_coalescing()
    backend.broadcast([torch.zeros(2)])
    backend.allreduce([x])
    return backend._end_coalescing().get_future()


def _be_interrupted_all_the_time(kind: str) -> int:
    """How often waits were interrupted, some of them where they ended."""
    rank, hits, armed = dist.get_rank(), 0, False

    def interrupt(*_args: Any) -> None:
        nonlocal hits, armed
        if armed:
            armed = False
            hits += 1
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        for turn in range(300):
            x = torch.full((20_000,), float(turn))
            if rank == 1 and turn % 3 == 0:
                time.sleep(0.004)
            if kind == "message":
                work = dist.irecv(x, 1) if rank == 0 else dist.isend(x, 0)
            else:
                work = dist.all_reduce(x, async_op=True)
            while True:
                try:
                    armed = True
                    work.wait()
                    armed = False
                    break
                except KeyboardInterrupt:
                    pass
            assert x.eq(turn if kind == "message" else 2 * turn).all()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    check_works()
    return hits


@everywhere
@pytest.mark.parametrize("kind", ["collective", "message"])
def test_interrupts_at_any_time_leave_the_work_in_flight(kind: str, backend: str) -> None:
    with crew(2, backend) as ranks:
        hits = ranks.run(_be_interrupted_all_the_time, kind)
        assert sum(hits) > 10, hits


# What is not complete before the other rank calls the same.
FUTURES: dict[str, Callable[[torch.Tensor], Any]] = {
    "work": lambda x: dist.all_reduce(x, async_op=True).get_future(),
    "then": lambda x: (
        dist.all_reduce(x, async_op=True)
        .get_future()
        .then(lambda f: f.then(lambda g: g.value()).wait())
        .then(lambda f: f.value())
    ),
    "block": _through_a_block,
    "two collectives": _through_two_collectives,
    "message": lambda x: dist.irecv(x, 1).get_future(),
    "ours": lambda x: ours.all_reduce(x, async_op=True).get_future(),
    "ours, a list": lambda x: ours.all_gather(
        [torch.empty(3), x], x + 0, async_op=True
    ).get_future(),
    "ours, a message": lambda x: ours.irecv(x, 1).get_future(),
    "op": lambda x: _work_of(functional.all_reduce(x, "sum")).get_future(),
}


def _be_interrupted_at_a_future(name: str, scratch: Path) -> Report:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    check_works()
    x = torch.ones(3)
    future = FUTURES[name](x)
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    future.add_done_callback(told.put)
    assert isinstance(future, torch._C.Future)
    mark(scratch, "waiting")
    failure = report(future.wait)
    assert not future.done()
    mark(scratch, "interrupted")  # before which nobody else comes
    value = future.wait()[-1]
    assert future.done()
    assert value.eq(2 if "message" in name or "list" in name else 3).all()
    check_works()
    passed = told.get(timeout=60)  # as with torch's futures, callbacks follow the end of the wait
    assert isinstance(passed, _C.Future) and passed.done()
    return failure


def _come_to_a_future(name: str, scratch: Path) -> None:
    check_works()
    while not (scratch / "interrupted").exists():
        time.sleep(0.01)
    x = torch.full((3,), 2.0)
    if "message" in name:
        dist.send(x, 0)
    elif name == "op":
        dist.all_reduce(x)
    else:
        FUTURES[name](x).wait()
    check_works()


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, backend) for backend in (BACKEND, FALLBACK) for name in FUTURES]
    + [(name, "gloo") for name in FUTURES if "ours" in name or name == "op"],
)
def test_an_interrupt_ends_the_wait_for_a_future(name: str, backend: str) -> None:
    with crew(2, backend) as ranks:
        ranks.start(0, _be_interrupted_at_a_future, name, ranks.scratch)
        ranks.start(1, _come_to_a_future, name, ranks.scratch)
        ranks.await_mark("waiting")
        time.sleep(0.2)
        sent = ranks.signal(0, signal.SIGINT)
        failure = ranks.result(0)
        ranks.result(1)
        assert failure.kind == "KeyboardInterrupt"
        print(f"KeyboardInterrupt {(failure.at - sent) * 1e3:.0f} ms after the signal")


# --- groups used wrongly -------------------------------------------------------------------------


def _use_after_destroy() -> None:
    group = dist.new_group()
    check_works(group)
    backend = group._get_backend(torch.device("cpu"))
    pending = backend.recv([torch.empty(1)], 1 - dist.get_rank(), 3)
    dist.destroy_process_group(group)
    failure = report(pending.wait)
    assert failure.kind in ("GroupClosed", "RankLost"), failure  # whoever is first
    assert failure.op == "recv"
    for call in (
        lambda: backend.allreduce([torch.ones(1)]).wait(),
        lambda: backend.send([torch.ones(1)], 1 - dist.get_rank(), 0).wait(),
        lambda: backend.barrier().wait(),
    ):
        failure = report(call)
        assert failure.kind == "GroupClosed", failure
        assert "got a destroyed one" in failure.text, failure
    check_works()


@everywhere
def test_a_destroyed_group_says_so(backend: str) -> None:
    run(2, _use_after_destroy, backend=backend)


def _in_child(call: Callable[[], Any]) -> str:
    """What `call` returns, run in a forked child."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = str(call())
        except BaseException as error:
            text = f"raised {error!r}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        said = file.read()
    os.waitpid(pid, 0)
    return said


def _fork() -> None:
    check_works()
    if dist.get_rank() == 0:
        dist.barrier()
        dist.send(torch.ones(1), 1)
    else:
        waits = dist.irecv(torch.ones(1), 0)
        said = _in_child(lambda: report(waits.is_completed))
        assert "GroupClosed" in said, said
        dist.barrier()
        waits.wait()
    for call in (
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: dist.barrier(),
        lambda: dist.all_reduce(torch.ones(1), async_op=True).wait(),
        lambda: dist.send(torch.ones(1), 1 - dist.get_rank()),
    ):
        said = _in_child(lambda call=call: report(call))
        assert "GroupClosed" in said, said
        assert "must be used in the process that created it" in said, said
        check_works()
    assert _in_child(dist.destroy_process_group) == "None"
    check_works()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("ARENA", ("1000", "99999999999999", "2 MiB", "-1")),
        ("SPIN_US", ("1.5", "-1", "99999999999999")),
        ("INLINE_US", ("many", "99999999999999")),
        ("STRICT", ("3", "yes", " 1")),
        *((flag, ("2", "yes", " 1")) for flag in ("THREAD", "DISABLE")),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    name: str, values: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in values:
        monkeypatch.setenv(f"TORCH_C10D_EXT_SHM_{name}", value)
        with pytest.raises(ValueError, match=f"TORCH_C10D_EXT_SHM_{name}: must be .*{value!r}"):
            shm_settings()


@everywhere
def test_a_forked_child_cannot_use_the_group_and_does_not_harm_it(backend: str) -> None:
    with crew(2, backend) as ranks:
        ranks.run(_fork)


def _fork_and_die(scratch: Path) -> None:
    check_works()
    if os.fork() == 0:
        (scratch / "child").write_text(str(os.getpid()))
        signal.alarm(60)
        signal.pause()
    mark(scratch, "rank 1")
    time.sleep(120)


@everywhere
def test_a_forked_child_does_not_hide_the_death_of_its_parent(backend: str) -> None:
    with crew(2, backend) as ranks:
        ranks.start(0, _call, "all_reduce", 1, ranks.scratch)
        ranks.start(1, _fork_and_die, ranks.scratch)
        ranks.await_mark("rank 0")
        ranks.await_mark("child")
        child = int((ranks.scratch / "child").read_text())
        try:
            ranks.signal(1, signal.SIGKILL)
            failure, _ = ranks.result(0)
            assert (failure.kind, failure.ranks) == ("RankLost", [1])
            os.kill(child, 0)  # was there all the time
        finally:
            os.kill(child, signal.SIGKILL)


def _threads(same: bool) -> None:
    """Threads that use one group at the same time, with data that does not tell them apart or does.

    A collective then meets whatever the other rank called at that moment: a sum of two values that
    belong together, or a mismatch, never anything else.
    """
    rank = dist.get_rank()
    rounds, sums, failures = 200, [], []

    def work(number: int) -> None:
        for i in range(rounds):
            x = torch.full((8 if same else 8 + number,), float(1 + rank))
            try:
                dist.all_reduce(x)
            except errors.CollectiveMismatch:
                failures.append(i)
                assert x.eq(1 + rank).all()
            else:
                sums.append(x)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(x.eq(3).all() for x in sums)
    assert len(sums) + len(failures) == 4 * rounds
    assert not same or not failures
    check_works()


@pytest.mark.parametrize("same", [True, False])
def test_threads_on_one_group_are_serialised(same: bool) -> None:
    run(2, _threads, same, backend=BACKEND)


def _threads_on_their_own_groups() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group() for _ in range(4)]
    wrong: list[Any] = []

    def work(number: int) -> None:
        for i in range(100):
            x = torch.full((8,), float(1000 * number + i + rank))
            dist.all_reduce(x, group=groups[number])
            if not x.eq(size * (1000 * number + i) + sum(range(size))).all():
                wrong.append((number, i, x))

    # In another order on every rank.
    threads = [threading.Thread(target=work, args=((rank + n) % 4,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for group in groups:
        dist.destroy_process_group(group)


def test_threads_may_each_have_a_group() -> None:
    run(3, _threads_on_their_own_groups, backend=BACKEND)


# --- the end of a process ------------------------------------------------------------------------

EXITS = Path(__file__).with_name("exits.py")

# By scenario: what rank 0 and rank 1 exit with.
EXIT_CODES = {
    "returns": (0, 0),
    "destroys": (0, 0),
    "exits with 3": (3, 3),
    "raises": (1, 1),
    "one raises": (7, 1),
    # Its groups are left first.
    "one raises and lingers": (7, 1),
    "one returns and lingers": (7, 0),
    "one exits": (7, 3),
    "one is killed": (7, -signal.SIGKILL),
    "in flight": (0, 0),
    "in flight and raises": (1, 1),
    "in flight on one": (0, 0),
    "messages in flight": (0, 0),
    "one gone": (0, 0),
    "thread in a collective": (0, 0),
    "threads at works": (0, 0),
    "late threads at works": (1, 0),
}


FALLBACK_EXITS = (
    "returns",
    "raises",
    "one raises and lingers",
    "one returns and lingers",
    "in flight",
    "in flight and raises",
    "messages in flight",
    "threads at works",
    "late threads at works",
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("scenarios", "disabled"),
    [(tuple(EXIT_CODES), "0"), (FALLBACK_EXITS, "1")],
    ids=[BACKEND, FALLBACK],
)
def test_processes_end_as_they_would_without_the_backend(
    scenarios: tuple[str, ...], disabled: str, tmp_path: Path
) -> None:
    launcher = subprocess.Popen(
        [sys.executable, str(EXITS), str(tmp_path), *scenarios],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={
            **os.environ,
            "TORCH_C10D_EXT_SHM_DISABLE": disabled,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
            "LD_PRELOAD": str(build.build("starved_threads", [], library=True)),
        },
        start_new_session=True,
    )
    try:
        output, of_ranks = launcher.communicate(timeout=400)
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
    print(output, of_ranks, sep="\n")
    assert launcher.returncode == 0
    got = dict(
        line.removeprefix("= ").split(": ") for line in output.splitlines() if line[:2] == "= "
    )
    assert got == {name: str(EXIT_CODES[name]) for name in scenarios}
    # Nobody of the session is left.
    with pytest.raises(ProcessLookupError):
        os.killpg(launcher.pid, 0)
