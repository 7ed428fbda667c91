"""What `tools/check_debug.py` runs on each of two ranks: collectives whose values are checked.

The arguments are the rank and the file by which the ranks meet.
"""

from __future__ import annotations

import datetime as dt
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor

from torch_c10d_ext import _C, functional

# What travels with the header of a collective, what fits the shared memory, and what takes turns.
SIZES = (1, 1000, 1 << 20)


def over_gloo(group: dist.ProcessGroup) -> bool:
    return isinstance(group._get_backend(torch.device("cpu")), _C.CheckedBackend)


def check(got: Tensor, expected: Tensor) -> None:
    assert torch.equal(got, expected), f"got {got}, expected {expected}"


def collectives(group: dist.ProcessGroup, rank: int, size: int) -> None:
    both = [torch.arange(size) * 10 + r for r in range(2)]
    mine, total, gathered = both[rank], both[0] + both[1], torch.cat(both)
    two = torch.cat([mine, mine + 1])

    check(functional.all_reduce(mine, "sum", group), total)
    check(functional.all_gather_single(mine, 0, group), gathered)

    x = mine.clone()
    dist.all_reduce(x, group=group)
    check(x, total)
    x = mine.clone()
    work = dist.all_reduce(x, group=group, async_op=True)
    work.wait()
    check(x, total)
    x = mine.clone()
    dist.broadcast(x, 1, group=group)
    check(x, both[1])
    parts = [torch.zeros_like(mine) for _ in both]
    dist.all_gather(parts, mine, group=group)
    check(torch.cat(parts), gathered)
    x = torch.zeros_like(mine)
    dist.reduce_scatter_tensor(x, two, group=group)
    check(x, total + 2 * rank)
    x = torch.zeros_like(two)
    dist.all_to_all_single(x, two, group=group)
    check(x, gathered + rank)
    x = torch.zeros_like(mine)
    if rank == 0:
        dist.send(mine, 1, group=group)
        dist.recv(x, 1, group=group)
    else:
        dist.recv(x, 0, group=group)
        dist.send(mine, 0, group=group)
    check(x, both[1 - rank])
    dist.barrier(group)


def main(rank: int, store: str) -> None:
    # Not the extension of the tree.
    assert _C.__file__.startswith(os.environ["PYTHONPATH"]), _C.__file__
    dist.init_process_group(
        "shm",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=dt.timedelta(seconds=60),
    )
    groups = [dist.group.WORLD, dist.new_group([0, 1], backend="shm")]
    assert not any(map(over_gloo, groups))
    # Of the fall-back, too.
    os.environ["TORCH_C10D_EXT_SHM_DISABLE"] = "1"
    groups.append(dist.new_group(backend="shm"))
    del os.environ["TORCH_C10D_EXT_SHM_DISABLE"]
    assert over_gloo(groups[-1])
    for group in groups:
        for size in SIZES:
            collectives(group, rank, size)

    x = torch.ones(3, requires_grad=True)
    (functional.all_reduce(x, "sum") * (rank + 1)).sum().backward()
    check(x.grad, torch.full((3,), 3.0))
    for r in range(2):
        alone = dist.new_group([r], backend="shm")
        if r == rank:
            dist.barrier(alone)
    dist.destroy_process_group(groups[1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
