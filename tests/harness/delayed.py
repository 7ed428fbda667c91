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

from tests.harness.over_gloo import GroupOverGloo

DELAY = 0.05

_DEADLINE = 30.0


class LateWork(dist.Work):
    """Done when its thread says so; a wait then returns or raises."""

    def __init__(self, collective: str, inputs: list[Tensor], start: Callable[[], Any]) -> None:
        super().__init__()
        self._collective = collective
        self._inputs = inputs
        self._seen = [x.clone() for x in inputs]
        self._start = start
        self._done = threading.Event()
        self._changed = False

    def run(self) -> None:
        time.sleep(DELAY)
        pairs = zip(self._inputs, self._seen, strict=True)
        self._changed = not all(torch.equal(x, y) for x, y in pairs)
        self._start().wait()  # the peers count on it either way
        self._done.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        assert self._done.wait(_DEADLINE), f"{self._collective} takes longer than {_DEADLINE:g} s"
        if self._changed:
            raise RuntimeError(f"the input of {self._collective} changed in flight")
        return True


class DelayedGroup(GroupOverGloo):
    """gloo, 50 ms behind."""

    BACKEND = "delayed"

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, size, timeout)
        self._works: queue.SimpleQueue[LateWork] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._works.get().run()

    def _late(self, collective: str, inputs: list[Tensor], start: Callable[[], Any]) -> dist.Work:
        work = LateWork(collective, inputs, start)
        self._works.put(work)
        return work

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


register = DelayedGroup.register
