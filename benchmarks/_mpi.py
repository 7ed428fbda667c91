"""A rank of an MPI peer: the calls of ``_exchange`` with mpi4py and numpy alone."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import Any

from benchmarks._ranks import serve, time_calls

# Elements per rank up to which results are compared.
CHECKED = 1 << 22

_case: dict[str, Callable[[], Any]] = {}


def prepare(collective: str, dtype: str, size: int, ways: list[str]) -> dict[str, str]:
    """Makes the buffers of a case and calls it once; what is wrong, by way of calling."""
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    ranks, rank = world.size, world.rank
    kind = np.dtype(dtype)
    count = max(size // kind.itemsize // ranks * ranks, ranks)
    steps = (np.arange(count, dtype="int32") % 16).astype(kind)
    x, part = steps + kind.type(rank), count // ranks
    xs = [steps + kind.type(r) for r in range(ranks)] if count < CHECKED else []
    total = ranks * steps + kind.type(ranks * (ranks - 1) / 2)
    out: Any
    if collective == "all_reduce":
        spec, out, want = [x, MPI.FLOAT], x, total
        call = lambda: world.Allreduce(MPI.IN_PLACE, spec)  # noqa: E731
    elif collective == "all_gather":
        out = np.ones(ranks * count, kind)
        send, receive = [x, MPI.FLOAT], [out, MPI.FLOAT]
        want = np.concatenate(xs) if xs else None
        call = lambda: world.Allgather(send, receive)  # noqa: E731
    elif collective == "reduce_scatter":
        out = np.ones(part, kind)
        send, receive = [x, MPI.FLOAT], [out, MPI.FLOAT]
        want = total[rank * part : (rank + 1) * part]
        call = lambda: world.Reduce_scatter_block(send, receive)  # noqa: E731
    elif collective == "all_to_all":
        out = np.ones(count, kind)
        send, receive = [x, part, MPI.FLOAT], [out, part, MPI.FLOAT]
        want = np.concatenate([y[rank * part : (rank + 1) * part] for y in xs]) if xs else None
        call = lambda: world.Alltoall(send, receive)  # noqa: E731
    else:
        spec, out, want = [x, MPI.FLOAT], x, steps.copy()
        call = lambda: world.Bcast(spec, 0)  # noqa: E731
    call()
    if xs and not np.array_equal(out, want):
        return dict.fromkeys(ways, "wrong result")
    x.fill(0)
    _case[ways[0]] = call
    return {}


def block(way: str, count: int) -> tuple[float, float]:
    """Seconds that ``count`` calls take, of the clock and of the processor."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()
    return time_calls(_case[way], count)


def release() -> None:
    """Lets go of the buffers."""
    _case.clear()


def _main() -> None:
    from mpi4py import MPI

    # An interrupt is for the parent: it tells the ranks, which then end in good order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Client(sys.argv[1], "AF_UNIX")
    connection.send((MPI.COMM_WORLD.rank, _shared_memory()))
    serve(connection)


def _shared_memory() -> set[str]:
    """The names in /dev/shm of what this rank has mapped."""
    with open("/proc/self/maps") as maps:
        lines = [line.split(maxsplit=5) for line in maps]
    paths = [x[5].strip() for x in lines if len(x) > 5]
    return {p for p in paths if p.startswith("/dev/shm/") and not p.endswith(" (deleted)")}


if __name__ == "__main__":
    # Functions arrive by the module's name.
    from benchmarks import _mpi

    _mpi._main()
