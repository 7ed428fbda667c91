"""Every functional collective, waited for, against torch's or what one would write with dist.*."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import _torch as theirs
from benchmarks._measure import Case, Timings, measure
from torch_c10d_ext import functional as ours

TORCH, OURS = "torch", "ours"
# Bytes per rank.
SMALL = (8, 64 << 10)
LARGE = (1 << 20, 4 << 20, 16 << 20)
# Tensors per coalesced call.
PARTS = 4


def small(seconds: float, device: str) -> list[Timings]:
    """All collectives, with messages so small that the call is what costs."""
    return measure(
        [case for size in SMALL for case in _measurable(size, device)], seconds, device=device
    )


def large(seconds: float, device: str) -> list[Timings]:
    """The workhorses with messages so large that the bytes are what costs."""
    names = ("all_reduce", "all_gather_single", "reduce_scatter_single")
    cases = [case for size in LARGE for case in _measurable(size, device) if case.name in names]
    return measure([case for name in names for case in cases if case.name == name], seconds, device)


def calls_alone(seconds: float) -> list[Timings]:
    """All collectives at 8 B on the fake backend: what is left is the layer's own time."""
    cases = _collectives(SMALL[0], "cpu") + _group_arguments()
    # The fake backend takes even shards alone, and writes no results that could be compared.
    cases = [case for case in cases if not case.name.startswith("all_gather uneven")]
    for case in cases:
        case.same_results = False
    return measure(cases, seconds)


def label(size: int) -> str:
    """A number of bytes for a table."""
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size // factor} {unit}"
    return f"{size} B"


def wait_all_ours(results: list[Tensor]) -> list[Tensor]:
    return [ours.wait_tensor(result) for result in results]


def _measurable(size: int, device: str) -> list[Case]:
    cases = _collectives(size, device)
    if theirs.can_all_gather(device):
        return cases
    gathers = ("all_gather_single", "all_gather_single_coalesced", "all_gather, backward")
    return [case for case in cases if case.name not in gathers]


def _collectives(size: int, device: str) -> list[Case]:
    group = dist.group.WORLD
    assert group is not None
    ranks, rank = group.size(), group.rank()
    count = size // 4
    x = torch.arange(count, dtype=torch.float32, device=device) % 64 + rank
    leaf = x.clone().requires_grad_()
    parts = [
        torch.full((max(count // PARTS, 2),), rank + i, device=device) * 1.0 for i in range(PARTS)
    ]
    ring = [(i + 1) % ranks for i in range(ranks)]
    wait, their_wait = ours.wait_tensor, theirs.wait
    total, per_part = label(size), f"{PARTS} x {label(parts[0].numel() * 4)}"

    def case(name: str, torchs: Callable[[], Any], mine: Callable[[], Any], size: str) -> Case:
        return Case(name, {TORCH: torchs, OURS: mine}, size)

    return [
        # torch against itself: what this run can tell apart.
        case(
            "(torch against torch)",
            lambda: their_wait(theirs.all_reduce(x, "sum", group)),
            lambda: their_wait(theirs.all_reduce(x, "sum", group)),
            total,
        ),
        case(
            "all_reduce",
            lambda: their_wait(theirs.all_reduce(x, "sum", group)),
            lambda: wait(ours.all_reduce(x, "sum", group)),
            total,
        ),
        case(
            "all_gather_single",
            lambda: their_wait(theirs.all_gather_single(x, 0, group)),
            lambda: wait(ours.all_gather_single(x, 0, group)),
            total,
        ),
        case(
            "reduce_scatter_single",
            lambda: their_wait(theirs.reduce_scatter_single(x, "sum", 0, group)),
            lambda: wait(ours.reduce_scatter_single(x, "sum", 0, group)),
            total,
        ),
        case(
            "all_to_all_single",
            lambda: their_wait(theirs.all_to_all_single(x, None, None, group)),
            lambda: wait(ours.all_to_all_single(x, None, None, group)),
            total,
        ),
        case(
            "broadcast",
            lambda: their_wait(theirs.broadcast(x, 0, group)),
            lambda: wait(ours.broadcast(x, 0, group)),
            total,
        ),
        case(
            "permute_tensor",
            lambda: their_wait(theirs.permute_tensor(x, ring, group)),
            lambda: wait(ours.permute_tensor(x, ring, group)),
            total,
        ),
        case(
            "all_reduce_coalesced",
            lambda: theirs.wait_all(theirs.all_reduce_coalesced(parts, "sum", group)),
            lambda: wait_all_ours(ours.all_reduce_coalesced(parts, "sum", group)),
            per_part,
        ),
        case(
            "all_gather_single_coalesced",
            lambda: theirs.wait_all(theirs.all_gather_single_coalesced(parts, group)),
            lambda: wait_all_ours(ours.all_gather_single_coalesced(parts, group)),
            per_part,
        ),
        case(
            "reduce_scatter_single_coalesced",
            lambda: theirs.wait_all(
                theirs.reduce_scatter_single_coalesced(parts, "sum", [0] * PARTS, group)
            ),
            lambda: wait_all_ours(
                ours.reduce_scatter_single_coalesced(parts, "sum", [0] * PARTS, group)
            ),
            per_part,
        ),
        case(
            "all_reduce, then + 1",
            lambda: theirs.all_reduce(x, "sum", group) + 1,
            lambda: ours.all_reduce(x, "sum", group) + 1,
            total,
        ),
        case(
            "all_gather, backward",
            lambda: _gradient(theirs.all_gather_single_autograd(leaf, 0, group), leaf),
            lambda: _gradient(ours.all_gather_single_autograd(leaf, 0, group), leaf),
            total,
        ),
        case(
            "reduce (torch: dist)",
            lambda: _reduce_by_hand(x, group),
            lambda: wait(ours.reduce(x, "sum", 0, group)),
            total,
        ),
        case(
            "gather (torch: dist)",
            lambda: _gather_by_hand(x, group),
            lambda: wait(ours.gather(x, 0, group)),
            total,
        ),
        case(
            "scatter (torch: dist)",
            lambda: _scatter_by_hand(x, group),
            lambda: wait(ours.scatter(x, 0, group)),
            total,
        ),
        *_uneven(count, total, device, group),
        case(
            "broadcast_coalesced (torch: dist)",
            lambda: _broadcast_coalesced_by_hand(parts, group),
            lambda: wait_all_ours(ours.broadcast_coalesced(parts, 0, group)),
            per_part,
        ),
    ]


def _uneven(count: int, size: str, device: str, group: dist.ProcessGroup) -> list[Case]:
    """Rank i contributes or receives i rows more than rank 0."""
    ranks, rank = group.size(), group.rank()
    sizes = [count + i for i in range(ranks)]
    mine = torch.arange(sizes[rank], dtype=torch.float32, device=device)
    whole = torch.arange(sum(sizes), dtype=torch.float32, device=device)
    wait = ours.wait_tensor
    return [
        Case(
            "all_gather uneven (torch: dist)",
            {
                TORCH: lambda: _all_gather_uneven_by_hand(mine, sizes, group),
                OURS: lambda: wait(ours.all_gather(mine, sizes, group)),
            },
            size,
        ),
        Case(
            "reduce_scatter uneven (torch: dist)",
            {
                TORCH: lambda: _reduce_scatter_uneven_by_hand(whole, sizes, group),
                OURS: lambda: wait(ours.reduce_scatter(whole, "sum", sizes, group)),
            },
            size,
        ),
    ]


def _group_arguments() -> list[Case]:
    """all_reduce at 8 B with every way to name the group."""
    group = dist.group.WORLD
    assert group is not None
    x = torch.ones(2)
    mesh = init_device_mesh("cpu", (group.size(),))
    forms = {"name": group.group_name, "mesh": mesh, "(mesh, dim)": (mesh, 0)}

    def case(name: str, form: Any) -> Case:
        return Case(
            f"all_reduce, group by {name}",
            {
                TORCH: lambda: theirs.wait(theirs.all_reduce(x, "sum", form)),
                OURS: lambda: ours.wait_tensor(ours.all_reduce(x, "sum", form)),
            },
            label(8),
        )

    return [case(name, form) for name, form in forms.items()]


def _gradient(result: Tensor, leaf: Tensor) -> Tensor:
    leaf.grad = None
    result.backward(torch.ones_like(result))
    assert leaf.grad is not None
    return leaf.grad


# What a user of torch writes where torch has no functional form: fresh outputs, input untouched.


def _reduce_by_hand(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.clone()
    dist.reduce(out, 0, group=group)
    return out if group.rank() == 0 else torch.zeros_like(x)


def _gather_by_hand(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.rank() != 0:
        dist.gather(x, None, 0, group=group)
        return x.new_empty(0)
    out = x.new_empty(group.size() * x.size(0))
    dist.gather(x, list(out.chunk(group.size())), 0, group=group)
    return out


def _scatter_by_hand(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(x.size(0) // group.size())
    parts = list(x.chunk(group.size())) if group.rank() == 0 else None
    dist.scatter(out, parts, 0, group=group)
    return out


def _broadcast_coalesced_by_hand(tensors: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    outs = [t.clone() for t in tensors]
    dist._broadcast_coalesced(group, outs, 1 << 28, 0)
    return outs


def _all_gather_uneven_by_hand(x: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    longest = max(sizes)
    padded = torch.nn.functional.pad(x, (0, longest - x.size(0)))
    rows = x.new_empty(group.size() * longest)
    dist.all_gather_into_tensor(rows, padded, group=group)
    return torch.cat([row[:size] for row, size in zip(rows.split(longest), sizes, strict=True)])


def _reduce_scatter_uneven_by_hand(x: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total.split(sizes)[group.rank()].clone()
