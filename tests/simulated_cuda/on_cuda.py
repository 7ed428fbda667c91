"""The contract's checks on CUDA tensors, a device per rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import torch_c10d_ext
from tests import contract
from tests.harness import run
from tests.harness.on_device import moved

# The backend of pools that a test has for itself: the fixture `own_processes`.
ALONE = "cuda:nccl"


def device() -> torch.device:
    """This rank's own, which is made the current one."""
    mine = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(mine)
    return mine


def check(name: str, *args: Any) -> Any:
    """On the worker: the contract's check of this name."""
    with moved(device()):
        result = getattr(contract, name)(*args)
    torch.cuda.synchronize()
    return result


def verify(size: int, name: str, *args: Any, backend: str, deadline: float = 200) -> None:
    """In the parent: contract.verify, on CUDA tensors."""
    contract.verify(size, check, name, *args, backend=backend, deadline=deadline)


def run_on_devices(
    size: int, fn: Callable[..., Any], *args: Any, backend: str, deadline: float = 100
) -> list[Any]:
    """harness.run with the rank's device made current first."""
    return run(size, _with_device, fn.__module__, fn.__qualname__, args, backend=backend,
               deadline=deadline)  # fmt: skip


def _with_device(module: str, name: str, args: tuple[Any, ...]) -> Any:
    import importlib

    device()
    result = getattr(importlib.import_module(module), name)(*args)
    torch.cuda.synchronize()
    # In this pool tests follow that begin where this one ends.
    assert torch_c10d_ext.pending_count() == 0
    return result
