"""The stream rules of what is made of other methods, where a backend has not all of c10d's.

nccl is said to have less than it has: so the paths for such backends run on CUDA tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

import torch_c10d_ext
import torch_c10d_ext.distributed as ext
import torch_c10d_ext.functional as F
from tests.contract import group
from tests.simulated_cuda.on_cuda import ALONE, device, run_on_devices
from tests.simulated_cuda.test_streams import COUNT, _differ, _none_fails, _world

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("own_processes")]

METHODS = (
    *("allreduce", "reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor"),
    *("all_to_all_single", "send", "recv"),
)
# A call gives a result and what waits for it.
Start = Callable[[Tensor], tuple[Tensor, Callable[[], Any]]]


def _waits(call: Callable[[Tensor], Tensor]) -> Start:
    def start(x: Tensor) -> tuple[Tensor, Callable[[], Any]]:
        y = call(x)
        return y, lambda: F.wait_tensor(y)

    return start


def _without_lists(n: int, rank: int) -> dict[str, tuple[Start, Any]]:
    def into_every_second_column(x: Tensor) -> Tensor:
        out = torch.empty(n * COUNT, 4, device=x.device)[:, ::2]
        return torch.ops.c10d_ext.all_gather_into_tensor_out(x, n, group(), out=out)

    def by_lists(x: Tensor) -> tuple[Tensor, Callable[[], Any]]:
        whole = torch.empty_like(x)
        outs = list(whole.chunk(n))
        work = ext.all_to_all(outs, list(x.clone().chunk(n)), async_op=True)
        return whole, work.wait

    def in_a_block(x: Tensor) -> tuple[Tensor, Callable[[], Any]]:
        of = x.new_empty(n * COUNT, 2), x.new_empty(n * COUNT, 2, dtype=torch.float64)
        with ext.coalescing_manager(device=x.device, async_ops=True) as block:
            ext.all_gather_into_tensor(of[0], x.clone())
            ext.all_gather_into_tensor(of[1], (x + 1).double())
        return of[1], block.wait

    return {
        "all_gather of a list": (
            _waits(lambda x: F.all_gather_into_tensor_coalesced([x, x + 1], None)[1]),
            lambda xs: torch.cat(xs) + 1,
        ),
        "all_gather of two dtypes": (in_a_block, lambda xs: (torch.cat(xs) + 1).double()),
        "all_gather into every second column": (
            _waits(into_every_second_column),
            lambda xs: torch.cat(xs),
        ),
        "all_to_all by lists": (
            by_lists,
            lambda xs: torch.cat([x.chunk(n)[rank] for x in xs]),
        ),
        "barrier": (_waits(lambda x: F.barrier(x, None)), lambda xs: xs[rank]),
    }


def _with_roots(n: int, rank: int) -> dict[str, tuple[Start, Any]]:
    last = n - 1

    def either(xs: list[Tensor]) -> Tensor | None:
        bits = [x.int() for x in xs]
        for other in bits[1:]:
            bits[0] = bits[0] | other
        return bits[0] if rank == last else None

    return {
        "reduce of bits": (
            _waits(lambda x: F.reduce(x.int(), "bor", last, None)),
            either,
        ),
        "gather": (
            _waits(lambda x: F.gather(x, last, None)),
            lambda xs: torch.cat(xs) if rank == last else torch.empty(0, 2),
        ),
        "scatter": (
            _waits(lambda x: F.scatter(x, last, None)),
            lambda xs: xs[last].chunk(n)[rank],
        ),
    }


def _other_stream(calls: str, methods: list[str]) -> list[str]:
    """Started on one stream, waited for on another, while the first one's memory is used again."""
    torch_c10d_ext.register_backend_capabilities(
        "nccl", methods=methods, reduces_bitwise=False, starts_messages_together=True
    )
    world, mine = dist.group.WORLD, device()
    less = dist.new_group(backend="nccl")
    c10d._update_default_pg(less)
    failures = []
    try:
        n, rank = dist.get_world_size(), dist.get_rank()
        begins, ends = torch.cuda.Stream(mine), torch.cuda.Stream(mine)
        for name, (start, reference) in globals()[calls](n, rank).items():
            xs = _world(n)
            want, x = reference(xs), xs[rank].to(mine)
            torch.cuda.synchronize()
            with torch.cuda.stream(begins):
                given = x.clone()
                y, wait = start(given)
                del given
            # A rank's own part may be copied where the call began.
            ends.wait_stream(begins)
            with torch.cuda.stream(ends):
                wait()
            with torch.cuda.stream(begins):
                sizes = (1, 1, 1, 1, 2 * COUNT, COUNT, 2 * COUNT, 4 * COUNT, 2 * n * COUNT)
                junk = [torch.full((k,), 9.0, device=mine) for k in sizes for _ in range(2)]
                junk += [torch.full((6 * n * COUNT,), 9.0, device=mine)]
            with torch.cuda.stream(ends):
                z = getattr(y, "elem", y) + 0
            begins.synchronize()
            ends.synchronize()
            if text := _differ(z, want):
                failures.append(f"{name}: {text}")
            if not all(bool((j == 9.0).all()) for j in junk):
                failures.append(f"{name}: memory of others was written")
            torch.cuda.synchronize()
    finally:
        c10d._update_default_pg(world)
        dist.destroy_process_group(less)
    return failures


@pytest.mark.parametrize("size", [2, 4])
def test_memory_is_kept_without_calls_for_lists(size: int) -> None:
    calls = ("_without_lists", list(METHODS))
    _none_fails(run_on_devices(size, _other_stream, *calls, backend=ALONE))


@pytest.mark.parametrize("size", [2, 4])
def test_memory_is_kept_with_calls_for_roots(size: int) -> None:
    calls = ("_with_roots", [*METHODS, "gather", "scatter", "barrier"])
    _none_fails(run_on_devices(size, _other_stream, *calls, backend=ALONE))


class _Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


class _Witness(dist.ProcessGroup):
    """Of two ranks, and does nothing: it sees which device is the current one."""

    def __init__(self) -> None:
        super().__init__(dist.get_rank(), 2)
        self.saw: list[int] = []

    def getBackendName(self) -> str:  # noqa: N802
        return "witness"

    def _see(self, *_args: Any) -> dist.Work:
        self.saw.append(torch.cuda.current_device())
        return _Done()

    allreduce = send = recv = _see


def _called_from_another_device() -> list[str]:
    mine = device()
    witness = _Witness()
    x = torch.zeros(COUNT, device=mine)
    torch._C._distributed_c10d._register_process_group("witness", witness)
    try:
        with torch.cuda.device((mine.index + 1) % torch.cuda.device_count()):
            F.wait_tensor(F.all_reduce(x, "sum", "witness"))
            other = [1 - dist.get_rank()]
            for sends in (True, False):
                F.wait_message(F.batch_isend_irecv([x], other, [sends], group="witness")[0], x)
    finally:
        torch._C._distributed_c10d._unregister_process_group("witness")
    return [] if witness.saw == [mine.index] * 3 else [f"current were {witness.saw}, not {mine}"]


def test_a_backend_finds_the_device_of_its_tensors_current() -> None:
    """nccl sees to it itself; what others may count on is this."""
    _none_fails(run_on_devices(2, _called_from_another_device, backend=ALONE))


def _memory_of_a_scatter() -> int:
    """Bytes beside the result, at most."""
    x = torch.ones(dist.get_world_size() * COUNT, device=device())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = F.scatter(x, 1, None)
    more = torch.cuda.max_memory_allocated() - before - COUNT * x.element_size()
    assert torch.equal(F.wait_tensor(y), x[:COUNT])
    return int(more)


def test_only_the_root_of_a_scatter_copies_its_input() -> None:
    more = run_on_devices(2, _memory_of_a_scatter, backend=ALONE)
    assert more == [0, 2 * COUNT * 4]
