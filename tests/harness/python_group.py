"""A process group written in Python, over gloo: the collectives C++ reaches, works with a future.

What it is asked for completes on a thread of its own, so a future ends whoever waits or not.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness.over_gloo import GroupOverGloo

DEADLINE = timedelta(seconds=30)


class FutureWork(dist.Work):
    """Ends when its future does."""

    def __init__(self, results: list[Tensor], inner: Any) -> None:
        super().__init__()
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        threading.Thread(target=self._run, args=(results, inner), daemon=True).start()

    def _run(self, results: list[Tensor], inner: Any) -> None:
        try:
            inner.wait(DEADLINE)
        except Exception as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(results)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._future.wait()
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future


class PythonGroup(GroupOverGloo):
    """Three collectives."""

    BACKEND = "python"

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, size, timeout)
        self.calls: list[str] = []

    def _started(self, collective: str, results: list[Tensor], inner: Any) -> dist.Work:
        self.calls.append(collective)
        return FutureWork(results, inner)

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self._started("allreduce", tensors, self._gloo.allreduce(tensors, opts))

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self._started("broadcast", tensors, self._gloo.broadcast(tensors, opts))

    def alltoall_base(self, out: Tensor, x: Tensor, outs: Any, ins: Any, opts: Any) -> dist.Work:
        inner = self._gloo.alltoall_base(out, x, outs, ins, opts)
        return self._started("alltoall_base", [out], inner)

    # What torch's own functions and DDP call besides.

    def allgather(self, outs: Any, xs: Any, opts: Any = None) -> dist.Work:
        return self._started("allgather", outs[0], self._gloo.allgather(outs, xs, opts))

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._started("barrier", [], self._gloo.barrier(opts))


register = PythonGroup.register
