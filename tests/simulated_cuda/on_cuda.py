"""The contract's checks with every op on CUDA tensors, a device per rank.

The checks make CPU tensors and look at CPU tensors. In between, what an op is given goes to the
rank's device and what it returns comes back, differentiably, as a user's program would do it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests import contract
from tests.contract import Case, Collective
from tests.harness import run


def device() -> torch.device:
    """This rank's own, which is made the current one."""
    mine = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(mine)
    return mine


def _there(x: Tensor) -> Tensor:
    return x.to(device())


def _call(
    c: Collective, form: str, case: Case, xs: Sequence[Tensor], outs: Sequence[Tensor] = ()
) -> list[Tensor]:
    there = [_there(x) for x in xs], [_there(out) for out in outs]
    return [contract.wait(y).cpu() for y in contract.start(c, form, case, *there)]


_plain_computation = contract.computation


def _computation(c: Collective, form: str, case: Case) -> Callable[..., Any]:
    f, mine = _plain_computation(c, form, case), device()

    def on_cuda(*xs: Tensor) -> Any:
        ys = f(*[x.to(mine) for x in xs])
        return ys.cpu() if isinstance(ys, Tensor) else [y.cpu() for y in ys]

    return on_cuda


@contextlib.contextmanager
def _moved() -> Iterator[None]:
    with (
        mock.patch.object(contract, "call", _call),
        mock.patch.object(contract, "computation", _computation),
    ):
        yield


def check(name: str, *args: Any) -> Any:
    """On the worker: the contract's check of this name."""
    device()
    with _moved():
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
    return getattr(importlib.import_module(module), name)(*args)
