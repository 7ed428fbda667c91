"""A rank of a torch peer: a collective on one backend, called in every way there is."""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import torch_c10d_ext.distributed as ours
from benchmarks._ranks import time_calls

# Elements per rank up to which results are compared.
CHECKED = 1 << 22

_case: dict[str, Callable[[], Any]] = {}


def prepare(collective: str, dtype: str, size: int, ways: list[str]) -> dict[str, str]:
    """Makes the buffers of a case and calls it once; what is wrong, by way of calling."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    kind = getattr(torch, dtype)
    # Every collective takes as many elements as can be shared out.
    count = max(size // kind.itemsize // ranks * ranks, ranks)
    steps = torch.arange(count, dtype=torch.int32).remainder_(16).to(kind)
    # All ranks' inputs and outputs once more are too much memory for the largest cases.
    want = _expected(collective, [steps + r for r in range(ranks)]) if count < CHECKED else None
    errors = {}
    for way in ways:
        x = steps + rank
        try:
            call, result = _call(collective, way, x)
            got = call()
        except Exception as error:
            errors[way] = f"{type(error).__name__}: {error}"
            continue
        checked = want is not None and not way.startswith("limit")
        if checked and not torch.equal(got if result is None else result, want):
            errors[way] = "wrong result"
            continue
        x.zero_()
        _case[way] = call
    return errors


def _call(collective: str, way: str, x: Tensor) -> tuple[Callable[[], Any], Tensor | None]:
    """One call, and the tensor it writes; None where it returns a fresh one."""
    ops, group = torch.ops.c10d_ext, dist.group.WORLD
    assert group is not None
    wait, name, ranks = ops.wait_tensor, group.group_name, group.size()
    count = x.numel()
    if way == "limit":
        # What an in-place all_reduce cannot do without: every rank's bytes read and written once.
        return x.neg_, x
    if way == "limit, out":
        # The same of one with another tensor for its result.
        other = torch.ones_like(x)
        return lambda: torch.neg(x, out=other), other
    if collective == "all_reduce":
        return {
            "dist": lambda: dist.all_reduce(x),
            "ours": lambda: ours.all_reduce(x),
            "op": lambda: wait(ops.all_reduce_(x, "sum", name)),
            "functional": lambda: wait(ops.all_reduce(x, "sum", name)),
            "deepspeed": lambda: torch.ops.deepspeed.inference_all_reduce_(x),
        }[way], None if way == "functional" else x
    if collective == "broadcast":
        return {
            "dist": lambda: dist.broadcast(x, 0),
            "ours": lambda: ours.broadcast(x, 0),
            "op": lambda: wait(ops.broadcast_(x, 0, name)),
            "functional": lambda: wait(ops.broadcast(x, 0, name)),
        }[way], None if way == "functional" else x
    counts = {"all_gather": ranks * count, "reduce_scatter": count // ranks, "all_to_all": count}
    out = torch.ones(counts[collective], dtype=x.dtype) if way != "functional" else None
    if collective == "all_gather":
        call: dict[str, Callable[[], Any]] = {
            "dist": lambda: dist.all_gather_into_tensor(out, x),
            "ours": lambda: ours.all_gather_into_tensor(out, x),
            "op": lambda: wait(ops.all_gather_into_tensor_out(x, ranks, name, out=out)),
            "functional": lambda: wait(ops.all_gather_into_tensor(x, ranks, name)),
        }
    elif collective == "reduce_scatter":
        call = {
            "dist": lambda: dist.reduce_scatter_tensor(out, x),
            "ours": lambda: ours.reduce_scatter_tensor(out, x),
            "op": lambda: wait(ops.reduce_scatter_tensor_out(x, "sum", ranks, name, out=out)),
            "functional": lambda: wait(ops.reduce_scatter_tensor(x, "sum", ranks, name)),
        }
    else:
        even = [count // ranks] * ranks
        call = {
            "dist": lambda: dist.all_to_all_single(out, x),
            "ours": lambda: ours.all_to_all_single(out, x),
            "op": lambda: wait(ops.all_to_all_single_out(x, even, even, name, out=out)),
            "functional": lambda: wait(ops.all_to_all_single(x, even, even, name)),
        }
    return call[way], out


def _expected(collective: str, xs: list[Tensor]) -> Tensor:
    ranks, rank = len(xs), dist.get_rank()
    if collective == "broadcast":
        return xs[0]
    if collective == "all_gather":
        return torch.cat(xs)
    if collective == "all_to_all":
        return torch.cat([x.chunk(ranks)[rank] for x in xs])
    total = sum(xs[1:], xs[0])
    return total.chunk(ranks)[rank] if collective == "reduce_scatter" else total


def prepare_many(count: int, size: int, ways: list[str]) -> dict[str, str]:
    """Many tensors to all_reduce: one call each, together, or as one tensor of their size."""
    ops, group = torch.ops.c10d_ext, dist.group.WORLD
    assert group is not None
    wait, name = ops.wait_tensor, group.group_name
    xs = [torch.empty(size // 4).fill_(0) for _ in range(count)]
    whole = torch.empty(count * size // 4).fill_(0)

    def one_by_one() -> None:
        for x in xs:
            ops.all_reduce_(x, "sum", name)
        for x in xs:
            wait(x)

    def together() -> None:
        for x in ops.all_reduce_coalesced_(xs, "sum", name):
            wait(x)

    def in_a_block(api: Any) -> None:
        with api._coalescing_manager(group):
            for x in xs:
                api.all_reduce(x, group=group)

    def alone(api: Any) -> None:
        for x in xs:
            api.all_reduce(x)

    calls: dict[str, Callable[[], Any]] = {
        "op, one by one": one_by_one,
        "op, together": together,
        "ours, one by one": lambda: alone(ours),
        "ours, block": lambda: in_a_block(ours),
        "dist, one by one": lambda: alone(dist),
        "dist, block": lambda: in_a_block(dist),
        "one tensor": lambda: ours.all_reduce(whole),
    }
    for way in ways:
        calls[way]()
        _case[way] = calls[way]
    return {}


def block(way: str, count: int) -> tuple[float, float]:
    """Seconds that ``count`` calls take, of the clock and of the processor."""
    dist.all_reduce(torch.zeros(1))
    return time_calls(_case[way], count)


def release() -> None:
    """Lets go of the buffers."""
    _case.clear()


def overlap(size: int, busy: bool, rounds: int) -> dict[str, float]:
    """An asynchronous all_reduce with work of about its own length before the wait.

    The work computes, or, if not ``busy``, sleeps: as a rank does that waits for something else.
    """
    x = torch.empty(size // 4).fill_(0)
    a = torch.ones(192, 192)
    out = torch.empty_like(a)

    def communicate() -> None:
        dist.all_reduce(x)

    def work() -> None:
        if not busy:
            time.sleep(alone)
            return
        for _ in range(repeats):
            torch.mm(a, a, out=out)

    repeats = 50
    alone = _median(communicate, rounds)
    alone = float(_agreed(alone))
    repeats = max(1, round(repeats * alone / _median(lambda: torch.mm(a, a, out=out), 50) / 50))
    repeats = int(_agreed(repeats))
    working = _median(work, rounds)
    calls, totals = [], []
    for _ in range(rounds):
        dist.all_reduce(torch.zeros(1))
        began = time.perf_counter()
        handle = dist.all_reduce(x, async_op=True)
        calls.append(time.perf_counter() - began)
        work()
        handle.wait()
        totals.append(time.perf_counter() - began)
    return {
        "call": statistics.median(calls),
        "alone": alone,
        "work": working,
        "both": statistics.median(totals),
    }


def _median(call: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        dist.all_reduce(torch.zeros(1))
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _agreed(value: float) -> float:
    holder = torch.tensor([float(value)], dtype=torch.float64)
    dist.broadcast(holder, 0)
    return holder.item()


def growth(calls: int) -> dict[str, int]:
    """What this process has more of after so many small collectives than before them."""
    ops, group = torch.ops.c10d_ext, dist.group.WORLD
    assert group is not None
    wait, name, x = ops.wait_tensor, group.group_name, torch.zeros(2)

    def some(turns: int) -> None:
        for _ in range(turns):
            wait(ops.all_reduce_(x, "sum", name))
            wait(ops.all_reduce(x, "sum", name))
            dist.all_reduce(x)
            dist.broadcast(x, 0, async_op=True).wait()

    some(5000)
    before = _footprint()
    some(calls // 4)
    after = _footprint()
    return {what: after[what] - before[what] for what in before}


def growth_of_dropped(rounds: int, count: int, size: int) -> dict[str, int]:
    """What is resident beyond before, after so many results that nobody waits for or keeps."""
    ops, group = torch.ops.c10d_ext, dist.group.WORLD
    assert group is not None
    x = torch.zeros(size // 4)
    ops.wait_tensor(ops.all_reduce(torch.zeros(2), "sum", group.group_name))
    time.sleep(2)  # until nothing is kept of what came before
    before = _resident()
    for _ in range(rounds):
        results = [ops.all_reduce(x, "sum", group.group_name) for _ in range(count)]
        del results
        dist.barrier()
    at_once = _resident()
    time.sleep(2)
    return {"at once": at_once - before, "after 2 s": _resident() - before}


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _footprint() -> dict[str, int]:
    return {
        "resident": _resident(),
        "shared": shared_memory(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def shared_memory() -> int:
    """The bytes of the memory files that this process has mapped."""
    sizes: dict[str, int] = {}
    with open("/proc/self/maps") as file:
        for line in file:
            found = re.match(r"(\w+)-(\w+) \S+ \w+ \S+ (\d+) +/memfd:", line)
            if found:
                start, end, inode = found.groups()
                sizes[inode] = sizes.get(inode, 0) + int(end, 16) - int(start, 16)
    return sum(sizes.values())


_pairs: dict[int, Any] = {}


def pair_up() -> None:
    """Makes a group of rank 0 with every other rank."""
    for peer in range(1, dist.get_world_size()):
        group = dist.new_group([0, peer])
        if dist.get_rank() in (0, peer):
            dist.all_reduce(torch.ones(1), group=group)
            _pairs[peer] = group


def meet(peer: int) -> float:
    """When, by the machine's monotonic clock, rank 0 was told that ``peer`` is lost."""
    try:
        dist.all_reduce(torch.ones(1), group=_pairs[peer])
    except dist.DistBackendError:
        return time.monotonic()
    raise AssertionError(f"rank {peer} took part")
