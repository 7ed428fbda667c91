"""The parent's side of the worker pools: one pool per (backend, world size), spawned on first use.

A worker is a process that joined one process group and then runs functions by name until told to
stop, so that a test costs a message instead of an interpreter, an `import torch` and a rendezvous.
Every wait has a deadline: a pool that misses one is killed, each rank's stack goes into the
report, and the next call gets a fresh pool.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.harness import worker

# Seconds. START covers the imports of a cold machine; GRACE is what the other ranks get to
# notice that a peer failed before they are killed instead of waiting for it until the deadline.
START_DEADLINE = 120.0
CALL_DEADLINE = 60.0
GRACE = 5.0
STOP_DEADLINE = 10.0

# Set for the workers before the server they are forked from starts.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # No pool of compiler processes per rank: the ranks are the parallelism.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    # The CPU's vector instructions are the compiler's, too: every rank would try them anew.
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
    # The code around AOTInductor's kernels takes longer to compile than to run.
    "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL": "O0",
    # A cached graph would hide a broken lowering; C++ kernels are still shared, keyed by content.
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
}


# Where the server finds what it imports: multiprocessing does not tell it before Python 3.13.
SEARCH_PATH = "C10D_EXT_TESTS_SEARCH_PATH"


class WorkersFailed(AssertionError):
    """A call failed on at least one rank; the text holds every rank's traceback or stack."""


class Pool:
    """The workers of one process group, rank 0 to `world_size` - 1."""

    def __init__(self, backend: str, world_size: int) -> None:
        self.world_size = world_size
        self.scratch = Path(tempfile.mkdtemp(dir=_scratch(), prefix=f"{world_size}-"))
        context = _context()
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=worker.main,
                args=(theirs, rank, world_size, backend, str(self.scratch), list(sys.path)),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)
        self._collect("start", START_DEADLINE)

    def call(self, task: bytes, what: str, deadline: float) -> list[Any]:
        """Run a pickled (function, args) on every rank; results by rank, or WorkersFailed."""
        for connection in self.connections:
            connection.send_bytes(task)
        return self._collect(what, deadline)

    def _collect(self, what: str, deadline: float) -> list[Any]:
        ends = time.monotonic() + deadline
        replies: dict[int, tuple[str, Any]] = {}
        failed = False
        while len(replies) < self.world_size:
            missing = [c for r, c in enumerate(self.connections) if r not in replies]
            ready = wait(missing, timeout=max(0.0, ends - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = self.connections.index(connection)
                try:
                    replies[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    replies[rank] = ("died", self._obituary(rank))
                if replies[rank][0] != "ok" and not failed:
                    failed = True
                    ends = min(ends, time.monotonic() + GRACE)
        if not failed and len(replies) == self.world_size:
            return [replies[rank][1] for rank in range(self.world_size)]
        report = self._report(what, deadline, replies)
        self.kill()
        raise WorkersFailed(report)

    def _obituary(self, rank: int) -> str:
        process = self.processes[rank]
        process.join(GRACE)
        code = process.exitcode
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def _report(self, what: str, deadline: float, replies: dict[int, tuple[str, Any]]) -> str:
        stuck = [rank for rank in range(self.world_size) if rank not in replies]
        for rank in stuck:
            pid = self.processes[rank].pid
            if pid is not None and self.processes[rank].is_alive():
                os.kill(pid, signal.SIGUSR1)  # faulthandler writes every thread's stack
        if stuck:
            time.sleep(0.5)
        lines = [f"{what} at world size {self.world_size} failed"]
        for rank in range(self.world_size):
            status, value = replies.get(rank, ("stuck", ""))
            if status == "ok":
                lines.append(f"--- rank {rank}: returned normally")
            elif status == "error":
                lines.append(f"--- rank {rank} raised\n{value}")
            elif status == "died":
                lines.append(f"--- rank {rank} {value}\n{self._tail(rank, 'stacks')}")
            else:
                lines.append(
                    f"--- rank {rank} gave no answer within {deadline:g} s (or {GRACE:g} s after "
                    f"another rank failed); it was at\n{self._tail(rank, 'stacks')}"
                )
            output = self._tail(rank, "log")
            if output:
                lines.append(f"output of rank {rank}:\n{output}")
        return "\n".join(lines)

    def _tail(self, rank: int, kind: str, limit: int = 6000) -> str:
        path = self.scratch / f"{rank}.{kind}"
        return path.read_text(errors="replace")[-limit:].strip() if path.exists() else ""

    def stop(self) -> None:
        """End the workers in good order, and by force those that do not go."""
        for connection in self.connections:
            with contextlib.suppress(OSError, ValueError):
                connection.send_bytes(worker.STOP)
        ends = time.monotonic() + STOP_DEADLINE
        for process in self.processes:
            process.join(max(0.0, ends - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join(STOP_DEADLINE)
        for connection in self.connections:
            connection.close()
        shutil.rmtree(self.scratch, ignore_errors=True)


_pools: dict[tuple[str, int], Pool] = {}
_scratch_directory: str | None = None


def run(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    backend: str = "gloo",
    deadline: float = CALL_DEADLINE,
) -> list[Any]:
    """Call `fn(*args)` on every rank of a process group of `world_size` and return results by rank.

    `fn` must be a module-level function, arguments and results picklable. Raises WorkersFailed
    with each rank's traceback when any rank raises, dies or gives no answer in `deadline` seconds;
    the pool is then replaced, so that what follows starts clean.
    """
    assert "<" not in fn.__qualname__, f"{fn.__qualname__} is not a module-level function"
    task = pickle.dumps((fn.__module__, fn.__qualname__, args))
    key = (backend, world_size)
    if key not in _pools:
        _pools[key] = Pool(backend, world_size)
    try:
        return _pools[key].call(task, f"{fn.__module__}.{fn.__qualname__}", deadline)
    except BaseException:
        _pools.pop(key).kill()
        raise


def stop(backend: str) -> None:
    """Stop the pools of a backend that few tests use, for the memory of their processes."""
    for key in [key for key in _pools if key[0] == backend]:
        _pools.pop(key).stop()


def shutdown() -> None:
    """Stop every pool and remove what they left on disk."""
    global _scratch_directory
    while _pools:
        _pools.popitem()[1].stop()
    if _scratch_directory is not None:
        shutil.rmtree(_scratch_directory, ignore_errors=True)
        _scratch_directory = None


def _scratch() -> str:
    """The session's directory for rendezvous files, logs and compiled kernels."""
    global _scratch_directory
    if _scratch_directory is None:
        _scratch_directory = tempfile.mkdtemp(prefix="torch_c10d_ext-tests-")
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault(
            "TORCHINDUCTOR_CACHE_DIR", os.path.join(_scratch_directory, "inductor")
        )
    return _scratch_directory


def _context() -> Any:
    import torch

    os.environ[SEARCH_PATH] = os.pathsep.join(sys.path)

    if torch.version.cuda is not None:
        # A process that asked for devices and then forked cannot use CUDA in the child.
        return multiprocessing.get_context("spawn")
    # Children of the server share its imports: a worker is ready in milliseconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.harness.preload"])
    return context
