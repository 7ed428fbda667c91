"""batch_isend_irecv: starts messages, each with a ticket for its wait."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torch_c10d_ext
from tests.contract import group
from tests.harness import run
from torch_c10d_ext import functional as F
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


# --- the forms that torch's functional collectives have ------------------------------------------


def _message(rank: int) -> Tensor:
    """Enough to be in flight for a while, and not dense."""
    return (torch.arange(200_000.0) + 1000 * rank).view(2, -1).t()


def _in_place() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    right, left = (rank + 1) % n, (rank - 1) % n
    x, y = _message(rank), torch.zeros(100_000, 2)

    # Whichever comes first: nothing waits before the result is used.
    received = F.irecv_inplace(y, left, 3)
    sent = F.isend_inplace(x, right, 3)
    assert torch.equal(received + 0, _message(left)) and torch.equal(y, _message(left))
    assert received.data_ptr() == y.data_ptr()
    assert torch.equal(sent * 1, _message(rank))

    ours, theirs = torch.zeros(100_000, 2, dtype=torch.bfloat16), torch.zeros(3)
    results = F.batch_p2p_ops_inplace(
        ["irecv", "isend", "isend", "irecv"],
        [left, right, left, right],
        [0, 0, 9, 9],
        [ours, x.bfloat16(), torch.full((3,), float(rank)), theirs],
    )
    assert torch.equal(results[0] + 0, _message(left).bfloat16())
    assert torch.equal(results[3] + 0, torch.full((3,), float(right)))
    for result in results:
        F.wait_tensor(result)

    # Nobody waits: it arrives and leaves nothing behind.
    z = torch.zeros(4)
    F.isend_inplace(torch.full((4,), float(rank)), right)
    F.irecv_inplace(z, left)
    deadline = time.monotonic() + 60
    while torch_c10d_ext.pending_count() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert torch_c10d_ext.pending_count() == 0
    assert torch.equal(z, torch.full((4,), float(left)))

    # By the rank in the world, and by that in a group of others.
    reverse = dist.new_group(list(range(1, n)))
    if rank and n > 2:
        place, others = rank - 1, n - 1
        to, source = (place + 1) % others, (place - 1) % others
        F.isend_inplace(torch.tensor([1.0 + rank]), None, 0, reverse, group_dst=to)
        got = F.irecv_inplace(torch.zeros(1), source + 1, 0, reverse)
        assert got.item() == 2.0 + source
    dist.barrier()
    if rank and n > 2:
        dist.destroy_process_group(reverse)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_in_place_forms(backend: str, size: int) -> None:
    run(size, _in_place, backend=backend)


def _traced() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    right, left = (rank + 1) % n, (rank - 1) % n

    def ring(x: Tensor, y: Tensor) -> Tensor:
        got = F.batch_p2p_ops_inplace(["irecv", "isend"], [left, right], [0, 0], [y, x * 2])
        F.isend_inplace(x + 1, right, 1)
        more = F.irecv_inplace(torch.empty_like(y), left, 1)
        return got[0] + more

    for backend in ("eager", "aot_eager", "inductor", "make_fx"):
        torch._dynamo.reset()
        x, y = torch.full((5,), float(rank)), torch.zeros(5)
        if backend == "make_fx":
            traced = make_fx(ring)(x, y)
            y.zero_()
        else:
            traced = torch.compile(ring, fullgraph=True, backend=backend)
        assert torch.equal(traced(x, y), torch.full((5,), 3.0 * left + 1)), backend
        assert torch.equal(y, torch.full((5,), 2.0 * left)), backend
    dist.barrier()
    assert torch_c10d_ext.pending_count() == 0


@pytest.mark.parametrize("size", [2, 3])
def test_in_place_forms_trace(size: int) -> None:
    run(size, _traced, backend="shm")


def _in_place_refused() -> None:
    rank, x = dist.get_rank(), torch.ones(2)
    here = rf".*\(rank {rank}/2, group '0'\)"
    batch = F.batch_p2p_ops_inplace
    for call, text in (
        (
            lambda: F.isend_inplace(x, 1 - rank, group_dst=0),
            "isend_inplace: one of dst and group_d",
        ),
        (lambda: F.irecv_inplace(x, None), "irecv_inplace: one of src and group_src must be given"),
        (
            lambda: F.isend_inplace(x, 7),
            r"isend_inplace: dst must be a rank of the group, \[0, 1\]",
        ),
        (lambda: F.isend_inplace(x, rank), "isend: the peer must be another rank, got this rank"),
        (lambda: F.irecv_inplace(x, 1 - rank, -1), "irecv: tag must be between 0 and"),
        (lambda: F.irecv_inplace(x[:1].expand(3), 1 - rank), "irecv: a tensor that receives must"),
        (lambda: batch(["isend"], [1 - rank], [0, 0], [x]), "must have one length, got 1, 1, 2"),
        (
            lambda: batch(["send"], [1 - rank], [0], [x]),
            "must hold 'isend' and 'irecv', got 'send'",
        ),
    ):
        with pytest.raises(ValueError, match=text + here):
            call()
    assert torch_c10d_ext.pending_count() == 0


def test_in_place_forms_refuse() -> None:
    run(2, _in_place_refused)


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
