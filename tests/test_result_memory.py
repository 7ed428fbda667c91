"""Results of functional collectives get the memory that results before them have given back."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import re
import resource
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

import torch_c10d_ext.functional as F
from tests.harness import run
from tests.harness.crew import crew
from tests.native import build
from torch_c10d_ext import _C

MIB = 1 << 20
SETTING = "TORCH_C10D_EXT_RESULT_CACHE"
BACKENDS = ("gloo", "shm")
_DEADLINE = 20.0

# The smallest result that is kept, and a larger one.
SMALLEST, LARGE = MIB, 8 * MIB


def _input(size: int = LARGE) -> Tensor:
    return torch.arange(size // 4, dtype=torch.float32) % 1024 + dist.get_rank()


def _sum(size: int = LARGE) -> Tensor:
    ranks = dist.get_world_size()
    steps = torch.arange(size // 4, dtype=torch.float32) % 1024
    return steps * ranks + sum(range(ranks))


def _result(size: int = LARGE) -> Tensor:
    return F.wait_tensor(F.all_reduce(_input(size), "sum", None))


def _eventually(condition: Callable[[], bool], what: str) -> None:
    ends = time.monotonic() + _DEADLINE
    while not condition():
        assert time.monotonic() < ends, what
        time.sleep(0.005)


def _nothing_idle() -> None:
    gc.collect()
    _eventually(lambda: _C.pending_count() == 0, "something stays pending")
    _C.release_idle_results()


def _until_idle(size: int) -> None:
    """Until memory of `size` has come back: a backend may let go of it a little later."""
    _eventually(lambda: _C.idle_result_bytes() >= size, f"{_C.idle_result_bytes()} bytes are idle")


def _resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


@pytest.mark.long
def test_the_cache_of_blocks() -> None:
    build.run(build.build("block_cache_test", ["block_cache"]))


# --- reuse ---------------------------------------------------------------------------------------


def _collectives(x: Tensor) -> dict[str, Callable[[], Tensor]]:
    ranks = dist.get_world_size()
    even = [x.numel() // ranks] * ranks
    return {
        "all_reduce": lambda: F.all_reduce(x, "sum", None),
        "all_gather": lambda: F.all_gather_single(x, 0, None),
        "all_gather uneven": lambda: F.all_gather(x, [x.numel()] * ranks, None),
        "reduce_scatter": lambda: F.reduce_scatter_single(x, "sum", 0, None),
        "reduce_scatter uneven": lambda: F.reduce_scatter(x, "sum", even, None),
        "all_to_all": lambda: F.all_to_all_single(x, None, None, None),
        "broadcast": lambda: F.broadcast(x, 0, None),
        "reduce": lambda: F.reduce(x, "sum", 0, None),
        "permute": lambda: F.permute_tensor(x, [(r + 1) % ranks for r in range(ranks)], None),
        "coalesced": lambda: F.all_reduce_coalesced([x], "sum", None)[0],
    }


def _results_reuse_memory() -> None:
    x = _input()
    for name, call in _collectives(x).items():
        _nothing_idle()
        first = F.wait_tensor(call())
        place, want, size = first.data_ptr(), first.clone(), first.nbytes
        del first
        _until_idle(size)
        second = F.wait_tensor(call())
        assert second.data_ptr() == place, name
        assert _C.idle_result_bytes() == 0, name
        assert torch.equal(second, want), name
        del second
        _until_idle(size)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_result_gets_the_memory_of_one_that_was_dropped(backend: str) -> None:
    run(2, _results_reuse_memory, backend=backend)


def _unwaited_results_come_back() -> None:
    _nothing_idle()
    F.all_reduce(_input(), "sum", None)
    _until_idle(LARGE)
    assert torch.equal(_result(), _sum())
    dist.barrier()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_result_that_nobody_waits_for_gives_its_memory_back(backend: str) -> None:
    run(2, _unwaited_results_come_back, backend=backend)


def _small_results_are_the_heaps() -> None:
    _nothing_idle()
    small = _result(SMALLEST - 4)
    del small
    large = _result(SMALLEST)
    del large
    _until_idle(SMALLEST)
    assert _C.idle_result_bytes() == SMALLEST


def test_small_results_are_left_to_the_heap() -> None:
    run(2, _small_results_are_the_heaps, backend="shm")


def _held_results_stay() -> None:
    held: list[tuple[Tensor, float]] = []
    for turn in range(60):
        x = torch.full((SMALLEST // 4 + turn % 3,), float(turn))
        y = F.wait_tensor(F.all_reduce(x, "sum", None))
        if turn % 3 != 0:
            held.append((y, float(turn)))
        del y
        if turn % 10 == 9:
            del held[::4]
    for y, value in held:
        assert torch.equal(y, torch.full_like(y, value * dist.get_world_size())), value
    assert len({y.data_ptr() for y, _ in held}) == len(held)


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_that_are_held_are_not_written_again(backend: str) -> None:
    run(2, _held_results_stay, backend=backend)


def _chains_are_right() -> None:
    """Each result is dropped as soon as the next collective reads it."""
    x = torch.ones(LARGE // 4)
    for _ in range(10):
        y = F.all_reduce(x, "sum", None)
        for _ in range(4):
            y = F.all_reduce(y, "avg", None)
        y = F.wait_tensor(y)
        assert torch.equal(y, torch.full_like(y, float(dist.get_world_size())))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_collective_in_flight_reads_is_not_given_away(backend: str) -> None:
    run(2, _chains_are_right, backend=backend)


# --- bound and return ----------------------------------------------------------------------------


def _no_more_is_kept_than_set(limit: int) -> None:
    os.environ[SETTING] = str(limit)
    results = [_result(2 * MIB) for _ in range(10)]
    # The blocks that are kept begin as huge pages do, and the heap's behind a header.
    assert [y.data_ptr() % (2 * MIB) == 0 for y in results] == [limit > 0] * 10
    before = _resident()
    while results:
        results.pop()
        assert _C.idle_result_bytes() <= limit
    assert _C.idle_result_bytes() == limit // (2 * MIB) * 2 * MIB
    if limit:  # else it is the heap's
        assert before - _resident() > 20 * MIB - limit - MIB


@pytest.mark.parametrize("limit", (0, 2 * MIB - 1, 5 * MIB))
def test_no_more_is_kept_than_the_setting_says(limit: int) -> None:
    with crew(1, "gloo") as ranks:
        ranks.run(_no_more_is_kept_than_set, limit)


def _a_wrong_setting_is_named() -> None:
    for wrong in ("x", "-1", "1.5", "1 GiB", " 1", "0x10", "9223372036854775808", "9" * 30):
        os.environ[SETTING] = wrong
        said = f"{SETTING}: must be a whole number from 0 to {2**63 - 1}, got '{wrong}'"
        for size in (8, LARGE):
            with pytest.raises(ValueError, match=re.escape(said)):
                F.all_reduce(_input(size), "sum", None)
    os.environ[SETTING] = ""
    assert torch.equal(_result(), _sum())
    _until_idle(LARGE)


def test_a_wrong_setting_is_named() -> None:
    with crew(1, "gloo") as ranks:
        ranks.run(_a_wrong_setting_is_named)


def _idle_memory_goes_back() -> None:
    _nothing_idle()
    results = [_result() for _ in range(8)]
    held = _resident()
    results.clear()
    _until_idle(8 * LARGE)
    began = time.monotonic()
    _eventually(lambda: _C.idle_result_bytes() == 0, "memory stays idle")
    assert time.monotonic() - began > 1.0
    _eventually(lambda: held - _resident() > 7 * LARGE, "memory stays resident")


def test_idle_memory_goes_back_to_the_system_without_another_call() -> None:
    run(2, _idle_memory_goes_back, backend="shm")


def _growth_of_dropped_results() -> float:
    """MiB that stay resident after 8 times 20 results that nobody waits for."""
    x = _input()
    F.wait_tensor(F.all_reduce(x[:2], "sum", None))
    _nothing_idle()
    before = _resident()
    for _ in range(8):
        results = [F.all_reduce(x, "sum", None) for _ in range(20)]
        del results
        _eventually(lambda: _C.pending_count() == 0, "something stays pending")
        assert _C.idle_result_bytes() <= 20 * LARGE  # what a round needs, and no more
        dist.barrier()
    _nothing_idle()
    return (_resident() - before) / MIB


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropped_results_leave_no_memory_behind(backend: str) -> None:
    growths = run(2, _growth_of_dropped_results, backend=backend)
    assert max(growths) < 40, growths


# --- forks and threads ---------------------------------------------------------------------------


def _child_of_a_fork(child: Callable[[], None]) -> None:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            child()
            status = 0
        finally:
            os._exit(status)
    ends = time.monotonic() + _DEADLINE
    while (done := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > ends:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            raise AssertionError(f"the child takes longer than {_DEADLINE:g} s")
        time.sleep(0.01)
    assert done[1] == 0, f"the child ended with status {done[1]}"


def _forked_children_go_on() -> None:
    held, dropped = _result(), _result()
    del dropped
    _until_idle(LARGE)
    kept: list[Tensor] = [held]

    def child() -> None:
        assert _C.idle_result_bytes() == 0
        assert torch.equal(kept[0], _sum())
        kept[0].zero_()
        kept.clear()
        y = _result()  # world size 1 needs no backend, which is the parent's
        assert torch.equal(y, _sum())
        place = y.data_ptr()
        del y
        assert _C.idle_result_bytes() == LARGE
        assert _result().data_ptr() == place
        _eventually(lambda: _C.idle_result_bytes() == 0, "memory stays idle in the child")

    del held
    for _ in range(2):
        _child_of_a_fork(child)
        assert torch.equal(kept[0], _sum())
        assert torch.equal(_result(), _sum())


def test_a_forked_child_has_results_of_its_own() -> None:
    with crew(1, "gloo") as ranks:
        ranks.run(_forked_children_go_on)


def _threads_have_results_of_their_own() -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            held: list[Tensor] = []
            for turn in range(150):
                size = SMALLEST // 4 + 4096 * (turn % 5)
                y = F.wait_tensor(F.all_reduce(torch.full((size,), number + turn), "sum", None))
                held.append(y)
                if len(held) > 3:
                    gone = held.pop(turn % 3)
                    assert gone.min() == gone.max()
            for y in held:
                assert y.min() == y.max()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_DEADLINE)
        assert not thread.is_alive()
    assert not errors, errors


def test_threads_have_results_of_their_own() -> None:
    with crew(1, "gloo") as ranks:
        ranks.run(_threads_have_results_of_their_own)


# --- a result is a tensor as any other -----------------------------------------------------------


def _resized(y: Tensor) -> None:
    y.resize_(3)
    assert torch.equal(y, _sum()[:3])
    y.resize_(LARGE // 2)
    assert torch.equal(y[: LARGE // 4], _sum())
    y.fill_(1)
    assert y.sum() == LARGE // 2


def _storage_resized(y: Tensor) -> None:
    storage = y.untyped_storage()
    assert storage.resizable() and storage.nbytes() == LARGE
    storage.resize_(0)
    _until_idle(LARGE)
    storage.resize_(64)
    storage.resize_(LARGE)
    y.fill_(2)
    assert y.sum() == LARGE // 2


def _shared(y: Tensor) -> None:
    y.share_memory_()
    assert y.is_shared() and torch.equal(y, _sum())
    _until_idle(LARGE)


def _as_numpy(y: Tensor) -> None:
    array = y.numpy()
    place = y.data_ptr()
    del y
    assert array.ctypes.data == place and place % 64 == 0
    other = _result()
    assert other.data_ptr() != place
    other.zero_()
    assert np.array_equal(array, _sum().numpy())


def _saved(y: Tensor) -> None:
    file = io.BytesIO()
    torch.save(y, file)
    assert len(file.getvalue()) < LARGE + MIB
    file.seek(0)
    assert torch.equal(torch.load(file), _sum())
    assert torch.equal(pickle.loads(pickle.dumps(y)), _sum())


def _cloned_lazily(y: Tensor) -> None:
    clone = torch._lazy_clone(y)
    assert torch._C._is_cow_tensor(y) and torch._C._is_cow_tensor(clone)
    clone[0] = -1
    assert torch.equal(y, _sum()) and clone[0] == -1
    y[1] = -2
    assert y[1] == -2 and torch.equal(clone[1:], _sum()[1:])
    del clone
    again = torch._lazy_clone(y)
    del y
    assert torch.equal(again[2:], _sum()[2:])
    _nothing_idle()
    again += 1
    del again
    _until_idle(LARGE)


def _set_and_swapped(y: Tensor) -> None:
    alias = torch.empty(0)
    alias.set_(y.untyped_storage(), 0, (LARGE // 4,))
    del y
    other = _result().zero_()
    assert torch.equal(alias, _sum())
    other.data = alias
    del alias
    assert torch.equal(other, _sum())
    assert torch.equal(copy.deepcopy(other), _sum())


_USES = {
    "resize_": _resized,
    "storage.resize_": _storage_resized,
    "share_memory_": _shared,
    "numpy": _as_numpy,
    "torch.save": _saved,
    "_lazy_clone": _cloned_lazily,
    "set_": _set_and_swapped,
}


def _use(name: str) -> None:
    _nothing_idle()
    results = [_result()]
    _USES[name](results.pop())
    _nothing_idle()


@pytest.mark.parametrize("name", _USES)
def test_a_result_can_be_used_as_any_tensor(name: str) -> None:
    run(2, _use, name, backend="shm")


def _looks_as_if_made_by_empty() -> None:
    x = _input()
    y, want = F.wait_tensor(F.all_reduce(x, "sum", None)), torch.empty(LARGE // 4)
    for attribute in ("dtype", "device", "layout", "requires_grad", "is_leaf", "_version"):
        assert getattr(y, attribute) == getattr(want, attribute), attribute
    assert y.stride() == want.stride() and y.storage_offset() == 0
    assert torch._C._dispatch_keys(y) == torch._C._dispatch_keys(want)
    with torch.inference_mode():
        assert F.wait_tensor(F.all_reduce(x, "sum", None)).is_inference()
    for dtype in (torch.bool, torch.complex64, torch.int16, torch.bfloat16, torch.float8_e5m2):
        z = F.wait_tensor(F.broadcast(x.to(dtype), 0, None))
        assert z.dtype == dtype and z.untyped_storage().nbytes() == z.nbytes


def test_a_result_looks_as_if_made_by_empty() -> None:
    run(2, _looks_as_if_made_by_empty, backend="shm")


def _fill_is_torchs() -> None:
    _nothing_idle()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        y = _result()
        assert torch.equal(y, _sum())
        del y
        assert _C.idle_result_bytes() == 0
        torch.utils.deterministic.fill_uninitialized_memory = False
        y = _result()
        del y
        _until_idle(LARGE)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(False)


def test_memory_that_is_to_be_filled_is_torchs() -> None:
    run(2, _fill_is_torchs, backend="shm")


def _profiled() -> Any:
    """Bytes that a profiler saw allocated and freed under the op."""
    _result()
    x = _input()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        y = F.wait_tensor(F.all_reduce(x, "sum", None))
        del y
    (op,) = [e for e in seen.key_averages() if e.key == "c10d_ext::all_reduce"]
    freed = [e.self_cpu_memory_usage for e in seen.key_averages() if e.key == "[memory]"]
    return op.self_cpu_memory_usage, sum(freed)


def test_a_memory_profile_counts_results_and_not_what_is_kept() -> None:
    assert run(2, _profiled, backend="shm") == [(LARGE, -LARGE)] * 2
