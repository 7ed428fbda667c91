"""TORCH_C10D_EXT_SHM_STRICT=2: ranks that call a collective from different lines are told so."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from tests.harness import run
from torch_c10d_ext import _call_site, backend_of, functional
from torch_c10d_ext.errors import CollectiveMismatch

STRICT = "TORCH_C10D_EXT_SHM_STRICT"
DISABLE = "TORCH_C10D_EXT_SHM_DISABLE"

# On shared memory, and where one rank cannot.
served = pytest.mark.parametrize("by", ("shm", "gloo"))


@contextlib.contextmanager
def strict_group(by: str, strict: str = "2") -> Iterator[Any]:
    os.environ[STRICT] = strict
    if by == "gloo" and dist.get_rank() == 0:
        os.environ[DISABLE] = "1"
    try:
        group = dist.new_group(backend="shm")
    finally:
        del os.environ[STRICT]
        os.environ.pop(DISABLE, None)
    assert (served := backend_of(group)) == by, served
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


# --- ways to call: each of two functions has the same calls on two lines --------------------------


def _by_torch(x: torch.Tensor, group: Any, first: bool) -> None:
    if first:
        dist.all_reduce(x, group=group)
    else:
        dist.all_reduce(x, group=group)


def _by_torch_async(x: torch.Tensor, group: Any, first: bool) -> None:
    work = dist.all_reduce(x, group=group, async_op=True) if first else None
    if work is None:
        work = dist.all_reduce(x, group=group, async_op=True)
    work.wait()


def _functional(x: torch.Tensor, group: Any, first: bool) -> None:
    if first:
        y = functional.all_reduce(x, "sum", group)
    else:
        y = functional.all_reduce(x, "sum", group)
    functional.wait_tensor(y)


def _objects(x: torch.Tensor, group: Any, first: bool) -> None:
    said: list[Any] = [None] * dist.get_world_size(group)
    if first:
        dist.all_gather_object(said, 1, group=group)
    else:
        dist.all_gather_object(said, 1, group=group)


def _barrier(x: torch.Tensor, group: Any, first: bool) -> None:
    if first:
        dist.barrier(group)
    else:
        dist.barrier(group)


def _compiled(x: torch.Tensor, group: Any, first: bool) -> None:
    """A compiled region stands where its function does."""
    name = group.group_name

    def one(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 2, "sum", name)

    def other(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 2, "sum", name)

    y = torch.compile(one if first else other, backend="aot_eager", fullgraph=True)(x)
    y + 1


def _gradient(x: torch.Tensor, group: Any, first: bool) -> None:
    x = x.detach().clone().requires_grad_()
    loss = functional.all_reduce(x, "sum", group).sum()
    if first:
        loss.backward()
    else:
        loss.backward()
    x.grad.sum().item()


WAYS: dict[str, Callable[..., None]] = {
    "torch": _by_torch,
    "async": _by_torch_async,
    "functional": _functional,
    "objects": _objects,
    "barrier": _barrier,
    "compiled": _compiled,
    "gradient": _gradient,
}


def _tells_swapped_calls(by: str, way: str) -> str:
    call = WAYS[way]
    with strict_group(by) as group:
        x = torch.full((4,), float(dist.get_rank()))
        for first in (True, False):
            call(x.clone(), group, first)  # from one line, and then from another: as it should be
        before = x.clone()
        with pytest.raises(dist.DistBackendError) as caught:
            call(x, group, dist.get_rank() == 0)
        # Of what is thrown in a backward pass torch's engine keeps the base class alone.
        if way != "gradient":
            assert type(caught.value) is CollectiveMismatch
            assert caught.value.ranks == [1]
        torch.testing.assert_close(x, before)
        call(x, group, True)  # the group goes on
    return str(caught.value)


@served
@pytest.mark.parametrize("way", WAYS)
def test_tells_swapped_calls(by: str, way: str) -> None:
    lines = []
    for rank, text in enumerate(run(2, _tells_swapped_calls, by, way)):
        sites = re.findall(r" at (backends/test_shm_swapped\.py:(\d+))\b", text)
        assert len(sites) == 2, text
        assert sites[0] != sites[1]
        assert f"(rank {rank}/2, group '" in text
        lines.append(sites)
    assert lines[0] == lines[1]  # the same on both ranks


def _tells_who_is_odd() -> str:
    with strict_group("shm") as group:
        x = torch.ones(2)
        with pytest.raises(CollectiveMismatch) as caught:
            _by_torch(x, group, dist.get_rank() != 1)
        assert caught.value.ranks == [1]
    return str(caught.value)


def test_tells_who_is_odd() -> None:
    for text in run(3, _tells_who_is_odd):
        assert re.search(
            r":\d+\)? on ranks 0 and 2, .*:\d+\)? on rank 1 in collective \d+ ", text
        ), text


def _compares_lines_where_asked_alone(strict: str) -> None:
    for by in ("shm", "gloo"):
        with strict_group(by, strict) as group:
            x = torch.ones(3)
            _by_torch(x, group, dist.get_rank() == 0)
            assert x.tolist() == [2.0] * 3


@pytest.mark.parametrize("strict", ("0", "1"))
def test_compares_lines_where_asked_alone(strict: str) -> None:
    run(2, _compares_lines_where_asked_alone, strict)


def _takes_checkouts_in_different_places(root: str) -> list[float]:
    folder = Path(root, str(dist.get_rank()), "job")
    folder.mkdir(parents=True)
    program = folder / "train.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "def step(group):\n"
        "    x = torch.ones(2)\n"
        "    dist.all_reduce(x, group=group)\n"
        "    return x.tolist()\n"
    )
    step = runpy.run_path(str(program))["step"]
    with strict_group("shm") as group:
        return step(group)


def test_takes_checkouts_in_different_places(tmp_path: Path) -> None:
    assert run(2, _takes_checkouts_in_different_places, str(tmp_path)) == [[2.0, 2.0]] * 2


def _takes_ddp() -> list[float]:
    with strict_group("shm") as group:
        torch.manual_seed(0)
        model = DDP(torch.nn.Linear(3, 3), process_group=group, bucket_cap_mb=1e-5)
        for _ in range(3):
            model(torch.full((2, 3), float(dist.get_rank()))).sum().backward()
        return model.module.weight.grad.flatten().tolist()


def test_takes_ddp() -> None:
    first, second = run(2, _takes_ddp)
    assert first == second


def _keeps_the_end_of_a_long_path(root: str) -> str:
    rank = dist.get_rank()
    folder = Path(root, str(rank), "d" * 150)
    folder.mkdir(parents=True)
    program = folder / "train.py"
    program.write_text(
        "import torch.distributed as dist\n"
        "def step(x, group, first):\n"
        "    if first:\n"
        "        dist.all_reduce(x, group=group)\n"
        "    else:\n"
        "        dist.all_reduce(x, group=group)\n"
    )
    step = runpy.run_path(str(program))["step"]
    with strict_group("shm") as group:
        step(torch.ones(2), group, True)
        with pytest.raises(CollectiveMismatch) as caught:
            step(torch.ones(2), group, rank == 0)
    return str(caught.value)


def test_keeps_the_end_of_a_long_path(tmp_path: Path) -> None:
    for text in run(2, _keeps_the_end_of_a_long_path, str(tmp_path)):
        assert re.search(
            r" at d{20,}/train\.py:4 on rank 0, .* at d{20,}/train\.py:6 on rank 1", text
        )


def test_a_call_site_is_the_line_of_the_program() -> None:
    def direct() -> str:
        return _call_site.call_site()

    assert re.fullmatch(r"backends/test_shm_swapped\.py:\d+", direct())
    assert direct() != direct().replace(":", ";")
    # Frames of torch in between are passed over.
    site = torch.utils._pytree.tree_map(lambda _: _call_site.call_site(), [1])[0]
    assert re.fullmatch(r"backends/test_shm_swapped\.py:\d+", site)
