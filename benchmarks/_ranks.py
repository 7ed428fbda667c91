"""Processes that hold a rank each and run functions when asked; every wait has a deadline."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import gc
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

START_DEADLINE = 180.0
STOP_DEADLINE = 10.0
# What a rank waits for its peers before it gives up by itself.
BACKEND_TIMEOUT = dt.timedelta(seconds=60)
# Where nothing but calls is measured: glibc keeps 7 freed blocks of a size in a thread, and whether
# a call frees more, into a heap whose layout chance decides, makes 1 us of 4.
CALLS_ALONE = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=2000"}


class RanksFailed(RuntimeError):
    """A rank raised, died or did not answer in time; the others have been ended."""


class Ranks:
    """The ranks of one process group, each in its own process, to be used in a ``with`` block.

    With the ``fake`` backend one process stands for all of them.
    """

    def __init__(
        self,
        backend: str,
        size: int,
        device: str = "cpu",
        package: str | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """``package``: the directory of another torch_c10d_ext than this one's.

        ``settings``: environment variables.
        """
        self.backend, self.size, self.device = backend, size, device
        self._package = package
        self._settings = {**(CALLS_ALONE if backend == "fake" else {}), **(settings or {})}
        self._scratch = Path(tempfile.mkdtemp(prefix="torch_c10d_ext-bench-"))
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        self._started = False

    def __enter__(self) -> Ranks:  # noqa: PYI034
        context = multiprocessing.get_context("spawn")
        try:
            with (
                _environment(self._scratch, self._settings),
                _first_on_path(self._package, self._scratch),
            ):
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

    def kill_during(
        self, rank: int, fn: Callable[..., float], *args: Any, deadline: float
    ) -> float:
        """Seconds from the end of ``rank``, with rank 0 in ``fn(*args)``, to what that returns."""
        self._connections[0].send((fn, args))
        time.sleep(0.1)  # until it is in there
        killed = time.monotonic()
        self._processes[rank].kill()
        what = f"{fn.__module__}.{fn.__qualname__}"
        if not self._connections[0].poll(deadline):
            raise RanksFailed(f"{what}: no answer from rank 0 within {deadline:.0f} s")
        ok, told = self._connections[0].recv()
        if not ok:
            raise RanksFailed(f"{what}: rank 0: {told}")
        return told - killed

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


class MpiRanks(Ranks):
    """The ranks of an MPI world, started by the ``mpiexec`` of the environment at ``prefix``.

    The environment needs mpi4py and numpy, not torch: what runs there is ``benchmarks/_mpi.py``.
    """

    def __init__(self, name: str, prefix: Path, size: int) -> None:
        super().__init__(name, size)
        self._prefix = prefix
        self._mpiexec: subprocess.Popen[bytes] | None = None
        self._names: set[str] = set()  # of the ranks' shared memory

    def __enter__(self) -> MpiRanks:  # noqa: PYI034
        address = str(self._scratch / "socket")
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(address)
            listener.listen(self.size)
            listener.settimeout(0.2)
            rank = [str(self._prefix / "bin" / "python"), "-m", "benchmarks._mpi", address]
            flags = _MPIEXEC_FLAGS.get(self.backend, [])
            with open(self._scratch / "log", "wb") as log:
                self._mpiexec = subprocess.Popen(
                    [str(self._prefix / "bin" / "mpiexec"), *flags, "-n", str(self.size), *rank],
                    cwd=Path(__file__).resolve().parent.parent,
                    # numpy asks for huge pages for large arrays and torch does not: the memory is
                    # to be the same for all.
                    env={
                        **os.environ,
                        "NUMPY_MADVISE_HUGEPAGE": "0",
                        **_MPI_SETTINGS.get(self.backend, {}),
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            by_rank: dict[int, Connection] = {}
            ends = time.monotonic() + START_DEADLINE
            while len(by_rank) < self.size:
                if self._mpiexec.poll() is not None or time.monotonic() > ends:
                    raise RanksFailed(f"{self.backend} does not start: {self._said()}")
                with contextlib.suppress(TimeoutError):
                    connection = Connection(listener.accept()[0].detach())
                    rank, names = connection.recv()
                    by_rank[rank] = connection
                    self._names |= names
            self._connections = [by_rank[rank] for rank in range(self.size)]
            self._started = True
        except BaseException:
            self._end()
            raise
        finally:
            listener.close()
        return self

    def _said(self) -> str:
        return (self._scratch / "log").read_text(errors="replace").strip()[-300:]

    def _end(self) -> None:
        for connection in self._connections:
            connection.close()  # ranks leave when it ends
        self._connections = []
        if self._mpiexec is not None:
            try:
                self._mpiexec.wait(STOP_DEADLINE)
            except subprocess.TimeoutExpired:
                os.killpg(self._mpiexec.pid, signal.SIGKILL)
                self._mpiexec.wait(STOP_DEADLINE)
        for name in self._names:
            Path(name).unlink(missing_ok=True)  # of a rank that did not come to its end
        super()._end()


# More ranks than cores, and ranks left to the scheduler, as those of torch are.
_MPIEXEC_FLAGS = {"Open MPI": ["--map-by", ":oversubscribe", "--bind-to", "none"]}
_MPI_SETTINGS = {
    "Open MPI": {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    },
    "Intel MPI": {"I_MPI_FABRICS": "shm", "I_MPI_PIN": "0", "I_MPI_HYDRA_BOOTSTRAP": "fork"},
}


def serve(connection: Connection) -> bool:
    """Runs what it is told to until told to stop; a rank sleeps while its peers are measured.

    Returns whether it was told: otherwise the parent is gone, or an interrupt came.
    """
    while True:
        try:
            task = connection.recv()
            if task is None:
                return True
            fn, args = task
            connection.send(_answer(functools.partial(fn, *args)))
        except (EOFError, OSError, KeyboardInterrupt):
            return False


def time_calls(call: Callable[[], Any], count: int) -> tuple[float, float]:
    """Seconds that ``count`` calls take, of the clock and of the processor."""
    cpu = time.process_time()
    began = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - began, time.process_time() - cpu


@contextlib.contextmanager
def _environment(scratch: Path, more: Mapping[str, str]) -> Any:
    """What the ranks must find set when they import torch; one thread each, caches in scratch."""
    settings = {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        **more,
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


@contextlib.contextmanager
def _first_on_path(package: str | None, scratch: Path) -> Iterator[None]:
    """Where processes that are spawned look for ``torch_c10d_ext`` first.

    For nothing else: another checkout has benchmarks of its own, and the entry point that is
    installed is the one of this checkout.
    """
    if package is None:
        yield
        return
    alone = scratch / "package"
    alone.mkdir()
    (alone / "torch_c10d_ext").symlink_to(Path(package).resolve() / "torch_c10d_ext")
    sys.path.insert(0, str(alone))
    try:
        with _environment(scratch, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}):
            yield
    finally:
        sys.path.remove(str(alone))


def _serve(
    connection: Connection, backend: str, rank: int, size: int, device: str, scratch: str
) -> None:
    connection.send(_answer(functools.partial(_join, backend, rank, size, device, scratch)))
    if not serve(connection):
        os._exit(1)
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
        "gloo" if backend == "deepspeed" else backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=BACKEND_TIMEOUT,
    )
    if backend == "deepspeed":
        _join_deepspeed(rank, size, Path(scratch).name)
    gc.collect()
    gc.freeze()


# DeepSpeed's shared-memory op, where tools/get_peers.sh has built it.
DEEPSPEED = Path(__file__).resolve().parent.parent / "build/peers/deepspeed/deepspeed_shm.so"


def _join_deepspeed(rank: int, size: int, name: str) -> None:
    import torch.distributed as dist
    from torch.utils.cpp_extension import _import_module_from_library

    # It makes a name in /dev/shm of these, and leaves it there.
    os.environ.update(LOCAL_SIZE=f"{size}", MASTER_ADDR=name, MASTER_PORT="0")
    module = _import_module_from_library("deepspeed_shm", str(DEEPSPEED.parent), True)
    module.initialize(size, rank)
    dist.barrier()
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{name}_0_{rank}"):
        path.unlink()


def _answer(task: Callable[[], Any]) -> tuple[bool, Any]:
    try:
        return True, task()
    except BaseException:
        return False, traceback.format_exc()
