"""The input of a functional call may be written as soon as the call has returned.

Rank 0 writes while its collectives are in flight, the others as soon as they have called. Every
result is that of the values at the call, and every input holds what was written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_c10d_ext
import torch_c10d_ext.functional as F
from tests.harness import run
from tests.harness.flight import in_flight, quick_store
from tests.harness.worker import FALLBACK

Call = Callable[[Tensor], Any]


def _calls(n: int) -> dict[str, Call]:
    """Every functional collective, of 2n rows."""
    ring = [(m + 1) % n for m in range(n)]
    uneven = [2 * n - (n - 1)] + [1] * (n - 1)
    rank = dist.get_rank()
    return {
        "all_reduce": lambda x: F.all_reduce(x, "sum", None),
        "all_reduce_coalesced": lambda x: F.all_reduce_coalesced([x, x[1:]], "sum", None),
        "reduce": lambda x: F.reduce(x, "sum", n - 1, None),
        "all_gather": lambda x: F.all_gather(x[: uneven[rank]], uneven, None),
        "all_gather_single": lambda x: F.all_gather_single(x, 0, None),
        "all_gather_single along columns": lambda x: F.all_gather_single(x, 1, None),
        "all_gather_single_coalesced": lambda x: F.all_gather_single_coalesced([x, x[0]], None),
        "reduce_scatter": lambda x: F.reduce_scatter(x, "sum", uneven, None),
        "reduce_scatter_single": lambda x: F.reduce_scatter_single(x, "sum", 0, None),
        "reduce_scatter_single_coalesced": lambda x: F.reduce_scatter_single_coalesced(
            [x, x[:n]], "sum", [0, 0], None
        ),
        "all_to_all_single": lambda x: F.all_to_all_single(x, None, None, None),
        "all_to_all_single with splits": lambda x: F.all_to_all_single(x, [2] * n, [2] * n, None),
        "broadcast": lambda x: F.broadcast(x, 0, None),
        "broadcast_coalesced": lambda x: F.broadcast_coalesced([x, x[1]], n - 1, None),
        "gather": lambda x: F.gather(x, 0, None),
        "scatter": lambda x: F.scatter(x, 0, None),
        "permute_tensor": lambda x: F.permute_tensor(x, ring, None),
        "reduce_from_group": lambda x: F.reduce_from_group(x, None),
    }


# These wait for the collective themselves.
_BLOCK = {"all_gather_single along columns"}


def _values(n: int, columns: int = 3) -> Tensor:
    return torch.arange(2.0 * n * columns).reshape(2 * n, columns) * 4 + dist.get_rank() + 1


def _given_to_numpy(x: Tensor) -> Tensor:
    x.numpy()
    return x


SOURCES: dict[str, Call] = {
    "dense": torch.clone,
    "a parameter": lambda x: torch.nn.Parameter(x.clone()),
    "every second column": lambda x: torch.repeat_interleave(x, 2, dim=1)[:, ::2],
    "transposed": lambda x: x.t().contiguous().t(),
    "a part": lambda x: torch.cat([x, x, x])[len(x) : 2 * len(x)],
    "numpy's": lambda x: torch.from_numpy(x.clone().numpy()),
    "given to numpy": lambda x: _given_to_numpy(x.clone()),
    "in shared memory": lambda x: x.clone().share_memory_(),
    "bfloat16": lambda x: x.to(torch.bfloat16),
    "int16": lambda x: x.to(torch.int16),
    "complex": lambda x: torch.complex(x, -x),
    "a result, waited for": lambda x: F.all_reduce(x, "sum", None).wait(),
}


def _numpy(x: Tensor) -> None:
    if x.dtype == torch.bfloat16:
        x = x.view(torch.int16)
    np.copyto(x.detach().numpy(), 0)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "zero_": lambda x: x.zero_(),
    "out=": lambda x: torch.mul(x, 0, out=x),
    "a view": lambda x: x[:, :].zero_(),
    "by index": lambda x: x.__setitem__(slice(None), 0),
    "data": lambda x: x.data.copy_(torch.zeros_like(x)),
    "foreach": lambda x: torch._foreach_zero_([x]),
    "detach": lambda x: x.detach().mul_(0),
    "numpy": _numpy,
    "dlpack": lambda x: torch.from_dlpack(x.detach()).zero_(),
}


def _tensors(result: Any) -> list[Tensor]:
    """Of a result, waited for."""
    results = result if isinstance(result, list) else [result]
    return [F.wait_tensor(t).detach().clone() for t in results]


def _differ(got: list[Tensor], want: list[Tensor]) -> bool:
    return len(got) != len(want) or not all(map(torch.equal, got, want))


@torch.no_grad()
def _write_in_flight(sources: list[str], writes: list[str]) -> list[str]:
    n, store, failures = dist.get_world_size(), quick_store(), []
    for name, call in _calls(n).items():
        cases = []
        for source in sources:
            for write in writes:
                x = SOURCES[source](_values(n))
                cases.append((f"{name} of {source}, {write}", x, WRITES[write]))
        wants = [_tensors(call(x.detach().clone())) for _, x, _ in cases]
        with in_flight(store) as gate:
            if name in _BLOCK:
                gate.open()
            results = []
            for _, x, write in cases:
                results.append(call(x))
                write(x)
            if dist.get_rank() == 0 and n > 1 and name not in _BLOCK:
                first = results[0][0] if isinstance(results[0], list) else results[0]
                work = F.work_of(first)
                if work is None or work.is_completed():
                    failures.append(f"{name} is not in flight")
            gate.open()
            for (what, x, _), result, want in zip(cases, results, wants, strict=True):
                if _differ(_tensors(result), want):
                    failures.append(f"{what}: the result is not of the values at the call")
                if x.any():
                    failures.append(f"{what}: the write is lost")
    if torch_c10d_ext.pending_count() != 0:
        failures.append("works are left")
    return failures


@pytest.mark.parametrize(("backend", "size"), [("shm", 2), ("shm", 3), ("gloo", 2), (FALLBACK, 2)])
def test_inputs_of_every_kind_may_be_written(backend: str, size: int) -> None:
    for failures in run(size, _write_in_flight, [*SOURCES], [*WRITES], backend=backend):
        assert failures == []


@pytest.mark.parametrize(("backend", "size"), [("shm", 1), ("shm", 4), ("gloo", 1), ("gloo", 3)])
def test_inputs_may_be_written_in_every_world(backend: str, size: int) -> None:
    sources = ["dense", "every second column", "numpy's"]
    for failures in run(size, _write_in_flight, sources, ["zero_", "data"], backend=backend):
        assert failures == []


def _write_under_a_python_group() -> list[str]:
    failures = []
    for source in ("dense", "transposed", "numpy's"):
        for name, call in _calls(dist.get_world_size()).items():
            x = SOURCES[source](_values(dist.get_world_size()))
            want = _tensors(call(x.detach().clone()))
            result = call(x)
            x.zero_()
            if _differ(_tensors(result), want) or x.any():
                failures.append(f"{name} of {source}")
    return failures


def test_inputs_of_a_group_written_in_python_may_be_written() -> None:
    """Its works read 50 ms after they were started, and say where their inputs have changed."""
    for failures in run(2, _write_under_a_python_group, backend="delayed"):
        assert failures == []


def _write_much() -> list[str]:
    """More than a backend takes along at the call."""
    n, failures = dist.get_world_size(), []
    for name, call in _calls(n).items():
        for source in ("dense", "every second column", "numpy's"):
            x = SOURCES[source](_values(n, columns=(1 << 20) // n))
            want = _tensors(call(x.clone()))
            result = call(x)
            x.zero_()
            if _differ(_tensors(result), want) or x.any():
                failures.append(f"{name} of {source}")
    return failures


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_large_inputs_may_be_written(backend: str) -> None:
    for failures in run(2, _write_much, backend=backend):
        assert failures == []


def _leave_alone() -> list[str]:
    """What is not written is not copied: it stays where it was."""
    n, failures = dist.get_world_size(), []
    for name, call in _calls(n).items():
        x = _values(n, columns=1000)
        address, version = torch._C._data_address(x), x._version
        with in_flight(quick_store()) as gate:
            if name in _BLOCK:
                gate.open()
            result = call(x)
            read = x + 1  # reading copies nothing
            gate.open()
            _tensors(result)
        there = torch._C._data_address(x) == address and x._version == version
        if not there or not torch.equal(read - 1, x):
            failures.append(name)
    return failures


@pytest.mark.parametrize("backend", ["shm", "gloo", FALLBACK])
def test_inputs_that_nobody_writes_stay_in_place(backend: str) -> None:
    for failures in run(2, _leave_alone, backend=backend):
        assert failures == []


def _chain() -> None:
    """In-place and functional collectives of one tensor, one after another, all in flight."""
    n, rank = dist.get_world_size(), dist.get_rank()
    total, name = n * (n + 1) / 2, dist.group.WORLD.group_name
    for count in (8, 1 << 18):
        x = torch.full((count,), rank + 1.0)
        with in_flight(quick_store()) as gate:
            first = F.all_reduce(x, "sum", None)
            torch.ops.c10d_ext.all_reduce_(x, "sum", name)
            second = F.all_reduce(x, "max", None)
            torch.ops.c10d_ext.all_reduce_(x, "sum", name)
            third = F.broadcast(x, 0, None)
            work = dist.all_reduce(x, async_op=True)
            fourth = F.all_reduce(x, "max", None)
            gate.open()
            work.wait()
        F.wait_tensor(x)
        got = [t.wait()[-1].item() for t in (first, second, third, fourth)] + [x[0].item()]
        assert got == [total, total, n * total, n * n * total, n * n * total], got


# gloo's two threads keep no order between calls on one tensor.
@pytest.mark.parametrize("size", [2, 3])
def test_calls_in_flight_on_one_tensor_follow_each_other(size: int) -> None:
    run(size, _chain, backend="shm")


def _results_of_one_input() -> None:
    """Autograd, views and a second call see the input's own values, whoever shares its memory."""
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.full((4,), rank + 1.0, requires_grad=True)
    view = x.detach()[1:]
    with in_flight(quick_store()) as gate:
        y = F.all_reduce(x, "sum", None)
        view.fill_(5.0)
        z = F.all_reduce(x, "sum", None)
        gate.open()
        assert torch.equal(y.wait(), torch.full((4,), n * (n + 1) / 2))
        assert torch.equal(z[1:].detach(), torch.full((3,), 5.0 * n))
    assert torch.equal(x.detach()[1:], view)
    (y * z).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_views_of_an_input_that_is_written_follow_it(backend: str) -> None:
    run(2, _results_of_one_input, backend=backend)
