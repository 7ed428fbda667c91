"""Processes that hold a rank each and run functions when asked; every wait has a deadline."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import gc
import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

START_DEADLINE = 180.0
STOP_DEADLINE = 10.0
# What a rank waits for its peers before it gives up by itself.
BACKEND_TIMEOUT = dt.timedelta(seconds=60)


class RanksFailed(RuntimeError):
    """A rank raised, died or did not answer in time; the others have been ended."""


class Ranks:
    """The ranks of one process group, each in its own process, to be used in a ``with`` block.

    With the ``fake`` backend one process stands for all of them.
    """

    def __init__(self, backend: str, size: int, device: str = "cpu") -> None:
        self.backend, self.size, self.device = backend, size, device
        self._scratch = Path(tempfile.mkdtemp(prefix="torch_c10d_ext-bench-"))
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        self._started = False

    def __enter__(self) -> Ranks:  # noqa: PYI034
        context = multiprocessing.get_context("spawn")
        try:
            with _environment(self._scratch):
                for rank in range(1 if self.backend == "fake" else self.size):
                    ours, theirs = context.Pipe()
                    self._connections.append(ours)
                    place = (self.backend, rank, self.size, self.device, str(self._scratch))
                    process = context.Process(target=_serve, args=(theirs, *place), daemon=True)
                    process.start()
                    theirs.close()
                    self._processes.append(process)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        stack: TracebackType | None,
    ) -> None:
        if kind is None:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.send(None)
            ends = time.monotonic() + STOP_DEADLINE
            for process in self._processes:
                process.join(max(0.0, ends - time.monotonic()))
        self._end()

    def ready(self) -> None:
        """Returns when all ranks have joined the group."""
        if not self._started:
            self._collect("the start of the ranks", START_DEADLINE)
            self._started = True

    def run(self, fn: Callable[..., Any], *args: Any, deadline: float) -> list[Any]:
        """Calls ``fn(*args)``, a function of a module, on every rank; the results by rank."""
        self.ready()
        what = f"{fn.__module__}.{fn.__qualname__}"
        for rank, connection in enumerate(self._connections):
            try:
                connection.send((fn, args))
            except OSError as error:
                raise RanksFailed(f"{what}: rank {rank}: the process died") from error
        return self._collect(what, deadline)

    def _collect(self, what: str, deadline: float) -> list[Any]:
        ends = time.monotonic() + deadline
        results: dict[int, Any] = {}
        while len(results) < len(self._connections):
            missing = [c for rank, c in enumerate(self._connections) if rank not in results]
            ready = wait(missing, max(0.0, ends - time.monotonic()))
            if not ready:
                raise RanksFailed(f"{what}: no answer from every rank within {deadline:.0f} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = self._connections.index(connection)
                try:
                    ok, results[rank] = connection.recv()
                except (EOFError, OSError):
                    ok, results[rank] = False, "the process died"
                if not ok:
                    raise RanksFailed(f"{what}: rank {rank}: {results[rank]}")
        return [results[rank] for rank in range(len(results))]

    def _end(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join(STOP_DEADLINE)
        for connection in self._connections:
            connection.close()
        shutil.rmtree(self._scratch, ignore_errors=True)


@contextlib.contextmanager
def _environment(scratch: Path) -> Any:
    """What the ranks must find set when they import torch; one thread each, caches in scratch."""
    settings = {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(
    connection: Connection, backend: str, rank: int, size: int, device: str, scratch: str
) -> None:
    connection.send(_answer(functools.partial(_join, backend, rank, size, device, scratch)))
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError, KeyboardInterrupt):  # the parent is gone, or told to go
            os._exit(1)
        if task is None:
            break
        fn, args = task
        connection.send(_answer(functools.partial(fn, *args)))
    import torch.distributed as dist

    dist.destroy_process_group()
    # Threads of a backend may outlive its group; interpreter shutdown would race with them.
    os._exit(0)


def _join(backend: str, rank: int, size: int, device: str, scratch: str) -> None:
    import torch
    import torch.distributed as dist

    import torch_c10d_ext  # noqa: F401

    warnings.simplefilter("ignore")  # torch deprecates some of what it is measured with
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(0)
    store: Any
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        store = FakeStore()
    else:
        store = dist.FileStore(os.path.join(scratch, "rendezvous"), size)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=BACKEND_TIMEOUT
    )
    gc.collect()
    gc.freeze()


def _answer(task: Callable[[], Any]) -> tuple[bool, Any]:
    try:
        return True, task()
    except BaseException:
        return False, traceback.format_exc()
