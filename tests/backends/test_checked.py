"""The shm backend where one rank cannot share memory: torch.distributed's collectives over gloo.

They are held to what test_shm.py asks of shm.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import torch_c10d_ext.distributed as ours
from tests.backends import test_shm as shm
from tests.backends.dist_ops import DIST_OPS, How, all_gather_single, inputs_of
from tests.contract import verify
from tests.harness import run, values
from tests.harness.script import torchrun
from torch_c10d_ext import _C, functional
from torch_c10d_ext.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    GroupClosed,
    InvalidArgument,
    RankLost,
)

CPU = torch.device("cpu")
LATE = r"all_reduce: the collective 1 must be done within 0.2 s, got no answer from rank 1 \(pid"
SIZES = (2, 3)

sizes = pytest.mark.parametrize("size", SIZES)


@contextlib.contextmanager
def fallen_back(odd: int = 1, piggyback: int | None = None, **kwargs: Any) -> Iterator[Any]:
    """A group in which rank `odd` cannot share memory, as the default group."""
    world = dist.group.WORLD
    rank = dist.get_rank()
    os.environ["TORCH_C10D_EXT_SHM_PIGGYBACK"] = "" if piggyback is None else str(piggyback)
    if rank == min(odd, dist.get_world_size() - 1):
        os.environ["TORCH_C10D_EXT_SHM_DISABLE"] = "1"
    group = dist.new_group(backend="shm", **kwargs)
    c10d._update_default_pg(group)
    try:
        yield group
    finally:
        c10d._update_default_pg(world)
        os.environ.pop("TORCH_C10D_EXT_SHM_DISABLE", None)
        del os.environ["TORCH_C10D_EXT_SHM_PIGGYBACK"]
        dist.destroy_process_group(group)


def _conforms(*fns: str) -> Any:
    """Functions of test_shm.py by name, and that they leave nothing in the table of works.

    Once with little data that travels with the calls, and once with all of it by gloo.
    """
    _conforms_with(None, *fns)
    return _conforms_with(0, *fns)


def _conforms_with(piggyback: int | None, *fns: str) -> Any:
    report = None
    with fallen_back(piggyback=piggyback) as group:
        backend = group._get_backend(CPU)
        assert type(backend) is _C.CheckedBackend and backend.name() == "shm"
        for name in fns:
            fn = getattr(shm, name)
            args = ("shm",) if name in ("reduces", "moves") else ()
            report = fn(*args)
        dist.barrier()
        _is_empty()
    return report


def _is_empty() -> None:
    ends = time.monotonic() + 10
    while _C.pending_count():  # gloo's threads release it
        assert time.monotonic() < ends, _C.pending_count()
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("what", "size"),
    [
        ("reduces", 3),
        ("moves", 2),
        ("moves", 3),
        ("moves_less_than_bytes", 1),
        ("moves_less_than_bytes", 2),
        ("lays_out", 2),
        ("refuses", 2),
    ],
)
def test_dist_ops(what: str, size: int) -> None:
    verify(size, _conforms, what, backend="gloo")


@sizes
def test_messages_works_and_groups(size: int) -> None:
    run(
        size,
        _conforms,
        *("_sends_and_receives", "_receives_from_anyone", "_many_in_flight"),
        *("_completes_without_a_wait", "_futures", "_durations", "_barriers", "_sequence_numbers"),
        *("_sparse_sums", "_splits", "_shrinks", "_groups_come_and_go", "_single_machine_errors"),
        *("_one_tensor_in_flight", "_chains_in_flight"),
        backend="gloo",
    )


def _says_what_is_wrong() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    with fallen_back() as group:
        name = group.group_name
        with pytest.raises(InvalidArgument) as wrong:
            dist.all_gather([torch.empty(2)] * (n - 1), torch.ones(2))
        assert str(wrong.value) == (
            f"all_gather: outputs must be one tensor for each of the {n} ranks, got {n - 1} "
            f"(rank {rank}/{n}, group '{name}')"
        )
        with pytest.raises(TypeError, match="all_reduce: sparse tensors can be reduced with sum"):
            dist.all_reduce(torch.eye(2).to_sparse(), dist.ReduceOp.MIN)
        work = dist.all_reduce(torch.ones(3), async_op=True)
        work.wait()
        assert work._get_duration() > 0
        assert work.result()[0].tolist() == [n] * 3


def _mixed_lists() -> None:
    """Inputs of several dtypes in one coalesced gather, and parts of several sizes at one root."""
    n, rank = dist.get_world_size(), dist.get_rank()
    with fallen_back() as group:
        xs = [torch.full((3,), rank, dtype=torch.uint8), torch.full((2, 2), float(rank))]
        joined = [torch.empty(3 * n, dtype=torch.uint8), torch.empty(2, 2 * n).t()]
        group.allgather_into_tensor_coalesced(joined, xs).wait()
        for r in range(n):
            assert torch.equal(joined[0][3 * r : 3 * r + 3], torch.full_like(xs[0], r))
            assert torch.equal(joined[1][2 * r : 2 * r + 2], torch.full_like(xs[1], r))
        parts = [torch.empty(r + 1) for r in range(n)]
        dist.gather(torch.full((rank + 1,), float(rank)), parts if rank == 0 else None)
        if rank == 0:
            assert [p.tolist() for p in parts] == [[float(r)] * (r + 1) for r in range(n)]
        out = torch.empty(2 * rank)
        dist.scatter(out, [torch.arange(2.0 * r) for r in range(n)] if rank == 0 else None)
        assert torch.equal(out, torch.arange(2.0 * rank))
        # The output holds the input.
        whole = torch.arange(float(2 * n)) * (rank + 1)
        mine = whole[1:3]
        want = torch.cat([torch.tensor([r + 1.0, 2 * r + 2.0]) for r in range(n)])
        all_gather_single(whole, mine)
        assert torch.equal(whole, want)


def _ours() -> None:
    """This package's calls reach gloo past c10d's methods."""
    n, rank = dist.get_world_size(), dist.get_rank()
    world = dist.group.WORLD
    with fallen_back() as group:
        x = torch.arange(6, dtype=torch.int16).view(2, 3).t() * (rank + 1)
        want = torch.arange(6, dtype=torch.int16).view(2, 3).t() * (n * (n + 1) // 2)
        assert torch.equal(functional.all_reduce(x, "sum", group), want)
        ours.all_reduce(x, group=group)
        assert torch.equal(x, want)
        for collective in DIST_OPS:
            how = How(group=group, api=ours)
            xs = inputs_of(collective, n, (3, 2), torch.float32, how)
            outs = shm.fresh(
                collective, xs[rank], collective.outputs(n, rank, (3, 2), 0), torch.float32
            )
            shm.call(collective, how, xs[rank], outs)
            for out, right in zip(outs, collective.reference(xs, how)[rank], strict=True):
                assert not (wrong := values.mismatch(out, right, ulps=4)), f"{collective}: {wrong}"
        ours.monitored_barrier(group, dt.timedelta(seconds=20), wait_all_ranks=True)
        ours.monitored_barrier(group)
        if rank == 0:
            rank_1 = r"rank 1 \(pid \d+(?: on \w+)?, \w+\)"
            late = rf"monitored_barrier: .* within 0.3 s, got no answer from {rank_1}"
            with pytest.raises(CollectiveTimeout, match=late) as missing:
                ours.monitored_barrier(group, dt.timedelta(seconds=0.3))
            assert missing.value.ranks == list(range(1, n))
        dist.barrier(world)  # nobody leaves before
        _is_empty()


def _callbacks_may_wait() -> None:
    """Also those of collectives without data, which end on no thread of gloo's."""
    with fallen_back():
        for size in (0, 3):
            first = dist.all_reduce(torch.ones(size), async_op=True)
            x = torch.ones(2)
            later = first.get_future().then(lambda _, x=x: dist.all_reduce(x))
            later.wait()
            assert x.tolist() == [dist.get_world_size()] * 2


def _ours_and_torchs_meet() -> None:
    """Ranks that call this package, and ranks that call torch."""
    n, rank = dist.get_world_size(), dist.get_rank()
    api: Any = ours if rank == 0 else dist
    with fallen_back() as group:
        x = torch.full((2,), float(rank))
        everyone = [[float(r)] * 2 for r in range(n)]
        for root in range(n):
            parts = [torch.empty(2) for _ in range(n)] if rank == root else None
            api.gather(x, parts, root)
            assert parts is None or [p.tolist() for p in parts] == everyone
            y = torch.empty(2)
            sent = [torch.full((2,), float(r)) for r in range(n)] if rank == root else None
            api.scatter(y, sent, root)
            assert torch.equal(x, y)
        parts = [torch.empty(2) for _ in range(n)]
        api.all_gather(parts, x)
        assert [p.tolist() for p in parts] == everyone
        joined = functional.all_gather(x, [2] * n, group) if rank == 0 else torch.empty(2 * n)
        if rank != 0:
            dist.all_gather(list(joined.split(2)), x)
        assert joined.view(n, 2).tolist() == everyone
        mine = torch.empty(2)
        api.reduce_scatter(mine, [torch.full((2,), float(r + rank)) for r in range(n)])
        assert mine.tolist() == [n * rank + n * (n - 1) / 2] * 2
        api.all_to_all_single(swapped := torch.empty(n), torch.arange(float(n)) + 10 * rank)
        assert swapped.tolist() == [10.0 * r + rank for r in range(n)]
        # And hear of each other where they do not.
        call = (
            functional.all_reduce(x, "sum", group)
            if rank == 0
            else dist.broadcast(x, 0, async_op=True)
        )
        with pytest.raises(CollectiveMismatch, match=r"all_reduce\(2 x float32, sum\) on rank 0"):
            call.wait()
        _is_empty()


def _keeps_nan() -> None:
    """gloo's min and max depend on where a NaN is; shm's do not."""
    n, rank = dist.get_world_size(), dist.get_rank()
    nan, inf = float("nan"), float("inf")
    numbers = [nan, -1.5, -0.0, 0.0, 2.0, inf, -inf, -3.0, 448.0]
    float8 = torch.float8_e4m3fn
    with fallen_back():
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, float8):
            usable = [v for v in numbers if dtype != float8 or abs(v) != inf]
            row = torch.tensor(usable)
            every = [
                torch.stack([row.roll(r * (i + 1)) for i in range(n)]).to(dtype) for r in range(n)
            ]
            for name, function in (("MIN", torch.minimum), ("MAX", torch.maximum)):
                op = getattr(dist.ReduceOp, name)
                want = every[0].double()
                for x in every[1:]:
                    want = function(want, x.double())
                assert want.isnan().any()
                alone, outs = every[rank].clone(), [every[rank].clone() for _ in range(2)]
                part = torch.empty_like(every[rank][0])
                dist.all_reduce(alone, op)
                ours.all_reduce(outs[0], op)
                dist.all_reduce(outs[1].t(), op)
                dist.reduce_scatter(part, list(every[rank].unbind()), op)
                for out, right in (*((x, want) for x in (alone, *outs)), (part, want[rank])):
                    torch.testing.assert_close(out.double(), right, rtol=0, atol=0, equal_nan=True)


def _in_a_block() -> None:
    """Calls of several kinds in one block have one work."""
    n, rank = dist.get_world_size(), dist.get_rank()
    with fallen_back():
        there, here = (rank + 1) % n, (rank - 1) % n
        x, got = torch.full((200_000,), float(rank)), torch.empty(200_000)
        y = torch.full((3,), float(rank))
        with dist._coalescing_manager(device=CPU, async_ops=True) as block:
            dist.isend(x, there)
            dist.irecv(got, here)
            dist.broadcast(y, 1)
        block.wait()
        assert got[0] == got[-1] == here
        assert y[0] == 1


def _times_out() -> None:
    world = dist.group.WORLD
    with fallen_back() as group:
        options = dist.AllreduceOptions()
        options.timeout = dt.timedelta(seconds=0.2)
        before = time.monotonic()
        if dist.get_rank() == 0:
            work = group.allreduce([torch.ones(3)], options)
            assert work is not None
            with pytest.raises(CollectiveTimeout, match=LATE) as late:
                work.wait()
            assert late.value.ranks == list(range(1, dist.get_world_size()))
            assert time.monotonic() - before < 10
        dist.barrier(world)
    with fallen_back() as group:
        group.set_timeout(dt.timedelta(seconds=0.2))
        before = time.monotonic()
        if dist.get_rank() == 0:
            with pytest.raises(CollectiveTimeout, match=LATE):
                dist.all_reduce(torch.ones(3))
            assert time.monotonic() - before < 10
        dist.barrier(world)


def _never_is_a_timeout() -> None:
    world, n, never = dist.group.WORLD, dist.get_world_size(), dt.timedelta(days=365_000)
    with fallen_back(timeout=never) as group:
        x = torch.ones(3)
        if dist.get_rank() == 0:
            work = dist.all_reduce(x, async_op=True)
            dist.barrier(world)
        else:
            dist.barrier(world)
            work = dist.all_reduce(x, async_op=True)
        assert work.wait(never)
        assert torch.equal(x, torch.full((3,), float(n)))
        group.set_timeout(never)
        dist.all_reduce(x)
        group.monitored_barrier(never)
        with pytest.raises(ValueError, match="set_timeout: the timeout must be from 0 to"):
            group.set_timeout(dt.timedelta(seconds=-1))


def _merges() -> None:
    with fallen_back():
        os.environ["TORCH_C10D_EXT_SHM_DISABLE"] = "1"  # on all ranks: each part falls back
        shm._merges()


def _ends() -> None:
    with fallen_back() as group:
        backend = group._get_backend(CPU)
        dist.all_reduce(torch.ones(1))
    with pytest.raises(GroupClosed, match="got a destroyed one"):
        backend.allreduce([torch.ones(3)]).wait()


def _goes_on_without_rank_0() -> None:
    """It matches the messages of the others, and says who is gone, after it has left."""
    world, rank = dist.group.WORLD, dist.get_rank()
    with fallen_back() as group:
        dist.barrier()
        if rank != 0:
            dist.barrier(world)  # rank 0 has left
            there = 3 - rank
            for tag in range(3):
                got = torch.empty(5)
                sent = dist.isend(torch.full((5,), float(rank + tag)), there, tag=tag)
                dist.recv(got, there, tag=tag)
                sent.wait()
                assert torch.equal(got, torch.full((5,), float(there + tag)))
            odd = (dist.send, torch.ones(2)) if rank == 1 else (dist.recv, torch.ones(3))
            with pytest.raises(CollectiveMismatch, match="what is sent must be what is received"):
                odd[0](odd[1], there)
            for call in (
                lambda: dist.send(torch.ones(1), 0),
                lambda: dist.all_reduce(torch.ones(1)),
                lambda: dist.send(torch.ones(1), there),  # the group has ended
            ):
                with pytest.raises(RankLost, match=r"got rank 0 \(pid \d+, left the group\)"):
                    call()
            assert group.rank() == rank
    if rank == 0:
        dist.barrier(world)


def test_messages_go_on_without_rank_0() -> None:
    run(3, _goes_on_without_rank_0, backend="gloo")


RANK_0_EXITS = """
import atexit, os, pathlib, sys, time
import torch, torch.distributed as dist
import torch_c10d_ext

def mark(name):
    (pathlib.Path(sys.argv[1]) / name).touch()

def await_mark(name):
    ends = time.monotonic() + 60
    while not (pathlib.Path(sys.argv[1]) / name).exists():
        assert time.monotonic() < ends, name
        time.sleep(0.005)

rank = int(os.environ["RANK"])
os.environ["TORCH_C10D_EXT_SHM_DISABLE"] = "1"
dist.init_process_group("shm")
dist.barrier()
if rank == 0:
    await_mark("sent")
    dist.destroy_process_group()
    atexit.register(mark, "exits")  # before the groups are closed
elif rank == 1:
    work = dist.isend(torch.arange(4), 2)
    mark("sent")
    work.wait()
    dist.destroy_process_group()
else:
    await_mark("exits")
    got = torch.zeros(4, dtype=torch.int64)
    dist.recv(got, 1)
    assert got.tolist() == [0, 1, 2, 3]
    dist.destroy_process_group()
"""


def test_messages_go_on_while_rank_0_exits(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(RANK_0_EXITS)
    torchrun(3, program, [str(tmp_path)], 100)


@sizes
def test_what_is_its_own(size: int) -> None:
    for fn in (
        *(_says_what_is_wrong, _mixed_lists, _ours, _ours_and_torchs_meet, _keeps_nan, _in_a_block),
        *(_callbacks_may_wait, _times_out, _never_is_a_timeout, _merges, _ends),
    ):
        run(size, fn, backend="gloo")
