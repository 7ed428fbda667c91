"""The choice of shm's algorithms: forced ones give the right values, mistakes a clear error."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.backends.failures import report
from tests.harness import run
from tests.native import build

VARIABLE = "TORCH_C10D_EXT_SHM_ALGORITHMS"

# Elements: none, a part of a cache line, odd ones on both sides of what fits beside an
# announcement, and more than one chunk.
COUNTS = (0, 1, 7, 1001, 8193, 33333, 300007)

COLLECTIVES: dict[str, tuple[str, ...]] = {
    "all_reduce": ("eager", "two_shot", "swap"),
    "reduce": ("eager", "two_shot"),
    "broadcast": ("eager", "pipelined"),
    "all_gather": ("eager", "swap", "pipelined"),
    "reduce_scatter": ("eager", "swap", "pipelined"),
    "all_to_all": ("eager", "swap", "pipelined"),
    "gather": ("eager", "pipelined"),
    "scatter": ("eager", "pipelined"),
}


def test_selection_in_cpp() -> None:
    assert build.run(build.build("algorithms_test", build.SOURCES)) == "ok\n"


def _input(count: int, rank: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(count) * 7 + rank * 1009).remainder(61).to(dtype)


def _outcome(name: str, count: int, dtype: torch.dtype, group: dist.ProcessGroup) -> list[Tensor]:
    """What a collective of `count` elements a part leaves on this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = _input(count, rank, dtype)
    all_parts = _input(size * count, rank, dtype)
    root = size - 1
    whole = torch.zeros(size * count, dtype=dtype)
    outs = [torch.zeros(count, dtype=dtype) for _ in range(size)]
    if name == "all_reduce":
        dist.all_reduce(x, group=group)
        return [x]
    if name == "reduce":
        dist.reduce(x, root, group=group)
        return [x] if rank == root else []
    if name == "broadcast":
        dist.broadcast(x, root, group=group)
        return [x]
    if name == "all_gather":
        group._allgather_base(whole, x).wait()
        return [whole]
    if name == "reduce_scatter":
        group._reduce_scatter_base(outs[0], all_parts).wait()
        return outs[:1]
    if name == "all_to_all":
        dist.all_to_all_single(whole, all_parts, group=group)
        return [whole]
    if name == "gather":
        dist.gather(x, outs if rank == root else None, root, group=group)
        return outs if rank == root else []
    assert name == "scatter"
    parts = list(all_parts.split(count)) if count else [x] * size
    dist.scatter(outs[0], parts if rank == root else None, root, group=group)
    return outs[:1]


def _expected(name: str, count: int, dtype: torch.dtype) -> list[Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    root = size - 1
    inputs = [_input(count, peer, dtype) for peer in range(size)]
    wholes = [_input(size * count, peer, dtype).reshape(size, count) for peer in range(size)]

    def total(values: list[Tensor]) -> Tensor:
        # Every rank adds in the order of the ranks, and rounds float8 once.
        wide = torch.float32 if dtype.is_floating_point else dtype
        return torch.stack([value.to(wide) for value in values]).sum(0, dtype=wide).to(dtype)

    def at_root(outputs: list[Tensor]) -> list[Tensor]:
        return outputs if rank == root else []

    return {
        "all_reduce": lambda: [total(inputs)],
        "reduce": lambda: at_root([total(inputs)]),
        "broadcast": lambda: [inputs[root]],
        "all_gather": lambda: [torch.cat(inputs)],
        "reduce_scatter": lambda: [total([whole[rank] for whole in wholes])],
        "all_to_all": lambda: [torch.cat([whole[rank] for whole in wholes])],
        "gather": lambda: at_root(inputs),
        "scatter": lambda: [wholes[root][rank]],
    }[name]()


def _groups(overrides: str) -> Iterator[dist.ProcessGroup]:
    os.environ[VARIABLE] = overrides
    try:
        group = dist.new_group()
    finally:
        del os.environ[VARIABLE]
    yield group
    dist.destroy_process_group(group)


def _forced(name: str) -> None:
    for algorithm in COLLECTIVES[name]:
        if algorithm == "swap" and dist.get_world_size() != 2:
            continue
        for group in _groups(f"{name}:*:*:{algorithm}"):
            for dtype in (torch.int32, torch.float8_e4m3fn):
                for count in COUNTS:
                    got = _outcome(name, count, dtype, group)
                    want = _expected(name, count, dtype)
                    assert len(got) == len(want)
                    for one, other in zip(got, want, strict=True):
                        # torch compares no float8.
                        same = torch.equal(one.view(torch.uint8), other.view(torch.uint8))
                        assert same, f"{algorithm} of {count} {dtype}"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_algorithm_gives_the_right_values(name: str, size: int) -> None:
    run(size, _forced, name, backend="shm")


def _mistaken() -> None:
    for text, said in (
        ("all_reduce:*:*:ring", "the algorithm must be eager, two_shot, swap or pipelined, got"),
        ("all_reduce:0-x:*:eager", "the bytes must be \\*, or one or two numbers as in 8, "),
        ("broadcast:*:*:swap", "the algorithm of broadcast on so many ranks must be eager or "),
        ("eager", "a rule must be op:bytes:ranks:algorithm or op:bytes:ranks:dtype:algorithm"),
    ):
        with pytest.raises(ValueError, match=f"shm: {VARIABLE}: {said}.*"):
            next(_groups(text))
    # Nothing was sent, nobody waits.
    dist.all_reduce(torch.ones(1))


def test_mistakes_are_told_on_every_rank() -> None:
    run(2, _mistaken, backend="shm")


def _disagreeing() -> None:
    rank = dist.get_rank()
    overrides = ("all_reduce:*:*:two_shot", "all_reduce:*:*:eager", "")
    for group in _groups(overrides[rank]):
        for count in (1, 100_000):
            x = torch.full((count,), float(rank))
            failure = report(lambda x=x, group=group: dist.all_reduce(x, group=group))
            assert (failure.kind, failure.ranks) == ("CollectiveMismatch", [1, 2]), failure
            for peer, text in enumerate(overrides):
                how = f"with algorithms '{text}'" if text else "with the default algorithms"
                assert f"{how} on rank {peer}" in failure.text, failure.text
            assert x.eq(rank).all()
    dist.all_reduce(torch.ones(1))


def test_ranks_that_choose_differently_all_raise() -> None:
    run(3, _disagreeing, backend="shm")


def _split() -> None:
    """A part of a group has its choice of algorithms: ranks that differ there differ here."""
    for same in (True, False):
        text = "all_reduce:*:*:two_shot" if same or dist.get_rank() == 0 else ""
        for group in _groups(text):
            timeout = dt.timedelta(seconds=60)
            part = group.split_group([0, 1], timeout=timeout, group_name=f"part, {same}")
            x = torch.ones(3)
            if same:
                part.allreduce([x]).wait()
                assert x.eq(2).all()
            else:
                failure = report(part.allreduce([x]).wait)
                assert failure.kind == "CollectiveMismatch", failure
                assert "with algorithms 'all_reduce:*:*:two_shot' on rank 0" in failure.text


def test_a_part_of_a_group_chooses_as_the_group_does() -> None:
    run(2, _split, backend="shm")
