"""The input of a functional call may be written as soon as the call has returned.

Rank 0 writes while its collectives are in flight, the others as soon as they have called. Every
result is that of the values at the call, and every input holds what was written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import torch_c10d_ext
import torch_c10d_ext.distributed as ours
import torch_c10d_ext.functional as F
from tests.harness import run
from tests.harness.flight import Gate, in_flight, quick_store
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
            for way in writes:
                x = SOURCES[source](_values(n))
                cases.append((f"{name} of {source}, {way}", x, WRITES[way]))
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


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.long)])
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


def _copied(call: Callable[[], Any]) -> bool:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        call()
    return "aten::clone" in {event.name for event in seen.events()}


def _copies(source: str) -> list[str]:
    n, failures = dist.get_world_size(), []
    rows = torch.empty(2 * n, 3)
    waits: dict[str, Call] = {
        "all_gather": lambda x: ours.all_gather_into_tensor(rows, x[:2]),
        "reduce_scatter": lambda x: ours.reduce_scatter_tensor(rows[:2], x),
        "all_to_all": lambda x: ours.all_to_all_single(rows, x),
    }
    goes_on: dict[str, Call] = {
        "all_gather": lambda x: F.all_gather_single(x[:2], 0, None),
        "reduce_scatter": lambda x: F.reduce_scatter_single(x, "sum", 0, None),
        "all_to_all": lambda x: F.all_to_all_single(x, None, None, None),
    }
    x = SOURCES[source](_values(n))
    for name, call in waits.items():
        if _copied(lambda call=call: call(x)):
            failures.append(f"{name} copies though its caller waits")
        want = _tensors(goes_on[name](x))[0]
        if _differ([rows[: len(want)]], [want]):
            failures.append(f"{name} has other values")
        if not _copied(lambda name=name: F.wait_tensor(goes_on[name](x))):
            failures.append(f"{name} does not copy though its caller goes on")
    return failures


@pytest.mark.parametrize("backend", ["shm", "gloo", FALLBACK])
@pytest.mark.parametrize("source", ["numpy's", "given to numpy", "in shared memory"])
def test_who_waits_copies_no_input_that_is_shared_outside_torch(backend: str, source: str) -> None:
    for failures in run(2, _copies, source, backend=backend):
        assert failures == []


def _in_place_of_numpy(size: int) -> None:
    """Inputs and outputs have a storage each over memory of one array."""
    n, rank = dist.get_world_size(), dist.get_rank()
    array = np.zeros(size * n, np.float32)
    part = array[size * rank :][:size]
    whole = torch.from_numpy(array)

    def fill() -> None:
        array[:] = np.arange(len(array)) + 1000 * rank

    def of(other: int) -> Tensor:
        return torch.arange(float(len(array))) + 1000 * other

    fill()
    ours.all_to_all_single(whole, torch.from_numpy(array))
    rows = [of(other)[size * rank :][:size] for other in range(n)]
    assert torch.equal(whole, torch.cat(rows))
    fill()
    ours.all_gather_into_tensor(whole, torch.from_numpy(part))
    assert torch.equal(whole, torch.cat([of(m)[size * m :][:size] for m in range(n)]))
    fill()
    ours.reduce_scatter_tensor(torch.from_numpy(part), whole)
    assert np.array_equal(part, torch.stack(rows).sum(0).numpy())
    whole.fill_(7.0)  # numpy's array is there yet
    assert (array == 7.0).all()


@pytest.mark.parametrize("backend", ["shm", "gloo", FALLBACK])
@pytest.mark.parametrize("size", [1, 3000, 700_000])
def test_inputs_and_outputs_may_be_one_array_of_numpy(backend: str, size: int) -> None:
    run(3, _in_place_of_numpy, size, backend=backend)


def _stay_with_numpy() -> None:
    n, rank, store = dist.get_world_size(), dist.get_rank(), quick_store()
    x = torch.arange(1000.0 * n)
    array = x.numpy()
    out = torch.empty(1000)
    if rank == 0:
        caller = threading.Thread(target=ours.reduce_scatter_tensor, args=(out, x), daemon=True)
        caller.start()
        time.sleep(0.3)  # until it waits for the others
        x.add_(0)
        store.set("written", b"1")
        caller.join(20)
        assert not caller.is_alive()
    else:
        store.wait(["written"])
        ours.reduce_scatter_tensor(out, x)
    assert torch.equal(out, n * (torch.arange(1000.0) + 1000 * rank))
    array[0] = -1
    assert x[0] == -1


def test_who_waits_leaves_an_input_where_numpy_has_it() -> None:
    run(2, _stay_with_numpy, backend="shm")


def _drop_at_once() -> None:
    """The input's owner drops it while the collective's thread does."""
    n = dist.get_world_size()
    for i in range(20_000):
        y = F.all_gather_single(torch.full((64,), float(i)), 0, None)
        z = F.reduce_scatter_single(torch.full((32 * n,), float(i)), "sum", 0, None)
        if i % 7 == 0:
            assert (y.wait()[0].item(), z.wait()[0].item()) == (i, n * i)


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.long), "shm"])
def test_inputs_may_be_dropped(backend: str) -> None:
    run(2, _drop_at_once, backend=backend, deadline=100)


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


def _moves(in_part: bool) -> None:
    """A tensor moves when it is written while a snapshot has its memory, which goes with that.

    Rank 0 calls all at once; the others join the first call, and the later ones when rank 0 has
    its result, and other values in the memory that nobody has any more.
    """
    n, rank = dist.get_world_size(), dist.get_rank()
    ops, name = torch.ops.c10d_ext, dist.group.WORLD.group_name
    count = 1 << 20  # more than is taken along at the call
    gate = Gate(f"moves/{in_part}", quick_store())
    x = torch.arange(float(n * count)) + rank
    total = sum(torch.arange(float(n * count)) + r for r in range(n))

    first = F.all_reduce(x, "sum", None)
    gate.wait()
    if in_part:
        own = x[rank * count : (rank + 1) * count]
        ops.all_gather_into_tensor_out(own, n, name, out=x)
    else:
        gathered = torch.empty(n * n * count)
        works = [
            dist.all_gather(list(gathered.chunk(n)), x, async_op=True),
            dist.all_reduce(x, async_op=True),
        ]
    assert torch.equal(first.wait(), total)
    junk = [torch.full_like(x, -1.0) for _ in range(4)]
    gate.open()
    if in_part:
        F.wait_tensor(x)
        parts = [torch.arange(float(r * count), (r + 1) * count) + r for r in range(n)]
        assert torch.equal(x, torch.cat(parts))
    else:
        for work in works:
            work.wait()
        parts = [torch.arange(float(n * count)) + r for r in range(n)]
        assert torch.equal(gathered, torch.cat(parts))
        assert torch.equal(x, total)
    assert all(t[0] == -1 for t in junk)


# gloo's two threads keep no order between calls on one tensor.
@pytest.mark.parametrize("in_part", [True, False], ids=["part of the output", "c10d's"])
def test_a_source_that_is_moved_is_read_where_it_was(in_part: bool) -> None:
    run(2, _moves, in_part, backend="shm")
    run(3, _moves, in_part, backend="shm")


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


# --- in place, and out= --------------------------------------------------------------------------


def _writers(n: int, name: str) -> dict[str, Callable[[Tensor], Any]]:
    """Ops that write `out`, of 2n rows, and leave the wait to the caller."""
    ops, like = torch.ops.c10d_ext, torch.ones(2 * n, 3)
    return {
        "all_reduce_": lambda out: ops.all_reduce_(out, "sum", name),
        "all_reduce_out": lambda out: ops.all_reduce_out(like, "sum", name, out=out),
        "all_reduce_coalesced_": lambda out: ops.all_reduce_coalesced_([out], "sum", name),
        "broadcast_": lambda out: ops.broadcast_(out, 0, name),
        "broadcast_coalesced_": lambda out: ops.broadcast_coalesced_([out], 0, name),
        "reduce_": lambda out: ops.reduce_(out, "sum", 0, name),
        "all_gather_into_tensor_out": lambda out: ops.all_gather_into_tensor_out(
            like[:2], n, name, out=out
        ),
        "reduce_scatter_tensor_out": lambda out: ops.reduce_scatter_tensor_out(
            torch.ones(2 * n * n, 3), "sum", n, name, out=out
        ),
        "all_to_all_single_out": lambda out: ops.all_to_all_single_out(
            like, [2] * n, [2] * n, name, out=out
        ),
    }


WAITS: dict[str, Callable[[Tensor], Any]] = {
    "wait_tensor": F.wait_tensor,
    "the op": torch.ops.c10d_ext.wait_tensor,
    "of a view": lambda t: F.wait_tensor(t[1:]),
}


def _message(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def _refuse_writes(flies: bool) -> list[str]:
    n, rank, failures = dist.get_world_size(), dist.get_rank(), []
    name = dist.group.WORLD.group_name
    for op, start in _writers(n, name).items():
        for way, wait in WAITS.items():
            out = torch.ones(2 * n, 3)
            with in_flight(quick_store()) as gate:
                if not flies:
                    gate.open()
                start(out)
                if not flies:
                    F.wait_tensor(out)
                    start(out)  # once more: what the first one left is gone
                out.detach()[0] = 7.0
                version = out._version
                gate.open()
                text = _message(lambda wait=wait, out=out: wait(out))
            want = (
                f"{op}: the tensor it writes must be left alone until the wait, got a write in "
                f"flight (version {version} where it was {version - 1}) "
                f"(rank {rank}/{n}, group '{name}')"
            )
            if text.splitlines()[:1] != [want]:
                failures.append(f"{op}, {way}: {text!r}")
            if again := _message(lambda out=out: F.wait_tensor(out)):
                failures.append(f"{op}, {way}: twice: {again}")
    return failures


@pytest.mark.parametrize("flies", [False, True], ids=["complete", "in flight"])
@pytest.mark.parametrize(("backend", "size"), [("shm", 1), ("shm", 2), ("gloo", 2), (FALLBACK, 3)])
def test_a_write_to_what_is_in_flight_is_said_at_the_wait(
    backend: str, size: int, flies: bool
) -> None:
    for failures in run(size, _refuse_writes, flies, backend=backend):
        assert failures == []


def _allow_writes() -> None:
    """What is the user's again, or never was lent."""
    n, name, ops = dist.get_world_size(), dist.group.WORLD.group_name, torch.ops.c10d_ext
    started_work_of = torch_c10d_ext._C.started_work_of

    def until_over(work: Any) -> None:
        ends = time.monotonic() + 30
        while not work.is_completed():
            assert time.monotonic() < ends
            time.sleep(0.001)

    seen: dict[str, Callable[[Tensor], Any]] = {
        "waited for": F.wait_tensor,
        "waited for by its work": lambda t: started_work_of(t).wait(),
        "seen to be over": lambda t: until_over(started_work_of(t)),
        "by its future": lambda t: started_work_of(t).get_future().wait(),
    }
    for what, see in seen.items():
        x = torch.ones(4)
        ops.all_reduce_(x, "sum", name)
        see(x)
        x.add_(1)
        assert _message(lambda x=x: F.wait_tensor(x)) == "", what
        assert torch.equal(x, torch.full((4,), n + 1.0)), what
    # At once, and the other part of a tensor.
    x = torch.ones(4)
    ours.all_reduce(x)
    x.add_(1)
    F.all_reduce_inplace(x, "sum", None)
    x.add_(1)
    F.wait_tensor(x)
    assert torch.equal(x, torch.full((4,), n * (n + 1) + 1.0))
    ops.all_reduce_(x[:2], "sum", name)
    x[2:].add_(1)
    F.wait_tensor(x)
    # One more collective on the tensor, or on a part of it, and reads.
    x = torch.ones(4)
    ops.all_reduce_(x, "sum", name)
    ops.all_reduce_(x, "max", name)
    ops.broadcast_(x[:2], 0, name)
    F.wait_tensor(x)
    assert torch.equal(x, torch.full((4,), float(n)))
    work = ours.all_reduce(x, async_op=True)
    work.wait()
    x.zero_()
    work.wait()
    # A result of the class, written in place, waits first.
    y = F.all_reduce(torch.ones(4), "sum", None)
    y.add_(1)
    assert torch.equal(y.wait(), torch.full((4,), n + 1.0))
    with torch.inference_mode():
        x = torch.ones(4)
        ops.all_reduce_(x, "sum", name)
        F.wait_tensor(x)
    assert torch_c10d_ext.pending_count() == 0


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_what_has_been_waited_for_may_be_written(backend: str) -> None:
    run(2, _allow_writes, backend=backend)
