"""Many small tensors: one coalesced call, or one block of calls, against one call each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import _torch as theirs
from benchmarks._measure import Case, Timings, measure
from benchmarks.functional import wait_all_ours
from torch_c10d_ext import distributed
from torch_c10d_ext import functional as ours

TORCH, OURS = "torch", "ours"
TORCH_SINGLE, OURS_SINGLE = "torch, 64 calls", "ours, 64 calls"
COUNT, SIZE = 64, 4 << 10


def many(seconds: float, device: str) -> list[Timings]:
    """64 tensors of 4 KiB; the single calls are all started before the first wait."""
    group = dist.group.WORLD
    assert group is not None
    xs = [
        torch.arange(SIZE // 4, dtype=torch.float32, device=device) % 64 + i for i in range(COUNT)
    ]
    dims = [0] * COUNT

    def case(name: str, torch_single: Any, single: Any, torch_coalesced: Any, mine: Any) -> Case:
        peers = {
            TORCH: lambda: theirs.wait_all(torch_coalesced()),
            OURS: lambda: wait_all_ours(mine()),
            TORCH_SINGLE: lambda: theirs.wait_all([torch_single(x) for x in xs]),
            OURS_SINGLE: lambda: wait_all_ours([single(x) for x in xs]),
        }
        if name == "all_gather_single" and not theirs.can_all_gather(device):
            del peers[TORCH], peers[TORCH_SINGLE]
        return Case(name, peers, f"{COUNT} x {SIZE >> 10} KiB")

    return measure(
        [
            case(
                "all_reduce",
                lambda x: theirs.all_reduce(x, "sum", group),
                lambda x: ours.all_reduce(x, "sum", group),
                lambda: theirs.all_reduce_coalesced(xs, "sum", group),
                lambda: ours.all_reduce_coalesced(xs, "sum", group),
            ),
            case(
                "all_gather_single",
                lambda x: theirs.all_gather_single(x, 0, group),
                lambda x: ours.all_gather_single(x, 0, group),
                lambda: theirs.all_gather_single_coalesced(xs, group),
                lambda: ours.all_gather_single_coalesced(xs, group),
            ),
            case(
                "reduce_scatter_single",
                lambda x: theirs.reduce_scatter_single(x, "sum", 0, group),
                lambda x: ours.reduce_scatter_single(x, "sum", 0, group),
                lambda: theirs.reduce_scatter_single_coalesced(xs, "sum", dims, group),
                lambda: ours.reduce_scatter_single_coalesced(xs, "sum", dims, group),
            ),
        ],
        seconds,
        device,
    )


def managed(seconds: float, device: str) -> list[Timings]:
    """64 calls in one coalescing block, torch's and ours, and 64 calls on their own."""
    n = dist.get_world_size()
    xs = [torch.ones(SIZE // 4, device=device) for _ in range(COUNT)]
    wide = [torch.ones(n * SIZE // 4, device=device) for _ in range(COUNT)]

    def case(name: str, call: Callable[[Any, Tensor, Tensor], Any]) -> Case:
        def one_by_one(api: Any) -> None:
            for x, w in zip(xs, wide, strict=True):
                call(api, x, w)

        def in_a_block(api: Any) -> None:
            with api._coalescing_manager(device=torch.device(device)):
                one_by_one(api)

        # On gloo torch's raises, and the group does nothing from then on.
        peers = {} if dist.get_backend() == "gloo" else {TORCH: lambda: in_a_block(dist)}
        peers |= {
            OURS: lambda: in_a_block(distributed),
            TORCH_SINGLE: lambda: one_by_one(dist),
            OURS_SINGLE: lambda: one_by_one(distributed),
        }
        return Case(name, peers, f"{COUNT} x {SIZE >> 10} KiB", same_results=False)

    return measure(
        [
            case("all_reduce", lambda api, x, w: api.all_reduce(x)),
            case("all_gather_into_tensor", lambda api, x, w: api.all_gather_into_tensor(w, x)),
            case("reduce_scatter_tensor", lambda api, x, w: api.reduce_scatter_tensor(x, w)),
        ],
        seconds,
        device,
    )
