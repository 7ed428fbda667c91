"""Process groups written in Python: every collective, futures, DDP and compiled code on them."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import torch_c10d_ext
import torch_c10d_ext.distributed as ours
import torch_c10d_ext.functional as F
from tests.backends.dist_ops import DIST_OPS, How
from tests.backends.test_shm import check
from tests.contract import Report, verify
from tests.harness import run
from tests.harness.python_group import PythonGroup
from torch_c10d_ext import _C

COLLECTIVES = [v for v in DIST_OPS if "isend" not in v.name]
DEADLINE = 30.0


def _every_collective() -> Any:
    n, report = dist.get_world_size(), Report()
    assert isinstance(dist.group.WORLD, PythonGroup)
    for turn, collective in enumerate(COLLECTIVES):
        for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.complex64, torch.bool):
            for op in ("sum", "product", "avg", "bxor") if collective.reduces else ("sum",):
                if (op == "avg") > dtype.is_floating_point or (
                    op == "bxor" and (dtype.is_floating_point or dtype.is_complex)
                ):
                    continue
                how = How(op, None, root=turn % n, async_op=turn % 2 == 0, api=ours)
                check(report, f"{collective} {dtype} {op}", collective, (5, 3), dtype, how)
    called = set(dist.group.WORLD.calls)
    report.expect(f"{called}", n > 1 and not called <= {"allreduce", "broadcast", "alltoall_base"})
    report.expect("in flight", torch_c10d_ext.pending_count() != 0)
    return report.result()


@pytest.mark.parametrize("size", (1, 2, 3))
def test_every_collective_is_made_of_three_collectives(size: int) -> None:
    verify(size, _every_collective, backend="python")


def _futures() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    total = torch.full((4,), n * (n + 1) / 2)
    x = torch.full((4,), rank + 1.0)
    # Nobody waits: the future does.
    got = ours.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0].clone()).wait()
    assert torch.equal(got, total)
    outs = [torch.empty(4) for _ in range(n)]
    work = ours.all_gather(outs, torch.full((4,), rank + 1.0), async_op=True)
    for r, out in enumerate(work.get_future().wait()):
        assert torch.equal(out, torch.full((4,), r + 1.0))
    y = F.all_reduce(torch.full((4,), rank + 1.0), "sum", None)
    work = torch_c10d_ext.work_of(y)
    assert work is not None
    assert torch.equal(work.get_future().wait()[0], total)
    assert torch.equal(y + 0, total)
    # Its work knows the result when it is over.
    y = F.all_reduce(torch.full((4,), rank + 1.0), "sum", None)
    work = torch_c10d_ext.work_of(y)
    ends = time.monotonic() + DEADLINE
    while torch_c10d_ext.pending_count():
        assert time.monotonic() < ends
        time.sleep(0.01)
    assert work is not None
    assert torch.equal(work.get_future().wait()[0], total)
    # A result that is dropped completes as well, and leaves nothing.
    F.all_reduce(torch.ones(4), "sum", None)
    ends = time.monotonic() + DEADLINE
    while torch_c10d_ext.pending_count():
        assert time.monotonic() < ends
        time.sleep(0.01)
    subgroup = dist.new_group(list(range(n)))
    assert torch.equal(F.all_reduce(torch.full((4,), rank + 1.0), "sum", subgroup) + 0, total)


def test_futures_end_by_themselves() -> None:
    run(2, _futures, backend="python")


def _work_without_a_future() -> None:
    x = torch.ones(3)
    work = ours.all_reduce(x, async_op=True)
    here = rf"\(rank {dist.get_rank()}/2, group '0'\)"
    with pytest.raises(NotImplementedError, match=f"all_reduce: .*must have a future.*{here}"):
        work.get_future()
    work.wait()
    assert torch.equal(x, torch.full((3,), 2.0))


def test_says_so_where_a_work_has_no_future() -> None:
    run(2, _work_without_a_future, backend="delayed")


def _barriers() -> None:
    """Its own where it has one, else an all_reduce."""
    world = dist.group.WORLD
    assert isinstance(world, PythonGroup)
    before = len(world.calls)
    x = torch.arange(3.0) + dist.get_rank()
    assert torch.equal(F.barrier(x, None) + 0, x)
    barrier = PythonGroup.barrier
    try:
        del PythonGroup.barrier
        assert torch.equal(F.barrier(x, None) + 0, x)
    finally:
        PythonGroup.barrier = barrier  # type: ignore[method-assign]
    assert world.calls[before:] == ["barrier", "allreduce"]


def test_a_barrier_is_made_where_there_is_none() -> None:
    run(2, _barriers, backend="python")


class _Bare(dist.ProcessGroup):
    """Can do nothing."""

    def getBackendName(self) -> str:  # noqa: N802
        return "bare"


def _bare_group() -> None:
    bare = _Bare(dist.get_rank(), 2)
    torch._C._distributed_c10d._register_process_group("bare", bare)
    here = rf"\(rank {dist.get_rank()}/2, group 'bare'\)"
    try:
        for call in (
            lambda: F.all_reduce(torch.ones(2), "sum", "bare"),
            lambda: F.gather(torch.ones(2), 0, "bare"),
            lambda: F.broadcast(torch.ones(2), 0, "bare"),
            lambda: F.barrier(torch.ones(2), "bare"),
        ):
            with pytest.raises(ValueError, match=f"must define allreduce, broadcast and .*{here}"):
                call()
    finally:
        torch._C._distributed_c10d._unregister_process_group("bare")


def test_says_what_a_group_must_define() -> None:
    run(2, _bare_group)


class _FailedWork(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        raise RuntimeError("no network")

    def get_future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future()


class _Failing(_Bare):
    def allreduce(self, _tensors: Any, _opts: Any = None) -> dist.Work:
        return _FailedWork()

    def broadcast(self, _tensors: Any, _opts: Any = None) -> dist.Work:
        return _FailedWork()

    def alltoall_base(self, *_args: Any) -> dist.Work:
        return _FailedWork()


def _errors_are_raised_again() -> None:
    failing = _Failing(dist.get_rank(), 2)
    torch._C._distributed_c10d._register_process_group("failing", failing)
    try:
        x = torch.ones(3)
        torch.ops.c10d_ext.all_reduce_(x, "sum", "failing")
        work = _C.work_of(x)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="no network"):
                work.wait()
    finally:
        torch._C._distributed_c10d._unregister_process_group("failing")


def test_errors_are_raised_by_every_wait() -> None:
    run(2, _errors_are_raised_again)


def _gradients(hook: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    if hook is not None:
        model.register_comm_hook(None, hook)
    model(torch.arange(6.0).view(2, 3) * (dist.get_rank() + 1)).square().sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    del model
    gc.collect()
    return grads


# DDP refuses annotations that are strings.
def _averages(state, bucket):  # type: ignore[no-untyped-def]
    work = ours.all_reduce(bucket.buffer(), "avg", async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _gathers_and_averages(state, bucket):  # type: ignore[no-untyped-def]
    """By a work of ours that spreads what arrived."""
    n = dist.get_world_size()
    rows = [torch.empty_like(bucket.buffer()) for _ in range(n)]
    work = ours.all_gather(rows, bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: sum(future.value()) / n)


def _ddp() -> None:
    want = _gradients(None)
    assert "allreduce" in dist.group.WORLD.calls  # type: ignore[attr-defined, union-attr]
    for hook in (_averages, _gathers_and_averages):
        for got, w in zip(_gradients(hook), want, strict=True):
            torch.testing.assert_close(got, w)


def test_ddp_and_its_hooks() -> None:
    run(2, _ddp, backend="python")


def _compiled() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        work = ours.all_reduce(x, async_op=True)
        y = F.reduce_scatter_tensor(torch.ones(2 * n, 3), "sum", 0, None)
        work.wait()
        return x * 2, y

    x, y = torch.compile(f, fullgraph=True)(torch.full((3,), rank + 1.0))
    assert torch.equal(x, torch.full((3,), n * (n + 1.0)))
    assert torch.equal(y, torch.full((2, 3), float(n)))


def test_compiled_code() -> None:
    run(2, _compiled, backend="python", deadline=120)
