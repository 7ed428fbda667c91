"""What a call costs beyond the backend's own time, into memory that is there: what dist.* does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d

from benchmarks._measure import Case, Timings, measure
from torch_c10d_ext import _C, functional

BARE, DIST, OURS = "backend", "dist", "ours"
SIZE = 8


def added(seconds: float, device: str) -> list[Timings]:
    """Our functions and dist.* against the bare backend; world size 1 goes to the backend, too."""
    _C.set_single_rank_shortcut(False)
    try:
        return measure(_cases(device), seconds, device)
    finally:
        _C.set_single_rank_shortcut(True)


def with_shortcut(seconds: float, device: str) -> list[Timings]:
    """As users call it: world size 1 is answered at once."""
    return measure(_cases(device), seconds, device)


def _wait(work: dist.Work | None) -> None:
    """A backend that has run the call on its caller's stream has no work."""
    if work is not None:
        work.wait()


def _cases(device: str) -> list[Case]:
    group = dist.group.WORLD
    assert group is not None
    backend: Any = group._get_backend(torch.device(device))
    ranks = group.size()
    # Zeros: a sum in place stays what it is.
    x = torch.zeros(SIZE // 4, device=device)
    gathered = x.new_zeros(ranks * x.size(0))
    part = x.new_zeros(x.size(0) // ranks)
    received = torch.zeros_like(x)
    # Under their names in torch 2.11.
    all_gather_base, reduce_scatter_base = backend._allgather_base, backend._reduce_scatter_base
    to_sum, to_scatter = dist.AllreduceOptions(), dist.ReduceScatterOptions()
    to_gather, to_exchange = _c10d.AllgatherOptions(), _c10d.AllToAllOptions()
    from_0 = dist.BroadcastOptions()
    from_0.rootRank, from_0.rootTensor = 0, 0
    for options in (to_sum, to_scatter, to_gather, to_exchange, from_0):
        options.asyncOp = False  # as dist.* asks when it waits: on the caller's stream
    even: list[int] = [x.size(0) // ranks] * ranks

    cases = {
        "all_reduce_inplace": (
            lambda: _wait(backend.allreduce([x], to_sum)),
            lambda: dist.all_reduce(x),
            lambda: functional.all_reduce_inplace(x, "sum", group),
        ),
        "broadcast_inplace": (
            lambda: _wait(backend.broadcast([x], from_0)),
            lambda: dist.broadcast(x, 0),
            lambda: functional.broadcast_inplace(x, 0, group),
        ),
        "all_gather_tensor_inplace": (
            lambda: _wait(all_gather_base(gathered, x, to_gather)),
            lambda: dist.all_gather_into_tensor(gathered, x),
            lambda: functional.all_gather_tensor_inplace(gathered, x, group),
        ),
        "reduce_scatter_tensor_inplace": (
            lambda: _wait(reduce_scatter_base(part, x, to_scatter)),
            lambda: dist.reduce_scatter_tensor(part, x),
            lambda: functional.reduce_scatter_tensor_inplace(part, x, "sum", group),
        ),
        "all_to_all_inplace": (
            lambda: _wait(backend.alltoall_base(received, x, even, even, to_exchange)),
            lambda: dist.all_to_all_single(received, x, even, even),
            lambda: functional.all_to_all_inplace(received, x, even, even, group),
        ),
    }
    return [
        Case(op, dict(zip((BARE, DIST, OURS), calls, strict=True)), f"{SIZE} B", same_results=False)
        for op, calls in cases.items()
    ]
