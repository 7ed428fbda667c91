"""A backend that reads its inputs and writes its outputs late, and tells when the inputs changed.

A process group in Python over gloo. What it is asked for starts only after a delay, on a thread, in
order. If the tensors it was given no longer hold what they held when it was asked (because someone
reused memory in flight), the work fails and says so.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future

DELAY = 0.05

_Job = tuple[Callable[[], Any], list[Tensor], list[Tensor], Any, str]


class DelayedGroup(dist.ProcessGroup):
    """gloo, 50 ms behind."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._name = ""
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            start, inputs, seen, future, verb = self._jobs.get()
            time.sleep(DELAY)
            unchanged = all(torch.equal(x, y) for x, y in zip(inputs, seen, strict=True))
            start().wait()  # the peers count on it either way
            if unchanged:
                future.set_result(None)
            else:
                future.set_exception(RuntimeError(f"the input of {verb} changed in flight"))

    def _late(self, verb: str, inputs: list[Tensor], start: Callable[[], Any]) -> dist.Work:
        future: Any = torch.futures.Future()
        seen = [x.clone() for x in inputs]
        self._jobs.put((start, inputs, seen, future, verb))
        return _create_work_from_future(future)

    def allreduce(self, tensors: Any, opts: Any) -> dist.Work:
        return self._late("allreduce", tensors, lambda: self._gloo.allreduce(tensors, opts))

    def broadcast(self, tensors: Any, opts: Any) -> dist.Work:
        return self._late("broadcast", tensors, lambda: self._gloo.broadcast(tensors, opts))

    def alltoall_base(
        self, output: Tensor, given: Tensor, outs: list[int], ins: list[int], opts: Any
    ) -> dist.Work:
        return self._late(
            "alltoall_base",
            [given],
            lambda: self._gloo.alltoall_base(output, given, outs, ins, opts),
        )

    def barrier(self, opts: Any) -> dist.Work:
        return self._late("barrier", [], lambda: self._gloo.barrier(opts))

    def getBackendName(self) -> str:  # noqa: N802
        return "delayed"

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        pass

    @property
    def group_name(self) -> str:
        return self._name


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> DelayedGroup:
    return DelayedGroup(store, rank, size, timeout)


def register() -> None:
    """Make the backend known by the name `delayed`."""
    if not hasattr(dist.Backend, "DELAYED"):
        dist.Backend.register_backend("delayed", _create, devices=["cpu"])
