"""batch_isend_irecv: starts messages, each with a ticket for its wait."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_c10d_ext
from tests.contract import group
from tests.harness import run
from torch_c10d_ext.functional import batch_isend_irecv, wait_message


def _round_trip() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    right, left = (rank + 1) % n, (rank - 1) % n
    x = (torch.arange(6.0) + 10 * rank).view(2, 3).t()  # strided
    y = torch.full((3, 2), -1.0)
    before = y.clone()
    tickets = batch_isend_irecv([x, y, x + 1], [right, left, right], [True, False, True], [4, 4, 5])
    x.zero_()  # what is sent is a copy
    values, source = wait_message(tickets[1], y)
    want = (torch.arange(6.0) + 10 * left).view(2, 3).t()
    assert torch.equal(values, want) and values.is_contiguous()
    assert torch.equal(y, before)
    assert source.item() == left and source.dtype == torch.int64
    empty, source = wait_message(tickets[0])
    assert empty.shape == (0,) and source.item() == rank
    del tickets  # one was never waited for: it arrives nevertheless
    (ticket,) = batch_isend_irecv([y], [-1 if n == 2 else left], [False], [5])
    values, source = wait_message(ticket, y)
    assert torch.equal(values, want + 1) and source.item() == left
    dist.barrier()
    assert torch_c10d_ext.pending_count() == 0


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("size", [2, 3])
def test_messages_and_tickets(backend: str, size: int) -> None:
    run(size, _round_trip, backend=backend)


def _fake() -> None:
    peer = 1 - dist.get_rank()
    op = torch.ops.c10d_ext.batch_isend_irecv
    x = torch.ones(2, 3)
    real = op([x, x.clone()], [peer, peer], [True, False], [0, 0], group())
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        tickets = op([fake, fake], [peer, peer], [True, False], [0, 0], group())
        for ours, theirs in zip(tickets, real, strict=True):
            for what in ("shape", "dtype", "device"):
                assert getattr(ours, what) == getattr(theirs, what)
            assert ours.stride() == theirs.stride()
        values, source = torch.ops.c10d_ext.wait_message(tickets[1], [2, 3], x.dtype)
        with pytest.raises(ValueError, match=r"isend: the peer must be a rank.*got 5 \(rank"):
            op([fake], [5], [True], [0], group())
    got, rank = wait_message(real[1], x)
    for ours, theirs in ((values, got), (source, rank)):
        assert (ours.shape, ours.dtype, ours.stride()) == (
            theirs.shape,
            theirs.dtype,
            theirs.stride(),
        )
    wait_message(real[0])


def test_fake_tensors_meet_the_same_checks_and_shapes() -> None:
    run(2, _fake)


def _refused() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    peer, x = 1 - rank, torch.ones(2)
    here = rf".*\(rank {rank}/{n}, group '0'\)"
    for args, text in (
        (([], [], []), "batch_isend_irecv: inputs must hold at least one tensor, got"),
        (([x], [n], [True]), f"isend: the peer must be a rank of the group, 0 to 1, got {n}"),
        (([x], [-1], [True]), "isend: the peer must be.*got -1"),
        (([x], [rank], [False]), f"irecv: the peer must be another rank, got this rank, {rank}"),
        (([x], [peer], [True], [-2]), "isend: tag must be between 0 and.*got -2"),
        (([x], [peer, peer], [True]), "each message must have a tensor.*got 1, 2, 1 and 1"),
        (([x[:1].expand(3)], [peer], [False]), "irecv: a tensor that receives must hold"),
    ):
        with pytest.raises(ValueError, match=text + here):
            batch_isend_irecv(*args)
    assert torch_c10d_ext.pending_count() == 0


def test_bad_messages_are_refused() -> None:
    run(2, _refused)
