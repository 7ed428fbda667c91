"""Little data travels with the calls on which ranks agree, and the backend inside moves none of it.

That values are those of any other backend test_checked.py and the tests of hosts tell.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.backends.test_checked import fallen_back
from tests.harness import run, values
from torch_c10d_ext import _C, _backends, functional
from torch_c10d_ext import distributed as ours
from torch_c10d_ext.errors import CollectiveMismatch

CPU = torch.device("cpu")


def _moved(group: Any) -> int:
    """How many collectives gloo has been asked for."""
    return int(group._get_backend(CPU).inner._get_sequence_number_for_group())


def _travels(given: int | None) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    most = _C.usual_piggyback(n, by_leaders=False) if given is None else given
    with fallen_back(piggyback=given) as group:
        fits = most // n // 4  # elements of float32 on each rank
        before = _moved(group)
        for count in (1, fits):
            x = torch.arange(count, dtype=torch.float32) + 10 * rank
            total = functional.all_reduce(x, "sum", group) + 0
            assert torch.equal(total, n * torch.arange(count) + 10.0 * sum(range(n)))
        y = torch.full((3,), rank, dtype=torch.bfloat16)
        dist.broadcast(y, n - 1, group=group)
        assert torch.equal(y, torch.full((3,), n - 1, dtype=torch.bfloat16))
        # Of a broadcast the root's data travels, once, and not a copy for each rank.
        whole = most // 4
        z = torch.arange(whole, dtype=torch.float32) * (rank + 1)
        assert torch.equal(functional.broadcast(z, n - 1, group) + 0, n * torch.arange(whole))
        assert torch.equal(z, (rank + 1) * torch.arange(whole))
        dist.barrier(group)
        # Uneven parts: rank r sends 1 + q elements to rank q.
        sent = torch.full((n * (n + 1) // 2,), rank)
        parts = functional.all_to_all_single(sent, [rank + 1] * n, [1 + q for q in range(n)], group)
        assert (parts + 0).tolist() == [q for q in range(n) for _ in range(rank + 1)]
        # Even parts: none, so little that all ranks hear all of it, up to 4096 bytes, a bit more,
        # and up to the same size as what is not cut.
        uncut = 4096 // 4 // n**2
        for each in (0, 1, uncut, min(uncut + 1, fits // n), fits // n):
            cut = torch.arange(n * each, dtype=torch.float32) + rank
            own = torch.arange(rank * each, (rank + 1) * each)
            got = functional.reduce_scatter_tensor(cut, "sum", 0, group) + 0
            assert torch.equal(got, n * own + float(sum(range(n))))
            got = functional.all_to_all_single(cut, None, None, group) + 0
            assert torch.equal(got, torch.cat([own + float(q) for q in range(n)]))
        # Rank 0's parts are even, and the others' are not: it gives `each` to every rank.
        for each in (0, 1, uncut // 4):
            counts = [each] + [each if rank == 0 else each + 1] * (n - 1)
            sent = torch.arange(sum(counts)) * n + rank
            got = functional.all_to_all_single(sent, counts, counts, group) + 0
            starts = [rank * each, *[rank * each + max(rank - 1, 0)] * (n - 1)]
            wanted = [
                torch.arange(start, start + count) * n + q
                for q, (start, count) in enumerate(zip(starts, counts, strict=True))
            ]
            assert torch.equal(got, torch.cat(wanted)), (each, rank)
        assert _moved(group) == before, "gloo was asked"
        large = functional.all_reduce(torch.ones(fits + 1), "sum", group) + 0
        assert torch.equal(large, torch.full((fits + 1,), float(n)))
        assert _moved(group) == before + 1


@pytest.mark.parametrize(("size", "given"), [(2, 4096), (3, None), (2, 262144)])
def test_little_data_travels_with_the_calls(size: int, given: int | None) -> None:
    run(size, _travels, given, backend="gloo")


def test_what_is_little_is_less_where_ranks_are_many() -> None:
    assert _backends.piggyback_bytes({}) is None
    by_root = [_C.usual_piggyback(n, by_leaders=False) for n in (0, 1, 8, 64, 4096)]
    assert by_root == [32768, 32768, 32768, 4096, 64]
    by_leaders = [_C.usual_piggyback(n, by_leaders=True) for n in (0, 1, 4, 8, 64)]
    assert by_leaders == [262144, 262144, 262144, 131072, 16384]


def _one_rank_has_more() -> None:
    """What all give is what travels: a rank whose part is large has the others use gloo, too."""
    rank, n = dist.get_rank(), dist.get_world_size()
    with fallen_back() as group:
        before = _moved(group)
        rows = [1 if q else 8192 for q in range(n)]
        given = [rows[rank]] * n
        x = torch.full((sum(given),), float(rank))
        parts = functional.all_to_all_single(x, rows, given, group) + 0
        assert torch.equal(
            parts, torch.cat([torch.full((m,), float(q)) for q, m in enumerate(rows)])
        )
        assert _moved(group) == before + 1


def test_one_rank_has_more() -> None:
    run(3, _one_rank_has_more, backend="gloo")


def _keeps_the_order() -> None:
    """A call behind one in flight reads what that leaves, and not what is there when it is made."""
    n = dist.get_world_size()
    with fallen_back() as group:
        for _ in range(20):
            x = torch.ones(1 << 16)
            first = dist.all_reduce(x, group=group, async_op=True)
            second = dist.all_reduce(x[:2], group=group, async_op=True)
            third = dist.all_reduce(x[1:3], group=group, async_op=True)
            for work in (third, first, second):
                work.wait()
            assert x[:4].tolist() == [n**2, n**3, n**2, n], x[:4]


def test_keeps_the_order_of_calls() -> None:
    run(2, _keeps_the_order, backend="gloo")


def _reduces_alike() -> None:
    """Whether a sum could travel with its call does not show in its bits."""
    rank, n = dist.get_rank(), dist.get_world_size()
    with fallen_back() as group:
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(rank)
            x = torch.randn(64).to(dtype) * 10 ** torch.randint(-3, 4, (64,))
            x = x.to(dtype)
            x[rank] = float("nan")
            for op in ("sum", "avg", "max", "product"):
                alone = functional.all_reduce(x, op, group) + 0
                parts = functional.reduce_scatter_tensor(x.repeat(n), op, 0, group) + 0
                slow = dist.all_reduce(torch.ones(1 << 20), group=group, async_op=True)
                behind = functional.all_reduce(x, op, group)
                behind_parts = functional.reduce_scatter_tensor(x.repeat(n), op, 0, group)
                for early, late in ((alone, behind), (parts, behind_parts)):
                    assert torch.equal(early.view(torch.uint8), (late + 0).view(torch.uint8))
                slow.wait()


def test_how_data_travels_does_not_show_in_bits() -> None:
    run(3, _reduces_alike, backend="gloo")


def _layouts_do_not_show() -> None:
    """Ranks whose tensors lie in memory in other ways send the same and get the same."""
    rank = dist.get_rank()
    shape = (3, 2)
    with fallen_back() as group:
        before = _moved(group)
        for dtype in values.DTYPES:
            others = [name for name in values.layouts(dtype, shape) if name != "expanded"]
            for op, shift in itertools.product(values.meanings(dtype), range(len(others))):
                if op == "premul_sum":
                    continue
                layout = others[(rank + shift) % len(others)]
                dense = values.values(shape, dtype, rank)
                wanted = dense.clone()
                ours.all_reduce(wanted, op, group)
                got = values.lay_out(dense, layout)
                ours.all_reduce(got, op, group)
                assert not (wrong := values.mismatch(got, wanted)), f"{op}, {dtype}: {wrong}"
                fresh = functional.all_reduce(values.lay_out(dense, layout), op, group).clone()
                assert not (wrong := values.mismatch(fresh, wanted)), f"{op}, {dtype}: {wrong}"
        assert _moved(group) == before


def test_how_tensors_lie_in_memory_does_not_show() -> None:
    run(4, _layouts_do_not_show, backend="gloo")


def _settings_differ() -> None:
    rank = dist.get_rank()
    with fallen_back(piggyback=(0, None)[rank]) as group:
        with pytest.raises(CollectiveMismatch, match=r"with TORCH_C10D_EXT_SHM_PIGGYBACK=0") as e:
            dist.all_reduce(torch.ones(2), group=group)
        assert e.value.ranks == [1]
        # What is not reduced, or not little, is alike whatever is set.
        y = torch.full((3,), float(rank))
        dist.broadcast(y, 1, group=group)
        large = torch.ones(8192)
        dist.all_reduce(large, group=group)
        assert torch.equal(y, torch.ones(3)) and torch.equal(large, torch.full((8192,), 2.0))


def test_settings_that_differ_are_told() -> None:
    run(2, _settings_differ, backend="gloo")


def _writes_nothing_where_ranks_differ() -> None:
    rank = dist.get_rank()
    with fallen_back() as group:
        for root in (0, 1):
            x = torch.full((2 + rank,), 5.0 + rank)
            with pytest.raises(CollectiveMismatch, match="broadcast"):
                dist.broadcast(x, root, group=group)
            assert torch.equal(x, torch.full_like(x, 5.0 + rank))
        out = torch.full((2,), 7.0)
        torch.ops.c10d_ext.all_reduce_out(
            torch.ones(2), ("sum", "max")[rank], group.group_name, out=out
        )
        with pytest.raises(CollectiveMismatch, match="all_reduce"):
            torch.ops.c10d_ext.wait_tensor(out)
        assert torch.equal(out, torch.full((2,), 7.0))
        y = torch.full((3,), float(rank))
        dist.broadcast(y, 1, group=group)
        assert torch.equal(y, torch.ones(3))


def test_writes_nothing_where_ranks_differ() -> None:
    run(2, _writes_nothing_where_ranks_differ, backend="gloo")


def _calls_back() -> None:
    """A callback of one may make, and wait for, the next."""
    n = dist.get_world_size()
    with fallen_back() as group:
        seen = []

        def again(_: Any) -> None:
            y = torch.ones(2)
            dist.all_reduce(y, group=group)
            seen.append(y.tolist())

        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        work.get_future().then(again).wait()
        assert seen == [[float(n)] * 2]


def test_callbacks_may_call_the_next() -> None:
    run(2, _calls_back, backend="gloo")


@pytest.mark.parametrize("text", ["-1", "262145", "4k"])
def test_the_setting_is_checked(text: str) -> None:
    with pytest.raises(ValueError, match=f"_PIGGYBACK: must be .* 0 to 262144, got '{text}'"):
        _backends.shm_settings({"TORCH_C10D_EXT_SHM_PIGGYBACK": text})
    assert "TORCH_C10D_EXT_SHM_PIGGYBACK" not in os.environ
