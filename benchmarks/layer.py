"""What a call costs beyond the backend's own time: in-place and out ops, nothing allocated."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks._measure import Case, Timings, measure
from torch_c10d_ext import _C

BARE, DIST, OURS = "backend", "dist", "ours"
SIZE = 8


def added(seconds: float, device: str) -> list[Timings]:
    """Our ops and dist.* against the bare backend; world size 1 goes to the backend, too."""
    _C.set_single_rank_shortcut(False)
    try:
        return measure(_cases(device), seconds, device)
    finally:
        _C.set_single_rank_shortcut(True)


def with_shortcut(seconds: float, device: str) -> list[Timings]:
    """As users call it: world size 1 is answered at once."""
    return measure(_cases(device), seconds, device)


def _cases(device: str) -> list[Case]:
    ops: Any = torch.ops.c10d_ext
    group = dist.group.WORLD
    assert group is not None
    name = group.group_name
    backend: Any = group._get_backend(torch.device(device))
    ranks = group.size()
    wait = ops.wait_tensor.default
    # Zeros: a sum in place stays what it is.
    x = torch.zeros(SIZE // 4, device=device)
    gathered = x.new_zeros(ranks * x.size(0))
    part = x.new_zeros(x.size(0) // ranks)
    received = torch.zeros_like(x)
    # Under their names in torch 2.11.
    all_gather_base, reduce_scatter_base = backend._allgather_base, backend._reduce_scatter_base
    from_0 = dist.BroadcastOptions()
    from_0.rootRank, from_0.rootTensor = 0, 0
    even: list[int] = [x.size(0) // ranks] * ranks

    all_reduce_, broadcast_ = ops.all_reduce_.default, ops.broadcast_.default
    all_gather_out = ops.all_gather_into_tensor_out.default
    reduce_scatter_out = ops.reduce_scatter_tensor_out.default
    all_to_all_out = ops.all_to_all_single_out.default
    cases = {
        "all_reduce_": (
            lambda: backend.allreduce([x]).wait(),
            lambda: dist.all_reduce(x),
            lambda: wait(all_reduce_(x, "sum", name)),
        ),
        "broadcast_": (
            lambda: backend.broadcast([x], from_0).wait(),
            lambda: dist.broadcast(x, 0),
            lambda: wait(broadcast_(x, 0, name)),
        ),
        "all_gather_into_tensor_out": (
            lambda: all_gather_base(gathered, x).wait(),
            lambda: dist.all_gather_into_tensor(gathered, x),
            lambda: wait(all_gather_out(x, ranks, name, out=gathered)),
        ),
        "reduce_scatter_tensor_out": (
            lambda: reduce_scatter_base(part, x).wait(),
            lambda: dist.reduce_scatter_tensor(part, x),
            lambda: wait(reduce_scatter_out(x, "sum", ranks, name, out=part)),
        ),
        "all_to_all_single_out": (
            lambda: backend.alltoall_base(received, x, even, even).wait(),
            lambda: dist.all_to_all_single(received, x, even, even),
            lambda: wait(all_to_all_out(x, even, even, name, out=received)),
        ),
    }
    return [
        Case(op, dict(zip((BARE, DIST, OURS), calls, strict=True)), f"{SIZE} B", same_results=False)
        for op, calls in cases.items()
    ]
