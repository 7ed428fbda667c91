"""Devices that are neither CPU nor CUDA: every op on a PrivateUse1 device, in its streams' order.

The device (`tests/native/queue_device.cpp`) is as small as one can be: its streams are queues, its
memory follows CUDA's rules, its backend of c10d has two collectives on a stream of its own.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import importlib.util
import shlex
import sysconfig
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.utils import cpp_extension

import torch_c10d_ext
import torch_c10d_ext.distributed as ours
import torch_c10d_ext.functional as F
from tests import contract
from tests.contract import FUNCTIONAL, INPLACE, OUT, verify
from tests.harness import pool, run
from tests.harness.flight import single_rank_shortcut
from tests.harness.on_device import moved
from tests.native import build
from tests.simulated_cuda.test_streams import _differ, _is_over, _starts, _world

NAME = "c10d_ext_queue_device"
# A pool of their own: a process keeps the device once it has it.
BACKEND = "cpu:gloo"
OTHERS = ("XPU", "HPU", "MTIA", "PrivateUse1")
METHODS = ("allreduce", "all_to_all_single")
MODULES = [
    f"tests.ops.test_{stem}"
    for stem in (
        "all_gather",
        "all_gather_into_tensor",
        "all_reduce",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "gather",
        "permute_tensor",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
    )
]

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def extension() -> Iterator[str]:
    """The device's extension module, compiled against the installed torch."""
    torch_dir = Path(torch.__file__).parent
    source = build.PROGRAMS / "queue_device.cpp"
    command = [
        *shlex.split("c++ -shared -fPIC -std=c++20 -O1 -g0 -fvisibility=hidden"),
        f"-DTORCH_EXTENSION_NAME={NAME}",
        *(f"-I{path}" for path in cpp_extension.include_paths()),
        f"-I{sysconfig.get_paths()['include']}",
        str(source),
        f"-L{torch_dir / 'lib'}",
        *shlex.split("-ltorch -ltorch_cpu -ltorch_python -lc10"),
    ]
    out = build.ROOT / "build" / "native" / "plain" / "queue_device.so"
    yield str(build._make(out, command, [source]))
    pool.stop(BACKEND)


# --- on the worker -------------------------------------------------------------------------------


@functools.cache
def _load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.utils.rename_privateuse1_backend("queue")
    described = types.ModuleType("torch.queue")
    described.is_available = lambda: True  # type: ignore[attr-defined]
    described.device_count = lambda: 1  # type: ignore[attr-defined]
    described.current_device = lambda: 0  # type: ignore[attr-defined]
    torch._register_device_module("queue", described)

    def create(options: Any, _: Any) -> Any:
        store = dist.PrefixStore("carrier", options.store)
        timeout = dt.timedelta(seconds=60)
        carrier = c10d.ProcessGroupGloo(store, options.group_rank, options.group_size, timeout)
        return module.create(carrier)

    dist.Backend.register_backend("queue", create, extended_api=True, devices=["queue"])
    torch_c10d_ext.register_backend_capabilities("queue", methods=METHODS)
    return module


@contextlib.contextmanager
def _on_the_device(path: str, shortcut: bool = False) -> Iterator[Any]:
    """A group that serves the device as the default group, and nothing in order by luck."""
    module = _load(path)
    world = dist.group.WORLD
    group = dist.new_group(backend="cpu:gloo,queue:queue")
    c10d._update_default_pg(group)
    module.set_delay(300)
    try:
        with single_rank_shortcut(shortcut):
            yield module
    finally:
        module.set_delay(0)
        c10d._update_default_pg(world)
        dist.destroy_process_group(group)


def _contract(path: str, name: str, *args: Any) -> Any:
    with _on_the_device(path), moved(torch.device("queue")):
        return getattr(contract, name)(*args)


@contextlib.contextmanager
def _stream(module: Any, stream: int) -> Iterator[None]:
    before = module.exchange_stream(stream)
    try:
        yield
    finally:
        module.exchange_stream(before)


def _each(
    path: str,
    check: Callable[[Any, str, Any, Tensor, Tensor | None], str],
    shortcut: bool = False,
) -> list[str]:
    """What is wrong with each call's result."""
    n, rank, failures = dist.get_world_size(), dist.get_rank(), []
    world = _world(n)
    with _on_the_device(path, shortcut) as module:
        for name, (start, reference) in _starts(n, rank).items():
            want = reference([x.clone() for x in world])
            text = check(module, name, start, world[rank].to("queue"), want)
            if text:
                failures.append(f"{name}: {text}")
    assert torch_c10d_ext.pending_count() == 0
    return failures


def _none_fails(failures: list[list[str]]) -> None:
    for rank, each in enumerate(failures):
        assert not each, f"rank {rank}:\n" + "\n".join(each)


# --- every op ------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", OTHERS)
def test_every_op_has_a_kernel(device: str) -> None:
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("c10d_ext::")]
    on_cpu = [n for n in names if torch._C._dispatch_has_kernel_for_dispatch_key(n, "CPU")]
    assert len(on_cpu) >= 30
    for name in on_cpu:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, device), name


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("size", [1, 2])
def test_values(size: int, module: str, extension: str) -> None:
    c = contract.load(module)
    for form in c.forms:
        verify(size, _contract, extension, "check_values", module, form, backend=BACKEND)


@pytest.mark.parametrize("module", MODULES)
def test_gradients(module: str, extension: str) -> None:
    verify(2, _contract, extension, "check_gradients", module, FUNCTIONAL, backend=BACKEND)


@pytest.mark.parametrize("form", [FUNCTIONAL, INPLACE, OUT])
def test_compile(form: str, extension: str) -> None:
    module = "tests.ops.test_all_reduce"
    args = ("check_compiled", module, form, "aot_eager", 1)
    verify(2, _contract, extension, *args, backend=BACKEND)


# --- streams -------------------------------------------------------------------------------------


def _in_order(module: Any, _name: str, start: Any, x: Tensor, want: Tensor | None) -> str:
    """The input is written late, and overwritten as soon as the call is back."""
    late = torch.full_like(x, -1.0)
    module.synchronize(0)
    module.sleep(3)
    late.copy_(x)
    y = start(late)
    late.fill_(-7.0)
    return _differ(y + 0, want)


def _reads_in_order(path: str) -> list[str]:
    return _each(path, _in_order)


@pytest.mark.parametrize("size", [1, 2])
def test_inputs_are_read_in_the_order_of_the_stream(size: int, extension: str) -> None:
    _none_fails(run(size, _reads_in_order, extension, backend=BACKEND))


def _elsewhere(module: Any, name: str, start: Any, x: Tensor, want: Tensor | None) -> str:
    """Started on one stream, waited for on another, while the first one's memory is used again."""
    if name.endswith("dim 1"):  # computes with its result, on the stream that it began on
        return ""
    begins, ends = module.new_stream(), module.new_stream()
    module.synchronize(0)
    with _stream(module, begins):
        given = x.clone()
        y = start(given)
        del given
    if _is_over(y):
        module.synchronize(begins)
    with _stream(module, ends):
        y = F.wait_tensor(y)
    with _stream(module, begins):
        junk = [torch.full_like(x, 9.0) for _ in range(4)]
        junk += [torch.full((x.numel() // 2 * k,), 9.0, device="queue") for k in (1, 2, 4)]
    with _stream(module, ends):
        text = _differ(y + 0, want)
    module.synchronize(begins)
    if not all(bool((j.cpu() == 9.0).all()) for j in junk):
        text += " memory of others was written"
    return text


def _waits_elsewhere(path: str, shortcut: bool) -> list[str]:
    return _each(path, _elsewhere, shortcut)


@pytest.mark.parametrize(("size", "shortcut"), [(1, False), (1, True), (2, False)])
def test_memory_is_kept_for_the_stream_that_waits(
    size: int, shortcut: bool, extension: str
) -> None:
    _none_fails(run(size, _waits_elsewhere, extension, shortcut, backend=BACKEND))


def _host_is_free(path: str) -> bool:
    with _on_the_device(path) as module:
        x = torch.ones(8, device="queue")
        F.wait_tensor(F.all_reduce(x, "sum", None))
        module.synchronize(0)
        module.sleep(1000)
        y = F.wait_tensor(F.all_reduce(x, "sum", None))
        free = not module.is_idle(0)
        return free and y.cpu().tolist() == [float(dist.get_world_size())] * 8


def test_a_wait_leaves_the_host_free(extension: str) -> None:
    assert all(run(2, _host_is_free, extension, backend=BACKEND))


def _never_waited(path: str) -> None:
    """Results that nobody waits for leave nothing behind."""
    with _on_the_device(path):
        x = torch.ones(8, device="queue")
        for _ in range(100):
            F.all_reduce(x, "sum", None)
        # The backend's stream comes to this after those.
        F.wait_tensor(F.all_reduce(x, "sum", None)).cpu()
        left = torch_c10d_ext.pending_count()
        for _ in range(2 * left):
            F.wait_tensor(F.all_reduce(x, "sum", None))
        assert left > 0 and torch_c10d_ext.pending_count() == 0


def test_results_that_nobody_waits_for(extension: str) -> None:
    run(2, _never_waited, extension, backend=BACKEND)


def _futures(path: str) -> list[float]:
    n = dist.get_world_size()
    with _on_the_device(path):
        x = torch.full((100,), float(dist.get_rank() + 1), device="queue")
        work = ours.all_reduce(x, async_op=True)
        doubled = work.get_future().then(lambda done: done.value()[0] * 2).wait()
        assert doubled.cpu().tolist() == [float(n * (n + 1))] * 100
        return x.cpu().tolist()  # type: ignore[no-any-return]


def test_futures(extension: str) -> None:
    assert run(2, _futures, extension, backend=BACKEND) == [[3.0] * 100] * 2
