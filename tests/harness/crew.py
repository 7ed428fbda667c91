"""Workers of one group that a test may kill, stop or interrupt, each told what to do by itself."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.harness.pool import GRACE, Pool

DEADLINE = 30.0


class Crew:
    """One worker per rank. Nothing of it is used again by other tests."""

    def __init__(self, size: int, backend: str) -> None:
        self._pool = Pool(backend, size)
        self.scratch = self._pool.scratch

    def start(self, rank: int, fn: Callable[..., Any], *args: Any) -> None:
        """Have `rank` call the module-level function `fn`."""
        task = pickle.dumps((fn.__module__, fn.__qualname__, args))
        self._pool.connections[rank].send_bytes(task)

    def result(self, rank: int, deadline: float = DEADLINE) -> Any:
        """What `rank`'s function returned; an AssertionError when it raised or does not return."""
        connection = self._pool.connections[rank]
        if not connection.poll(deadline):
            os.kill(self.pid(rank), signal.SIGUSR1)  # the stacks
            time.sleep(0.5)
            stacks = self._pool._tail(rank, "stacks")
            raise AssertionError(f"rank {rank} gave no answer within {deadline:g} s\n{stacks}")
        try:
            status, value = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            raise AssertionError(f"rank {rank} {self._pool._obituary(rank)}") from None
        assert status == "ok", f"rank {rank} raised\n{value}\n{self._pool._tail(rank, 'log')}"
        return value

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `fn` on every rank."""
        ranks = range(self._pool.world_size)
        for rank in ranks:
            self.start(rank, fn, *args)
        return [self.result(rank) for rank in ranks]

    def pid(self, rank: int) -> int:
        pid = self._pool.processes[rank].pid
        assert pid is not None
        return pid

    def signal(self, rank: int, number: int) -> float:
        """The time of the monotonic clock at which `rank` is sent a signal."""
        now = time.monotonic()
        os.kill(self.pid(rank), number)
        return now

    def has_ended(self, rank: int) -> bool:
        """Whether the process of `rank` ends soon."""
        self._pool.processes[rank].join(GRACE)
        return not self._pool.processes[rank].is_alive()

    def await_mark(self, name: str) -> None:
        """Return a little after a worker has called `mark` with this name."""
        ends = time.monotonic() + DEADLINE
        while not (self.scratch / name).exists():
            assert time.monotonic() < ends, f"nobody gets to {name!r} within {DEADLINE:g} s"
            time.sleep(0.001)
        time.sleep(0.05)


def mark(scratch: Path, name: str) -> None:
    """Tell the test that this worker is about to do something."""
    (scratch / name).touch()


@contextlib.contextmanager
def crew(size: int, backend: str) -> Iterator[Crew]:
    made = Crew(size, backend)
    try:
        yield made
    finally:
        made._pool.kill()
