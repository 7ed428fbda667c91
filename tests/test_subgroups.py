"""split_group and shrink_group, on the backends where torch has no way to and where it has."""

from __future__ import annotations

import datetime as dt
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_c10d_ext.distributed as ours
from tests.harness import run
from tests.harness.crew import crew

BACKENDS = ["gloo", "shm"]


def _total(group: Any) -> float:
    x = torch.full((2,), 10.0 ** dist.get_rank())
    ours.all_reduce(x, group=group)
    dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
    return float(x[0])


def _splits() -> None:
    rank = dist.get_rank()
    half = ours.split_group(split_ranks=[[1, 0], [2, 3]], group_desc="half")
    assert half is not None
    assert dist.get_process_group_ranks(half) == ([0, 1] if rank < 2 else [2, 3])
    assert half.rank() == rank % 2
    assert half.group_desc == "half"
    assert dist.get_backend_config(half) == dist.get_backend_config()
    assert dist.get_backend(half) == dist.get_backend()
    assert _total(half) == (11.0 if rank < 2 else 1100.0)
    # Ranks count in the group that is split; again, and with some left out.
    for _ in range(2):
        odd = ours.split_group(dist.group.WORLD, [[1, 3]], dt.timedelta(seconds=30))
        assert (odd is None) == (rank % 2 == 0)
        if odd is not None:
            assert _total(odd) == 1010.0
            alone = ours.split_group(odd, [[0], [1]])
            assert alone is not None
            assert dist.get_process_group_ranks(alone) == [rank]
            assert _total(alone) == 10.0**rank
    backend = dist.get_backend()
    some = ours.split_group(split_ranks=[[3, 2]], backend=f"cpu:{backend}")
    if some is not None:
        assert dist.get_backend_config(some) == f"cpu:{backend}"
        assert _total(some) == 1100.0
    here = rf"\(rank {rank}/4, group '0'\)"
    for lists, text in (
        (None, "at least one list"),
        ([], "at least one list"),
        ([[0], []], "none empty"),
        ([[0, 0]], "different ranks"),
        ([[0, 1], [1]], "different ranks"),
        ([[0, 4]], "0 to 3"),
    ):
        with pytest.raises(ValueError, match=f"split_group: split_ranks .*{text}.*{here}"):
            ours.split_group(split_ranks=lists)
    with pytest.raises(ValueError, match=f"split_group: backend must be some.*'cuda:nccl' {here}"):
        ours.split_group(split_ranks=[[0]], backend="cuda:nccl")
    ours.barrier()


@pytest.mark.parametrize("backend", BACKENDS)
def test_splits_a_group(backend: str) -> None:
    run(4, _splits, backend=backend)


def _shrinks() -> None:
    rank = dist.get_rank()
    for turn, flags in enumerate((0, 1)):
        group = ours.new_group([0, 1, 2, 3])
        pair = ours.new_group([1, 3])
        for bad, error, text in (
            ([], ValueError, "empty"),
            ("1", TypeError, "list"),
            ([1, 1], ValueError, "Duplicate"),
            ([4], ValueError, "bounds"),
            ([rank], RuntimeError, "should not call"),
        ):
            with pytest.raises(error, match=text):
                ours.shrink_group(bad, group)  # type: ignore[arg-type]
        ours.barrier()
        if rank != turn:
            rest = ours.shrink_group([turn], group, flags)
            assert dist.get_process_group_ranks(rest) == [r for r in range(4) if r != turn]
            assert _total(rest) == 1111.0 - 10.0**turn
            # Its ranks count anew.
            if rank != 3:
                smaller = ours.shrink_group([2], rest)
                assert smaller.size() == 2
                assert _total(smaller) == 111.0 - 10.0**turn
        ours.barrier()
        if rank in (1, 3):
            assert _total(pair) == 1010.0  # other groups live on
        ours.barrier()


@pytest.mark.parametrize("backend", [*BACKENDS, "cpu:gloo,cuda:gloo", "cpu:shm,cuda:gloo"])
def test_shrinks_a_group(backend: str) -> None:
    run(4, _shrinks, backend=backend)


def _shrinks_the_world(dead: int) -> tuple[int, int, float]:
    other = dist.distributed_c10d._get_default_group()
    rest = ours.shrink_group([dead])
    assert dist.group.WORLD is rest
    assert rest is not other
    x = torch.full((2,), 1.0)
    ours.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), float(x[0])


def test_shrinks_the_default_group_to_those_that_live() -> None:
    with crew(3, "gloo") as ranks:
        os.kill(ranks.pid(1), signal.SIGKILL)
        assert ranks.has_ended(1)
        for rank in (0, 2):
            ranks.start(rank, _shrinks_the_world, 1)
        assert [ranks.result(rank) for rank in (0, 2)] == [(0, 2, 2.0), (1, 2, 2.0)]
